"""Augmentation and scaling against NumPy, and their independence of batch, layout and precision."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cnnjax.augment import (
    Augmentation,
    augment,
    center_crop,
    cutout,
    per_image_standardization,
    random_brightness,
    random_contrast,
    random_crop,
    random_crop_to,
    random_flip,
    random_translate,
    sample_keys,
    scale,
)

# Sides that differ, so that swapped rows and columns show. One batch size for most tests, since the random draws are
# compiled again for each.
COUNT = 400
SHAPE = (COUNT, 8, 11, 3)
EVERYTHING = Augmentation(flip=True, crop_padding=2, brightness=63.0, contrast=(0.2, 1.8))


def images(shape=SHAPE, seed=0):
    return np.random.default_rng(seed).uniform(0, 255, shape).astype(np.float32)


def keys(seed=0):
    return sample_keys(jax.random.key(seed), jnp.arange(COUNT))


def windows(image_HWC, height, width):
    """Every window of a size, as {(top, left): window}."""
    rows, columns = image_HWC.shape[0] - height + 1, image_HWC.shape[1] - width + 1
    return {(i, j): image_HWC[i : i + height, j : j + width] for i in range(rows) for j in range(columns)}


def places(source_BHWC, crops_BHWC):
    """Where each crop was taken; fails unless it is an exact window of its own image."""
    found = []
    for image, crop in zip(source_BHWC, np.asarray(crops_BHWC), strict=True):
        matches = [at for at, window in windows(image, *crop.shape[:2]).items() if np.array_equal(window, crop)]
        assert len(matches) == 1
        found.append(matches[0])
    return np.array(found)


def test_flip_mirrors_about_half_of_the_rows():
    x = images((COUNT, 3, 4, 1))
    y = np.asarray(random_flip(keys(), x))
    flipped = np.array([np.array_equal(b, a[:, ::-1]) for a, b in zip(x, y, strict=True)])
    kept = np.array([np.array_equal(b, a) for a, b in zip(x, y, strict=True)])
    assert (flipped ^ kept).all()
    assert 150 < flipped.sum() < 250  # five standard deviations


def test_crop_takes_windows_of_the_padded_image_at_every_place():
    x = images((COUNT, 6, 9, 2))
    y = random_crop(keys(), x, padding=1)
    assert y.shape == x.shape
    at = places(np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0))), y)
    counts = np.zeros((3, 3))
    np.add.at(counts, tuple(at.T), 1)
    # Chi-square over nine places, 8 degrees of freedom, p = 1e-4.
    assert np.sum((counts - COUNT / 9) ** 2 / (COUNT / 9)) < 31.8


def test_crop_to_takes_windows_at_every_place():
    x = images((COUNT, 6, 7, 2))
    y = random_crop_to(keys(), x, 5)
    assert y.shape == (COUNT, 5, 5, 2)
    at = places(x, y)
    assert {tuple(place) for place in at.tolist()} == {(i, j) for i in range(2) for j in range(3)}


def test_translation_repeats_edges_at_every_shift():
    x = images((COUNT, 6, 9, 2))
    y = random_translate(keys(), x, 1)
    assert y.shape == x.shape
    at = places(np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="edge"), y)
    assert {tuple(place) for place in at.tolist()} == {(i, j) for i in range(3) for j in range(3)}


@pytest.mark.parametrize("size", [1, 4, 5, 40])
def test_cutout_paints_one_square_around_a_pixel(size):
    x = images((COUNT, 8, 11, 3))
    painted = (np.asarray(cutout(keys(), x, size, (300.0, 301.0, 302.0))) == [300, 301, 302]).all(-1)
    kept = np.asarray(cutout(keys(), x, size, (-1.0,)))
    assert np.array_equal(kept[~painted], x[~painted]) and (kept[painted] == -1).all()
    centres = set()
    for mask in painted:
        fitting = [
            (row, column)
            for row in range(8)
            for column in range(11)
            if np.array_equal(mask, _square(row - size // 2, column - size // 2, size))
        ]
        assert fitting
        centres.update(fitting)
    assert size == 40 or len(centres) > 80  # of 88; 400 draws miss one on average


def _square(top, left, size):
    mask = np.zeros((8, 11), bool)
    mask[max(top, 0) : max(top + size, 0), max(left, 0) : max(left + size, 0)] = True
    return mask


def test_crop_of_the_full_size_and_padding_zero_change_nothing():
    x = images((COUNT, 6, 6, 1))
    np.testing.assert_array_equal(random_crop_to(keys(), x, 6), x)
    np.testing.assert_array_equal(random_crop(keys(), x, padding=0), x)


@pytest.mark.parametrize(("size", "top", "left"), [(24, 4, 4), (23, 4, 4), (32, 0, 0), (1, 15, 15)])
def test_center_crop(size, top, left):
    x = images((2, 32, 32, 3))
    np.testing.assert_array_equal(center_crop(x, size), x[:, top : top + size, left : left + size])


def test_brightness_adds_one_number_an_image_and_does_not_clip():
    x = images((COUNT, 2, 3, 3))
    difference = np.asarray(random_brightness(keys(), x, 63.0)) - x
    delta = difference[:, 0, 0, 0]
    np.testing.assert_allclose(difference, np.broadcast_to(delta[:, None, None, None], x.shape), atol=4e-5)
    assert -63 <= delta.min() < -60 and 60 < delta.max() < 63
    assert abs(delta.mean()) < 9  # five standard deviations of the mean of a uniform draw
    result = np.asarray(random_brightness(keys(), x, 63.0))
    assert result.min() < 0 and result.max() > 255


def test_contrast_scales_about_the_channel_mean():
    x = images((COUNT, 4, 5, 3))
    y = np.asarray(random_contrast(keys(), x, 0.2, 1.8), np.float64)
    mean = x.astype(np.float64).mean(axis=(1, 2), keepdims=True)
    np.testing.assert_allclose(y.mean(axis=(1, 2), keepdims=True), mean, rtol=1e-5)
    # Least squares recovers each image's factor, and nothing is left over.
    factor = ((y - mean) * (x - mean)).sum(axis=(1, 2, 3)) / ((x - mean) ** 2).sum(axis=(1, 2, 3))
    np.testing.assert_allclose(y, mean + factor[:, None, None, None] * (x - mean), atol=1e-3)
    assert 0.2 <= factor.min() < 0.22 and 1.78 < factor.max() < 1.8


def test_augment_applies_crop_flip_brightness_contrast_in_this_order():
    x, k = images(), keys()
    by_hand = random_crop(k, x, 2)
    by_hand = random_flip(k, by_hand)
    by_hand = random_brightness(k, by_hand, 63.0)
    by_hand = random_contrast(k, by_hand, 0.2, 1.8)
    np.testing.assert_allclose(augment(EVERYTHING, k, x, train=True), by_hand, rtol=1e-6, atol=1e-4)
    cropped = augment(Augmentation(crop_to=7, flip=True), k, x, train=True)
    np.testing.assert_array_equal(cropped, random_flip(k, random_crop_to(k, x, 7)))


def test_evaluation_crops_the_centre_and_nothing_else():
    x = images()
    np.testing.assert_array_equal(augment(EVERYTHING, None, x, train=False), x)
    options = Augmentation(flip=True, crop_to=5, brightness=9.0)
    np.testing.assert_array_equal(augment(options, None, x, train=False), x[:, 1:6, 3:8])


def test_default_changes_nothing_and_needs_no_keys():
    x = images()
    np.testing.assert_array_equal(augment(Augmentation(), None, x, train=True), x)
    assert not Augmentation().is_random


@pytest.mark.parametrize(
    "options",
    [
        Augmentation(flip=True),
        Augmentation(crop_padding=1),
        Augmentation(crop_to=3),
        Augmentation(brightness=1.0),
        Augmentation(contrast=(0.5, 2.0)),
    ],
)
def test_each_option_alone_is_random(options):
    assert options.is_random
    x = images()
    one, other = (augment(options, keys(seed=seed), x, train=True) for seed in (0, 1))
    assert not np.array_equal(one, other)
    with pytest.raises(ValueError, match="sample_keys_B is None"):
        augment(options, None, x, train=True)


def test_kinds_draw_independently():
    """With one key for all kinds, the flip (draw < 1/2) would be the sign of the brightness draw."""
    x = images((COUNT, 2, 6, 1))
    k = keys()
    ramp = np.broadcast_to(np.arange(1.0, 10.0)[:, None, None], (COUNT, 9, 9, 1))  # a crop's value shows its row
    draws = [
        [not np.array_equal(a, b) for a, b in zip(x, np.asarray(random_flip(k, x)), strict=True)],
        (np.asarray(random_brightness(k, x)) - x)[:, 0, 0, 0],
        np.asarray(random_contrast(k, x)).std(axis=(1, 2, 3)) / x.std(axis=(1, 2, 3)),
        np.asarray(random_crop(k, ramp, 4))[:, 4, 4, 0],
        np.asarray(random_crop_to(k, ramp, 1))[:, 0, 0, 0],
    ]
    correlation = np.corrcoef(np.array(draws, np.float64))
    np.testing.assert_array_less(np.abs(correlation - np.eye(5)), 0.25)  # five standard deviations


@pytest.mark.parametrize(
    ("options", "atol"),
    [
        (Augmentation(flip=True, crop_padding=2, brightness=63.0), 0),
        (Augmentation(flip=True, crop_to=5), 0),
        (Augmentation(contrast=(0.2, 1.8)), 1e-4),  # the compiler may sum a mean in another order in another batch size
    ],
)
def test_rows_do_not_depend_on_the_batch(options, atol):
    x = images()
    index = np.random.default_rng(1).permutation(1000)[: len(x)]
    key = jax.random.key(3)
    run = jax.jit(lambda index, x: augment(options, sample_keys(key, index), x, train=True))
    whole = np.asarray(run(index, x))
    for rows in ([5, 0, 17], list(range(COUNT))[::-1]):
        np.testing.assert_allclose(run(index[rows], x[rows]), whole[rows], rtol=0, atol=atol)


def test_sample_keys_fold_the_sample_number_in():
    key = jax.random.key(5)
    got = jax.random.key_data(sample_keys(key, jnp.array([7, 2])))
    want = [jax.random.key_data(jax.random.fold_in(key, i)) for i in (7, 2)]
    np.testing.assert_array_equal(got, want)


def test_float64_sees_the_same_augmentation():
    x = images()
    single = augment(EVERYTHING, keys(), jnp.asarray(x), train=True)
    single_to = random_crop_to(keys(), jnp.asarray(x), 5)
    with jax.enable_x64(True):
        double = augment(EVERYTHING, keys(), jnp.asarray(x, jnp.float64), train=True)
        double_to = random_crop_to(keys(), jnp.asarray(x, jnp.float64), 5)
        assert double.dtype == double_to.dtype == jnp.float64
        still_single = augment(EVERYTHING, keys(), jnp.asarray(x, jnp.float32), train=True)
        assert still_single.dtype == jnp.float32
    assert single.dtype == jnp.float32
    np.testing.assert_array_equal(single_to, double_to)
    np.testing.assert_allclose(single, double, rtol=0, atol=2e-4)
    np.testing.assert_allclose(single, still_single, rtol=0, atol=1e-4)


SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from cnnjax.augment import Augmentation, augment, sample_keys

assert len(jax.devices()) == 4, jax.devices()
mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
split = NamedSharding(mesh, P("data"))
key = jax.random.key(0)
x = np.random.default_rng(0).uniform(0, 255, (16, 8, 9, 3)).astype(np.float32)
index = np.arange(100, 116, dtype=np.int32)
for options, atol in (
    (Augmentation(flip=True, crop_padding=2, brightness=63.0), 0),
    (Augmentation(contrast=(0.2, 1.8)), 1e-4),
):
    def f(key, index, x):
        return augment(options, sample_keys(key, index), x, train=True)

    want = jax.jit(f)(key, index, x)
    arguments = key, jax.device_put(index, split), jax.device_put(x, split)
    compiled = jax.jit(f, out_shardings=split).lower(*arguments).compile()
    np.testing.assert_allclose(compiled(*arguments), want, rtol=0, atol=atol)
    for collective in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
        assert collective not in compiled.as_text(), collective
    mapped = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P("data")))
    np.testing.assert_allclose(mapped(*arguments), want, rtol=0, atol=atol)
print("agreed")
"""


