"""Whether a training step fits into memory."""

import math

import jax
import psutil

from cnnjax import partition
from cnnjax.diagnose.findings import Finding
from cnnjax.feed import abstract_batch
from cnnjax.losses import Objective
from cnnjax.networks import Shape
from cnnjax.partition import Layout
from cnnjax.strategy import Steps


def step_bytes(made: Steps, objective: Objective, layout: Layout, batch_size: int, image_shape: Shape) -> int:
    """What one training step takes on all devices together, by the compiler's account; 0 with ``pipe``."""
    if "pipe" in layout.mesh.shape:
        return 0
    abstract = jax.tree.map(
        lambda array, sharding: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding),
        jax.eval_shape(made.init), made.state_shardings,
    )  # fmt: skip
    compiled = made.train.lower(abstract, abstract_batch(objective, layout, batch_size, image_shape)).compile()
    memory = compiled.memory_analysis()
    if memory is None:
        return 0
    each = memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
    return (each - memory.alias_size_in_bytes) * layout.mesh.size


def available_bytes(layout: Layout) -> int:
    """Memory that the devices of a layout have left: that of the host for CPU devices."""
    device = layout.mesh.devices.flat[0]
    if device.platform == "cpu":
        return psutil.virtual_memory().available
    stats = device.memory_stats() or {}
    return (stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)) * layout.mesh.size


def examine_memory(
    made: Steps, objective: Objective, layout: Layout, batch_size: int, image_shape: Shape
) -> list[Finding]:
    """Whether a training step fits into the memory that is free, and else the largest batch that does."""
    available = available_bytes(layout)
    needed = step_bytes(made, objective, layout, batch_size, image_shape)
    if not available or needed <= available:
        return []
    fits = 1 << (batch_size - 1).bit_length() - 1  # the largest power of two below
    while fits > 1 and step_bytes(made, objective, layout, fits, image_shape) > available:
        fits //= 2
    return [
        Finding(
            "error", "memory",
            f"a step of {batch_size} images takes {needed / 2**30:.2f} GiB on --mesh "
            f"{partition.describe(layout.mesh)}, but {available / 2**30:.2f} GiB are free",
            "the run would be killed, or swap",
            f"--batch-size {fits}, which fits; or --microbatches {math.ceil(batch_size / fits)}",
        )
    ]  # fmt: skip
