"""The 1,797 handwritten digits that come with the code, so that everything runs without a download."""

from pathlib import Path

import numpy as np

from cnnjax.datasets.base import Dataset, Splits
from cnnjax.datasets.csv import read_table
from cnnjax.datasets.csv_columns import Columns
from cnnjax.datasets.csv_form import look
from cnnjax.datasets.files import DATA
from cnnjax.datasets.resize import resize

_MAX_VALUE = 16


def load_digits(image_shape: tuple[int, int, int] = (32, 32, 3), folder: Path = DATA) -> Splits:
    """The shipped digits, scaled to 0..255 and resized.

    Args:
        image_shape: Height, width and channels of the images; every channel is the same.
        folder: Where ``train.csv`` and ``test.csv`` lie.

    Returns:
        1,438 training and 359 test images, uint8 ``[N, *image_shape]``.

    Raises:
        FileNotFoundError: If the shipped files are not there.
        ValueError: If ``image_shape`` is not three positive numbers.
    """
    if len(image_shape) != 3 or min(image_shape) < 1:
        raise ValueError(f"image shape {image_shape}; expected height, width and channels, each at least 1")
    return Splits(_load(folder / "train.csv", image_shape), _load(folder / "test.csv", image_shape))


def _load(path: Path, image_shape: tuple[int, int, int]) -> Dataset:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected the digits shipped with cnnjax in {path.parent}")
    table = read_table(look(path), Columns((8, 8, 1), (0,), ""))
    height, width, channels = image_shape
    grey_NHW = resize(table.values_NP.reshape(-1, 8, 8) * np.float32(255 / _MAX_VALUE), height, width)
    grey_NHWC = np.rint(grey_NHW).astype(np.uint8)[..., np.newaxis]
    labels_N = np.asarray(table.labels).astype(np.int32)
    return Dataset("digits", np.repeat(grey_NHWC, channels, axis=-1), labels_N, tuple("0123456789"), str(path))
