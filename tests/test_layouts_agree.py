"""The central claim: no layout changes the numbers. Every layout in LAYOUTS inherits every test here."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cnnjax import networks, partition
from cnnjax.augment import Augmentation
from cnnjax.datasets.digits import load_digits
from cnnjax.datasets.order import batches, epoch_order
from cnnjax.feed import Feed
from cnnjax.optim import OptimizerConfig, make_optimizer, make_schedule
from cnnjax.step import Recipe, compile_steps

LAYOUTS = ["data=2", "data=4", "data=8"]
STEPS = 20


@functools.cache
def train(network: str, mesh_text: str, batch_size: int, x64: bool):
    """Losses, gradient norms and final state of 20 steps on real digits, everything random switched on.

    With 50 images and batches of 20, every third batch is padded.
    """
    with jax.enable_x64(x64):
        digits = load_digits((32, 32, 3)).train.subset(np.arange(50))
        config = OptimizerConfig("nesterov", 0.05, schedule="cosine", weight_decay=5e-4)
        dtype = jnp.float64 if x64 else jnp.float32
        recipe = Recipe(
            networks.build_cnn(network, 10), make_optimizer(config, STEPS), make_schedule(config, STEPS), seed=7,
            augmentation=Augmentation(True, 2, brightness=20.0, contrast=(0.7, 1.3)), scaling="standardize",
            mean=(60.0,) * 3, std=(80.0,) * 3, label_smoothing=0.1, ema=0.9, dtype=dtype, param_dtype=dtype,
        )  # fmt: skip
        mesh = partition.make_mesh(mesh_text)[0]
        steps = compile_steps(recipe, mesh, digits.image_shape)
        state, losses, norms = steps.init(), [], []
        for epoch in range(STEPS):
            with Feed(digits, batches(epoch_order(7, epoch, len(digits)), batch_size), mesh) as feed:
                for batch in feed:
                    if len(losses) < STEPS:
                        state, metrics = steps.train(state, batch)
                        losses.append(float(metrics["loss"] / metrics["count"]))
                        norms.append(float(metrics["grad_norm"]))
        with Feed(digits, batches(np.arange(len(digits)), batch_size), mesh) as feed:
            evaluated = [jax.device_get(steps.evaluate(state, batch)) for batch in feed]
        sums = [float(sum(part[name] for part in evaluated)) for name in ("loss", "correct", "count")]
        return np.array(losses), np.array(norms), jax.device_get(state), sums


def differences(a, b):
    """Largest difference of each array relative to its largest value."""
    return jax.tree.leaves(jax.tree.map(lambda x, y: np.max(np.abs(x - y)) / max(np.max(np.abs(y)), 1e-30), a, b))


# data=8 does not divide 20 images, and no layout divides 19.
CASES = [
    *(pytest.param("cifar10_slim", layout, 20) for layout in LAYOUTS),
    pytest.param("cifar10_slim", LAYOUTS[-1], 19),
    *(pytest.param("cifar10_slim", layout, 19, marks=pytest.mark.slow) for layout in LAYOUTS[:-1]),
    *(pytest.param("cnn2d_3layer_fullconnected_3layer", layout, 100, marks=pytest.mark.slow) for layout in LAYOUTS),
    *(pytest.param("resnet18_cifar", layout, 6, marks=pytest.mark.slow) for layout in LAYOUTS[-1:]),
]


@pytest.mark.parametrize(("network", "layout", "batch_size"), CASES)
def test_layout_equals_one_device_in_float64(network, layout, batch_size):
    losses, norms, state, sums = train(network, layout, batch_size, True)
    expected_losses, expected_norms, expected_state, expected_sums = train(network, "data=1", batch_size, True)
    assert len(losses) == STEPS and len(set(losses)) == STEPS
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-9)
    np.testing.assert_allclose(norms, expected_norms, rtol=1e-9)
    np.testing.assert_allclose(sums, expected_sums, rtol=1e-9)
    assert max(differences(state, expected_state)) < 1e-9


@pytest.mark.parametrize("layout", LAYOUTS)
def test_first_loss_equals_one_device_in_float32(layout):
    losses = train("cifar10_slim", layout, 20, False)[0]
    np.testing.assert_allclose(losses[0], train("cifar10_slim", "data=1", 20, False)[0][0], rtol=1e-5)


def test_the_same_layout_gives_the_same_bits():
    first = train("cifar10_slim", "data=4", 20, False)
    train.cache_clear()
    again = train("cifar10_slim", "data=4", 20, False)
    assert np.array_equal(first[0], again[0])
    assert all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (first[2], again[2])), strict=True))
