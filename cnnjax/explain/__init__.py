"""What a layout costs, read from the compiled training step: memory, work and traffic of each device. Nothing is run.

A sharding is a wish. What the compiler made of it is in the text of the compiled program, and the numbers here come
from there: sizes from its memory analysis, traffic from its collectives, each traced to the mesh axes that it crosses.

    python -m experiments.cifar10 --mesh data=4 --explain
"""

from cnnjax.explain.cost import Explanation, Parameter, abstract_state, explain, pretend
from cnnjax.explain.hlo import KINDS, Collective, Machine, collectives, device_groups
from cnnjax.explain.stages import explain_stages, stages_report
from cnnjax.explain.words import advice, report, step_seconds

__all__ = (
    "KINDS", "Collective", "Explanation", "Machine", "Parameter", "abstract_state", "advice",
    "collectives", "device_groups", "explain", "explain_stages", "pretend", "report", "stages_report", "step_seconds",
)  # fmt: skip
