"""The central claim: no layout changes the numbers.

`equivalence.default_cases` is the table; every layout and strategy in it inherits the tests below. What they compare,
and how, is `experiments.equivalence`.
"""

import dataclasses
import functools

import jax
import numpy as np
import numpy_reference as reference
import optax
import pytest

from cnnjax import networks
from cnnjax.augment import Augmentation
from cnnjax.datasets.digits import load_digits
from cnnjax.networks import AvgPool, BatchNorm, Conv, Dense, Dropout, Flatten, MaxPool, Relu, Residual
from cnnjax.step import Recipe, create_state
from cnnjax.strategy import compile_steps
from experiments import equivalence
from experiments.equivalence import Case

STEPS = 20
LAYOUTS = equivalence.default_cases()


def problem(network, batch_size, steps=STEPS, shape=(32, 32, 3)):
    """With 50 images and batches of 20 or 19, every third batch is padded."""
    digits = load_digits(shape).train
    return equivalence.make_problem(
        network, digits.subset(np.arange(50)), digits.subset(np.arange(50, 100)), batch_size, steps, seed=7
    )


@functools.cache
def trained(name: str, case: Case, batch_size: int, steps: int, x64: bool):
    with jax.enable_x64(x64):
        return equivalence.train(problem(networks.build_cnn(name, 10), batch_size, steps), case)


def check(name: str, case: Case, batch_size: int, steps: int = STEPS):
    outcome, expected = (trained(name, one, batch_size, steps, True) for one in (case, case.one_device))
    assert len(set(expected.losses_T)) == steps, "nothing was trained"
    values = equivalence.differences(outcome, expected)
    assert equivalence.agrees(values, True), values


# Cheap ones: one of each axis, strategy and kind of micro-batch. No layout divides 19 images.
FAST = [
    *(Case(mesh) for mesh in ("data=4", "fsdp=4", "model=2", "space=2")),
    *(Case("data=2,fsdp=2", "shard_map"), Case("data=4", "pmap")),
    *[case for case in LAYOUTS if "pipe" in case.mesh][:1],
]


@pytest.mark.parametrize("case", [FAST[0], *(pytest.param(case, marks=pytest.mark.slow) for case in FAST[1:])], ids=str)
def test_layout_equals_one_device_over_two_epochs(case):
    check("cifar10_slim", case, 19, steps=5)


@pytest.mark.slow
@pytest.mark.parametrize("case", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    ("network", "batch_size", "steps"),
    [
        ("cifar10_slim", 20, STEPS),
        ("cifar10_slim", 19, STEPS),
        ("cnn2d_3layer_fullconnected_3layer", 20, STEPS),
        ("resnet18_cifar", 6, 3),
    ],
)
def test_layout_equals_one_device(network, case, batch_size, steps):
    check(network, case, batch_size, steps)


@pytest.mark.slow
@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_first_loss_equals_one_device_in_float32(case):
    outcome, expected = (trained("cifar10_slim", one, 20, 2, False) for one in (case, case.one_device))
    values = equivalence.differences(outcome, expected)
    assert equivalence.agrees(values, False), values


def test_the_same_layout_gives_the_same_bits():
    small = problem(networks.build_cnn("cnn2d_1layer_fullconnected_2layer", 10), 20, 3, (8, 8, 1))
    first, again = (equivalence.train(small, Case("data=4")) for _ in range(2))
    assert np.array_equal(first.losses_T, again.losses_T)
    assert all(np.array_equal(a, b) for a, b in zip(*(jax.tree.leaves(o.state) for o in (first, again)), strict=True))


# Strides of 2 and 3, each kind of padding, windows that overlap and that do not, blocks, and two kinds of mean; on
# 23x19 images, so that almost no height divides.
ODD = (
    *(Conv(6, (3, 2), (2, 1), "SAME"), BatchNorm(), Relu()),
    *(MaxPool((3, 3), (1, 2), "SAME"), Conv(8, (5, 3), padding=((2, 1), (0, 2)), use_bias=False), BatchNorm(), Relu()),
    *(Residual((Conv(8, padding="SAME"), Relu(), Conv(8, (1, 3), padding=((0, 0), (1, 1))), BatchNorm())), Relu()),
    MaxPool((2, 2), (2, 1), ((1, 0), (0, 1))),
    *(Residual((Conv(5, (3, 3), (3, 2), "SAME"), BatchNorm()), (Conv(5, (1, 1), (3, 2), use_bias=False),)), Relu()),
    *(AvgPool((2, 2), (1, 1)), MaxPool((1, 2), (1, 2)), AvgPool(), Flatten(), Dropout(0.2), Dense(10)),
)
SPACE = [Case("space=2"), Case("space=3"), Case("space=4"), Case("data=2,space=2"), Case("space=2", microbatches=3)]


