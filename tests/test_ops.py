import re

import hypothesis
import hypothesis.extra.numpy as npst
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import numpy_reference as reference
import pytest
from jax import lax

from cnnjax import ops

SIZES = st.tuples(st.integers(1, 7), st.integers(1, 7))
WINDOWS = st.tuples(st.integers(1, 3), st.integers(1, 3))
STRIDES = st.tuples(st.integers(1, 3), st.integers(1, 3))


def fits(size, window, padding):
    return padding == "SAME" or (size[0] >= window[0] and size[1] >= window[1])


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=12, deadline=None)
def test_max_pool_and_its_gradient_agree_with_loops(data):
    size, window, strides = data.draw(SIZES), data.draw(WINDOWS), data.draw(STRIDES)
    padding = data.draw(st.sampled_from(["VALID", "SAME"]))
    hypothesis.assume(fits(size, window, padding))
    # Few distinct values, so that ties are common.
    x = data.draw(npst.arrays(np.float64, (2, *size, 2), elements=st.integers(-2, 2)))
    with jax.enable_x64(True):
        expected = reference.max_pool(x, window, strides, padding)
        g = np.arange(expected.size, dtype=np.float64).reshape(expected.shape) + 1

        @jax.jit
        def pool(x, g):
            y, vjp = jax.vjp(lambda x: ops.max_pool(x, window, strides, padding), x)
            return y, vjp(g)[0]

        y, gradient = pool(x, g)
        assert np.array_equal(y, expected)
        np.testing.assert_allclose(gradient, reference.max_pool_gradient(x, g, window, strides, padding), rtol=1e-14)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("window", "strides"), [((2, 2), (2, 2)), ((3, 3), (2, 2)), ((3, 2), (1, 3))])
def test_max_pool_gives_what_reduce_window_gives(dtype, window, strides):
    x = jnp.round(jax.random.normal(jax.random.key(0), (3, 13, 11, 4)) * 2).astype(dtype)

    def plain(x):
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, *window, 1), (1, *strides, 1), "VALID")

    y, vjp = jax.vjp(lambda x: ops.max_pool(x, window, strides, "VALID"), x)
    y_plain, vjp_plain = jax.vjp(plain, x)
    assert y.dtype == dtype and np.array_equal(y, y_plain)
    g = jnp.ones(y.shape, dtype)  # whole numbers: their sums are exact in any order
    assert np.array_equal(vjp(g)[0], vjp_plain(g)[0])


def test_max_pool_lowers_to_plain_operations_on_accelerators():
    x = jax.ShapeDtypeStruct((2, 8, 8, 3), jnp.float32)
    grad = jax.jit(jax.grad(lambda x: ops.max_pool(x, (2, 2), (2, 2), "VALID").sum()))
    assert "select_and_scatter" in grad.trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert "select_and_scatter" not in grad.trace(x).lower(lowering_platforms=("cpu",)).as_text()


@pytest.mark.parametrize("padding", ["SAME", "VALID", ((1, 0), (2, 1))])
@pytest.mark.parametrize("strides", [(1, 1), (2, 3)])
def test_convolution_agrees_with_loops(padding, strides, x64):
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(2, 7, 8, 3)), rng.normal(size=(3, 2, 3, 4))
    y = ops.conv2d(jnp.asarray(x), jnp.asarray(w), strides, padding)
    np.testing.assert_allclose(y, reference.convolution(x, w, strides, padding), rtol=1e-12, atol=1e-12)


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=25, deadline=None)
def test_gradients_of_convolution_agree_with_loops(data):
    """A convolution is linear in images and in kernels: its gradients along any direction are convolutions again."""
    size, window, strides = data.draw(SIZES), data.draw(WINDOWS), data.draw(STRIDES)
    widths = st.tuples(st.integers(0, 3), st.integers(0, 3))
    padding = data.draw(st.one_of(st.sampled_from(["VALID", "SAME"]), st.tuples(widths, widths)))
    hypothesis.assume(padding != "VALID" or fits(size, window, padding))
    hypothesis.assume(all(n >= k for n, k in zip(size, window, strict=True)) or padding == "SAME")
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    x, dx = rng.normal(size=(2, 2, *size, 3))
    w, dw = rng.normal(size=(2, *window, 3, 4))
    with jax.enable_x64(True):
        y, vjp = jax.vjp(jax.jit(lambda x, w: ops.conv2d(x, w, strides, padding)), x, w)
        g = rng.normal(size=y.shape)
        gx, gw = map(np.asarray, vjp(jnp.asarray(g)))
    assert gx.shape == x.shape and gw.shape == w.shape
    np.testing.assert_allclose((gx * dx).sum(), (g * reference.convolution(dx, w, strides, padding)).sum(), rtol=1e-10)
    np.testing.assert_allclose((gw * dw).sum(), (g * reference.convolution(x, dw, strides, padding)).sum(), rtol=1e-10)


