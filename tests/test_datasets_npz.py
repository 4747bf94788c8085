"""NumPy's ``.npz`` files, by the arrays in them; Python objects are never loaded."""

import dataset_files as files
import numpy as np
import pytest

from cnnjax.datasets import ReadOptions, load

X = files.random_images(6, 0, (5, 4))
X[0, 0, :2] = 0, 255
Y = np.arange(6) % 3
COLOURS = files.random_images(6, 1, (8, 8, 3))
UNIT = np.float32(X / 255)


class Trap:
    """Would run code where it is unpickled."""

    def __reduce__(self):
        return pytest.fail, ("a pickle was executed",)


def write(folder, **arrays):
    np.savez_compressed(folder / "x.npz", **arrays)
    return str(folder / "x.npz")


# id: (arrays, options, images, labels, class names)
READ = {
    "keras": ({"x_train": X, "y_train": Y, "x_test": X, "y_test": Y}, {}, X, Y, ("0", "1", "2")),
    "medmnist": ({"train_images": X, "train_labels": Y[:, None], "val_images": X, "val_labels": Y[:, None],
                  "test_images": X, "test_labels": Y[:, None]}, {}, X, Y, ("0", "1", "2")),
    "images, labels": ({"images": X, "labels": Y.astype(np.uint8)}, {}, X, Y, ("0", "1", "2")),
    "X, y": ({"X": X[..., None], "y": Y}, {}, X, Y, ("0", "1", "2")),
    "one-hot": ({"images": X, "labels": np.eye(3)[Y]}, {}, X, Y, ("0", "1", "2")),
    "texts": ({"images": X, "labels": np.array(["b", "a", "c"])[Y]}, {}, X, [1, 0, 2] * 2, ("a", "b", "c")),
    "bytes": ({"images": X, "labels": np.array([b"b", b"a", b"c"])[Y]}, {}, X, [1, 0, 2] * 2, ("a", "b", "c")),
    "labels from 1": ({"images": X, "labels": Y + 1}, {}, X, Y, ("1", "2", "3")),
    "real labels": ({"images": X, "labels": Y + 0.5}, {}, X, Y + 0.5, ()),
    "numbers as asked": ({"images": X, "labels": Y}, {"task": "regression"}, X, Y, ()),
    "0 to 1": ({"images": UNIT, "labels": Y}, {}, X, Y, ("0", "1", "2")),
    "-1 to 1, half precision": ({"images": (X > 99) * 2 - np.float16(1), "labels": Y}, {}, (X > 99) * 255, Y,
                                ("0", "1", "2")),
    "true and false": ({"images": X > 99, "labels": Y}, {}, (X > 99) * 255, Y, ("0", "1", "2")),
    "wide integers": ({"images": X.astype(np.int64), "labels": Y}, {}, X, Y, ("0", "1", "2")),
    "flat": ({"images": X[:, :, :1].repeat(5, 2).reshape(6, 25), "labels": Y}, {}, X[:, :, :1].repeat(5, 2), Y,
             ("0", "1", "2")),
    "flat, shape given": ({"images": X.reshape(6, 20), "labels": Y}, {"image_shape": (5, 4, 1)}, X, Y, ("0", "1", "2")),
    "colours": ({"images": COLOURS, "labels": Y}, {}, COLOURS, Y, ("0", "1", "2")),
    "colours first": ({"images": COLOURS.transpose(0, 3, 1, 2), "labels": Y}, {}, COLOURS, Y, ("0", "1", "2")),
    "flat colours, given": ({"images": COLOURS.transpose(0, 3, 1, 2).reshape(6, -1), "labels": Y},
                            {"pixel_order": "channels_first"}, COLOURS, Y, ("0", "1", "2")),
}  # fmt: skip

REFUSED = {
    "objects": ({"images": X, "labels": np.array([Trap()] * 6)}, {}, "holds Python objects, which would have to be"),
    "other names": ({"foo": X, "bar": Y}, {}, r"\(it holds foo, bar\); expected the arrays x_train, y_train"),
    "no labels": ({"x_train": X}, {}, r"\(it holds x_train\)"),
    "too few labels": ({"images": X, "labels": Y[:4]}, {}, r"labels of images are int64 \[4\]; expected one .* 6 ima"),
    "not a number": ({"images": np.where(X > 250, np.nan, X), "labels": Y}, {}, "images holds values that are no"),
    "too large": ({"images": X * 2.0, "labels": Y}, {}, "images holds whole numbers 0 to 510; expected whole"),
    "standardized": ({"images": (X - 99.0) / 40, "labels": Y}, {}, "images holds numbers -.*; expected whole"),
    "other ranges": ({"x_train": X, "y_train": Y, "x_test": UNIT, "y_test": Y}, {},
                     "x_train holds whole numbers 0 to 255 and x_test holds numbers 0 to 1; expected .*the same for"),
    "other sizes": ({"x_train": X, "y_train": Y, "x_test": X[:, :4], "y_test": Y}, {}, r"x_test holds images of \[4"),
    "empty": ({"images": X[:0], "labels": Y[:0]}, {}, r"images is uint8 \[0, 5, 4\]; expected numbers \[N, H, W\]"),
    "complex": ({"images": X * 1j, "labels": Y}, {}, r"images is complex128 \[6, 5, 4\]; expected numbers"),
    "one class": ({"images": X, "labels": Y * 0}, {}, "label 0 of images is 0, as all 6 labels .* two classes or more"),
    "flat": ({"images": X.reshape(6, 20), "labels": Y}, {}, "20 values an image make no square image: give --image"),
    "other shape": ({"images": X, "labels": Y}, {"image_shape": (4, 5, 1)}, r"images of \[5, 4, 1\]; expected \[4"),
    "colours twice": ({"images": COLOURS[:, :3], "labels": Y}, {}, r"\[6, 3, 8, 3\]; expected --pixel-order"),
    "flat noise": ({"images": COLOURS.reshape(6, -1), "labels": Y}, {}, "expected --pixel-order channels_last or"),
}  # fmt: skip


@pytest.mark.parametrize("case", READ)
def test_read(case, tmp_path):
    arrays, options, images, labels, names = READ[case]
    splits = load(write(tmp_path, **arrays), options=ReadOptions(**options)).splits
    assert (splits.test is None) == (len(arrays) == 2)
    for dataset in (splits.train, splits.test or splits.train):
        wanted = np.asarray(images)
        np.testing.assert_array_equal(dataset.images_NHWC, wanted if wanted.ndim == 4 else wanted[..., np.newaxis])
        assert dataset.images_NHWC.dtype == np.uint8 and dataset.images_NHWC.flags.c_contiguous
        assert dataset.labels_N.tolist() == list(labels)
        assert dataset.class_names == names


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case, tmp_path):
    arrays, options, message = REFUSED[case]
    path = write(tmp_path, **arrays)
    with pytest.raises(ValueError, match=message) as error:
        load(path, options=ReadOptions(**options))
    assert path in str(error.value) and "\n" not in str(error.value)


def test_damaged(tmp_path):
    path = write(tmp_path, images=X, labels=Y)
    whole = (tmp_path / "x.npz").read_bytes()
    middle = bytearray(whole)
    middle[120:140] = bytes(20)
    for content in (whole[:200], bytes(middle), b"PK", b"hello", b"\x93NUMPY", b""):
        (tmp_path / "x.npz").write_bytes(content)
        with pytest.raises(ValueError, match=r"x\.npz: begins with .*; expected the arrays x_train") as error:
            load(f"npz:{path}")
        assert "\n" not in str(error.value)
