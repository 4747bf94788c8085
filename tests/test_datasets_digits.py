"""The shipped digits, against their files read by hand."""

from typing import NamedTuple

import jax
import numpy as np
import pytest

from cnnjax.datasets import digits
from cnnjax.datasets.files import DATA
from cnnjax.datasets.resize import resize


class Raw(NamedTuple):
    images_NHWC: np.ndarray
    labels_N: np.ndarray


def raw_digits(name: str) -> Raw:
    values = np.loadtxt(DATA / name, int, delimiter=",", skiprows=1)
    return Raw(values[:, 1:].reshape(-1, 8, 8, 1), values[:, 0])


def test_shipped_files():
    train, test = raw_digits("train.csv"), raw_digits("test.csv")
    assert train.images_NHWC.shape == (1438, 8, 8, 1)
    assert test.images_NHWC.shape == (359, 8, 8, 1)
    assert train.images_NHWC.max() == test.images_NHWC.max() == 16
    # scikit-learn's rows start 0, 1, 2, ... 9, 0, 1, ...; every fifth went to the test set.
    assert train.labels_N[:12].tolist() == [0, 1, 2, 3, 5, 6, 7, 8, 0, 1, 2, 3]
    assert test.labels_N[:4].tolist() == [4, 9, 4, 9]
    counts = np.bincount(train.labels_N) + np.bincount(test.labels_N)
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert train.images_NHWC[0, :, :, 0].tolist()[0] == [0, 0, 5, 13, 9, 1, 0, 0]


@pytest.mark.parametrize("shape", [(32, 32, 3), (8, 8, 1), (28, 30, 1), (5, 3, 2), (1, 1, 1)])
def test_load_digits(shape):
    splits = digits.load_digits(shape)
    assert splits.train.name == splits.test.name == "digits"
    assert splits.train.class_names == tuple("0123456789")
    for dataset, name in ((splits.train, "train.csv"), (splits.test, "test.csv")):
        raw = raw_digits(name)
        assert dataset.source == str(DATA / name)
        assert dataset.image_shape == shape
        np.testing.assert_array_equal(dataset.labels_N, raw.labels_N)
        grey = raw.images_NHWC[..., 0].astype(np.float32) * (255 / 16)
        wanted = jax.image.resize(grey, (len(raw.labels_N), *shape[:2]), "bilinear", precision="highest")
        assert np.abs(dataset.images_NHWC - np.asarray(wanted)[..., np.newaxis]).max() < 0.501


@pytest.mark.parametrize("size", [(32, 32), (3, 17), (9, 5), (1, 2)])
def test_resize(size):
    images = np.random.default_rng(0).uniform(0, 255, (4, 9, 7)).astype(np.float32)
    wanted = jax.image.resize(images, (4, *size), "bilinear", precision="highest")
    np.testing.assert_allclose(resize(images, *size), wanted, rtol=0, atol=1e-3)


def test_unchanged_size_is_exact():
    raw = raw_digits("train.csv")
    wanted = np.rint(raw.images_NHWC * (255 / 16)).astype(np.uint8)
    np.testing.assert_array_equal(digits.load_digits((8, 8, 1)).train.images_NHWC, wanted)


def test_digits_that_are_not_there(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"train\.csv: no such file; expected the digits shipped with cnnjax in"
    ):
        digits.load_digits(folder=tmp_path)


@pytest.mark.parametrize("shape", [(32, 32), (0, 32, 3), (32, 32, 3, 1)])
def test_impossible_shape(shape):
    with pytest.raises(ValueError, match=r"image shape .*; expected height, width and channels"):
        digits.load_digits(shape)
