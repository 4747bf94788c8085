"""Which device holds what: ``--mesh`` text to a `jax.sharding.Mesh`, ordered rules to shardings.

Mesh axes: ``data`` splits the batch; ``fsdp`` splits the batch, and parameters with their optimiser state; ``model``
splits the channels of convolutions and the features of dense layers; ``space`` splits image rows (`cnnjax.spatial`);
``pipe`` splits the layers (`cnnjax.pipeline`).
"""

import dataclasses
import itertools
import math
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from cnnjax import networks
from cnnjax.config import UsageError

AXES = ("data", "fsdp", "model", "space", "pipe")
BATCH_AXES = ("data", "fsdp")

# The first rule whose regular expression matches an array's path decides how its dimensions are split over ``model``.
# Paths look like ``params/conv_1/kernel``; optimiser state and moving averages end in the path of their parameter.
Rules = Sequence[tuple[str, PartitionSpec]]
REPLICATED: Rules = ((r".*", PartitionSpec()),)


def tensor_rules(network: networks.Network) -> Rules:
    """Rules that split channels over ``model`` so that two layers in a row need one reduction.

    Of the convolutions and dense layers in a row, every first splits its outputs and every second its inputs; bias and
    batch norm between them follow. `Flatten` starts a new row, and so does the body of a residual block, whose
    shortcut is not split since its output must be whole.
    """
    return (*_tensor_rules(network, r"(^|/)"), *REPLICATED)


