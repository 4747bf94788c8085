"""IDX reader: what goes wrong is named, and the real MNIST comes out right."""

import gzip
import struct

import dataset_files as files
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cnnjax.datasets import idx

IMAGES = files.idx_bytes(files.random_images(3, 0, (5, 4)))


@pytest.fixture(params=["plain", "gz"])
def mnist(request, tmp_path):
    return files.write_mnist(tmp_path / "mnist", gzipped=request.param == "gz")


def replace(folder, name, data):
    """Put ``data`` in place of a file, gzipped if the file was."""
    path = folder / name
    path.write_bytes(gzip.compress(data) if path.read_bytes()[:2] == b"\x1f\x8b" else data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", r"begins with nothing \(it is empty\); expected an IDX file of uint8 with 3 or 4 dimensions"),
        (b"\0\0", r"begins with '\\x00\\x00'; expected an IDX file"),
        (b"<!DOCTYPE html><html>", "begins with '<!DOCTYPE html><html'; expected an IDX file"),
        (b"\0\0\x0d\x03" + IMAGES[4:], r"states type 0x0d with 3 dimensions; expected .* \(type 0x08\)"),
        (b"\0\0\x08\x01" + IMAGES[4:], "states type 0x08 with 1 dimensions; expected an IDX file .* 3 or 4 dim"),
        (IMAGES[:9], "ends inside its header; expected an IDX file"),
        (IMAGES[:16], r"holds 0 values; expected 60 for the shape \[3, 5, 4\]"),
        (IMAGES[:-1], r"holds 59 values; expected 60 for the shape \[3, 5, 4\]"),
        (IMAGES + b"x", r"holds more than 60 values; expected 60 for the shape \[3, 5, 4\]"),
        (IMAGES[:4] + struct.pack(">III", 0, 5, 4), r"states the shape \[0, 5, 4\]; expected at least one value"),
        (IMAGES[:4] + b"\xff" * 12 + b"abc", r"holds 3 values; expected \d+ for the shape \[4294967295, "),
    ],
)
def test_wrong_image_file(mnist, data, message):
    replace(mnist, "train-images-idx3-ubyte", data)
    with pytest.raises(ValueError, match=rf"train-images-idx3-ubyte: {message}"):
        idx.read(mnist)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.95])
@pytest.mark.parametrize("change", ["cut", "flip"])
def test_damaged_gzip(tmp_path, share, change):
    folder = files.write_mnist(tmp_path, end="-idx{dim}-ubyte.gz", gzipped=True)
    path = folder / "t10k-images-idx3-ubyte.gz"
    data = bytearray(path.read_bytes())
    position = max(12, int(len(data) * share))
    if change == "cut":
        del data[position:]
    else:
        data[position] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(
        ValueError, match=r"t10k-images-idx3-ubyte\.gz: the file is damaged or cut short .*; expected an"
    ):
        idx.read(folder)


def test_numbers_of_images_and_labels_differ(mnist):
    replace(mnist, "t10k-labels-idx1-ubyte", files.idx_bytes(np.zeros(4, np.uint8)))
    with pytest.raises(
        ValueError, match="t10k-labels-idx1-ubyte: holds 4 labels; expected 2, one for each image of t10k"
    ):
        idx.read(mnist)


def test_sizes_of_the_splits_differ(mnist):
    replace(mnist, "t10k-images-idx3-ubyte", files.idx_bytes(files.random_images(2, 0, (4, 5))))
    with pytest.raises(ValueError, match=r"test images \[4, 5, 1\], training images \[5, 4, 1\]; expected the same"):
        idx.read(mnist)


@pytest.mark.parametrize(
    "name",
    ["train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"],
)
def test_missing_file(mnist, name):
    (mnist / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"mnist: {name} missing; expected both images and labels"):
        idx.read(mnist)


def test_without_test_set(mnist):
    for path in mnist.glob("t10k-*"):
        path.unlink()
    assert idx.read(mnist).test is None


def test_several_folders(tmp_path):
    for name in ("fashion", "letters"):
        files.write_mnist(tmp_path / name)
    with pytest.raises(ValueError, match=r"several folders hold such a data set \(fashion, letters\); expected one"):
        idx.read(tmp_path)


def test_number_of_classes(tmp_path):
    files.write_mnist(tmp_path / "letters")
    files.write_idx(tmp_path / "letters" / "t10k-labels-idx1-ubyte", np.array([26, 0], np.uint8))
    assert idx.read(tmp_path / "letters").train.class_names == tuple(str(label) for label in range(27))


@given(hnp.arrays(np.uint8, hnp.array_shapes(min_dims=1, max_dims=4, max_side=4)), st.booleans())
@settings(max_examples=50, deadline=None)
def test_round_trip(tmp_path_factory, array, gzipped):
    path = files.write_idx(tmp_path_factory.mktemp("idx") / "x", array, gzipped)
    back = idx.read_idx(path, (array.ndim,))
    assert back.dtype == np.uint8
    np.testing.assert_array_equal(back, array)


@given(st.binary(max_size=60), st.booleans())
@settings(max_examples=100, deadline=None)
def test_any_bytes_give_an_array_or_a_clear_error(tmp_path_factory, data, with_magic):
    path = tmp_path_factory.mktemp("idx") / "x"
    path.write_bytes(b"\0\0\x08\x01" * with_magic + data)
    try:
        idx.read_idx(path, (1,))
    except ValueError as error:
        assert str(error).startswith(f"{path}: ") and "; expected " in str(error)


@pytest.mark.realdata
def test_real_mnist():
    folder = files.real_data("mnist")
    splits = idx.read(folder)
    assert splits.train.name == "mnist"
    assert splits.train.images_NHWC.shape == (60_000, 28, 28, 1)
    assert splits.test.images_NHWC.shape == (10_000, 28, 28, 1)
    assert np.bincount(splits.train.labels_N).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert splits.test.labels_N[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
    data = gzip.decompress((folder / "t10k-images-idx3-ubyte.gz").read_bytes())
    assert splits.test.images_NHWC[77].tobytes() == data[16 + 77 * 784 : 16 + 78 * 784]
