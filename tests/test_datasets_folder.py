"""A folder of images for each class: every kind of image file, and what is wrong with one by its name."""

from pathlib import Path

import dataset_files as files
import numpy as np
import PIL.Image
import pytest

from cnnjax.datasets import ReadOptions, load
from cnnjax.datasets.folder import detect
from cnnjax.datasets.resize import resize

GREY = files.random_images(6, 0, (5, 4))
COLOUR = files.random_images(6, 1, (5, 4, 3))


def save(path: Path, pixels: np.ndarray, mode: str | None = None, **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = PIL.Image.fromarray(pixels)
    (image.convert(mode) if mode else image).save(path, **options)
    return path


@pytest.fixture
def pets(tmp_path):
    for number, image in enumerate(COLOUR):
        save(tmp_path / "Pets" / ("cat", "dog")[number % 2] / f"{number}.png", image)
    return tmp_path / "Pets"


def test_flat(pets):
    (pets / "cat" / "notes.txt").write_text("mine")
    (pets / "cat" / ".hidden.png").write_text("mine")
    (pets / ".git").mkdir()
    (pets / "README.md").write_text("mine")
    splits = load(str(pets)).splits
    assert (splits.train.name, splits.train.class_names, splits.test) == ("pets", ("cat", "dog"), None)
    np.testing.assert_array_equal(splits.train.images_NHWC, COLOUR[[0, 2, 4, 1, 3, 5]])
    assert splits.train.labels_N.tolist() == [0, 0, 0, 1, 1, 1]
    assert splits.said == (f"{pets}: 6 images of 5x4x3; 2 classes (cat, dog)",)


@pytest.mark.parametrize("test", ["test", "val", "validation"])
def test_parts_and_numbers(tmp_path, test):
    """Class 10 comes behind class 2, and deeper folders belong to the class above them."""
    for name in ("1", "2", "10"):
        save(tmp_path / "train" / name / "a" / "x.png", GREY[len(name)])
        save(tmp_path / test / name / "y.pgm", GREY[int(name) % 5])
    splits = load(str(tmp_path)).splits
    assert splits.train.class_names == splits.test.class_names == ("1", "2", "10")
    assert splits.test.source == str(tmp_path / test)
    order = [splits.train.class_names[label] for label in splits.test.labels_N]
    expected = np.stack([GREY[int(name) % 5] for name in order])
    np.testing.assert_array_equal(splits.test.images_NHWC[..., 0], expected)
    values = load(str(tmp_path), options=ReadOptions(task="regression")).splits.train
    assert values.task == "regression" and sorted(values.labels_N.tolist()) == [1, 2, 10]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK"])
def test_modes(pets, mode):
    path = save(pets / "dog" / "x.tif" if mode == "CMYK" else pets / "dog" / "x.png", COLOUR[0], mode)
    with PIL.Image.open(path) as image:
        assert image.mode == mode
        wanted = np.asarray(image.convert("RGBA" if mode in ("LA", "P") else "RGB").convert("RGB"))
    np.testing.assert_array_equal(load(str(pets)).splits.train.images_NHWC[-1], wanted)


def test_turned_by_the_camera(pets):
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    save(pets / "dog" / "turned.png", np.rot90(COLOUR[0]).copy(), exif=exif)
    np.testing.assert_array_equal(load(str(pets)).splits.train.images_NHWC[-1], COLOUR[0])


def test_sizes(pets):
    other = save(pets / "dog" / "other.png", files.random_images(1, 2, (6, 7, 3))[0])
    with pytest.raises(
        ValueError, match=r"other\.png: is 6x7, but .*0\.png is 5x4; expected one size, or --image-shape"
    ):
        load(str(pets))
    train = load(str(pets), options=ReadOptions(image_shape=(3, 8, 3))).splits.train
    wanted = [resize(COLOUR[0][..., c][np.newaxis], 3, 8)[0] for c in range(3)]
    np.testing.assert_array_equal(train.images_NHWC[0], np.rint(np.stack(wanted, -1)))
    grey = load(str(pets), options=ReadOptions(image_shape=(5, 4, 1))).splits
    np.testing.assert_array_equal(
        grey.train.images_NHWC[0, ..., 0], np.asarray(PIL.Image.fromarray(COLOUR[0]).convert("L"))
    )
    assert "resized, made grey" in grey.said[0] and other.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<html>", r"x\.jpg: cannot be read as an image \(cannot identify image file 'it'\); expected a whole"),
        (b"", r"x\.jpg: cannot be read as an image"),
        (-60, r"x\.jpg: cannot be read as an image \(.*truncated.*\); expected a whole image file"),
    ],
)
def test_damaged(pets, content, message):
    whole = (pets / "dog" / "1.png").read_bytes()
    (pets / "dog" / "x.jpg").write_bytes(whole[:content] if isinstance(content, int) else content)
    with pytest.raises(ValueError, match=message) as error:
        load(str(pets))
    assert "\n" not in str(error.value)


def test_refused(pets, monkeypatch):
    (pets / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty: holds nothing; expected images \(\.png"):
        load(str(pets))
    (pets / "empty").rmdir()
    with pytest.raises(ValueError, match=r"--label-column is first, but a folder of images .*; allowed with: csv"):
        load(str(pets), options=ReadOptions(label_column="first"))
    with pytest.raises(ValueError, match="--image-shape has 4 channels"):
        load(str(pets), options=ReadOptions(image_shape=(5, 4, 4)))
    save(pets / "dog" / "deep.png", np.full((5, 4), 40_000, np.uint16))
    with pytest.raises(ValueError, match=r"deep\.png: has pixels of mode I;16; expected 8 bits a channel"):
        load(str(pets))
    monkeypatch.setitem(__import__("sys").modules, "PIL.Image", None)
    with pytest.raises(ValueError, match="folder: needs Pillow, which is not installed: pip install pillow"):
        load(str(pets))


def test_class_of_the_test_set_alone(tmp_path):
    for name in ("train/a", "train/b", "test/a", "test/c"):
        save(tmp_path / name / "x.png", GREY[0])
    with pytest.raises(
        ValueError, match=r"test/c/x\.png: its class c has no images in .*train; expected a class that has"
    ):
        load(str(tmp_path))


def test_what_is_no_such_folder(tmp_path):
    save(tmp_path / "one" / "a" / "x.png", GREY[0])
    save(tmp_path / "bare" / "x.png", GREY[0])
    assert not detect(tmp_path / "bare") and not detect(tmp_path / "one") and not detect(tmp_path / "absent")
    assert detect(tmp_path)  # "one" and "bare" are its classes
