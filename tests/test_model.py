import jax
import jax.numpy as jnp
import numpy as np
import numpy_reference as reference
import pytest

from cnnjax import model, networks
from cnnjax.networks import AvgPool, BatchNorm, Conv, Dense, Dropout, Flatten, Init, MaxPool, Relu, Residual

RNG = np.random.default_rng(0)

MIXED = (
    *(Conv(4, (3, 2), (2, 1), "SAME"), BatchNorm(0.9, 1e-3, use_scale=False), Relu()),
    Residual((Conv(6, (1, 1), use_bias=False), BatchNorm(), Relu(), Conv(6, padding="SAME")), (Conv(6, (1, 1)),)),
    Residual((BatchNorm(), Relu())),
    *(MaxPool((3, 3), (2, 2), "SAME"), AvgPool((2, 2), (1, 1)), Flatten()),
    *(Dense(5, use_bias=False), BatchNorm(0.995, use_bias=False), Dense(3)),
)


def randomised(variables):
    """Every array, constants and statistics too, at a value that would show a mistake."""
    return jax.tree.map(lambda a: jnp.asarray(np.abs(RNG.normal(1, 0.3, a.shape)) + 0.1, a.dtype), variables)


def networks_to_try():
    yield "mixed", MIXED, (9, 8, 3)
    for name, entry in networks.REGISTRY.items():
        layers = tuple(layer for layer in entry.build(10) if not isinstance(layer, Dropout))
        yield name, shortened(layers) if name == "resnet18_cifar" else layers, entry.input_shape


def shortened(resnet18):
    """Its stem, the first block that widens, its head: the other blocks are the same code and cost minutes."""
    return (*resnet18[:3], *resnet18[7:9], *resnet18[-3:])


def jitted_init(network, shape, dtype=jnp.float32):
    return jax.jit(lambda key: model.init(key, network, shape, param_dtype=dtype))(jax.random.key(0))


def jitted_apply(network, variables, x, **options):
    dtype, train = options.pop("dtype", jnp.float32), options.pop("train")
    return jax.jit(lambda v, x, o: model.apply(network, v, x, train=train, dtype=dtype, **o))(variables, x, options)


@pytest.mark.parametrize(("network", "shape"), [pytest.param(n, s, id=i) for i, n, s in networks_to_try()])
@pytest.mark.parametrize("train", [True, False])
def test_forward_agrees_with_numpy(network, shape, train, x64):
    variables = randomised(jitted_init(network, shape, jnp.float64))
    x, weight = RNG.normal(size=(3, *shape)), np.array([1, 1, 0], np.float32)
    logits, stats = jitted_apply(network, variables, x, train=train, weight_B=weight, dtype=jnp.float64)
    params, old = (jax.tree.map(np.asarray, variables[key]) for key in ("params", "batch_stats"))
    expected, expected_stats = reference.forward(network, params, old, x, train=train, weight=weight)
    np.testing.assert_allclose(logits[:2], expected[:2], rtol=1e-9, atol=1e-9 * np.abs(expected).max())
    if not train:
        expected_stats = old
    assert jax.tree.structure(stats) == jax.tree.structure(expected_stats)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), stats, expected_stats)


@pytest.mark.parametrize("name", networks.REGISTRY)
def test_padding_rows_change_nothing(name, x64):
    network, shape = networks.build_cnn(name, 10), networks.default_input_shape(name)
    if name == "resnet18_cifar":
        network = shortened(network)
    variables = jitted_init(network, shape, jnp.float64)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(1), jnp.arange(4))
    x = jnp.asarray(RNG.normal(size=(4, *shape)))

    def run(rows, weight):
        return jitted_apply(network, variables, x[:rows], train=True, sample_keys_B=keys[:rows],
                            weight_B=weight, dtype=jnp.float64)  # fmt: skip

    logits, stats = run(4, jnp.array([1.0, 1, 1, 0]))
    alone, alone_stats = run(3, None)
    np.testing.assert_allclose(logits[:3], alone, rtol=1e-10, atol=1e-12)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), stats, alone_stats)


