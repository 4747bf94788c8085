"""What the compiled training step holds, computes and sends on each device."""

import dataclasses
import math
from collections import defaultdict
from typing import Any

import jax

from cnnjax import networks, partition
from cnnjax.explain.hlo import Collective, collectives
from cnnjax.feed import abstract_batch
from cnnjax.networks import Shape
from cnnjax.partition import Layout
from cnnjax.pipeline import Pipeline
from cnnjax.step import Recipe
from cnnjax.strategy import Steps, compile_steps


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One array of the parameters: its name, whole shape, partition spec, and bytes on each device."""

    name: str
    shape: Shape
    spec: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What one training step holds, computes and sends on each device; all sizes in bytes.

    Attributes:
        axis_sizes: The mesh.
        batch_size: Images a step, over all devices.
        rows: The same with the padding that makes it divide.
        microbatches: Parts that are computed one after another.
        parameters: Each parameter.
        rules: Partition rules, pattern and spec.
        optimizer_state: Of the optimiser.
        other_state: Batch statistics, moving average, counters.
        batch: Images, labels, weights, numbers.
        temporaries: Peak of everything else: activations, gradients, scratch.
        compiled: Arguments, temporaries and outputs less those that share memory, as the compiler counts them.
        gathered: Parameters as the layers use them, ``fsdp`` parts put together.
        whole_state: Bytes of parameters and optimiser state before they are split.
        flops: Floating-point operations, as the compiler counts them.
        network_flops: The same by the network's own count, divided by the devices.
        collectives: Each collective.
        notes: What the layout could not split.
        stage: Which stage of ``pipe`` this is about; empty without that axis.
        scratch: Of the temporaries of a stage, what lives only inside one of its programs.
    """

    axis_sizes: dict[str, int]
    batch_size: int
    rows: int
    microbatches: int
    parameters: tuple[Parameter, ...]
    rules: tuple[tuple[str, str], ...]
    optimizer_state: int
    other_state: int
    batch: int
    temporaries: int
    compiled: int
    gathered: int
    whole_state: int
    flops: float
    network_flops: float
    collectives: tuple[Collective, ...]
    notes: tuple[str, ...] = ()
    stage: str = ""
    scratch: int = 0

    @property
    def devices(self) -> int:
        """Devices of the mesh."""
        return math.prod(self.axis_sizes.values())

    @property
    def parameter_bytes(self) -> int:
        """All parameters on one device."""
        return sum(parameter.bytes for parameter in self.parameters)

    @property
    def state(self) -> int:
        """What training keeps on one device between steps."""
        return self.parameter_bytes + self.optimizer_state + self.other_state

    @property
    def fixed(self) -> int:
        """What does not grow with the batch: the state; among the temporaries one gradient.

        Micro-batches add a sum of gradients, and ``fsdp`` the parameters gathered.
        """
        copies = 1 + (self.microbatches > 1) + (self.axis_sizes.get("fsdp", 1) > 1)
        return self.state + min(copies * self.gathered, self.temporaries)

    @property
    def total(self) -> int:
        """Peak on one device."""
        return self.state + self.batch + self.temporaries

    @property
    def per_image(self) -> float:
        """What one more image of the batch adds on a device, if the growing part is proportional to the batch."""
        return (self.total - self.fixed) / self.rows

    def memory_at(self, batch_size: int) -> float:
        """Estimated peak on one device with another batch size."""
        return self.fixed + self.per_image * batch_size

    def traffic(self) -> dict[tuple[tuple[str, ...], str], list[Collective]]:
        """Collectives by the axes that they cross and their kind, in the order of the mesh."""
        found = defaultdict(list)
        for collective in self.collectives:
            found[collective.axes, collective.kind].append(collective)
        order = list(self.axis_sizes)
        return dict(sorted(found.items(), key=lambda item: ([order.index(axis) for axis in item[0][0]], item[0][1])))


def abstract_state(steps: Steps | Pipeline) -> Any:
    """The train state as shapes, dtypes and shardings; allocates nothing."""
    return jax.tree.map(
        lambda array, sharding: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding),
        jax.eval_shape(steps.init),
        steps.state_shardings,
    )