def test_a_sharded_batch_is_augmented_in_place_and_alike():
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "4", "JAX_PLATFORMS": "cpu"}
    # A count set for the parent's fake devices would contradict the one above.
    environment.pop("XLA_FLAGS", None)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SHARDED], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and done.stdout.split() == ["agreed"], done.stderr


def numpy_scale(x, how, mean, std):
    x = x.astype(np.float64)
    if how == "none":
        return x
    if how == "unit":
        return x / 255
    if how == "standardize":
        return (x - mean) / std
    result = np.zeros_like(x)
    for i, image in enumerate(x):
        if how == "per_image":
            result[i] = (image - image.mean()) / max(image.std(), image.size**-0.5)
        elif image.max() > image.min():
            result[i] = (image - image.min()) / (image.max() - image.min())
    return result


@pytest.mark.parametrize("how", ["none", "unit", "standardize", "per_image", "minmax"])
def test_scale_matches_numpy(how):
    x = images((6, 4, 5, 3))
    x[0] = 77.0  # a constant image
    x[1, 0, 0, 0] = 1e-3
    mean, std = np.array([125.3, 123.0, 113.9]), np.array([63.0, 62.1, 66.7])
    want = numpy_scale(x, how, mean, std)
    # The constant image's mean is off by an ulp of 77, and sqrt(4 * 5 * 3) magnifies it.
    atol = 2e-4 if how == "per_image" else 1e-6
    got = scale(jnp.asarray(x), how, mean, std)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=atol)
    np.testing.assert_allclose(jax.jit(lambda x: scale(x, how, mean, std))(x), want, rtol=1e-5, atol=atol)
    with jax.enable_x64(True):
        got = scale(jnp.asarray(x, jnp.float64), how, mean, std)
        assert got.dtype == jnp.float64
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


