"""Convolutions and pooling on split rows against the same operation on the whole image."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from cnnjax import ops, partition, spatial
from cnnjax.networks import pad_widths

LARGE = st.tuples(st.integers(1, 4), st.integers(1, 3))


@st.composite
def windows(draw):
    """Height and width of an image, window, strides and padding that fit, and what works on them."""
    size = draw(st.tuples(st.integers(1, 17), st.integers(1, 5)))
    window, strides = draw(LARGE), draw(LARGE)
    kind = draw(st.sampled_from(["convolution", "max", "mean"]))
    explicit = st.tuples(*(st.tuples(st.integers(0, k - 1), st.integers(0, k - 1)) for k in window))
    padding = "VALID" if kind == "mean" else draw(st.one_of(st.sampled_from(["SAME", "VALID"]), explicit))
    pads = pad_widths(size, window, strides, padding)
    hypothesis.assume(all(n + sum(p) >= k for n, p, k in zip(size, pads, window, strict=True)))
    return size, window, strides, padding, kind


def check(devices, size, window, strides, padding, kind):
    """Value and gradients, of the image and of the kernel."""
    rng = np.random.default_rng(0)
    x_BHWC, w_HWIO = rng.normal(size=(2, *size, 2)), rng.normal(size=(*window, 2, 3))

    def operation(x, padding, w):
        if kind == "convolution":
            return ops.conv2d(x, w, strides, padding)
        return ops.max_pool(x, window, strides, padding) if kind == "max" else ops.avg_pool(x, window, strides)

    mesh = partition.make_mesh(f"space={devices}")[0]
    rows = spatial.Rows("space", devices, size[0])

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(None, "space"), P()), out_specs=P())
    def blocks(x, w):
        fill = -jnp.inf if kind == "max" else 0.0
        y, out = spatial.windowed(functools.partial(operation, w=w), x, rows, window, strides, padding, fill)
        return spatial.gather(y, out)

    def split(x, w):
        return blocks(spatial.pad(x, rows), w)

    whole = functools.partial(operation, padding=padding)
    with jax.enable_x64(True):
        expected, whole_vjp = jax.vjp(lambda x, w: whole(x, w=w), x_BHWC, w_HWIO)
        g_BHWC = rng.normal(size=expected.shape)

        @jax.jit
        def both(x, w, g):
            y, vjp = jax.vjp(split, x, w)
            return y, vjp(g)

        y_BHWC, gradients = both(x_BHWC, w_HWIO, g_BHWC)
        np.testing.assert_allclose(y_BHWC, expected, rtol=1e-12, atol=1e-12)
        for gradient, right in zip(gradients, whole_vjp(g_BHWC), strict=True):
            np.testing.assert_allclose(gradient, right, rtol=1e-12, atol=1e-12)


@hypothesis.given(windows(), st.integers(2, 4))
@hypothesis.settings(max_examples=8, deadline=None, derandomize=True)
def test_split_rows_give_what_the_whole_image_gives(drawn, devices):
    check(devices, *drawn)


@pytest.mark.slow
@hypothesis.given(windows(), st.integers(2, 8))
@hypothesis.settings(max_examples=80, deadline=None)
def test_split_rows_give_what_the_whole_image_gives_for_many_shapes(drawn, devices):
    check(devices, *drawn)


@pytest.mark.parametrize("devices", [2, 3, 5])
@pytest.mark.parametrize("height", [3, 7, 8])
def test_the_mean_over_split_rows(devices, height, x64):
    x_BHWC = np.random.default_rng(0).normal(size=(2, height, 3, 4))
    mesh = partition.make_mesh(f"space={devices}")[0]
    rows = spatial.Rows("space", devices, height)
    split = jax.shard_map(lambda x: spatial.mean(x, rows), mesh=mesh, in_specs=P(None, "space"), out_specs=P())
    mean = jax.jit(lambda x: split(spatial.pad(x, rows)))(x_BHWC)
    np.testing.assert_allclose(mean, x_BHWC.mean((1, 2), keepdims=True), rtol=1e-12)
