"""Which device holds what: ``--mesh`` text to a `jax.sharding.Mesh`, ordered rules to shardings.

The mesh axis so far is ``data`` (split the batch). A new axis needs a name in `AXES` and rules that use it.
"""

import math
import os
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ("data",)
BATCH_AXES = ("data",)

# The first rule whose regular expression matches a parameter's path decides how its dimensions are split.
Rules = Sequence[tuple[str, PartitionSpec]]
REPLICATED: Rules = ((r".*", PartitionSpec()),)


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


def request_cpu_devices(count: int) -> None:
    """Asks for that many fake CPU devices, if no backend has started yet. Accelerators are not affected."""
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return  # the user has chosen; JAX refuses both settings together
    if count > max(jax.config.jax_num_cpu_devices, 1):  # type: ignore[attr-defined]  (made at run time)
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


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The leading dimension split over `BATCH_AXES`; for every array of a batch."""
    return NamedSharding(mesh, PartitionSpec(tuple(axis for axis in BATCH_AXES if axis in mesh.shape)))


def batch_rows(mesh: Mesh, batch_size: int) -> int:
    """Rows of the arrays that carry ``batch_size`` samples: the next multiple of the devices that split the batch."""
    ways = math.prod(mesh.shape[axis] for axis in BATCH_AXES if axis in mesh.shape)
    return -(-batch_size // ways) * ways


def state_shardings(abstract_state: Any, mesh: Mesh, rules: Rules = REPLICATED) -> Any:
    """Shardings of a state tree, by the first rule that matches each array's path.

    Args:
        abstract_state: Tree of arrays or `jax.ShapeDtypeStruct`.
        mesh: Device mesh.
        rules: Ordered ``(path regex, PartitionSpec)`` pairs. Paths look like ``params/conv_1/kernel``; optimiser
            state and moving averages end in the path of the parameter that they belong to.

    Raises:
        ValueError: If no rule matches an array.
    """

    def sharding(path: tuple, leaf: Any) -> NamedSharding:
        del leaf
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        for pattern, spec in rules:
            if re.search(pattern, name):
                return NamedSharding(mesh, spec)
        raise ValueError(f"no partition rule matches {name!r}; rules: {', '.join(pattern for pattern, _ in rules)}")

    return jax.tree_util.tree_map_with_path(sharding, abstract_state)
