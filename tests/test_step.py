import jax
import jax.numpy as jnp
import numpy as np
import numpy_reference as reference
import optax
import pytest

from cnnjax import networks, partition
from cnnjax.augment import Augmentation
from cnnjax.losses import Objective
from cnnjax.networks import BatchNorm, Conv, Dense, Dropout, Flatten, MaxPool, Relu
from cnnjax.partition import Layout
from cnnjax.step import Recipe, batch_sums, create_state, eval_step, preprocess, train_step
from cnnjax.strategy import compile_steps

NETWORK = (Conv(3, use_bias=False), BatchNorm(0.9), Relu(), MaxPool(), Flatten(), Dense(4))
SHAPE = (8, 8, 2)
RNG = np.random.default_rng(0)
ONE = Layout(partition.make_mesh("data=1")[0])


def recipe(network=NETWORK, **options):
    dtype = jnp.float64 if jax.config.jax_enable_x64 else jnp.float32
    options = {"scaling": "unit", "dtype": dtype, "param_dtype": dtype} | options
    schedule = optax.constant_schedule(0.1)
    return Recipe(network, options.pop("optimizer", optax.sgd(schedule)), schedule, **options)


def batch(size=6, valid=None):
    weight = np.ones(size, np.float32)
    weight[size if valid is None else valid :] = 0
    return {
        "image": RNG.integers(0, 256, (size, *SHAPE), np.uint8),
        "label": RNG.integers(0, 4, size).astype(np.int32),
        "weight": weight,
        "index": np.arange(size, dtype=np.int32),
    }


def reference_loss(network, params, stats, one, smoothing=0.0):
    logits, _ = reference.forward(network, params, stats, one["image"] / 255.0, train=True, weight=one["weight"])
    losses = reference.cross_entropy(logits, one["label"], smoothing)
    return (losses * one["weight"]).sum() / one["weight"].sum()


@pytest.mark.parametrize("mesh", ["data=1", "data=2"])
def test_a_micro_batch_of_padding_alone_changes_nothing(mesh):
    """In float32 and deep enough that a factor of 300 a layer, that of a variance of 0, would overflow."""
    layers = (layer for _ in range(16) for layer in (Conv(3, padding="SAME", use_bias=False), BatchNorm(), Relu()))
    network = (*layers, Flatten(), Dense(4))
    padded = batch(12, valid=8)
    short = {name: values[:8] for name, values in padded.items()}
    results = []
    for parts, one in ((3, padded), (2, short)):
        where = Layout(partition.make_mesh(mesh)[0], microbatches=parts)
        steps = compile_steps(recipe(network), where, SHAPE)
        rows = where.rows(len(one["weight"]))
        placed = {name: values[rows] for name, values in one.items()} | {"weight": one["weight"][rows] * (rows >= 0)}
        state, metrics = steps.train(steps.init(), jax.device_put(placed, where.batch_sharding))
        results.append(jax.device_get((state.params, state.batch_stats, metrics)))
    assert results[0][2]["count"] == 8 and np.isfinite(results[0][2]["grad_norm"])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), *results)


