"""Weights of other frameworks: both ways, and against a network computed in the other layout."""

import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import numpy_reference as reference
import pytest

from cnnjax import model
from cnnjax.compat import frameworks, jobs
from cnnjax.networks import AvgPool, BatchNorm, Conv, Dense, Flatten, MaxPool, Relu, Residual, output_shape


@pytest.fixture
def convert(monkeypatch):
    monkeypatch.syspath_prepend(frameworks.RUNNERS)
    import convert

    return convert


NETWORK = (
    *(Conv(4, (3, 2), (1, 1), "SAME"), BatchNorm(), Relu(), MaxPool()),
    *(Residual((Conv(6, padding="SAME"), BatchNorm(use_scale=False)), (Conv(6, (1, 1), use_bias=False),)), Relu()),
    *(Flatten(), BatchNorm(), Dense(7), Relu(), BatchNorm(), Dense(3)),
)
SHAPE = (6, 4, 2)


def weights(network, shape, seed):
    """Random ones, so that no two arrays or axes are alike."""
    rng = np.random.default_rng(seed)
    variables = jax.eval_shape(lambda: model.init(jax.random.key(0), network, shape))
    leaves = itertools.chain(*map(jax.tree_util.tree_leaves_with_path, variables.values()))
    return {"/".join(key.key for key in path): rng.uniform(0.5, 1.5, w.shape) for path, w in leaves}


def torch_style(layers, own, x_BCHW, convert, convention):
    """The network forward in evaluation, written for arrays as the convention has them."""
    x = x_BCHW
    for layer in layers:
        name, leaf = layer["name"], lambda key, name=layer["name"]: own[f"{name}/{key}"]
        match layer["kind"]:
            case "Conv":
                w_OIHW = leaf("kernel") if convention.kernel == "OIHW" else leaf("kernel").transpose(3, 2, 0, 1)
                w_OIHW = w_OIHW[:, :, ::-1, ::-1] if convention.flipped else w_OIHW
                padded = np.pad(x, ((0, 0), (0, 0), *layer["pads"]))
                views = np.lib.stride_tricks.sliding_window_view(padded, w_OIHW.shape[2:], (2, 3))
                views = views[:, :, :: layer["strides"][0], :: layer["strides"][1]]
                x = np.einsum("bchwij,ocij->bohw", views, w_OIHW)
                x = x + leaf("bias")[:, None, None] if layer["use_bias"] else x
            case "Dense":
                w_OI = leaf("kernel") if convention.dense == "OI" else leaf("kernel").T
                x = x @ w_OI.T + leaf("bias")
            case "BatchNorm":
                shape = (-1, *(1,) * (x.ndim - 2))
                x = (x - leaf("mean").reshape(shape)) / np.sqrt(leaf("var").reshape(shape) + layer["epsilon"])
                x = x * leaf("scale").reshape(shape) if layer["use_scale"] else x
                x = x + leaf("bias").reshape(shape)
            case "Relu":
                x = np.maximum(x, 0)
            case "MaxPool":
                views = np.lib.stride_tricks.sliding_window_view(x, layer["window"], (2, 3))
                x = views[:, :, :: layer["strides"][0], :: layer["strides"][1]].max((4, 5))
            case "AvgPool":
                views = np.lib.stride_tricks.sliding_window_view(x, layer["window"], (2, 3))
                x = views[:, :, :: layer["strides"][0], :: layer["strides"][1]].mean((4, 5))
            case "Flatten":
                x = (
                    x.reshape(len(x), -1)
                    if convention.flatten == "CHW"
                    else x.transpose(0, 2, 3, 1).reshape(len(x), -1)
                )
            case "Residual":
                x = sum(torch_style(layer[part], own, x, convert, convention) for part in ("body", "shortcut"))
        del name
    return x


def expected_logits(network, ours, x):
    """In cnnjax's own layout."""

    def tree(leaves):
        found: dict = {}
        for key, value in ours.items():
            *path, leaf = key.split("/")
            if leaf in leaves:
                node = found
                for part in path:
                    node = node.setdefault(part, {})
                node[leaf] = value
        return found

    params, stats = tree(("kernel", "bias", "scale")), tree(("mean", "var"))
    return reference.forward(network, params, stats, x, train=False)[0]