def test_standardize_takes_one_number_for_all_channels():
    x = images((2, 3, 3, 3))
    np.testing.assert_allclose(scale(x, "standardize", 100.0, [50.0]), (x - 100) / 50, rtol=1e-5, atol=1e-6)


def test_per_image_standardization_bounds_the_divisor():
    x = np.zeros((1, 2, 2, 1), np.float32)
    x[0, 0, 0, 0] = 0.1  # std 0.0433, below 1 / sqrt(4)
    np.testing.assert_allclose(per_image_standardization(x), (x - 0.025) / 0.5, rtol=1e-6)


@given(seed=st.integers(0, 10**6), levels=st.integers(1, 256))
@settings(max_examples=25, deadline=None)
def test_scaled_images_have_the_promised_range(seed, levels):
    x = np.random.default_rng(seed).integers(0, levels, (3, 2, 3, 2)).astype(np.float32)
    minmax = np.asarray(scale(x, "minmax"))
    constant = x.min(axis=(1, 2, 3)) == x.max(axis=(1, 2, 3))
    np.testing.assert_array_equal(minmax.min(axis=(1, 2, 3)), 0)
    np.testing.assert_allclose(minmax.max(axis=(1, 2, 3)), np.where(constant, 0, 1), rtol=2e-7)
    standard = np.asarray(scale(x, "per_image"))
    np.testing.assert_allclose(standard.mean(axis=(1, 2, 3)), 0, atol=1e-3)
    spread = np.where(constant, 0, np.minimum(1, x.std(axis=(1, 2, 3)) * np.sqrt(12)))
    np.testing.assert_allclose(standard.std(axis=(1, 2, 3)), spread, atol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"crop_padding": -1}, "crop_padding is -1; it must be at least 0"),
        ({"crop_to": 0}, "crop_to is 0; it must be None or at least 1"),
        ({"crop_padding": 4, "crop_to": 24}, "crop_padding is 4 and crop_to is 24; only one"),
        ({"brightness": -1.0}, "brightness is -1.0; it must be finite and at least 0"),
        ({"brightness": float("nan")}, "brightness is nan"),
        ({"contrast": (1.8, 0.2)}, r"contrast is \(1.8, 0.2\); it must satisfy 0 <= lowest <= highest"),
        ({"contrast": (-0.1, 0.2)}, r"contrast is \(-0.1, 0.2\)"),
        ({"contrast": (0.1,)}, r"contrast is \(0.1,\); it must be None or a pair"),
    ],
)
def test_option_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        Augmentation(**arguments)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, k: random_crop(k, x, -1), "padding is -1; it must be at least 0"),
        (lambda x, k: random_crop_to(k, x, 9), "crop size is 9; for 8x11 images it must be from 1 to 8"),
        (lambda x, k: center_crop(x, 0), "crop size is 0; for 8x11 images"),
        (lambda x, k: random_brightness(k, x, -2.0), "max_delta is -2.0"),
        (lambda x, k: random_contrast(k, x, 2.0, 1.0), r"contrast is \(2.0, 1.0\)"),
        (lambda x, k: random_flip(k, x[0]), r"images have shape \(8, 11, 3\); they must be \[batch"),
        (lambda x, k: scale(x.astype(np.uint8), "unit"), "images have dtype uint8; cast them"),
        (lambda x, k: scale(x, "zscore"), "scaling is 'zscore'; it must be one of none, unit, standardize, per_image"),
        (lambda x, k: scale(x, "standardize"), "mean is None; scaling 'standardize' needs 3 numbers"),
        (lambda x, k: scale(x, "standardize", [1, 2], [1, 1]), r"mean is \[1.0, 2.0\]; .* needs 3 finite numbers"),
        (lambda x, k: scale(x, "standardize", 0.0, [1, 0, 1]), r"std is \[1.0, 0.0, 1.0\]; .* above 0"),
        (lambda x, k: sample_keys(jax.random.PRNGKey(0), jnp.arange(2)), "dtype uint32; it must be a typed key"),
        (lambda x, k: sample_keys(jax.random.key(0, impl="rbg"), jnp.arange(2)), "uses the 'rbg' generator"),
    ],
)
def test_call_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call(images(), keys())
