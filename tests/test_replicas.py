"""k of N replicas and stale gradients: against NumPy, and the same on every layout."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpy_reference as reference
import optax
import pytest

from cnnjax import partition, replicas
from cnnjax.config import TrainConfig, parse_aggregate
from cnnjax.datasets.digits import load_digits
from cnnjax.networks import BatchNorm, Conv, Dense, Dropout, Flatten, MaxPool, Relu
from cnnjax.optim import OptimizerConfig, make_optimizer, make_schedule
from cnnjax.replicas import Aggregate, keep_fastest, stale, stale_schedule
from cnnjax.step import Recipe, create_state, train_step
from experiments import equivalence
from experiments.equivalence import Case

ONE = Case("data=1").layout()


# -- who counts -------------------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=(0, 1))
def drawn(aggregate, seed, step, weight_B):
    return keep_fastest(aggregate, ONE, seed, step, weight_B)


def kept_replicas(aggregate, seed, step, valid=None):
    """Replicas whose samples kept their weight; each keeps all or none."""
    weight = np.ones(aggregate.batch_size, np.float32)
    weight[aggregate.batch_size if valid is None else valid :] = 0
    after = np.asarray(drawn(aggregate, seed, step, weight))
    kept = []
    for r in range(aggregate.replicas):
        part = slice(r * aggregate.share, (r + 1) * aggregate.share)
        assert after[part].tolist() in (weight[part].tolist(), [0.0] * len(weight[part]))
        if after[part].any():
            kept.append(r)
    return kept


def test_k_of_n_replicas_count_and_each_is_slow_equally_often():
    aggregate = Aggregate(3, 4, 10)  # shares of 3, 3, 3 and 1
    kept = [kept_replicas(aggregate, 5, step) for step in range(400)]
    assert {len(one) for one in kept} == {3}
    slow = np.bincount([next(iter({0, 1, 2, 3} - set(one))) for one in kept], minlength=4)
    assert abs(slow - 100).max() < 4 * np.sqrt(400 * 0.25 * 0.75)
    assert kept != [kept_replicas(aggregate, 6, step) for step in range(400)]
    assert kept[:50] == [kept_replicas(aggregate, 5, step) for step in range(50)]


@pytest.mark.parametrize(("valid", "kept"), [(1, [[0]]), (4, [[0, 1]]), (7, [[0, 1], [0, 2], [1, 2]])])
def test_replicas_without_samples_are_left_out_first(valid, kept):
    """Else a last batch of one sample would sometimes be a batch of none."""
    seen = [kept_replicas(Aggregate(2, 4, 12), 0, step, valid) for step in range(30)]
    assert sorted(map(list, {tuple(one) for one in seen})) == kept


@pytest.mark.parametrize("text", ["3/4", "1/2", "12/13"])
def test_the_fraction_is_read(text):
    assert parse_aggregate(text) == tuple(map(int, text.split("/")))
    assert TrainConfig(aggregate=text).aggregate == text


def test_all_of_all_is_off():
    assert parse_aggregate(None) is parse_aggregate("4/4") is None
    optimizer, schedule = optax.sgd(0.1), optax.constant_schedule(0.1)
    assert stale(optimizer, 0) is optimizer and stale_schedule(schedule, 0) is schedule


@pytest.mark.parametrize("text", ["", "3", "4/3", "0/4", "a/b", "3/4/5", "-1/4", "0/0"])
def test_other_fractions_name_the_flag(text):
    with pytest.raises(ValueError, match=r"^--aggregate is '.*'; allowed: K/N with 1 <= K <= N, such as 3/4$"):
        TrainConfig(aggregate=text)


def test_other_mistakes_name_the_flag():
    with pytest.raises(ValueError, match=r"^--stale is -1; allowed: 0 or more$"):
        TrainConfig(stale=-1)
    with pytest.raises(ValueError, match=r"^--aggregate is 7/8, but --batch-size 9 gives only 5 shares of 2"):
        Aggregate(7, 8, 9)
    with pytest.raises(ValueError, match=r"--batch-size 3 gives only 3 shares of 1"):
        Aggregate(3, 4, 3)


# -- the update -------------------------------------------------------------------------------------------------------

NETWORK = (Flatten(), Dense(10))


def digits(count):
    train = load_digits((6, 5, 1)).train
    images, labels = train.images_NHWC[:count], train.labels_N[:count]
    weight, index = np.ones(count, np.float32), np.arange(count, dtype=np.int32)
    return {"image": images, "label": labels, "weight": weight, "index": index}


def recipe(network, optimizer, schedule=optax.constant_schedule(0.1), **options):  # noqa: B008 (a function)
    return Recipe(network, optimizer, schedule, scaling="unit", dtype=np.float64, param_dtype=np.float64, **options)


def linear_gradient(params, batch, chosen):
    """Of the mean cross-entropy over the chosen samples."""
    x = batch["image"][chosen].reshape(len(chosen), -1) / 255.0
    logits = x @ params["kernel"] + params["bias"]
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(chosen)), batch["label"][chosen]] -= 1
    return {"kernel": x.T @ p / len(chosen), "bias": p.mean(0)}


def test_the_update_is_the_gradient_of_the_mean_over_the_kept_samples(x64):
    """Exactly one choice of a slow replica explains each step, and not always the same one."""
    batch = digits(10)
    one = recipe(NETWORK, optax.sgd(0.1), aggregate=Aggregate(3, 4, 10))
    step = jax.jit(lambda s, b: train_step(one, ONE, s, b))
    state, slow = create_state(one, (6, 5, 1)), []
    for _ in range(8):
        before = jax.tree.map(np.array, state.params["dense_1"])
        state, metrics = step(state, batch)
        moved = jax.tree.map(lambda a, b: (a - np.asarray(b)) / 0.1, before, state.params["dense_1"])
        explained = []
        for r in range(4):
            chosen = np.array([i for i in range(10) if i // 3 != r])
            right = linear_gradient(before, batch, chosen)
            if all(np.allclose(moved[name], right[name], rtol=1e-9, atol=1e-12) for name in right):
                assert metrics["count"] == len(chosen)
                explained.append(r)
        assert len(explained) == 1
        slow += explained
    assert len(set(slow)) > 1


@pytest.mark.parametrize("microbatches", [1, 2])  # with 2, the dropped samples are a whole micro-batch
def test_batch_norm_leaves_dropped_samples_out(x64, microbatches):
    network = (Conv(3, (2, 2)), BatchNorm(0.9), Relu(), MaxPool(), Flatten(), Dense(10))
    batch, one = digits(8), recipe(network, optax.sgd(0.1), aggregate=Aggregate(1, 2, 8))
    start, layout = create_state(one, (6, 5, 1)), dataclasses.replace(ONE, microbatches=microbatches)
    params, stats = jax.tree.map(np.array, (start.params, start.batch_stats))
    after, metrics = jax.jit(lambda s, b: train_step(one, layout, s, b))(start, batch)
    explained = []
    for half in (slice(0, 4), slice(4, 8)):
        logits, expected = reference.forward(network, params, stats, batch["image"][half] / 255.0, train=True)
        loss = reference.cross_entropy(logits, batch["label"][half]).sum()
        same = np.allclose(metrics["loss"], loss, rtol=1e-12)
        for name in ("mean", "var"):
            got = np.asarray(after.batch_stats["batch_norm_1"][name])
            assert np.allclose(got, expected["batch_norm_1"][name], rtol=1e-12) == same
        explained.append(same)
    assert sorted(explained) == [False, True]


@pytest.mark.parametrize("late", [1, 3])
def test_stale_gradients_move_the_parameters_of_later_steps(x64, late):
    """Momentum, weight decay and a schedule by hand: parameter t + 1 comes from the gradient at parameter t - late."""
    config = OptimizerConfig("momentum", 0.2, schedule="time", time_decay=0.5, weight_decay=0.01)
    schedule = stale_schedule(make_schedule(config, 20), late)
    one = recipe(NETWORK, stale(make_optimizer(config, 20), late), schedule)
    batch, step = digits(6), jax.jit(lambda s, b: train_step(one, ONE, s, b))
    state = create_state(one, (6, 5, 1))
    path = [jax.tree.map(np.array, state.params["dense_1"])]
    velocity = jax.tree.map(np.zeros_like, path[0])
    for t in range(8):
        state, metrics = step(state, batch)
        new, rate = path[-1], 0.0
        if t >= late:
            rate = 0.2 / (1 + 0.5 * (t - late))
            gradient = linear_gradient(path[t - late], batch, np.arange(6))
            velocity = {name: 0.9 * velocity[name] + gradient[name] for name in velocity}
            decay = {"kernel": 0.01 * new["kernel"], "bias": 0.0}
            new = {name: new[name] - rate * (velocity[name] + decay[name]) for name in new}
        path.append(new)
        np.testing.assert_allclose(metrics["learning_rate"], rate, rtol=1e-12)
        for name, values in new.items():
            np.testing.assert_allclose(state.params["dense_1"][name], values, rtol=1e-9, atol=1e-13)


def test_adam_starts_when_the_first_gradient_is_due():
    params = {"kernel": jnp.array([1.0, -2.0])}
    prompt, late = optax.adamw(0.1), stale(optax.adamw(0.1), 2)
    states = prompt.init(params), late.init(params)
    gradients = [{"kernel": jnp.array([0.5, 3.0]) * (t + 1)} for t in range(4)]
    expected = []
    updates = []
    for g in gradients:
        u, first = prompt.update(g, states[0], params)
        expected.append(u["kernel"])
        u, second = late.update(g, states[1], params)
        updates.append(u["kernel"])
        states = first, second
    assert not np.any(updates[:2])
    np.testing.assert_allclose(updates[2:], expected[:2], rtol=1e-6)


# -- layouts ----------------------------------------------------------------------------------------------------------

SMALL = (Conv(4, (3, 3), padding="SAME"), BatchNorm(), Relu(), MaxPool(), Flatten(), Dropout(0.2), Dense(8), Dense(10))
# With 4 micro-batches the dropped replica is a whole one of them.
LAYOUTS = [Case("data=4"), Case("fsdp=4"), Case("data=2,model=2"), Case("space=2"), Case("data=4", microbatches=4)]
LAYOUTS += [Case("data=2,fsdp=2", "shard_map", 4), Case("data=4", "pmap")]
LAYOUTS += [Case("pipe=2", microbatches=4)] if "pipe" in partition.AXES else []


@functools.cache
def trained(case):
    with jax.enable_x64(True):
        train = load_digits((8, 8, 1)).train.subset(np.arange(45))
        problem = equivalence.make_problem(SMALL, train, train, 18, 5, seed=3)
        changed = dataclasses.replace(
            problem.recipe, aggregate=Aggregate(3, 4, 18), optimizer=stale(problem.recipe.optimizer, 2)
        )
        return equivalence.train(dataclasses.replace(problem, recipe=changed), case)


@pytest.mark.parametrize(
    "case",
    [Case("data=2,fsdp=2", "shard_map"), *LAYOUTS],
    ids=str,
)
@pytest.mark.slow
def test_both_together_are_the_same_on_every_layout(case):
    values = equivalence.differences(trained(case), trained(case.one_device))
    assert equivalence.agrees(values, True), values
    held = trained(case).state.opt_state
    assert isinstance(held, replicas.StaleState) and held.steps == 5 and len(held.held) == 2