@pytest.mark.parametrize(
    ("record", "fan_in", "fan_out", "variance", "bound"),
    [
        (Init("glorot_uniform"), 900, 400, 2 / 1300, np.sqrt(6 / 1300)),
        (Init("lecun_uniform"), 900, 400, 1 / 900, np.sqrt(3 / 900)),
        (Init("he_normal"), 900, 400, 2 / 900, 2.3 * np.sqrt(2 / 900)),
        # A unit normal cut at two deviations has variance 0.7737, which TensorFlow leaves as it is.
        (Init("truncated_normal", 0.1), 900, 400, 0.01 * 0.7737, 0.2),
    ],
)
def test_initialisers_have_their_stated_variance(record, fan_in, fan_out, variance, bound):
    w = np.asarray(model.initializer(record)(jax.random.key(3), (3, 3, fan_in // 9, fan_out), jnp.float32), np.float64)
    if record.kind == "glorot_uniform":
        w = np.asarray(model.initializer(record)(jax.random.key(3), (fan_in, fan_out), jnp.float32), np.float64)
    assert abs(w.mean()) < 5 * np.sqrt(variance / w.size)
    np.testing.assert_allclose(w.var(), variance, rtol=0.01)
    assert 0.97 * bound < np.abs(w).max() <= bound * (1 + 1e-6)


def test_a_float64_run_starts_from_the_same_weights():
    network, shape = networks.build_cnn("cifar10_slim", 10), (32, 32, 3)
    single = jitted_init(network, shape)
    with jax.enable_x64(True):
        double = jitted_init(network, shape, jnp.float64)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a, np.float64), b), single, double)


def test_moving_statistics_start_at_zero_and_one_and_are_not_moved_by_init():
    stats = jitted_init(networks.build_cnn("cifar10_slim", 10), (32, 32, 3))["batch_stats"]
    assert all((s["mean"] == 0).all() and (s["var"] == 1).all() for s in stats.values())


def test_dropout_differs_between_layers_samples_and_steps_only():
    network = (Flatten(), Dropout(0.5), Dropout(0.5))
    x = jnp.ones((3, 8, 8, 1))
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(1), jnp.array([5, 6, 5]))
    variables = {"params": {"unused": jnp.zeros(1)}, "batch_stats": {}}
    y, _ = jitted_apply(network, variables, x, train=True, sample_keys_B=keys)
    assert np.array_equal(y[0], y[2]) and not np.array_equal(y[0], y[1])
    assert set(np.unique(y)) == {0.0, 4.0}
    assert abs(float((y == 0).mean()) - 0.75) < 0.1  # were both layers' masks the same, it would be 0.5
    y, _ = jitted_apply(network, variables, x, train=False)
    assert (y == 1).all()


def test_nested_dropout_draws_for_itself():
    network = (Flatten(), Dropout(0.5), Residual((Dropout(0.5), Dropout(0.5)), (Dropout(0.5),)))
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(1), jnp.arange(50))
    variables = {"params": {"unused": jnp.zeros(1)}, "batch_stats": {}}
    y, _ = jitted_apply(network, variables, jnp.ones((50, 8, 8, 1)), train=True, sample_keys_B=keys)
    # 2 * (4 * [b and c] + 2 * [d]) where the first mask keeps; independent masks give these shares.
    values, counts = np.unique(np.asarray(y), return_counts=True)
    shares = dict(zip(values.tolist(), counts / y.size, strict=True))
    for value, share in {0.0: 0.5 + 0.1875, 4.0: 0.1875, 8.0: 0.0625, 12.0: 0.0625}.items():
        assert abs(shares[value] - share) < 0.03


def test_bfloat16_computes_in_bfloat16_with_float32_parameters():
    network, shape = networks.build_cnn("cifar10_slim", 10), (32, 32, 3)
    variables = jitted_init(network, shape)
    x = jnp.asarray(RNG.normal(size=(4, *shape)), jnp.float32)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(1), jnp.arange(4))
    logits, stats = jitted_apply(network, variables, x, train=True, sample_keys_B=keys, dtype=jnp.bfloat16)
    assert {a.dtype for a in jax.tree.leaves(stats)} == {jnp.dtype(jnp.float32)}
    single, _ = jitted_apply(network, variables, x, train=True, sample_keys_B=keys)
    assert logits.dtype == jnp.bfloat16
    assert 0 < float(jnp.abs(logits - single).max()) < 0.2
