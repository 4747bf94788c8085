"""Images whose rows are split over devices: halo exchange around convolutions and pooling.

The compiler can partition rows too, but not safely: with heights that do not divide it gathers images around pooling,
and on some layouts returns wrong numbers. So the exchange is written out here, for use inside `jax.shard_map`.

Every device holds a block of ``ceil(height / devices)`` rows; rows of the last blocks beyond the height are dummies,
kept at zero. All heights are known when tracing, so only the position of the device is dynamic.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from cnnjax.networks import Padding, pad_widths

Size = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Rows:
    """How the rows of an image are split.

    Attributes:
        axis: Mesh axis, manual in the surrounding `jax.shard_map`.
        devices: Its size.
        height: Rows of the whole image.
    """

    axis: str
    devices: int
    height: int

    @property
    def block(self) -> int:
        """Rows on each device, dummies included."""
        return -(-self.height // self.devices)

    def valid(self) -> jax.Array:
        """Which rows of this device's block are rows of the image, bool ``[block]``."""
        return lax.axis_index(self.axis) * self.block + jnp.arange(self.block) < self.height


def pad(x_BHWC: jax.Array, rows: Rows) -> jax.Array:
    """The whole image with dummy rows at its end, so that it splits evenly."""
    return jnp.pad(x_BHWC, ((0, 0), (0, rows.devices * rows.block - rows.height), (0, 0), (0, 0)))


def windowed(
    operation: Callable[[jax.Array, Padding], jax.Array],
    x_BHWC: jax.Array,
    rows: Rows | None,
    window: Size,
    strides: Size,
    padding: Padding,
    fill: float,
) -> tuple[jax.Array, Rows | None]:
    """Applies a convolution or pooling, fetching the rows that its windows need from other devices.

    Args:
        operation: ``(images, padding) -> images``.
        x_BHWC: Images, or this device's block of them.
        rows: How they are split; None where they are whole.
        window: Of the operation.
        strides: Likewise.
        padding: Likewise, for the whole image.
        fill: Value of padded rows: 0 for convolution, -inf for max pooling.

    Returns:
        The result, and how its rows are split.
    """
    if rows is None:
        return operation(x_BHWC, padding), None
    x_BHWC, padding, rows = _before_window(x_BHWC, rows, window, strides, padding, fill)
    return clean(operation(x_BHWC, padding), rows), rows


def _before_window(
    x_BHWC: jax.Array, rows: Rows, window: Size, strides: Size, padding: Padding, fill: float
) -> tuple[jax.Array, Padding, Rows]:
    """Fetches the rows that this device's outputs of a windowed operation need.

    Args:
        x_BHWC: This device's block, ``[B, block, W, C]``.
        rows: How the input is split.
        window: Of the operation.
        strides: Likewise.
        padding: Likewise, for the whole image.
        fill: Value of padded rows: 0 for convolution, -inf for max pooling.

    Returns:
        The block with halos and row padding; the padding that is left to the operation, none for rows; how its output
        is split.
    """
    (top, bottom), columns = pad_widths((rows.height, x_BHWC.shape[2]), window, strides, padding)
    out = dataclasses.replace(rows, height=(rows.height + top + bottom - window[0]) // strides[0] + 1)
    length = (out.block - 1) * strides[0] + window[0]
    # Device i needs `length` rows from image row i * out.block * stride - top; relative to its own first row that is:
    starts = [i * (out.block * strides[0] - rows.block) - top for i in range(rows.devices)]
    above, below = max(0, -min(starts)), max(0, max(starts) + length - rows.block)
    x_BHWC = _with_neighbours(x_BHWC, rows, above, below)
    index = lax.axis_index(rows.axis)
    start = jnp.asarray(starts, jnp.int32)[index]
    x_BHWC = _rows_from(x_BHWC, above + start, length)
    row = index * rows.block + start + jnp.arange(length)
    inside = (row >= 0) & (row < rows.height)
    x_BHWC = jnp.where(inside[:, None, None], x_BHWC, jnp.asarray(fill, x_BHWC.dtype))
    return x_BHWC, ((0, 0), columns), out


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _rows_from(x_BHWC: jax.Array, start: jax.Array, length: int) -> jax.Array:
    """Rows ``start`` to ``start + length``.

    The gradient is a slice of a padded array. That of `lax.dynamic_slice` is written into an array of zeros, around
    which XLA:CPU keeps each of the nine terms of a 3x3 pooling's gradient, and the zeros all through the step.
    """
    return lax.dynamic_slice_in_dim(x_BHWC, start, length, 1)


def _rows_from_fwd(x_BHWC, start, length):
    return _rows_from(x_BHWC, start, length), (start, x_BHWC.shape[1])


def _rows_from_bwd(length, saved, g_BHWC):
    start, height = saved
    free = height - length
    g_BHWC = jnp.pad(g_BHWC, ((0, 0), (free, free), (0, 0), (0, 0)))
    return lax.dynamic_slice_in_dim(g_BHWC, free - start, height, 1), None


_rows_from.defvjp(_rows_from_fwd, _rows_from_bwd)


def _with_neighbours(x_BHWC: jax.Array, rows: Rows, above: int, below: int) -> jax.Array:
    """The block between the last ``above`` rows before it and the first ``below`` rows after it; zeros off the ends."""
    parts = [x_BHWC]
    for hop in range(1, -(-above // rows.block) + 1):
        count = min(above - (hop - 1) * rows.block, rows.block)
        pairs = [(i, i + hop) for i in range(rows.devices - hop)]
        parts.insert(0, lax.ppermute(x_BHWC[:, rows.block - count :], rows.axis, pairs))
    for hop in range(1, -(-below // rows.block) + 1):
        count = min(below - (hop - 1) * rows.block, rows.block)
        pairs = [(i, i - hop) for i in range(hop, rows.devices)]
        parts.append(lax.ppermute(x_BHWC[:, :count], rows.axis, pairs))
    return jnp.concatenate(parts, 1)


def clean(x_BHWC: jax.Array, rows: Rows) -> jax.Array:
    """Sets dummy rows to zero, so that no -inf or NaN from them meets a gradient."""
    return jnp.where(rows.valid()[:, None, None], x_BHWC, jnp.zeros((), x_BHWC.dtype))


def mean(x_BHWC: jax.Array, rows: Rows) -> jax.Array:
    """Mean over all rows and columns of the image, ``[B, 1, 1, C]``, on every device."""
    total = lax.psum(jnp.sum(clean(x_BHWC, rows), (1, 2), keepdims=True), rows.axis)
    return total / (rows.height * x_BHWC.shape[2])


def gather(x_BHWC: jax.Array, rows: Rows) -> jax.Array:
    """The whole image on every device, ``[B, height, W, C]``."""
    whole = jnp.zeros((x_BHWC.shape[0], rows.devices * rows.block, *x_BHWC.shape[2:]), x_BHWC.dtype)
    # A sum of blocks in place, rather than all_gather: its result counts as the same on every device.
    whole = lax.dynamic_update_slice_in_dim(whole, x_BHWC, lax.axis_index(rows.axis) * rows.block, 1)
    return lax.psum(whole, rows.axis)[:, : rows.height]
