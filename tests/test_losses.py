"""Losses and measures of single samples, against NumPy in float64."""

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import numpy_reference as reference
import pytest

from cnnjax.augment import mixup_share, sample_keys
from cnnjax.losses import Objective, cross_entropy, mean_of_views, targets, views

# XLA takes subnormal numbers for 0.
NUMBERS = st.floats(-20, 20, allow_subnormal=False)
LOGITS = hnp.arrays(np.float64, st.tuples(st.integers(1, 9), st.integers(2, 12)), elements=NUMBERS)
KEYS = sample_keys(jax.random.key(3), jnp.arange(64))


@hypothesis.settings(max_examples=20)  # each shape is dispatched anew
@hypothesis.given(LOGITS, st.data())
def test_hits_among_the_largest_logits(logits, data):
    labels = np.array(
        data.draw(st.lists(st.integers(0, logits.shape[1] - 1), min_size=len(logits), max_size=len(logits)))
    )
    with jax.enable_x64(True):
        one_hot = targets({"label": jnp.asarray(labels)}, logits.shape[1], dtype=jnp.float64)
        values = cross_entropy(jnp.asarray(logits), one_hot, jnp.asarray(labels))
    for row, label, loss, top5 in zip(logits, labels, values["loss"], values["top5"], strict=True):
        assert top5 == (sum(other > row[label] for other in row) < 5)
        np.testing.assert_allclose(loss, np.log(np.exp(row - row[label]).sum()), rtol=1e-12, atol=1e-12)


def test_class_weights_multiply_the_training_loss_of_their_samples(x64):
    logits, labels = np.random.default_rng(0).normal(size=(6, 3)), np.array([0, 1, 2, 2, 1, 0])
    objective = Objective(0.2, (1.0, 0.5, 3.0))
    batch = {"label": jnp.asarray(labels)}
    expected = reference.cross_entropy(logits, labels, 0.2) * np.array([1, 0.5, 3, 3, 0.5, 1])
    np.testing.assert_allclose(objective.measure(jnp.asarray(logits), batch, KEYS[:6])["loss"], expected, rtol=1e-12)
    plain = reference.cross_entropy(logits, labels)
    np.testing.assert_allclose(objective.measure(jnp.asarray(logits), batch)["loss"], plain, rtol=1e-12)


def test_mixup_mixes_losses_in_the_drawn_shares(x64):
    logits = np.random.default_rng(0).normal(size=(64, 4))
    labels, others = np.random.default_rng(1).integers(0, 4, (2, 64))
    batch = {"label": jnp.asarray(labels), "other_label": jnp.asarray(others)}
    share = np.asarray(mixup_share(KEYS, 0.3), np.float64)
    losses = Objective(mixup=0.3).measure(jnp.asarray(logits), batch, KEYS)["loss"]
    expected = share * reference.cross_entropy(logits, labels) + (1 - share) * reference.cross_entropy(logits, others)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    np.testing.assert_allclose(Objective(mixup=0.3).measure(jnp.asarray(logits), batch)["loss"],
                               reference.cross_entropy(logits, labels), rtol=1e-12)  # fmt: skip


@pytest.mark.parametrize("alpha", [0.2, 4.0])
def test_shares_have_the_moments_of_their_beta_distribution(alpha):
    share = np.asarray(mixup_share(sample_keys(jax.random.key(0), jnp.arange(20_000)), alpha), np.float64)
    variance = 1 / (4 * (2 * alpha + 1))
    assert abs(share.mean() - 0.5) < 5 * np.sqrt(variance / len(share))
    assert abs(share.var() / variance - 1) < 0.05
    assert np.array_equal(share[:100], np.asarray(mixup_share(sample_keys(jax.random.key(0), jnp.arange(100)), alpha)))


def test_numbers_are_measured_in_their_own_unit(x64):
    outputs = np.random.default_rng(0).normal(size=(5, 1))
    labels = np.array([1000.0, 1010, 990, 1005, 1000])
    values = Objective(label_moments=(1000.0, 8.0)).measure(jnp.asarray(outputs), {"label": jnp.asarray(labels)})
    errors = outputs[:, 0] * 8 + 1000 - labels
    np.testing.assert_allclose(values["loss"], errors**2, rtol=1e-12)
    np.testing.assert_allclose(values["absolute"], abs(errors), rtol=1e-12)
    np.testing.assert_allclose(values["predicted"], outputs[:, 0] * 8 + 1000, rtol=1e-6)
    assert Objective(label_moments=(1000.0, 8.0)).unit == 64


def test_views_are_averaged_as_probabilities(x64):
    x = np.random.default_rng(0).normal(size=(3, 2, 5, 1))
    both = np.asarray(views(jnp.asarray(x)))
    assert np.array_equal(both[0::2], x) and np.array_equal(both[1::2], x[:, :, ::-1])
    logits = np.random.default_rng(1).normal(size=(6, 4)) * 3
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    mean = (shares[0::2] + shares[1::2]) / 2
    np.testing.assert_allclose(np.exp(mean_of_views(jnp.asarray(logits), True)), mean, rtol=1e-12)
    np.testing.assert_allclose(mean_of_views(jnp.asarray(logits), False), (logits[0::2] + logits[1::2]) / 2, rtol=1e-12)
