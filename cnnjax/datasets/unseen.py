"""Images that a trained network is asked about: with labels or without, read as those that it was trained on."""

import dataclasses
from pathlib import Path

import numpy as np

from cnnjax.datasets import csv, folder, npz
from cnnjax.datasets.base import Dataset, ReadOptions, Shape
from cnnjax.datasets.labels import number
from cnnjax.datasets.pixels import Scale
from cnnjax.datasets.search import load


@dataclasses.dataclass(frozen=True, eq=False)
class Unseen:
    """Images to predict.

    Attributes:
        images_NHWC: uint8 ``[N, H, W, C]``.
        labels_N: Where the files have labels: int32 classes of the network, or float32 numbers; else None.
        names: What ``predictions.csv`` calls each image: file names, or None for numbers from 1.
        source: Where they were read from.
    """

    images_NHWC: np.ndarray
    labels_N: np.ndarray | None
    names: tuple[str, ...] | None
    source: str


def read_unseen(
    data: str,
    options: ReadOptions,
    class_names: tuple[str, ...],
    image_shape: Shape,
    pixel_scale: tuple[float, float] | None,
) -> Unseen:
    """Reads images to predict.

    Args:
        data: As ``--data``; also a CSV or ``.npz`` file without labels, one image file, or a folder of image files.
            Of a data set in parts, the test set.
        options: How the network's own images were read.
        class_names: Its classes; empty for regression.
        image_shape: Height, width and channels of its own images.
        pixel_scale: Factor and offset of their pixels, where files held other numbers.

    Raises:
        FileNotFoundError: If there is nothing.
        ValueError: If the images are of another shape or range, or a label is none of the network's classes.
    """
    scale = Scale(*pixel_scale) if pixel_scale else None
    options = dataclasses.replace(options, image_shape=image_shape)
    reader, colon, rest = data.partition(":")
    path = Path(rest if colon and reader in ("csv", "npz", "folder") else data).expanduser()
    is_csv, is_npz = reader == "csv" or csv.detect(path), npz.detect(path)
    if path.is_file() and is_csv:
        images_NHWC, texts = csv.read_alone(path, options, scale or Scale(1))
        labels_N = None if texts is None else _labels(texts, class_names, str(path))
        return Unseen(images_NHWC, labels_N, None, str(path))
    if path.is_file() and is_npz and (alone := npz.read_alone(path, options, scale or Scale(1))) is not None:
        return Unseen(alone, None, None, str(path))
    if (path.is_file() and folder.is_image(path.name)) or (
        path.is_dir() and not folder.detect(path) and any(folder.is_image(entry.name) for entry in path.iterdir())
    ):
        images_NHWC, names = folder.read_flat(path, image_shape)
        return Unseen(images_NHWC, None, tuple(names), str(path))
    takes_shape = is_csv or is_npz or (path.is_dir() and folder.detect(path))
    asked = options if takes_shape else ReadOptions(task=options.task)
    splits = load(data, image_shape=image_shape, options=asked).splits
    if splits.unlabelled_NHWC is not None and splits.test is None:
        return _checked(Unseen(splits.unlabelled_NHWC, None, None, splits.train.source), image_shape)
    found: Dataset = splits.test or splits.train
    labels_N = found.labels_N
    if class_names and found.class_names != class_names:
        labels_N = _labels(np.array(found.class_names)[found.labels_N], class_names, found.source)
    return _checked(Unseen(found.images_NHWC, labels_N, None, found.source), image_shape)


def _checked(unseen: Unseen, image_shape: Shape) -> Unseen:
    if unseen.images_NHWC.shape[1:] != image_shape:
        found, own = ("x".join(map(str, shape)) for shape in (unseen.images_NHWC.shape[1:], image_shape))
        raise ValueError(f"{unseen.source}: images are {found}; expected {own}, as in training")
    return unseen


def _labels(texts: np.ndarray, class_names: tuple[str, ...], source: str) -> np.ndarray:
    """Labels as they are written, as classes of the network or as numbers; ``3.0`` is the class ``3``."""
    given = [str(text).strip() for text in texts]
    values = [number(text) for text in given]
    if not class_names:
        for row, value in enumerate(values):
            if value is None:
                raise ValueError(f"{source}: label of image {row + 1} is {given[row][:30]!r}; expected a number")
        return np.array(values, np.float32)
    place = {name: index for index, name in enumerate(class_names)}
    numbers = {value: index for name, index in place.items() if (value := number(name)) is not None}
    labels = [place.get(text, -1 if value is None else numbers.get(value, -1))
              for text, value in zip(given, values, strict=True)]  # fmt: skip
    for row, label in enumerate(labels):
        if label < 0:
            shown = ", ".join(class_names[:10]) + (", ..." if len(class_names) > 10 else "")
            raise ValueError(
                f"{source}: label of image {row + 1} is {given[row][:30]!r}; expected a class of the network: {shown}"
            )
    return np.array(labels, np.int32)
