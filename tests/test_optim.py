"""Schedules and optimisers against NumPy in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cnnjax.optim import OptimizerConfig, ema_update, kernel_mask, l2_penalty, make_optimizer, make_schedule

STEPS = 8


def rates(config, total_steps, steps):
    """The compiled schedule, at many steps in one call."""
    return np.asarray(jax.jit(jax.vmap(make_schedule(config, total_steps)))(jnp.asarray(steps, jnp.int32)))


def initial_params():
    rng = np.random.default_rng(0)
    return {
        "conv": {"kernel": rng.normal(size=(3, 3, 2, 4)), "bias": rng.normal(size=4)},
        "norm": {"scale": rng.normal(size=4), "bias": rng.normal(size=4)},
        "dense": {"kernel": rng.normal(size=(4, 5))},
    }


def gradient_sequence():
    rng = np.random.default_rng(1)
    return [jax.tree.map(lambda p: rng.normal(size=p.shape), initial_params()) for _ in range(STEPS)]


def numpy_run(config, rate_at):
    """The textbook update of each leaf by itself; decay only where the path ends in `kernel`."""
    result = {}
    for module, leaves in initial_params().items():
        result[module] = {}
        for name, w in leaves.items():
            v, m, s = np.zeros_like(w), np.zeros_like(w), np.zeros_like(w)
            decay = config.weight_decay if name == "kernel" and config.weight_decay_kind == "decoupled" else 0.0
            for t, gradients in enumerate(gradient_sequence()):
                g = gradients[module][name]
                if config.optimizer == "sgd":
                    direction = g
                elif config.optimizer == "momentum":
                    v = config.momentum * v + g
                    direction = v
                elif config.optimizer == "nesterov":
                    v = config.momentum * v + g
                    direction = config.momentum * v + g
                else:
                    m = config.b1 * m + (1 - config.b1) * g
                    s = config.b2 * s + (1 - config.b2) * g * g
                    m_hat = m / (1 - config.b1 ** (t + 1))
                    s_hat = s / (1 - config.b2 ** (t + 1))
                    direction = m_hat / (np.sqrt(s_hat) + config.eps)
                w = w - rate_at(t) * (direction + decay * w)
            result[module][name] = w
    return result


def optax_run(config, dtype, total_steps=100):
    optimizer = make_optimizer(config, total_steps)
    params = jax.tree.map(lambda p: jnp.asarray(p, dtype), initial_params())
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, gradients):
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    for gradients in gradient_sequence():
        params, state = step(params, state, jax.tree.map(lambda g: jnp.asarray(g, dtype), gradients))
    return params, state


def assert_trees_close(got, want, **tolerance):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), b, **tolerance), got, want)


CONFIGS = [
    OptimizerConfig("sgd", 0.1),
    OptimizerConfig("sgd", 0.1, weight_decay=0.3),
    OptimizerConfig("sgd", 0.1, weight_decay=0.3, weight_decay_kind="loss"),
    OptimizerConfig("momentum", 0.05, momentum=0.8),
    OptimizerConfig("momentum", 0.05, weight_decay=0.3),
    OptimizerConfig("nesterov", 0.05, momentum=0.9, weight_decay=0.1),
    OptimizerConfig("adam", 0.01, b1=0.8, b2=0.95, eps=1e-3),
    OptimizerConfig("adamw", 0.01, weight_decay=0.5),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.optimizer}-{c.weight_decay}-{c.weight_decay_kind}")
def test_optimizer_matches_numpy(config):
    want = numpy_run(config, lambda t: config.lr)
    params, _ = optax_run(config, jnp.float32)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))
    assert_trees_close(params, want, rtol=2e-5, atol=2e-6)
    with jax.enable_x64(True):
        params, _ = optax_run(config, jnp.float64)
        assert all(leaf.dtype == jnp.float64 for leaf in jax.tree.leaves(params))
        assert_trees_close(params, want, rtol=1e-12, atol=1e-13)
    assert jnp.zeros(()).dtype == jnp.float32  # float64 stayed inside


@pytest.mark.parametrize("optimizer", ["nesterov", "adamw"])
def test_optimizer_follows_its_schedule(optimizer):
    config = OptimizerConfig(
        optimizer, 0.05, schedule="exponential", decay_steps=3, decay_rate=0.5, warmup_steps=2, weight_decay=0.1
    )
    want_rates = [0.0, 0.025, 0.05, 0.05, 0.05, 0.025, 0.025, 0.025]
    with jax.enable_x64(True):
        params, _ = optax_run(config, jnp.float64)
    assert_trees_close(params, numpy_run(config, want_rates.__getitem__), rtol=1e-12, atol=1e-13)
    # The logged rate is the rate used.
    np.testing.assert_allclose(rates(config, 100, range(STEPS)), want_rates, rtol=1e-6)


def keras_nesterov(rate_at, momentum=0.9):
    """Keras SGD(nesterov=True): the rate is inside the velocity."""
    w = initial_params()["dense"]["kernel"]
    v = np.zeros_like(w)
    for t, gradients in enumerate(gradient_sequence()):
        g = gradients["dense"]["kernel"]
        v = momentum * v - rate_at(t) * g
        w = w + momentum * v - rate_at(t) * g
    return w


def test_nesterov_is_that_of_keras_while_the_rate_is_constant():
    with jax.enable_x64(True):
        params, _ = optax_run(OptimizerConfig("nesterov", 0.05), jnp.float64)
    np.testing.assert_allclose(params["dense"]["kernel"], keras_nesterov(lambda t: 0.05), rtol=1e-12)


def test_nesterov_departs_from_keras_after_a_drop_of_the_rate():
    config = OptimizerConfig("nesterov", 0.05, schedule="exponential", decay_steps=4)
    with jax.enable_x64(True):
        params, _ = optax_run(config, jnp.float64)
    difference = np.asarray(params["dense"]["kernel"]) - keras_nesterov(lambda t: 0.05 * 0.1 ** (t // 4))
    assert np.abs(difference).max() > 1e-2


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "nesterov", "adam", "adamw"])
def test_state_is_donated_and_rebuilt_from_its_leaves(optimizer):
    config = OptimizerConfig(optimizer, 0.1, schedule="cosine")
    tx = make_optimizer(config, 10)
    params = jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), initial_params())
    gradients = jax.tree.map(jnp.ones_like, params)
    state = tx.init(params)
    leaves, structure = jax.tree.flatten(state)
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)
    saved = [np.array(leaf) for leaf in leaves]

    def step(state, params):
        updates, state = tx.update(gradients, state, params)
        return state, optax.apply_updates(params, updates)

    want = jax.jit(step)(state, params)
    got = jax.jit(step, donate_argnums=(0, 1))(state, params)
    assert all(leaf.is_deleted() for leaf in leaves)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    fresh = jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), initial_params())
    rebuilt = jax.jit(step)(jax.tree.unflatten(structure, saved), fresh)
    jax.tree.map(np.testing.assert_array_equal, rebuilt, want)


@pytest.mark.parametrize("interval", [1, 7, 41, 47, 55, 350 * 390])
def test_staircase_drops_exactly_on_every_interval(interval):
    config = OptimizerConfig("sgd", 0.1, schedule="exponential", decay_steps=interval)
    drops = np.arange(1, 6) * interval
    np.testing.assert_allclose(rates(config, 10**7, drops), 0.1 * 0.1 ** np.arange(1, 6), rtol=1e-5)
    np.testing.assert_allclose(rates(config, 10**7, drops - 1), 0.1 * 0.1 ** np.arange(5), rtol=1e-5)


def test_smooth_exponential():
    config = OptimizerConfig("sgd", 0.2, schedule="exponential", decay_steps=10, decay_rate=0.5, staircase=False)
    steps = np.arange(40)
    np.testing.assert_allclose(rates(config, 40, steps), 0.2 * 0.5 ** (steps / 10), rtol=1e-6)


def test_cosine_ends():
    config = OptimizerConfig("sgd", 0.4, schedule="cosine", final_lr_fraction=0.25)
    steps = np.arange(101)
    want = 0.1 + 0.3 * (1 + np.cos(np.pi * steps / 100)) / 2
    got = rates(config, 100, steps)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    np.testing.assert_allclose(got[[0, 50, 100]], [0.4, 0.25, 0.1], rtol=1e-6)
    np.testing.assert_allclose(rates(config, 100, [101, 500]), 0.1, rtol=1e-6)
    to_zero = OptimizerConfig("sgd", 0.4, schedule="cosine")
    assert abs(rates(to_zero, 100, [100])[0]) < 1e-7


def test_time_decay():
    config = OptimizerConfig("nesterov", 0.05, schedule="time")
    steps = np.array([0, 1, 600, 10**6])
    np.testing.assert_allclose(rates(config, 10**7, steps), 0.05 / (1 + 1e-6 * steps), rtol=3e-7)


@pytest.mark.parametrize(
    ("options", "after"),
    [
        ({}, lambda t: 1.0),
        ({"schedule": "cosine"}, lambda t: (1 + math.cos(math.pi * t / 16)) / 2),
        ({"schedule": "exponential", "decay_steps": 5}, lambda t: 0.1 ** (t // 5)),
        ({"schedule": "time", "time_decay": 0.1}, lambda t: 1 / (1 + 0.1 * t)),
    ],
    ids=["constant", "cosine", "exponential", "time"],
)
def test_warmup_is_linear_and_the_schedule_counts_from_its_end(options, after):
    config = OptimizerConfig("sgd", 0.3, warmup_steps=4, **options)
    want = [0.3 * t / 4 for t in range(4)] + [0.3 * after(t) for t in range(17)]
    np.testing.assert_allclose(rates(config, 20, range(21)), want, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(make_schedule(config, 20)(7), want[7], rtol=1e-6)  # a Python int will do
    with jax.enable_x64(True):
        np.testing.assert_allclose(rates(config, 20, range(21)), want, rtol=1e-12, atol=1e-14)


@given(
    schedule=st.sampled_from(["constant", "cosine", "exponential", "time"]),
    lr=st.floats(1e-6, 10),
    warmup=st.integers(0, 5),
    total=st.integers(6, 200),
    interval=st.integers(1, 100),
    fraction=st.floats(0, 1),
    staircase=st.booleans(),
)
@settings(max_examples=20, deadline=None)
def test_every_schedule_peaks_after_the_warmup_and_never_grows_again(
    schedule, lr, warmup, total, interval, fraction, staircase
):
    config = OptimizerConfig(
        "sgd",
        lr,
        schedule=schedule,
        warmup_steps=warmup,
        decay_steps=interval,
        final_lr_fraction=fraction,
        staircase=staircase,
    )
    got = rates(config, total, np.arange(201))
    np.testing.assert_allclose(got[warmup], lr, rtol=1e-6)
    assert (np.diff(got[: warmup + 1]) > 0).all()
    assert (np.diff(got[warmup:]) <= 1e-6 * lr).all()
    assert (got >= 0).all()


def test_kernel_mask_and_l2_penalty_take_kernels_only():
    params = initial_params()
    assert kernel_mask(params) == {
        "conv": {"kernel": True, "bias": False},
        "norm": {"scale": False, "bias": False},
        "dense": {"kernel": True},
    }
    conv, dense = params["conv"]["kernel"], params["dense"]["kernel"]
    with jax.enable_x64(True):
        penalty, gradient = jax.value_and_grad(l2_penalty)(jax.tree.map(jnp.asarray, params), 0.004)
        np.testing.assert_allclose(penalty, 0.004 * ((conv**2).sum() + (dense**2).sum()) / 2, rtol=1e-12)
    assert_trees_close(gradient["conv"], {"kernel": 0.004 * conv, "bias": np.zeros(4)}, rtol=1e-12)
    assert_trees_close(gradient["dense"], {"kernel": 0.004 * dense}, rtol=1e-12)
    assert l2_penalty({"bias": jnp.ones(3)}, 0.1) == 0
    assert l2_penalty({"kernel": jnp.ones(3)}, 0.1).dtype == jnp.float32


def test_penalty_in_the_loss_equals_decoupled_decay_for_plain_sgd():
    params = jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), initial_params())
    gradients = jax.tree.map(lambda g: jnp.asarray(g, jnp.float32), gradient_sequence()[0])
    outcomes = []
    for kind in ("decoupled", "loss"):
        config = OptimizerConfig("sgd", 0.1, weight_decay=0.2, weight_decay_kind=kind)
        tx = make_optimizer(config, 5)
        total = gradients
        if kind == "loss":
            total = jax.tree.map(jnp.add, gradients, jax.grad(l2_penalty)(params, config.weight_decay))
        updates, _ = tx.update(total, tx.init(params), params)
        outcomes.append(updates)
    assert_trees_close(*outcomes, rtol=1e-5, atol=1e-7)


def test_ema_matches_tensorflow_formula():
    rng = np.random.default_rng(0)
    values = rng.normal(size=(300, 4))
    want = values[0]
    got32 = {"kernel": jnp.asarray(values[0], jnp.float32)}
    update = jax.jit(ema_update, static_argnums=2)
    for t, value in enumerate(values):
        d = min(0.95, (1 + t) / (10 + t))
        want = d * want + (1 - d) * value
        got32 = update(got32, {"kernel": jnp.asarray(value, jnp.float32)}, 0.95, jnp.int32(t))
    assert min(0.95, 300 / 309) == 0.95 and 100 / 109 < 0.95  # both branches were taken
    np.testing.assert_allclose(got32["kernel"], want, rtol=1e-4, atol=1e-6)


def test_ema_keeps_dtypes_and_the_small_rate():
    with jax.enable_x64(True):
        for dtype, rtol in ((jnp.float32, 3e-7), (jnp.float64, 1e-12)):
            got = ema_update(jnp.zeros(2, dtype), jnp.ones(2, dtype), 0.9999, jnp.int32(10**7))
            assert got.dtype == dtype
            np.testing.assert_allclose(got, 1e-4, rtol=rtol)
    got = ema_update(jnp.zeros(2), jnp.ones(2), 0.9999, 10**7)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, 1e-4, rtol=3e-7)


@given(decay=st.floats(0, 1), step=st.integers(0, 10**6), old=st.floats(-10, 10), new=st.floats(-10, 10))
@settings(max_examples=30, deadline=None)
def test_ema_lies_between_old_and_new(decay, step, old, new):
    got = float(ema_update(jnp.float32(old), jnp.float32(new), decay, step))
    assert min(old, new) - 1e-5 <= got <= max(old, new) + 1e-5
    # The weight of the new value never falls below 9 / (10 + step).
    assert abs(got - old) >= abs(new - old) * 9 / (10 + step) - 1e-5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "rmsprop"}, "optimizer is 'rmsprop'; it must be one of sgd, momentum, nesterov, adam, adamw"),
        ({"schedule": "step"}, "schedule is 'step'; it must be one of constant, cosine, exponential, time"),
        ({"weight_decay_kind": "l2"}, "weight_decay_kind is 'l2'; it must be one of decoupled, loss"),
        ({"lr": 0.0}, "lr is 0.0; it must be finite and above 0"),
        ({"lr": float("inf")}, "lr is inf"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"momentum": 1.0}, "momentum is 1.0; it must be at least 0 and below 1"),
        ({"b1": -0.1}, "b1 is -0.1"),
        ({"b2": 1.5}, "b2 is 1.5"),
        ({"eps": 0.0}, "eps is 0.0; it must be finite and above 0"),
        ({"warmup_steps": -1}, "warmup_steps is -1; it must be at least 0"),
        ({"schedule": "exponential"}, "decay_steps is None; it must be at least 1"),
        ({"decay_steps": 0}, "decay_steps is 0; it must be at least 1"),
        ({"decay_rate": 0.0}, "decay_rate is 0.0; it must be above 0 and at most 1"),
        ({"decay_rate": 2.0}, "decay_rate is 2.0"),
        ({"time_decay": -1.0}, "time_decay is -1.0; it must be finite and at least 0"),
        ({"final_lr_fraction": 1.5}, "final_lr_fraction is 1.5; it must be from 0 to 1"),
        ({"weight_decay": -1.0}, "weight_decay is -1.0; it must be finite and at least 0"),
        ({"optimizer": "adam", "weight_decay": 0.1}, "optimizer 'adam' and weight_decay_kind 'decoupled'; allowed"),
        (
            {"optimizer": "adamw", "weight_decay": 0.1, "weight_decay_kind": "loss"},
            "optimizer 'adamw' and weight_decay_kind 'loss'; allowed are 'adamw' with 'decoupled'",
        ),
    ],
)
def test_config_errors(options, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**{"optimizer": "sgd", "lr": 0.1, **options})


@pytest.mark.parametrize(("warmup", "total"), [(0, 0), (5, 5)])
def test_total_steps_must_exceed_the_warmup(warmup, total):
    config = OptimizerConfig("sgd", 0.1, warmup_steps=warmup)
    for make in (make_schedule, make_optimizer):
        with pytest.raises(ValueError, match=f"total_steps is {total} and warmup_steps is {warmup}"):
            make(config, total)


def test_ema_decay_error():
    with pytest.raises(ValueError, match=r"decay is 1.5; it must be from 0 to 1"):
        ema_update(jnp.zeros(1), jnp.ones(1), 1.5, 0)