@pytest.mark.parametrize("name", ["TENSORFLOW", "TORCH", "CAFFE", "THEANO"])
def test_converted_weights_compute_the_same_in_the_other_layout(convert, name):
    convention, ours = getattr(convert, name), weights(NETWORK, SHAPE, 1)
    layers = jobs.describe(NETWORK, SHAPE)
    x = np.random.default_rng(2).normal(size=(3, *SHAPE))

    expected = expected_logits(NETWORK, ours, x)
    own = convert.to_framework(layers, ours, convention)
    found = torch_style(layers, own, x.transpose(0, 3, 1, 2), convert, convention)
    np.testing.assert_allclose(found, expected, rtol=1e-10)
    # Weights laid out as for another flatten order, or mirrored, are of the same shapes and give other numbers.
    order = "CHW" if convention.flatten == "HWC" else "HWC"
    for wrong in ((order, convention.flipped), (convention.flatten, not convention.flipped)):
        mistaken = convert.Convention(convention.kernel, convention.dense, *wrong)
        own = convert.to_framework(layers, ours, mistaken)
        assert not np.allclose(torch_style(layers, own, x.transpose(0, 3, 1, 2), convert, convention), expected)


@st.composite
def networks(draw):
    """Small ones with an image shape: convolutions, maybe a block and a pooling, a flatten, and dense layers."""
    small = st.integers(1, 3)
    layers: list = []
    for _ in range(draw(st.integers(0, 2))):
        padding = draw(st.sampled_from(["SAME", "VALID", ((1, 0), (0, 2))]))
        kernel, strides = (draw(small), draw(small)), (draw(st.integers(1, 2)), 1)
        layers += [Conv(draw(small), kernel, strides, padding, draw(st.booleans())), *draw(maybe(Relu(), BatchNorm()))]
    channels = draw(small)
    shortcut = draw(st.sampled_from([(), (Conv(channels, (1, 1), use_bias=False), BatchNorm(use_scale=False))]))
    body = (Conv(channels, (3, 2), padding="SAME"), *draw(maybe(BatchNorm(), Relu())))
    layers += draw(maybe(Conv(channels, (1, 1)), Residual(body, shortcut), Relu()))
    layers += [*draw(maybe(AvgPool((1, 2)))), Flatten(), *draw(maybe(Relu(), BatchNorm(use_scale=False)))]
    layers += [*draw(maybe(Dense(draw(st.integers(1, 5))), BatchNorm(), Relu())), Dense(2)]
    shape = draw(st.integers(6, 8)), draw(st.integers(6, 8)), draw(small)
    try:
        output_shape(tuple(layers), shape)
    except ValueError:  # a window that does not fit
        hypothesis.reject()
    return tuple(layers), shape


def maybe(*layers):
    return st.sampled_from([(), layers])


@hypothesis.given(networks(), st.sampled_from(["TENSORFLOW", "TORCH", "CAFFE", "THEANO"]), st.integers(0, 99))
@hypothesis.settings(max_examples=60, deadline=None,
                     suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])  # fmt: skip
def test_any_network_computes_the_same_in_the_other_layout(convert, drawn, name, seed):
    (network, shape), convention = drawn, getattr(convert, name)
    layers, ours = jobs.describe(network, shape), weights(network, shape, seed)
    x = np.random.default_rng(seed).normal(size=(2, *shape))
    own = convert.to_framework(layers, ours, convention)
    found = torch_style(layers, own, x.transpose(0, 3, 1, 2), convert, convention)
    np.testing.assert_allclose(found, expected_logits(network, ours, x), rtol=1e-9, atol=1e-9)
    back = convert.from_framework(layers, own, convention)
    assert back.keys() == ours.keys() and all(np.array_equal(back[key], ours[key]) for key in ours)


@hypothesis.given(
    st.sampled_from(["HWIO", "OIHW"]), st.sampled_from(["IO", "OI"]), st.sampled_from(["HWC", "CHW"]), st.booleans(),
    st.tuples(st.integers(2, 5), st.integers(2, 5), st.integers(1, 3)), st.integers(0, 99),
)  # fmt: skip
@hypothesis.settings(max_examples=20, deadline=None,
                     suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])  # fmt: skip
def test_there_and_back_is_where_it_began(convert, kernel, dense, flatten, flipped, shape, seed):
    network = (
        Conv(3, (2, 1), padding="SAME"),
        BatchNorm(),
        AvgPool((1, 2)),
        Flatten(),
        BatchNorm(),
        Dense(4),
        Dense(2),
    )
    layers, ours = jobs.describe(network, shape), weights(network, shape, seed)
    convention = convert.Convention(kernel, dense, flatten, flipped)
    own = convert.to_framework(layers, ours, convention)
    back = convert.from_framework(layers, own, convention)
    assert back.keys() == ours.keys()
    assert all(back[key].shape == ours[key].shape and np.array_equal(back[key], ours[key]) for key in ours)


def test_biased_variance_by_hand(convert):
    x = np.random.default_rng(0).normal(size=(5, 3))
    before = np.array([1.0, 2.0, 3.0])
    running = 0.9 * before + 0.1 * x.var(0, ddof=1)
    np.testing.assert_allclose(
        convert.biased_variance(running, before, 0.9, 5), 0.9 * before + 0.1 * x.var(0), rtol=1e-12
    )
