"""The same for a mesh with ``pipe``: each stage is several programs on devices of its own.

A step runs the forward and the backward program of a stage once a micro-batch and its update once; in between it keeps
what every micro-batch's backward pass needs.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax

from cnnjax import networks, pipeline
from cnnjax.explain import words
from cnnjax.explain.cost import Explanation, abstract_state, bytes_each, state_fields
from cnnjax.explain.hlo import ASSUMED, Collective, Machine, collectives
from cnnjax.feed import abstract_batch
from cnnjax.networks import Shape
from cnnjax.partition import Layout
from cnnjax.step import Recipe


def explain_stages(
    recipe: Recipe, layout: Layout, input_shape: Shape, batch_size: int, image_shape: Shape | None = None
) -> list[Explanation]:
    """Compiles the programs of every stage and reads what they cost. Nothing is allocated on the devices or run.

    Args:
        recipe: What would be trained.
        layout: Where; its mesh has an axis ``pipe``.
        input_shape: ``(height, width, channels)`` of one image as the network takes it.
        batch_size: Images a step, over all devices.
        image_shape: The same before cropping; ``input_shape`` where None.
    """
    pipe = pipeline.Pipeline(recipe, layout, input_shape)
    state, batch = (
        abstract_state(pipe),
        abstract_batch(recipe.objective, layout, batch_size, image_shape or input_shape),
    )
    pipe.train.lower(state, batch)  # fills in the results and compiled programs that are read below
    found: list[_Found] = []
    for number, stage in enumerate(pipe.stages):
        own, received = pipe.part(state, number), None if not number else found[-1].stage_output
        found.append(_explain_stage(recipe, layout, input_shape, batch_size, batch, number, stage, own, received))
    return [one.explanation for one in found]


@dataclasses.dataclass(frozen=True)
class _Found:
    explanation: Explanation
    stage_output: jax.ShapeDtypeStruct


def _explain_stage(
    recipe: Recipe,
    layout: Layout,
    input_shape: Shape,
    batch_size: int,
    batch: Any,
    number: int,
    stage: Any,
    state: Any,
    received: jax.ShapeDtypeStruct | None,
) -> _Found:
    parts, rows = layout.microbatches, len(batch["label"])
    # What is sent is laid out over the same axes on both sides, so that each device sends and receives its part.
    x_bytes = 0 if received is None else bytes_each(received)
    output, saved, *_ = stage.run_forward.results
    y_bytes = bytes_each(output)
    runs = [(stage.run_forward, parts), (stage.run_backward, parts), (stage.run_update, 1)]
    if stage.layout.size("fsdp") > 1:
        runs.append((stage.run_gather, 1))
    if recipe.clip_norm:
        runs.append((stage.run_square, 1))
    memory = {program: program.compiled.memory_analysis() for program, _ in runs}
    scratch = {program: memory[program].temp_size_in_bytes for program in memory}
    kept = parts * (bytes_each(saved) + x_bytes)
    gathered = state_fields(recipe, stage.layout, state)["gathered"] if stage.layout.size("fsdp") > 1 else 0
    grads = bytes_each(state.params)
    peak = gathered + max(
        kept + y_bytes + scratch[stage.run_forward],
        kept + grads + x_bytes + scratch[stage.run_backward],
        grads + scratch[stage.run_update],
    )
    traffic: list[Collective] = []
    for program, times in runs:
        for one in collectives(program.compiled.as_text(), dict(stage.layout.mesh.shape)):
            traffic.append(dataclasses.replace(one, times=one.times * times))
    if not stage.last:
        traffic.append(_sent(y_bytes, output.shape, parts, f"activations to stage {number + 1}"))
    if received is not None:
        traffic.append(_sent(x_bytes, received.shape, parts, f"gradients to stage {number - 1}"))
    own_batch = batch if stage.first else {name: array for name, array in batch.items() if not name.endswith("image")}
    flops = sum(
        float((program.compiled.cost_analysis() or {}).get("flops", math.nan)) * times for program, times in runs
    )
    start, stop = stage.span
    names = [name for name, _ in networks.named_layers(recipe.network)]
    work = [
        row.multiply_adds
        for row in networks.summary(recipe.network, input_shape)
        if row.name.split("/")[0] in names[start:stop] and row.multiply_adds
    ]
    # The first layer of all has no gradient of its input.
    passes = 3 * sum(work) - (work[0] if stage.first and work else 0)
    explanation = Explanation(
        axis_sizes=dict(layout.mesh.shape),
        batch_size=batch_size,
        rows=rows,
        microbatches=parts,
        **state_fields(recipe, stage.layout, state),
        batch=bytes_each(own_batch),
        temporaries=peak,
        scratch=max(scratch.values()),
        compiled=bytes_each(state) + bytes_each(own_batch) + peak,
        flops=flops,
        network_flops=2 * passes * rows / stage.layout.mesh.size,
        collectives=tuple(traffic),
        stage=f"Stage {number}: layers {start} to {stop - 1} ({names[start]} to {names[stop - 1]})",
    )
    return _Found(explanation, output)


def _sent(payload: int, shape: Shape, times: int, what: str) -> Collective:
    return Collective("collective-permute", ("pipe",), 2, payload, (tuple(shape),), times, what)


def stages_report(found: Sequence[Explanation], machine: Machine = ASSUMED) -> str:
    """The explanation of all stages as text for a terminal."""
    parts = found[0].microbatches
    slots = parts + len(found) - 1
    seconds = [words.step_seconds(one, machine) for one in found]
    slowest = max(range(len(found)), key=lambda s: sum(seconds[s]))
    step_s = sum(seconds[slowest]) / parts * slots
    fullest = max(range(len(found)), key=lambda s: found[s].total)
    blocks = [words.title(found[0]), words.tables(found[0], machine)[1]]
    for one in found:
        parameters, _, *others = words.tables(one, machine)
        blocks += ["\n".join([one.stage, "-" * len(one.stage)]), parameters, *others]
    blocks.append(
        "\n".join(
            [
                "Time of a step, estimated",
                words.assumptions(machine),
                *(
                    f"  stage {s}: computing {1e3 * compute:.3f} ms, sending {1e3 * traffic:.3f} ms"
                    for s, (compute, traffic) in enumerate(seconds)
                ),
                f"  {parts} micro-batches through {len(found)} stages take {slots} turns of the slowest stage, "
                f"{slowest}: {1e3 * step_s:.3f} ms; it is idle for {(slots - parts) / slots:.0%} of them",
            ]
        )
    )
    blocks.append("\n".join([f"The fullest stage is {fullest}.", *words.advice(found[fullest], machine)]))
    return "\n\n".join(blocks)
