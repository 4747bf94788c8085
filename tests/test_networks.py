import math
import subprocess
import sys

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest

from cnnjax import model, networks
from cnnjax.networks import REGISTRY, AvgPool, Conv, Dense, Dropout, Flatten, MaxPool, build_cnn, summary

# Worked out by hand from the published layers: kernel + bias of each, batch norm's beta (and gamma) at the end.
PARAMETERS = {
    "cnn2d_3layer_fullconnected_3layer": (
        (9 * 1 + 1) * 32 + (9 * 32 + 1) * 64 + (9 * 64 + 1) * 128 + (4 * 4 * 128 + 1) * 128 + 129 * 64 + 65 * 10
    ),
    "cnn2d_3layer_fullconnected_3layer_mnist": (
        (9 * 1 + 1) * 32 + (9 * 32 + 1) * 48 + (9 * 48 + 1) * 32 + (7 * 7 * 32 + 1) * 128 + 129 * 128 + 129 * 10
    ),
    "cnn2d_2layer_full_connected_2layer": (25 + 1) * 32 + (25 * 32 + 1) * 64 + (7 * 7 * 64 + 1) * 1024 + 1025 * 10,
    "cifar10_slim": (
        *(9 * 3 * 32 + 9 * 32 * 32 + 9 * 32 * 64 + 64 * 80 + 9 * 80 * 192 + 768 * 10,),
        *(32 + 32 + 64 + 80 + 192 + 10,),
    ),
    "resnet18_cifar": 11_173_962,  # as published for the CIFAR variant of ResNet-18
}


def count(name: str) -> int:
    return sum(row.parameters for row in summary(build_cnn(name, 10), REGISTRY[name].input_shape))


@pytest.mark.parametrize("name", REGISTRY)
def test_every_registered_network_has_its_published_parameters(name):
    expected = PARAMETERS[name]  # a KeyError here: a new network needs its count, from a source other than this code
    assert count(name) == (sum(expected) if isinstance(expected, tuple) else expected)


@pytest.mark.parametrize("name", REGISTRY)
@pytest.mark.parametrize("classes", [1, 10])
def test_summary_agrees_with_the_arrays_that_flax_makes(name, classes):
    network, shape = build_cnn(name, classes), REGISTRY[name].input_shape
    variables = jax.eval_shape(lambda key: model.init(key, network, shape), jax.random.key(0))
    rows = summary(network, shape)
    for collection, field in (("params", "parameters"), ("batch_stats", "statistics")):
        made = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(variables[collection]))
        assert made == sum(getattr(row, field) for row in rows)
    logits, _ = jax.eval_shape(lambda v, x: model.apply(network, v, x, train=False), variables, jnp.ones((3, *shape)))
    assert logits.shape == (3, classes) == (3, *rows[-1].output_shape)


def test_shapes_and_multiply_adds_of_cifar10_slim():
    rows = {row.name: row for row in summary(build_cnn("cifar10_slim", 10), (32, 32, 3))}
    shapes = [rows[name].output_shape for name in ("conv_1", "conv_2", "conv_3", "max_pool_1", "conv_4", "conv_5")]
    assert shapes == [(15, 15, 32), (13, 13, 32), (13, 13, 64), (6, 6, 64), (6, 6, 80), (4, 4, 192)]
    assert rows["flatten_1"].output_shape == (768,)
    assert rows["conv_2"].multiply_adds == 13 * 13 * 32 * 9 * 32


def test_the_ancestors_constants_are_in_the_records():
    norms = [layer for layer in build_cnn("cifar10_slim", 10) if isinstance(layer, networks.BatchNorm)]
    assert len(norms) == 6
    assert {(n.momentum, n.epsilon, n.use_scale, n.use_bias) for n in norms} == {(0.995, 0.001, False, True)}
    two_two = build_cnn("cnn2d_2layer_full_connected_2layer", 10)
    weighted = [layer for layer in two_two if isinstance(layer, Conv | Dense)]
    assert all(w.kernel_init == networks.Init("truncated_normal", 0.1) for w in weighted)
    assert all(w.bias_init == networks.Init("constant", 0.1) for w in weighted)
    assert [layer.rate for layer in build_cnn("cnn2d_3layer_fullconnected_3layer_mnist", 10)
            if isinstance(layer, Dropout)] == [0.25, 0.25]  # fmt: skip


