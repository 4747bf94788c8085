"""The shipped digits and the CSV files they lie in."""

import jax
import numpy as np
import pytest

from cnnjax.datasets import digits
from cnnjax.datasets.csv import read_labelled
from cnnjax.datasets.files import DATA
from cnnjax.datasets.resize import resize


def test_shipped_files():
    train = read_labelled(DATA / "train.csv", "digits", 16)
    test = read_labelled(DATA / "test.csv", "digits", 16)
    assert train.images_NHWC.shape == (1438, 8, 8, 1)
    assert test.images_NHWC.shape == (359, 8, 8, 1)
    assert train.images_NHWC.max() == test.images_NHWC.max() == 16
    # scikit-learn's rows start 0, 1, 2, ... 9, 0, 1, ...; every fifth went to the test set.
    assert train.labels_N[:12].tolist() == [0, 1, 2, 3, 5, 6, 7, 8, 0, 1, 2, 3]
    assert test.labels_N[:4].tolist() == [4, 9, 4, 9]
    counts = np.bincount(train.labels_N) + np.bincount(test.labels_N)
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert train.images_NHWC[0, :, :, 0].tolist()[0] == [0, 0, 5, 13, 9, 1, 0, 0]
    line = (DATA / "test.csv").read_text().splitlines()[8]
    label, *pixels = [int(value) for value in line.split(",")]
    assert label == test.labels_N[7]
    assert pixels == test.images_NHWC[7].reshape(-1).tolist()


@pytest.mark.parametrize("shape", [(32, 32, 3), (8, 8, 1), (28, 30, 1), (5, 3, 2), (1, 1, 1)])
def test_load_digits(shape):
    splits = digits.load_digits(shape)
    assert splits.train.name == splits.test.name == "digits"
    assert splits.train.class_names == tuple("0123456789")
    for dataset, name in ((splits.train, "train.csv"), (splits.test, "test.csv")):
        raw = read_labelled(DATA / name, "digits", 16)
        assert dataset.source == str(DATA / name)
        assert dataset.image_shape == shape
        np.testing.assert_array_equal(dataset.labels_N, raw.labels_N)
        grey = raw.images_NHWC[..., 0].astype(np.float32) * (255 / 16)
        wanted = jax.image.resize(grey, (len(raw), *shape[:2]), "bilinear", precision="highest")
        assert np.abs(dataset.images_NHWC - np.asarray(wanted)[..., np.newaxis]).max() < 0.501


@pytest.mark.parametrize("size", [(32, 32), (3, 17), (9, 5), (1, 2)])
def test_resize(size):
    images = np.random.default_rng(0).uniform(0, 255, (4, 9, 7)).astype(np.float32)
    wanted = jax.image.resize(images, (4, *size), "bilinear", precision="highest")
    np.testing.assert_allclose(resize(images, *size), wanted, rtol=0, atol=1e-3)


def test_unchanged_size_is_exact():
    raw = read_labelled(DATA / "train.csv", "digits", 16)
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


HEADER = "label,pixel0,pixel1,pixel2,pixel3\n"


def test_csv(tmp_path):
    path = tmp_path / "x.csv"
    # As people have it: no newline at the end.
    path.write_text(HEADER + "3,0,1,2,255\n0,9,8,7,6")
    dataset = read_labelled(path, "x", 255)
    assert dataset.images_NHWC[..., 0].tolist() == [[[0, 1], [2, 255]], [[9, 8], [7, 6]]]
    assert dataset.labels_N.tolist() == [3, 0]
    assert dataset.source == str(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"begins with nothing \(it is empty\) .*; expected a header"),
        ("<!DOCTYPE html>\n<html>\n", "begins with '<!DOCTYPE html>.*; expected a header"),
        (HEADER, "has a header and no rows; expected"),
        ("pixel0,label\n1,2\n", "begins with 'pixel0,label.*; expected a header"),
        ("label\n1\n", "begins with 'label.*; expected a header"),
        ("1,0,1,2,3\n2,0,1,2,3\n", "begins with '1,0,1,2,3.*; expected a header"),
        ("label,pixel0,pixel1\n1,2,3\n", "has 2 pixels a row; expected a square number, such as 1"),
        (HEADER + "1,2,3,4,5\n1,2,3,4\n", "line 3 has pixel3 empty; expected a whole number"),
        (HEADER + "1,2,3,4,5\n1,2,3,4,5,6\n", r"Expected 5 fields in line 3, saw 6\); expected a header"),
        (HEADER + "1,2,3,4,5,6\n1,2,3,4,5,6\n", r"\(.*\); expected a header"),
        (HEADER + "1,2,3,4,5\n1,2,,4,5\n", "line 3 has pixel1 empty; expected a whole number"),
        (HEADER + "1,2,3,4,5\n\n1,2,3,4,5\n", "line 3 has label empty; expected a whole number"),
        (HEADER + "1,2,3.5,4,5\n", r"line 2 has pixel1 3\.5; expected a whole number"),
        (HEADER + "1,2,3,4,5\n1,2,3,4,x\n", "line 3 has pixel3 x; expected a whole number"),
        (HEADER + "cat,2,3,4,5\n", "line 2 has label cat; expected a whole number"),
        (HEADER + "True,2,3,4,5\n", "line 2 has label True; expected a whole number"),
        (HEADER + "1,2,3,4,17\n", "line 2 has pixel3 17; expected 0 to 16"),
        (HEADER + "1,2,3,4,5\n1,-1,3,4,5\n", "line 3 has pixel0 -1; expected 0 to 16"),
        (HEADER + "10,2,3,4,5\n", "line 2 has label 10; expected 0 to 9"),
        (HEADER + "1,2,3,4,99999999999999999999999\n", "line 2 has pixel3 9999.*; expected"),
        (HEADER + "1,2,3,4,18446744073709551615\n", "line 2 has pixel3 1844.*; expected 0 to 16"),
    ],
)
def test_wrong_csv(tmp_path, text, message):
    path = tmp_path / "x.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        read_labelled(path, "x", 16)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


def test_csv_that_is_no_text(tmp_path):
    (tmp_path / "x.csv").write_bytes(b"\xff\xfe\x00\x80" * 20)
    with pytest.raises(ValueError, match=r"x\.csv: .*; expected a header"):
        read_labelled(tmp_path / "x.csv", "x", 16)
    with pytest.raises(FileNotFoundError, match=r"y\.csv: no such file; expected"):
        read_labelled(tmp_path / "y.csv", "y", 16)
