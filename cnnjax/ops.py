"""Convolution, pooling, dropout: the numerics, each with the lowering that its platform runs fast.

Dimension letters: B batch, H height, W width, C channels, I input and O output features.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
from jax import lax

from cnnjax.networks import Padding, pad_widths
from cnnjax.spatial import Rows

Size = tuple[int, int]


def image_size(x_BHWC: jax.Array) -> Size:
    """Height and width."""
    return x_BHWC.shape[1], x_BHWC.shape[2]


# ---------------------------------------------------------------------------------------------------------------------
# Convolution
#
# XLA:CPU brings the gradients of a convolution into the form that its fast kernels take, but only outside of loops: in
# a loop over micro-batches the gradients as JAX writes them are 10 to 20 times slower. So on the CPU they are written
# in that form, images as NHWC and kernels as HWIO, to begin with.
# ---------------------------------------------------------------------------------------------------------------------


def conv2d(x_BHWC: jax.Array, w_HWIO: jax.Array, strides: Size, padding: Padding) -> jax.Array:
    """Cross-correlation of images with kernels; the result has shape ``[B, H', W', O]``."""
    pads = pad_widths(image_size(x_BHWC), (w_HWIO.shape[0], w_HWIO.shape[1]), strides, padding)
    return _conv2d(x_BHWC, w_HWIO, strides, pads)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _conv2d(x_BHWC, w_HWIO, strides, pads):
    return _conv2d_plain(x_BHWC, w_HWIO, strides, pads)


def _conv2d_plain(x_BHWC, w_HWIO, strides, pads, **dilation):
    dimensions = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x_BHWC, w_HWIO, strides, pads, dimension_numbers=dimensions, **dilation)


def _conv2d_fwd(x_BHWC, w_HWIO, strides, pads):
    return _conv2d(x_BHWC, w_HWIO, strides, pads), (x_BHWC, w_HWIO)


def _conv2d_bwd(strides, pads, saved, g_BHWO):
    def plain(x_BHWC, w_HWIO, g_BHWO):
        return jax.vjp(lambda x, w: _conv2d_plain(x, w, strides, pads), x_BHWC, w_HWIO)[1](g_BHWO)

    def canonical(x_BHWC, w_HWIO, g_BHWO):
        sizes, kernel = image_size(x_BHWC), (w_HWIO.shape[0], w_HWIO.shape[1])
        spans = [(n - 1) * s + 1 for n, s in zip(image_size(g_BHWO), strides, strict=True)]  # of the dilated gradient
        lows = [k - 1 - lo for k, (lo, _) in zip(kernel, pads, strict=True)]
        x_pads = [(lo, n + k - 1 - d - lo) for lo, n, k, d in zip(lows, sizes, kernel, spans, strict=True)]
        w_pads = [(lo, k - 1 + d - n - lo) for (lo, _), n, k, d in zip(pads, sizes, kernel, spans, strict=True)]
        w_HWOI = jnp.flip(w_HWIO, (0, 1)).swapaxes(2, 3)
        gx_BHWC = _conv2d_plain(g_BHWO, w_HWOI, (1, 1), x_pads, lhs_dilation=strides)
        # The batch is summed over, so it takes the place of the channels.
        x_CHWB, g_HWBO = x_BHWC.transpose(3, 1, 2, 0), g_BHWO.transpose(1, 2, 0, 3)
        gw_IHWO = _conv2d_plain(x_CHWB, g_HWBO, (1, 1), w_pads, rhs_dilation=strides)
        return gx_BHWC, gw_IHWO.transpose(1, 2, 0, 3)

    # Manual axes over which images differ and kernels do not, such as rows: their gradients are to be summed.
    x_BHWC, w_HWIO = saved
    images, kernels = (jax.typeof(a).manual_axis_type.varying for a in (g_BHWO, w_HWIO))
    apart = tuple(images - kernels)
    if apart:
        w_HWIO = lax.pcast(w_HWIO, apart, to="varying")
    gx_BHWC, gw_HWIO = lax.platform_dependent(x_BHWC, w_HWIO, g_BHWO, cpu=canonical, default=plain)
    return gx_BHWC, psum(gw_HWIO, apart)


_conv2d.defvjp(_conv2d_fwd, _conv2d_bwd)


# ---------------------------------------------------------------------------------------------------------------------
# Max pooling
#
# XLA:CPU runs select_and_scatter, the gradient of a max reduce_window, 4 to 30 times slower than the same gradient
# written with slices, so the CPU gets slices and accelerators the plain operation. Both give the whole gradient of a
# window to the first of its largest values in row-major order.
# ---------------------------------------------------------------------------------------------------------------------


def max_pool(x_BHWC: jax.Array, window: Size, strides: Size, padding: Padding) -> jax.Array:
    """Largest value of each window, shape ``[B, H', W', C]``.

    Of equal values the first in row-major order takes the whole gradient.
    """
    pads = pad_widths(image_size(x_BHWC), window, strides, padding)
    if any(map(any, pads)):
        lowest = jnp.array(-jnp.inf, x_BHWC.dtype)
        x_BHWC = lax.pad(x_BHWC, lowest, ((0, 0, 0), *((lo, hi, 0) for lo, hi in pads), (0, 0, 0)))
    return _max_pool(x_BHWC, window, strides)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _max_pool(x_BHWC, window, strides):
    slices = functools.partial(_max_pool_slices, window=window, strides=strides)
    plain = functools.partial(_max_pool_plain, window=window, strides=strides)
    return lax.platform_dependent(x_BHWC, cpu=slices, default=plain)


def _max_pool_fwd(x_BHWC, window, strides):
    y_BHWC = _max_pool(x_BHWC, window, strides)
    return y_BHWC, (x_BHWC, y_BHWC)


def _max_pool_bwd(window, strides, saved, g_BHWC):
    def plain(x_BHWC, y_BHWC, g_BHWC):
        del y_BHWC
        return jax.vjp(functools.partial(_max_pool_plain, window=window, strides=strides), x_BHWC)[1](g_BHWC)[0]

    slices = functools.partial(_max_pool_slices_gradient, window=window, strides=strides)
    return (lax.platform_dependent(*saved, g_BHWC, cpu=slices, default=plain),)


_max_pool.defvjp(_max_pool_fwd, _max_pool_bwd)


def _max_pool_plain(x_BHWC, window, strides):
    return lax.reduce_window(x_BHWC, -jnp.inf, lax.max, (1, *window, 1), (1, *strides, 1), "VALID")


def _window_slices(x_BHWC, window, strides):
    """For each window position in row-major order: its padding back to the input, and the values there."""
    sizes = x_BHWC.shape[1:3]
    outs = [(n - k) // s + 1 for n, k, s in zip(sizes, window, strides, strict=True)]
    for start in itertools.product(range(window[0]), range(window[1])):
        stops = [i + (o - 1) * s + 1 for i, o, s in zip(start, outs, strides, strict=True)]
        pads = [(i, n - stop, s - 1) for i, n, stop, s in zip(start, sizes, stops, strides, strict=True)]
        yield pads, x_BHWC[:, start[0] : stops[0] : strides[0], start[1] : stops[1] : strides[1], :]


def _max_pool_slices(x_BHWC, window, strides):
    return functools.reduce(jnp.maximum, (values for _, values in _window_slices(x_BHWC, window, strides)))


def _max_pool_slices_gradient(x_BHWC, y_BHWC, g_BHWC, window, strides):
    untaken = jnp.ones(y_BHWC.shape, bool)
    gx_BHWC = jnp.zeros_like(x_BHWC)
    zero = jnp.zeros((), g_BHWC.dtype)
    for pads, values in _window_slices(x_BHWC, window, strides):
        wins = untaken & (values == y_BHWC)
        untaken &= ~wins
        gx_BHWC += lax.pad(jnp.where(wins, g_BHWC, zero), zero, ((0, 0, 0), *pads, (0, 0, 0)))
    return gx_BHWC


def avg_pool(x_BHWC: jax.Array, window: Size, strides: Size) -> jax.Array:
    """Mean of each window, shape ``[B, H', W', C]``."""
    if window == x_BHWC.shape[1:3]:
        return jnp.mean(x_BHWC, axis=(1, 2), keepdims=True)
    total = lax.reduce_window(x_BHWC, 0.0, lax.add, (1, *window, 1), (1, *strides, 1), "VALID")
    return total / (window[0] * window[1])


# ---------------------------------------------------------------------------------------------------------------------
# Batch normalisation and dropout
# ---------------------------------------------------------------------------------------------------------------------


def batch_moments(
    x: jax.Array, weight_B: jax.Array | None, axes: tuple[str, ...] = (), rows: Rows | None = None
) -> tuple[jax.Array, jax.Array]:
    """Mean and biased variance of each channel over the valid samples of the batch.

    Args:
        x: ``[B, ..., C]``.
        weight_B: 1 for samples that count, 0 for padding; None where all count.
        axes: Manual mesh axes that split the batch. Under plain jit, which sees the whole batch, there are none.
        rows: How image rows are split, where they are.

    Returns:
        Mean and variance, each ``[C]``, in at least float32; 0 and 1 where no sample counts.
    """
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    dims = tuple(range(x.ndim - 1))
    if weight_B is None:
        weight_B = jnp.ones(x.shape[0], x.dtype)
    weight = weight_B.astype(x.dtype).reshape(-1, *(1,) * (x.ndim - 1))
    positions = x.size // x.shape[0] // x.shape[-1]
    sum_axes = axes
    if rows is not None:
        weight = weight * rows.valid()[:, None, None].astype(x.dtype)
        positions, sum_axes = rows.height * x.shape[2], (*axes, rows.axis)
    samples = psum(jnp.sum(weight_B.astype(x.dtype)), axes)
    count = jnp.maximum(samples, 1) * positions
    # Two passes: the mean of squares minus the square of the mean loses all digits on raw 0-255 inputs.
    mean = psum(jnp.sum(weight * x, dims), sum_axes) / count
    var = psum(jnp.sum(weight * jnp.square(x - mean), dims), sum_axes) / count
    # A variance of 0 would multiply the padding by 300 in each layer until it overflows, and 0 * inf is no gradient.
    return mean, jnp.where(samples > 0, var, 1)


def psum(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Sum over manual mesh axes; over none, the array itself."""
    return lax.psum(x, axes) if axes else x


def dropout(x: jax.Array, rate: float, sample_keys_B: jax.Array) -> jax.Array:
    """Zeroes values with probability ``rate`` and divides the rest by ``1 - rate``.

    Args:
        x: ``[B, ...]``.
        rate: From 0 to below 1.
        sample_keys_B: One key a sample, so that a sample's draw does not depend on the batch or the device it is in.
    """
    if rate == 0:
        return x
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, jnp.float32(1 - rate), x.shape[1:]))(sample_keys_B)
    return jnp.where(kept, x / (1 - rate), 0)