def test_both_spellings_name_one_network():
    for name in REGISTRY:
        other = name.replace("full_connected", "fullconnected")
        assert build_cnn(other, 7) == build_cnn(name, 7)
        assert build_cnn(other.replace("fullconnected", "full_connected"), 7) == build_cnn(name, 7)


@hypothesis.given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 40))
def test_grammar_gives_the_counts_that_the_name_states(convolutions, dense, classes):
    network = build_cnn(f"cnn2d_{convolutions}layer_full_connected_{dense}layer", classes)
    if (convolutions, dense) not in ((3, 3), (2, 2)):
        assert sum(isinstance(layer, Conv) for layer in network) == convolutions
        assert sum(isinstance(layer, Dense) for layer in network) == dense
    assert network[-1].features == classes
    assert networks.output_shape(network, (96, 96, 3)) == (classes,)


@hypothesis.given(
    st.tuples(st.integers(1, 20), st.integers(1, 20)),
    st.tuples(st.integers(1, 5), st.integers(1, 5)),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.sampled_from(["SAME", "VALID", ((1, 2), (0, 3))]),
)
@hypothesis.settings(max_examples=60, deadline=None)
def test_window_shapes_agree_with_jax(size, window, strides, padding):
    network = (Conv(2, window, strides, padding), MaxPool(window, strides, padding), Flatten(), Dense(1))
    try:
        rows = summary(network, (*size, 3))
    except ValueError as error:
        assert "does not fit" in str(error)
        return
    variables = jax.eval_shape(lambda key: model.init(key, network, (*size, 3)), jax.random.key(0))
    assert variables["params"]["dense_1"]["kernel"].shape[0] == rows[2].output_shape[0]


def test_a_misfit_names_the_layer_its_input_and_what_would_fit():
    network = build_cnn("cnn2d_5layer_full_connected_2layer", 10)
    with pytest.raises(ValueError, match=r"conv_5 .*2x2x256: at least 3 x 3.*34x34x1 would fit"):
        summary(network, (32, 32, 1))
    assert networks.output_shape(network, (34, 34, 1)) == (10,)
    with pytest.raises(ValueError, match="dense_1 needs a vector"):
        summary((Conv(3), Dense(2)), (8, 8, 1))
    with pytest.raises(ValueError, match="residual_1: its body gives"):
        summary((networks.Residual((Conv(3),)),), (8, 8, 1))
    with pytest.raises(ValueError, match="max_pool_1 needs an image"):
        summary((Flatten(), MaxPool()), (8, 8, 1))
    with pytest.raises(ValueError, match="avg_pool_1"):
        summary((AvgPool((9, 9)),), (8, 8, 1))


def test_an_unknown_name_gives_the_nearest():
    with pytest.raises(ValueError, match="unknown network 'resnet18_cifer'; nearest: resnet18_cifar"):
        build_cnn("resnet18_cifer", 10)
    with pytest.raises(ValueError, match="num_classes is 0"):
        build_cnn("cifar10_slim", 0)


def test_module_needs_only_the_standard_library():
    code = "import sys; sys.modules.update(jax=None, numpy=None, flax=None); import cnnjax.networks"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["cifar10_slim"], 0, "179,962"),
        (["resnet18_cifar", "100", "28,28,1"], 0, f"{11_173_962 + 90 * 513 - 9 * 2 * 64:,}"),
        ([], 0, "cnn2d_{n}layer"),
        (["nothing"], 2, "unknown network 'nothing'"),
        (["cifar10_slim", "ten"], 2, "CLASSES is 'ten'"),
        (["cifar10_slim", "10", "32x32"], 2, "HEIGHT,WIDTH,CHANNELS"),
        (["cifar10_slim", "10", "8,8,3"], 2, "would fit"),
        (["cifar10_slim", "10", "32,32,3", "more"], 2, "at most 3 arguments"),
    ],
)
def test_command_line(arguments, code, text, capsys):
    assert networks.main(arguments) == code
    shown = capsys.readouterr()
    assert text in (shown.out if code == 0 else shown.err)
    if code:
        assert shown.err.startswith("error: ") and shown.err.count("\n") == 1