def _tensor_rules(network: networks.Network, prefix: str) -> list[tuple[str, PartitionSpec]]:
    rules, split = [], False  # whether the channels that reach the layer are split
    named = networks.named_layers(network)
    weighted = [layer for layer in network if isinstance(layer, networks.Conv | networks.Dense | networks.Residual)]
    for name, layer in named:
        path = f"{prefix}{name}"
        match layer:
            case networks.Conv() | networks.Dense():
                weighted.pop(0)
                before = (None,) * (2 if isinstance(layer, networks.Conv) else 0)
                # Splitting outputs pays only where a layer with weights follows that takes split inputs.
                splits = not split and bool(weighted) and not isinstance(weighted[0], networks.Residual)
                if split:
                    rules.append((rf"{path}/kernel$", PartitionSpec(*before, "model")))
                if splits:
                    rules.append((rf"{path}/kernel$", PartitionSpec(*before, None, "model")))
                    rules.append((rf"{path}/bias$", PartitionSpec("model")))
                split = splits
            case networks.BatchNorm() if split:
                rules.append((rf"{path}/(scale|bias|mean|var)$", PartitionSpec("model")))
            case networks.Residual():
                weighted.pop(0)
                # First, since the rules of like-named layers outside would match inside the block too.
                rules[:0] = [*_tensor_rules(layer.body, f"{path}/body/"), (rf"{path}/", PartitionSpec())]
                split = False
            case networks.Flatten():
                split = False  # split channels are not contiguous in the vector: it is gathered, and small by then
            case _:
                pass
    return rules


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh and what is done with it.

    Attributes:
        mesh: Devices.
        microbatches: Parts of each batch whose gradients are added up before the update.
        rules: How ``model`` splits arrays; those of `tensor_rules` where None.
        strict: Whether a dimension that does not divide is an error rather than left whole.
        manual: None where the compiler partitions the step. Else the step sees its device's part of the batch and of
            the parameters, whose `PartitionSpec` tree this is, and the methods below are the collectives of the step.
        gathered: Where the compiler partitions the step, shardings of the parameters as layers use them; None leaves it
            the choice, which with ``fsdp`` it makes badly: it moves activations, and gathers kernels twice.
        bn_scope: ``global``: batch norm sums over the devices; ``local``: each device for itself, if manual.
        stages: Where the stages of ``pipe`` after the first start, as numbers of top-level layers counted from 0;
            balanced where None.
    """

    mesh: Mesh
    microbatches: int = 1
    rules: Rules | None = None
    strict: bool = False
    manual: Any = None
    gathered: Any = None
    bn_scope: str = "global"
    stages: tuple[int, ...] | None = None

    def size(self, axis: str) -> int:
        """Devices along an axis; 1 where the mesh lacks it."""
        return self.mesh.shape.get(axis, 1)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Axes of the mesh that split the batch."""
        return tuple(axis for axis in BATCH_AXES if axis in self.mesh.shape)

    @property
    def ways(self) -> int:
        """Parts that the batch is split into."""
        return math.prod(self.size(axis) for axis in self.batch_axes)

    @property
    def batch_sharding(self) -> NamedSharding:
        """Sharding of every array of a batch; with ``pipe``, on the devices of the first stage."""
        mesh = self.stage(0).mesh if "pipe" in self.mesh.shape else self.mesh
        return NamedSharding(mesh, PartitionSpec(self.batch_axes))

    @property
    def replicated(self) -> NamedSharding:
        """Every device holds the whole array."""
        return NamedSharding(self.mesh, PartitionSpec())

    def stage(self, index: int) -> "Layout":
        """The same on the devices at one index of ``pipe``."""
        names = tuple(axis for axis in self.mesh.axis_names if axis != "pipe")
        devices = self.mesh.devices.take(index, self.mesh.axis_names.index("pipe"))
        if not names:  # a mesh needs an axis
            names, devices = ("data",), np.array([devices])
        mesh = Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))
        return dataclasses.replace(self, mesh=mesh, stages=None)

    def rows(self, batch_size: int) -> np.ndarray:
        """Where each row of a batch's arrays comes from: positions in the batch, -1 for rows that only fill up.

        Micro-batch m is samples m * c to (m + 1) * c with c = ceil(batch_size / microbatches), whatever the mesh, so
        that its batch-norm statistics are the same everywhere. Rows are ordered by device, then micro-batch, so that
        `split` moves nothing between devices.
        """
        chunk = -(-batch_size // self.microbatches)
        share = -(-chunk // self.ways)
        place = np.full((self.microbatches, self.ways * share), -1)
        place[:, :chunk] = np.arange(self.microbatches * chunk).reshape(self.microbatches, chunk)
        place[place >= batch_size] = -1
        return place.reshape(self.microbatches, self.ways, share).swapaxes(0, 1).ravel()

    def split(self, batch: Any) -> Any:
        """Arrays ``[B, ...]`` of a batch to micro-batches ``[microbatches, B / microbatches, ...]``."""
        ways = self.ways if self.manual is None else 1

        def one(x: jax.Array) -> jax.Array:
            x = x.reshape(ways, self.microbatches, -1, *x.shape[1:]).swapaxes(0, 1)
            return x.reshape(self.microbatches, -1, *x.shape[3:])

        return jax.tree.map(one, batch)

    def part(self, batch: Any, number: jax.typing.ArrayLike) -> Any:
        """One micro-batch of those that `split` gives."""

        def one(x: jax.Array) -> jax.Array:
            x = x.reshape(self.ways, self.microbatches, -1, *x.shape[1:])
            return lax.dynamic_index_in_dim(x, number, 1, keepdims=False).reshape(-1, *x.shape[3:])

        return jax.tree.map(one, batch)

    # -- collectives, which do nothing where the compiler partitions the step ----------------------------------------

    @property
    def parts(self) -> int:
        """Parts that add up to the loss of a batch: micro-batches times devices that compute apart."""
        return self.microbatches * (1 if self.manual is None else self.ways)

    @property
    def bn_axes(self) -> tuple[str, ...]:
        """Axes over which batch norm must sum by itself."""
        return self.batch_axes if self.manual is not None and self.bn_scope == "global" else ()

    def total(self, tree: Any) -> Any:
        """Sums over the devices that split the batch."""
        return tree if self.manual is None else lax.psum(tree, self.batch_axes)

    def mean(self, tree: Any, weight: jax.Array) -> Any:
        """Means over the devices that split the batch, each counting as much as its ``weight``."""
        if self.manual is None:
            return tree
        if self.bn_scope == "global":  # all are the same
            return lax.pmean(tree, self.batch_axes)
        total = jnp.maximum(self.total(weight), 1)
        return self.total(jax.tree.map(lambda x: x * (weight.astype(x.dtype) / total), tree))

    def whole(self, params: Any) -> Any:
        """Parameters gathered from their ``fsdp`` parts; the transpose of this sums gradients and scatters them."""
        if self.manual is None:
            return params if self.gathered is None else lax.with_sharding_constraint(params, self.gathered)

        def gather(x: jax.Array, spec: PartitionSpec) -> jax.Array:
            return lax.all_gather(x, "fsdp", axis=spec.index("fsdp"), tiled=True) if "fsdp" in spec else x

        return jax.tree.map(gather, params, self.manual)

    def reduced(self, grads: Any) -> Any:
        """Gradients of the devices' losses summed, each in the form of its parameter."""
        if self.manual is None:
            return grads

        def reduce(g: jax.Array, spec: PartitionSpec) -> jax.Array:
            axes = tuple(axis for axis in self.batch_axes if axis not in spec)  # `whole` summed over fsdp
            return lax.psum(g, axes) if axes else g

        return jax.tree.map(reduce, grads, self.manual)

    def norm(self, grads: Any) -> jax.Array:
        """Euclidean norm of the whole gradient."""
        if self.manual is None:
            return optax.tree.norm(grads)

        def square(g: jax.Array, spec: PartitionSpec) -> jax.Array:
            return lax.psum(jnp.sum(jnp.square(g)), "fsdp") if "fsdp" in spec else jnp.sum(jnp.square(g))

        return jnp.sqrt(sum(jax.tree.leaves(jax.tree.map(square, grads, self.manual))))


def parse_mesh(text: str) -> dict[str, int]:
    """Reads ``data=4`` into ``{"data": 4}``; one size may be -1, which takes the devices that are left.

    Raises:
        ValueError: If the text is not of that form, or names an unknown axis; says what is allowed.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*([a-z]+)\s*=\s*(-?\d+)\s*", part)
        if match is None:
            raise ValueError(f"--mesh {text}: {part!r} is not AXIS=SIZE, such as data=4")
        axis, size = match[1], int(match[2])
        if axis not in AXES:
            raise ValueError(f"--mesh {text}: unknown axis {axis!r}; allowed: {', '.join(AXES)}")
        if axis in sizes:
            raise ValueError(f"--mesh {text}: axis {axis!r} is given twice")
        if size < 1 and size != -1:
            raise ValueError(f"--mesh {text}: size {size}; allowed: 1 or more, or -1 for all devices that are left")
        sizes[axis] = size
    if list(sizes.values()).count(-1) > 1:
        raise ValueError(f"--mesh {text}: only one axis may be -1")
    return sizes


def parse_stages(text: str | None) -> tuple[int, ...] | None:
    """Reads ``3,7`` into ``(3, 7)``: where the stages of ``pipe`` after the first start.

    Raises:
        ValueError: If the text is not a list of rising layer numbers.
    """
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    starts = tuple(int(part) for part in parts if part.isdecimal())
    if len(starts) < len(parts) or any(a >= b for a, b in itertools.pairwise((0, *starts))):
        raise ValueError(f"--stages is {text!r}; allowed: rising numbers of layers, from 1, such as 3,7")
    return starts


def request_cpu_devices(count: int) -> None:
    """Asks for that many fake CPU devices, if no backend has started yet. Accelerators are not affected."""
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return  # the user has chosen; JAX refuses both settings together
    if count > max(jax.config.jax_num_cpu_devices, 1):  # type: ignore[attr-defined]
        try:
            jax.config.update("jax_num_cpu_devices", count)
        except RuntimeError:
            return  # the backend runs already, with the devices that it has: make_mesh counts them


def make_mesh(text: str) -> tuple[Mesh, str]:
    """Builds the mesh that ``--mesh`` asks for, over the first devices of the default backend.

    Where the host has only CPUs, enough fake devices are made, provided that no JAX backend has started.

    Args:
        text: Such as ``data=4``; see `parse_mesh`.

    Returns:
        The mesh and one line that says what it runs on.

    Raises:
        ValueError: If the mesh needs more devices than there are.
    """
    sizes = parse_mesh(text)
    fixed = math.prod(size for size in sizes.values() if size != -1)
    request_cpu_devices(fixed)
    devices = jax.devices()
    sizes = {axis: max(len(devices) // fixed, 1) if size == -1 else size for axis, size in sizes.items()}
    needed, kind = math.prod(sizes.values()), devices[0].device_kind
    if needed > len(devices):
        raise ValueError(
            f"--mesh {text} needs {needed} devices, but there are {len(devices)} ({kind}); data=-1 takes all there are"
        )
    mesh = jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(AxisType.Auto,) * len(sizes),
        devices=devices[:needed],
    )
    if devices[0].platform != "cpu":
        return mesh, f"mesh {describe(mesh)}: {needed} of {len(devices)} {kind}"
    what = "1 CPU device" if needed == 1 else f"{needed} fake CPU devices, since this host has no accelerator"
    return mesh, f"mesh {describe(mesh)}: {what}"


def describe(mesh: Mesh) -> str:
    """The mesh as ``--mesh`` would be given, with every size written out."""
    return ",".join(f"{axis}={size}" for axis, size in mesh.shape.items())


def state_shardings(abstract_state: Any, layout: Layout, network: networks.Network) -> tuple[Any, list[str]]:
    """Shardings of a train state: ``model`` by rules, then ``fsdp`` on the largest dimension that is left and divides.

    Args:
        abstract_state: Tree of arrays or `jax.ShapeDtypeStruct`.
        layout: Mesh and rules.
        network: Whose rules to use where the layout has none.

    Returns:
        Tree of shardings, and one line for each array that a rule would split but whose dimension does not divide.

    Raises:
        UsageError: If no rule matches an array, or with ``layout.strict`` where a dimension does not divide.
    """
    rules = tensor_rules(network) if layout.rules is None else layout.rules
    notes: list[str] = []

    def sharding(path: tuple, leaf: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        spec = next((spec for pattern, spec in rules if re.search(pattern, name)), None)
        if spec is None:
            raise UsageError(f"no partition rule matches {name!r}; rules: {', '.join(pattern for pattern, _ in rules)}")
        axes = [axis if axis in layout.mesh.shape else None for axis in (*spec, *(None,) * leaf.ndim)][: leaf.ndim]
        for dim, axis in enumerate(axes):
            if axis is not None and leaf.shape[dim] % layout.size(axis):
                note = f"{name} {leaf.shape}: dimension {dim} does not divide by {axis}={layout.size(axis)}"
                if layout.strict:
                    raise UsageError(f"--strict-sharding: {note}")
                if name.startswith("params/"):  # the optimiser's state follows its parameter
                    notes.append(f"{note}; left whole")
                axes[dim] = None
        if layout.size("fsdp") > 1 and not name.startswith("batch_stats/"):
            free = [dim for dim, axis in enumerate(axes) if axis is None and leaf.shape[dim] % layout.size("fsdp") == 0]
            if free:
                axes[max(free, key=lambda dim: leaf.shape[dim])] = "fsdp"
        while axes and axes[-1] is None:
            axes.pop()
        return NamedSharding(layout.mesh, PartitionSpec(*axes))

    return jax.tree_util.tree_map_with_path(sharding, abstract_state), notes


def without_fsdp(sharding: NamedSharding) -> NamedSharding:
    """The same with the dimension that ``fsdp`` splits whole."""
    return NamedSharding(sharding.mesh, PartitionSpec(*(None if axis == "fsdp" else axis for axis in sharding.spec)))


def check_layout(strategy: str, layout: Layout) -> None:
    """Refuses combinations that a strategy does not know.

    Raises:
        ValueError: Names the flag, what was asked for, and the strategy that knows it.
    """
    known = {"jit": AXES, "shard_map": BATCH_AXES, "pmap": ("data",)}[strategy]
    if foreign := [axis for axis in layout.mesh.shape if axis not in known]:
        raise ValueError(
            f"--strategy {strategy} knows the axes {', '.join(known)}, but --mesh has {', '.join(foreign)}; "
            "--strategy jit knows all"
        )
    if strategy == "jit" and layout.bn_scope == "local":
        raise ValueError("--bn-scope local needs --strategy shard_map or pmap; jit computes over the whole batch")
    mesh, starts = describe(layout.mesh), layout.stages
    if "pipe" in layout.mesh.shape and "space" in layout.mesh.shape:
        raise ValueError(f"--mesh {mesh}: pipe and space do not go together; allowed with pipe: data, fsdp, model")
    if "pipe" in layout.mesh.shape and jax.process_count() > 1:
        raise ValueError(f"--mesh {mesh}: pipe runs in one process, but there are {jax.process_count()}")
    if starts is not None and len(starts) + 1 != layout.size("pipe"):
        raise ValueError(
            f"--stages names {len(starts)} starts, so {len(starts) + 1} stages, but --mesh {mesh} has "
            f"pipe={layout.size('pipe')}: one start fewer than stages is needed"
        )


def over_leading(f: Callable, devices: Sequence[jax.Device], out_axes: Any) -> Callable:
    """``f(state, batch)`` pmapped over ``data``: batch arrays get a leading device dimension, and results lose it.

    Args:
        f: Sees one device's part of the batch.
        devices: That the batch is split over.
        out_axes: As for `jax.pmap`, a tree like the result of ``f`` or a prefix: None for what all devices have alike,
            0 for arrays ``[B, ...]``.
    """
    mapped = jax.pmap(f, axis_name="data", in_axes=(None, 0), out_axes=out_axes, devices=devices)

    def merge(axis: int | None, results: Any) -> Any:
        return results if axis is None else jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), results)

    def call(state: Any, batch: Any) -> Any:
        results = mapped(state, jax.tree.map(lambda x: x.reshape(len(devices), -1, *x.shape[1:]), batch))
        return jax.tree.map(merge, out_axes, results, is_leaf=lambda x: x is None)

    return call