def explain(
    recipe: Recipe,
    layout: Layout,
    input_shape: Shape,
    batch_size: int,
    strategy: str = "jit",
    image_shape: Shape | None = None,
) -> Explanation:
    """Compiles the training step and reads what it costs. Nothing is allocated on the devices or run.

    Args:
        recipe: What would be trained.
        layout: Where.
        input_shape: ``(height, width, channels)`` of one image as the network takes it.
        batch_size: Images a step, over all devices.
        strategy: As for `compile_steps`.
        image_shape: The same before cropping; ``input_shape`` where None.

    Raises:
        ValueError: If the mesh has an axis ``pipe``, whose stages are programs of their own: see `explain_stages`.
    """
    if "pipe" in layout.mesh.shape:
        raise ValueError(f"mesh {partition.describe(layout.mesh)}: explain_stages is for meshes with pipe")
    steps = compile_steps(recipe, layout, input_shape, strategy)
    state, batch = (
        abstract_state(steps),
        abstract_batch(recipe.objective, layout, batch_size, image_shape or input_shape),
    )
    # The machine code will not run, so it need not be fast; on CPU nothing else depends on this.
    quick = {"xla_backend_optimization_level": 0} if layout.mesh.devices.flat[0].platform == "cpu" else None
    compiled = steps.train.lower(state, batch).compile(compiler_options=quick)
    axis_sizes = dict(layout.mesh.shape)
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}
    rows, summary = len(batch["label"]), networks.summary(recipe.network, input_shape)
    multiply_adds = [layer.multiply_adds for layer in summary if layer.multiply_adds]
    return Explanation(
        axis_sizes=axis_sizes,
        batch_size=batch_size,
        rows=rows,
        microbatches=layout.microbatches,
        **state_fields(recipe, layout, state),
        batch=bytes_each(batch),
        temporaries=memory.temp_size_in_bytes,
        compiled=memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
        - memory.alias_size_in_bytes,
        # XLA counts the body of a loop once, and the loop over micro-batches holds nearly all of the work.
        flops=float(cost.get("flops", math.nan)) * layout.microbatches,
        # Two for each multiply-add; forward, gradient of the weights, and of the input except at the first layer.
        network_flops=2 * (3 * sum(multiply_adds) - multiply_adds[0]) * rows / math.prod(axis_sizes.values()),
        collectives=tuple(collectives(compiled.as_text(), axis_sizes)),
        notes=steps.notes,
    )  # fmt: skip


def state_fields(recipe: Recipe, layout: Layout, state: Any) -> dict[str, Any]:
    """The fields of `Explanation` that an abstract state decides."""
    rules = partition.tensor_rules(recipe.network) if layout.rules is None else layout.rules
    gathered = jax.tree.map(lambda a: a.update(sharding=partition.without_fsdp(a.sharding)), state.params)
    parameters = tuple(
        Parameter(jax.tree_util.keystr(path, simple=True, separator="/"), leaf.shape, _spec(leaf.sharding.spec),
                  bytes_each(leaf))
        for path, leaf in jax.tree_util.tree_leaves_with_path(state.params)
    )  # fmt: skip
    return {
        "parameters": parameters,
        "rules": tuple((pattern, _spec(spec)) for pattern, spec in rules),
        "optimizer_state": bytes_each(state.opt_state),
        "other_state": bytes_each(state) - bytes_each((state.params, state.opt_state)),
        "gathered": bytes_each(gathered),
        "whole_state": sum(a.size * a.dtype.itemsize for a in jax.tree.leaves((state.params, state.opt_state))),
    }


def _spec(spec: Any) -> str:
    return f"({', '.join('-' if axis is None else str(axis) for axis in spec)})" if len(spec) else "whole"


def bytes_each(tree: Any) -> int:
    """Bytes of a tree of abstract arrays on one device."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def pretend(mesh: str, devices: int) -> str:
    """Makes ``--devices`` fake CPU devices, on any host; to be called before a backend starts.

    Returns:
        The mesh with every size written out.

    Raises:
        ValueError: If the mesh does not have as many.
    """
    sizes = partition.parse_mesh(mesh)
    fixed = math.prod(count for count in sizes.values() if count != -1)
    sizes = {axis: devices // fixed if count == -1 else count for axis, count in sizes.items()}
    if (product := math.prod(sizes.values())) != devices:
        raise ValueError(
            f"--devices is {devices}, but --mesh {mesh} has {product or fixed} devices; they must be equal"
        )
    jax.config.update("jax_platforms", "cpu")
    partition.request_cpu_devices(devices)
    return ",".join(f"{axis}={count}" for axis, count in sizes.items())