@pytest.mark.parametrize(("smoothing", "l2"), [(0.0, 0.0), (0.1, 0.03)])
def test_the_update_is_the_gradient_of_the_weighted_mean_loss(x64, smoothing, l2):
    """Against central differences of an independent NumPy loss, with padding in the batch."""
    one, start = batch(6, valid=5), create_state(recipe(), SHAPE)
    options = recipe(objective=Objective(smoothing), l2=l2)
    after, metrics = jax.jit(lambda s, b: train_step(options, ONE, s, b))(start, one)
    params, stats = jax.tree.map(np.array, (start.params, start.batch_stats))

    def loss():
        kernels = sum((layer["kernel"] ** 2).sum() for layer in params.values() if "kernel" in layer)
        return reference_loss(NETWORK, params, stats, one, smoothing) + l2 / 2 * kernels

    np.testing.assert_allclose(
        metrics["loss"] / metrics["count"], reference_loss(NETWORK, params, stats, one, smoothing)
    )
    assert metrics["count"] == 5
    squares = 0.0
    for layer, own in params.items():
        for name, values in own.items():
            for place in list(np.ndindex(values.shape))[:: max(values.size // 5, 1)]:
                kept, difference = values[place], 1e-5
                values[place] = kept + difference
                above = loss()
                values[place] = kept - difference
                below = loss()
                values[place] = kept
                moved = float(start.params[layer][name][place] - after.params[layer][name][place])
                np.testing.assert_allclose(moved / 0.1, (above - below) / 2e-5, rtol=1e-5, atol=1e-8)
            change = np.asarray(start.params[layer][name] - after.params[layer][name]) / 0.1
            squares += (change**2).sum()
    np.testing.assert_allclose(metrics["grad_norm"], np.sqrt(squares), rtol=1e-9)


def test_metrics_are_sums_over_the_samples_that_count():
    logits = jnp.array([[2.0, 0, 0], [0, 3, 0], [0, 0, 5], [9, 9, 9]])
    values = Objective().measure(logits, {"label": jnp.array([0, 2, 2, 0])})
    sums = batch_sums(recipe(), values, jnp.array([1.0, 1, 1, 0]))
    expected = reference.cross_entropy(np.asarray(logits, np.float64), np.array([0, 2, 2, 0]))[:3]
    np.testing.assert_allclose(sums["loss"], expected.sum(), rtol=1e-6)
    assert (sums["correct"], sums["count"]) == (2, 3)


def test_the_initial_loss_is_about_the_logarithm_of_the_classes():
    network = networks.build_cnn("cnn2d_2layer_fullconnected_1layer", 10)
    start = create_state(recipe(network), (16, 16, 2))
    one = {name: np.asarray(value) for name, value in batch(64).items()}
    one["image"] = RNG.integers(0, 256, (64, 16, 16, 2), np.uint8)
    metrics = eval_step(recipe(network), ONE, start, one)
    assert abs(float(metrics["loss"]) / 64 - np.log(10)) < 0.3


def test_evaluation_uses_the_moving_average_and_moving_statistics(x64):
    averaged = recipe(ema=0.5)
    step = jax.jit(lambda s, b: train_step(averaged, ONE, s, b))
    state, by_hand = create_state(averaged, SHAPE), None
    for t in range(3):
        state, _ = step(state, batch())
        decay = min(0.5, (1 + t) / (10 + t))
        before = create_state(averaged, SHAPE).params if by_hand is None else by_hand
        by_hand = jax.tree.map(lambda e, p, d=decay: d * e + (1 - d) * p, before, state.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), state.ema, by_hand)
    one = batch()
    metrics = eval_step(averaged, ONE, state, one)
    params, stats = jax.tree.map(np.array, (state.ema, state.batch_stats))
    logits, _ = reference.forward(NETWORK, params, stats, one["image"] / 255.0, train=False)
    np.testing.assert_allclose(metrics["loss"], reference.cross_entropy(logits, one["label"]).sum(), rtol=1e-9)
    assert np.array_equal(metrics["predicted"], logits.argmax(1))
    powers = np.exp(logits - logits.max(1, keepdims=True))
    np.testing.assert_allclose(metrics["probabilities"], powers / powers.sum(1, keepdims=True), rtol=1e-9)


def test_draws_depend_on_seed_step_and_sample_alone(x64):
    noisy = recipe((Flatten(), Dropout(0.5), Dense(4)), augmentation=Augmentation(True, 2))
    one = batch(6)
    order = np.array([4, 2, 0, 5, 1, 3])
    step = jax.jit(lambda s, b: train_step(noisy, ONE, s, b))
    moved = step(create_state(noisy, SHAPE), {name: values[order] for name, values in one.items()})[1]
    metrics = step(create_state(noisy, SHAPE), one)[1]
    np.testing.assert_allclose(moved["loss"], metrics["loss"], rtol=1e-12)
    later = step(create_state(noisy, SHAPE).replace(step=jnp.int32(1)), one)[1]
    other = {**one, "index": one["index"] + 10}
    assert abs(later["loss"] - metrics["loss"]) > 1e-6
    assert abs(step(create_state(noisy, SHAPE), other)[1]["loss"] - metrics["loss"]) > 1e-6


def test_evaluation_draws_nothing():
    noisy = recipe((Flatten(), Dropout(0.5), Dense(4)), augmentation=Augmentation(True, 2, brightness=50.0))
    one = batch()
    x = preprocess(noisy, one | {"image": jnp.asarray(one["image"])}, None, train=False)
    np.testing.assert_allclose(x, one["image"] / 255.0, rtol=1e-6)


def test_nothing_is_compiled_again_after_the_first_step(monkeypatch):
    import cnnjax.strategy as module

    traces = []
    for name in ("train_step", "eval_step"):
        original = getattr(module, name)

        def traced(*arguments, original=original, name=name):
            traces.append(name)
            return original(*arguments)

        monkeypatch.setattr(module, name, traced)
    layout = Layout(partition.make_mesh("data=4")[0])
    steps = compile_steps(recipe(), layout, SHAPE)
    state = steps.init()
    for valid in (8, 8, 3, 8):  # a padded batch is a batch like any other
        state, _ = steps.train(state, jax.device_put(batch(8, valid), layout.batch_sharding))
        steps.evaluate(state, jax.device_put(batch(8, valid), layout.batch_sharding))
    assert sorted(traces) == ["eval_step", "train_step"]


def test_the_state_is_donated_and_replicated():
    layout = Layout(partition.make_mesh("data=4")[0])
    steps = compile_steps(recipe(), layout, SHAPE)
    state = steps.init()
    after, _ = steps.train(state, jax.device_put(batch(8), layout.batch_sharding))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))
    assert all(len(leaf.sharding.device_set) == 4 and leaf.is_fully_replicated for leaf in jax.tree.leaves(after))
