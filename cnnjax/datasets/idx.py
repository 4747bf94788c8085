"""IDX files: the format of MNIST, Fashion-MNIST and their kin, gzipped or not.

A file has two zero bytes, a type byte, the number of dimensions, each dimension as a big-endian 32-bit number, and the
values, last dimension fastest. https://yann.lecun.com/exdb/mnist/
"""

import gzip
import math
from os.path import isfile
from pathlib import Path

import numpy as np

from cnnjax.datasets.base import Dataset, Splits
from cnnjax.datasets.files import (
    GZIP_ERRORS,
    beginning,
    choose_folder,
    damaged,
    file_beginning,
    holds,
    is_gzip,
    read_up_to,
)

_UINT8 = 0x08
_USUAL_FOLDERS = ("mnist", "MNIST/raw", "MNIST", "raw")
_TRAIN, _TEST = "train", "t10k"


def detect(path: Path) -> bool:
    """Whether ``path`` is a folder with IDX training images and labels, or the parent of one."""
    return path.is_dir() and choose_folder(path, _USUAL_FOLDERS, _has_training_set) is not None


def read(path: Path, name: str | None = None) -> Splits:
    """An IDX data set from the folder with its files, or the parent of that folder.

    Args:
        path: Folder with ``train-images-idx3-ubyte`` and the like; without ``t10k-*`` there is no test set.
        name: Name of the data set; None takes the name of the folder where it says ``mnist``, else ``idx``.

    Returns:
        Training and test set, images uint8 ``[N, H, W, C]``, one channel unless the files have a fourth dimension.

    Raises:
        FileNotFoundError: If there is no such folder, or a file is missing.
        ValueError: If a file is damaged or foreign, or images and labels differ in number.
    """
    if not path.is_dir():
        found = f"a file that begins with {file_beginning(path)}" if path.is_file() else "nothing"
        raise FileNotFoundError(f"{path}: there is {found}; expected a folder of IDX files")
    folder = choose_folder(path, _USUAL_FOLDERS, _has_training_set)
    if folder is None:
        raise FileNotFoundError(
            f"{path}: holds {holds(path)}; expected {_TRAIN}-images-idx3-ubyte and {_TRAIN}-labels-idx1-ubyte"
        )
    name = _name(folder) if name is None else name
    train_NHWC, train_N = _read_pair(folder, _TRAIN)
    has_test = _image_file(folder, _TEST) or _label_file(folder, _TEST)
    test_NHWC, test_N = _read_pair(folder, _TEST) if has_test else (None, None)
    classes = 1 + max(int(labels_N.max()) for labels_N in (train_N, test_N) if labels_N is not None)
    # A subset of the digits may lack the last of the ten classes; the network is to have ten outputs all the same.
    classes = max(classes, 10) if "mnist" in name else classes
    names = tuple(str(label) for label in range(classes))
    train = Dataset(name, train_NHWC, train_N, names, str(folder))
    if test_NHWC is None or test_N is None:
        return Splits(train, None)
    if test_NHWC.shape[1:] != train_NHWC.shape[1:]:
        found = f"test images {list(test_NHWC.shape[1:])}, training images {list(train_NHWC.shape[1:])}"
        raise ValueError(f"{folder}: holds {found}; expected the same height, width and channels")
    return Splits(train, Dataset(name, test_NHWC, test_N, names, str(folder)))


def read_idx(path: Path, dims: tuple[int, ...]) -> np.ndarray:
    """The array in one IDX file of uint8 values.

    Args:
        path: The file, gzipped or not, whatever its name says.
        dims: The numbers of dimensions to accept.

    Returns:
        uint8 array, with the shape that the file states.

    Raises:
        ValueError: If the file is damaged, foreign, or of another type or shape.
    """
    expected = f"an IDX file of uint8 with {' or '.join(str(dim) for dim in dims)} dimensions"
    try:
        with gzip.open(path) if is_gzip(path) else path.open("rb") as stream:
            magic = stream.read(4)
            if len(magic) < 4 or magic[:2] != b"\0\0":
                raise ValueError(f"{path}: begins with {beginning(magic + stream.read(16))}; expected {expected}")
            if magic[2] != _UINT8 or magic[3] not in dims:
                found = f"type {magic[2]:#04x} with {magic[3]} dimensions"
                raise ValueError(f"{path}: states {found}; expected {expected} (type {_UINT8:#04x})")
            header = stream.read(4 * magic[3])
            if len(header) < 4 * magic[3]:
                raise ValueError(f"{path}: ends inside its header; expected {expected}")
            shape = tuple(np.frombuffer(header, ">u4").tolist())
            size = math.prod(shape)
            if not size:
                raise ValueError(f"{path}: states the shape {list(shape)}; expected at least one value")
            data = read_up_to(stream, size)
            # Also reads the checksum at the end of a gzipped file.
            surplus = len(stream.read(1))
    except GZIP_ERRORS as error:
        raise damaged(path, error, expected) from None
    if len(data) != size or surplus:
        found = f"more than {size}" if surplus else str(len(data))
        raise ValueError(f"{path}: holds {found} values; expected {size} for the shape {list(shape)} that it states")
    return np.frombuffer(data, np.uint8).reshape(shape)


def _read_pair(folder: Path, prefix: str) -> tuple[np.ndarray, np.ndarray]:
    """Images ``[N, H, W, C]`` and labels ``[N]`` of one split."""
    image_path, label_path = _image_file(folder, prefix), _label_file(folder, prefix)
    if image_path is None or label_path is None:
        missing = f"{prefix}-images-idx3-ubyte" if image_path is None else f"{prefix}-labels-idx1-ubyte"
        raise FileNotFoundError(f"{folder}: {missing} missing; expected both images and labels of {prefix}")
    images = read_idx(image_path, (3, 4))
    labels_N = read_idx(label_path, (1,)).astype(np.int32)
    if len(images) != len(labels_N):
        raise ValueError(
            f"{label_path}: holds {len(labels_N)} labels; expected {len(images)}, one for each image of "
            f"{image_path.name}"
        )
    return images if images.ndim == 4 else images[..., np.newaxis], labels_N


def _has_training_set(folder: Path) -> bool:
    return _image_file(folder, _TRAIN) is not None or _label_file(folder, _TRAIN) is not None


def _image_file(folder: Path, prefix: str) -> Path | None:
    return _first_file(folder, f"{prefix}-images", (3, 4))


def _label_file(folder: Path, prefix: str) -> Path | None:
    return _first_file(folder, f"{prefix}-labels", (1,))


def _first_file(folder: Path, stem: str, dims: tuple[int, ...]) -> Path | None:
    """The file under one of its usual names: with a hyphen or a dot, plain or gzipped."""
    names = [f"{stem}{mark}idx{dim}-ubyte{end}" for dim in dims for end in ("", ".gz") for mark in "-."]
    return next((folder / name for name in names if isfile(folder / name)), None)


def _name(folder: Path) -> str:
    folder = folder.resolve()
    for name in (folder.name, folder.parent.name):
        if "mnist" in name.lower():
            return name.lower()
    return "idx"