def test_gradients_of_convolution_in_a_loop_are_in_the_form_that_is_fast():
    def scanned(w, x):
        grad = jax.grad(lambda w, x: ops.conv2d(jnp.tanh(ops.conv2d(x, w, (1, 1), "SAME")), w, (1, 1), "SAME").sum())
        return jax.lax.scan(lambda total, part: (total + grad(w, part), None), jnp.zeros_like(w), x)[0]

    arrays = jnp.zeros((3, 3, 4, 4)), jnp.zeros((2, 8, 6, 6, 4))
    text = jax.jit(scanned).lower(*arrays).compile().as_text()
    forms = set(re.findall(r"dim_labels=(\w+->\w+)", text))
    assert " while(" in text and forms == {"b01f_01io->b01f"}
    accelerated = jax.jit(scanned).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert "[f, 0, 1, b]x[i, 0, 1, o]->[0, 1, b, f]" in accelerated  # as JAX writes it


@pytest.mark.parametrize(("window", "strides"), [((2, 3), (1, 2)), ((6, 7), (1, 1))])
def test_average_pool_agrees_with_loops(window, strides, x64):
    x = np.random.default_rng(0).normal(size=(2, 6, 7, 3))
    np.testing.assert_allclose(
        ops.avg_pool(jnp.asarray(x), window, strides), reference.average_pool(x, window, strides), rtol=1e-12
    )


@pytest.mark.parametrize("shape", [(5, 3), (5, 4, 4, 3)])
def test_moments_leave_padding_out(shape, x64):
    x = np.random.default_rng(0).normal(100, 3, size=shape)
    weight = np.array([1, 0, 1, 1, 0], np.float32)
    x[weight == 0] = 1e6
    mean, var = ops.batch_moments(jnp.asarray(x), jnp.asarray(weight))
    valid = x[weight > 0].reshape(-1, 3)
    np.testing.assert_allclose(mean, valid.mean(0), rtol=1e-12)
    np.testing.assert_allclose(var, valid.var(0), rtol=1e-10)
    np.testing.assert_allclose(ops.batch_moments(jnp.asarray(x), None)[1], x.reshape(-1, 3).var(0), rtol=1e-10)


def test_moments_keep_their_digits_on_raw_pixels():
    x = np.random.default_rng(0).normal(200, 0.5, size=(64, 8, 8, 1)).astype(np.float32)
    _, var = ops.batch_moments(jnp.asarray(x), jnp.ones(64))
    np.testing.assert_allclose(var, x.astype(np.float64).reshape(-1, 1).var(0), rtol=1e-5)


def test_an_all_padding_batch_has_the_moments_of_nothing():
    mean, var = ops.batch_moments(jnp.full((4, 3), 7.0), jnp.zeros(4))
    assert np.array_equal(mean, [0, 0, 0]) and np.array_equal(var, [1, 1, 1])


def test_dropout_is_keyed_by_sample_and_keeps_the_mean():
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(1), jnp.arange(64))
    x = jnp.ones((64, 500))
    y = ops.dropout(x, 0.2, keys)
    assert set(np.unique(y)) == {0.0, np.float32(1 / (1 - 0.2))}
    assert abs(float((y == 0).mean()) - 0.2) < 4 * np.sqrt(0.2 * 0.8 / y.size)
    order = np.random.default_rng(0).permutation(64)
    assert np.array_equal(ops.dropout(x, 0.2, keys[order]), y[order])
    assert np.array_equal(ops.dropout(x[:7], 0.2, keys[:7]), y[:7])
    assert len({row.tobytes() for row in np.asarray(y)}) == 64
    assert ops.dropout(x, 0.0, keys) is x