@functools.cache
def odd(case: Case):
    with jax.enable_x64(True):
        return equivalence.train(problem(ODD, 19, 5, (23, 19, 2)), case)


@pytest.mark.slow
@pytest.mark.parametrize("case", SPACE, ids=str)
def test_odd_sizes_split_over_rows_equal_one_device(case):
    values = equivalence.differences(odd(case), odd(case.one_device))
    assert equivalence.agrees(values, True), values


# -- batch norm of each device for itself -----------------------------------------------------------------------------

LOCAL = (Conv(3, use_bias=False), BatchNorm(0.9), Relu(), MaxPool(), Flatten(), Dense(10))


# Of 5 images on 4 devices, the last device has none.
@pytest.mark.parametrize(
    ("strategy", "size"), [pytest.param("shard_map", 8, marks=pytest.mark.slow), ("shard_map", 5), ("pmap", 5)]
)
def test_local_batch_norm_equals_each_replica_by_itself(x64, strategy, size):
    """Against NumPy: its replicas' losses, moving statistics, and the gradient along random directions."""
    digits = load_digits((8, 8, 2)).train
    schedule = optax.constant_schedule(0.1)
    recipe = Recipe(LOCAL, optax.sgd(schedule), schedule, augmentation=Augmentation(), scaling="unit",
                    dtype=np.float64, param_dtype=np.float64)  # fmt: skip
    layout = dataclasses.replace(Case("data=4", strategy).layout(), bn_scope="local")
    start = create_state(recipe, digits.image_shape)
    params, stats = jax.tree.map(np.array, (start.params, start.batch_stats))
    images, labels = digits.images_NHWC[:size] / 255.0, digits.labels_N[:size]
    parts = [slice(i, i + 2) for i in range(0, size, 2)]

    def replicas(params):
        forwards = [reference.forward(LOCAL, params, stats, images[part], train=True) for part in parts]
        losses = [reference.cross_entropy(f[0], labels[part]) for f, part in zip(forwards, parts, strict=True)]
        return np.concatenate(losses).mean(), [f[1] for f in forwards]

    expected_loss, replica_stats = replicas(params)
    shares = np.array([len(labels[part]) for part in parts]) / size
    expected_stats = jax.tree.map(
        lambda *values: sum(s * v for s, v in zip(shares, values, strict=True)), *replica_stats
    )
    whole = reference.forward(LOCAL, params, stats, images, train=True)[0]
    assert abs(reference.cross_entropy(whole, labels).mean() - expected_loss) > 1e-4, "local and global must differ"

    place = layout.rows(size)
    batch = {
        "image": digits.images_NHWC[place], "label": digits.labels_N[place],
        "weight": (place >= 0).astype(np.float32), "index": place.astype(np.int32),
    }  # fmt: skip
    steps = compile_steps(recipe, layout, digits.image_shape, strategy)
    after, metrics = steps.train(steps.init(), jax.device_put(batch, layout.batch_sharding))
    np.testing.assert_allclose(metrics["loss"] / metrics["count"], expected_loss, rtol=1e-12)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), after.batch_stats, expected_stats)
    rng, gradient = np.random.default_rng(0), jax.tree.map(lambda a, b: (a - np.asarray(b)) / 0.1, params, after.params)
    for _ in range(3):
        way = jax.tree.map(lambda p: rng.normal(size=p.shape), params)
        above, below = (replicas(jax.tree.map(lambda p, d, h=h: p + h * d, params, way))[0] for h in (1e-6, -1e-6))
        slope = sum(jax.tree.leaves(jax.tree.map(lambda g, d: float((g * d).sum()), gradient, way)))
        np.testing.assert_allclose(slope, (above - below) / 2e-6, rtol=1e-5)
