"""Images in NumPy's ``.npz`` files, as Keras ships MNIST or as people save arrays; Python objects are never loaded."""

import zipfile
import zlib
from os.path import isfile
from pathlib import Path

import numpy as np

from cnnjax.datasets.base import Dataset, PixelOrder, ReadOptions, Shape, Splits
from cnnjax.datasets.files import file_beginning
from cnnjax.datasets.labels import encode
from cnnjax.datasets.pixels import (
    RANGES,
    Scale,
    arrange,
    ask_for_shape,
    extent,
    guess_order,
    shape_size,
    shared_scale,
    square_shape,
)

EXPECTED = "the arrays x_train, y_train, x_test, y_test; or train_images, train_labels and so on; or images, labels"

# Names of images and labels of each part, in the order of preference.
_TRAIN = (
    *(("x_train", "y_train"), ("train_images", "train_labels"), ("train_x", "train_y"), ("images", "labels")),
    *(("x", "y"), ("data", "target"), ("data", "labels")),
)
_TEST = (
    *(("x_test", "y_test"), ("test_images", "test_labels"), ("test_x", "test_y")),
    *(("x_val", "y_val"), ("val_images", "val_labels")),
)


def detect(path: Path) -> bool:
    """Whether ``path`` is an ``.npz`` file by its name and first bytes."""
    if not isfile(path) or path.suffix.lower() != ".npz":
        return False
    with path.open("rb") as stream:
        return stream.read(2) == b"PK"


def read(path: Path, options: ReadOptions | None = None) -> Splits:
    """Images from an ``.npz`` file.

    Args:
        path: The file. Images are ``[N, H, W]``, ``[N, H, W, C]``, ``[N, C, H, W]`` or ``[N, H*W*C]``; labels are
            numbers or texts, ``[N]`` or ``[N, 1]``, or one-hot.
        options: What the file does not say itself.

    Returns:
        Training and test set, images uint8 ``[N, H, W, C]``.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is damaged or foreign, or what its arrays mean is not clear; names the array.
    """
    options = options or ReadOptions()
    if not isfile(path):
        raise FileNotFoundError(f"{path}: no such file; expected a .npz file with {EXPECTED}")
    parts = _load(path)
    images, shape, order = [], options.image_shape, options.pixel_order
    for name, x, _ in parts:
        rows_NP, shape, order = _rows(f"{path}: {name}", x, shape, order)
        images.append(rows_NP)
    extents = [extent(rows_NP) for rows_NP in images]
    for (name, _, _), found in zip(parts, extents, strict=True):
        if not np.isfinite([found.low, found.high]).all():
            raise ValueError(f"{path}: {name} holds values that are no numbers (NaN or infinite); expected {RANGES}")
    scale = shared_scale(extents[0], extents[-1])
    if scale is None:
        held = " and ".join(f"{name} holds {found}" for (name, _, _), found in zip(parts, extents, strict=True))
        raise ValueError(f"{path}: {held}; expected {RANGES}, the same for all")
    encoded = encode(
        [_labels(f"{path}: labels of {name}", y, len(x)) for name, x, y in parts],
        options.task,
        lambda part, row: f"{path}: label {row} of {parts[part][0]}",
    )
    said, datasets = [], []
    for (name, _, _), rows_NP, found, labels_N in zip(parts, images, extents, encoded.parts, strict=True):
        pixels_NP, rounding = scale.apply(rows_NP)
        images_NHWC = np.ascontiguousarray(arrange(pixels_NP, shape or (0, 0, 0), order))
        datasets.append(Dataset(path.stem.lower(), images_NHWC, labels_N, encoded.class_names, str(path)))
        size = "x".join(map(str, images_NHWC.shape[1:]))
        said.append(f"{path}: {name} holds {len(images_NHWC):,} images of {size}; {scale.describe(found, rounding)}")
    said[0] += f"; {encoded.describe()}"
    test = datasets[1] if len(datasets) > 1 else None
    return Splits(datasets[0], test, said=tuple(said), pixel_scale=(scale.factor, scale.offset))


def read_alone(path: Path, options: ReadOptions, scale: Scale) -> np.ndarray | None:
    """Images without labels, read as those of another file were.

    Args:
        path: The file.
        options: Those that said how the other one was read, with ``image_shape``.
        scale: Its scale of pixels.

    Returns:
        Images, uint8 ``[N, H, W, C]``; None where the file does not hold just one array.

    Raises:
        ValueError: If the file is damaged, or its images are of another shape or range; names the array.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            if len(arrays.files) != 1:
                return None
            name, x = arrays.files[0], arrays[arrays.files[0]]
    except (ValueError, zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}; expected an array of images") from None
    rows_NP, shape, order = _rows(f"{path}: {name}", x, options.image_shape, options.pixel_order)
    found = extent(rows_NP)
    if not scale.low <= found.low <= found.high <= scale.high:
        raise ValueError(f"{path}: {name} holds {found}; expected {scale.low:g} to {scale.high:g}, as in training")
    return np.ascontiguousarray(arrange(scale.apply(rows_NP)[0], shape, order))


def _load(path: Path) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """Name, images and labels of the training set and, where there is one, of the test set."""
    try:
        with path.open("rb") as stream:
            if stream.read(4) != b"PK\x03\x04":  # NumPy would take it for a pickle
                raise ValueError("it is no such file")
            stream.seek(0)
            arrays = np.load(stream, allow_pickle=False)
            names = {name.lower(): name for name in arrays.files}
            found = [pair for pair in _TRAIN if pair[0] in names and pair[1] in names][:1]
            found += [pair for pair in _TEST if pair[0] in names and pair[1] in names][: len(found)]
            if not found:
                shown = ", ".join(arrays.files[:8]) or "nothing"
                raise ValueError(f"it holds {shown}")
            return [(names[x], arrays[names[x]], arrays[names[y]]) for x, y in found]
    except (ValueError, zipfile.BadZipFile, zlib.error, EOFError, OSError, MemoryError, NotImplementedError) as error:
        if "allow_pickle" in str(error):
            raise ValueError(
                f"{path}: holds Python objects, which would have to be executed to be read; expected plain arrays of "
                "numbers or texts: save it again without dtype=object"
            ) from None
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: begins with {file_beginning(path)} ({reason}); expected {EXPECTED}") from None


def _rows(
    place: str, x: np.ndarray, shape: Shape | None, order: PixelOrder | None
) -> tuple[np.ndarray, Shape, PixelOrder | None]:
    """Numbers of each image in a row, with the shape that they make and the order in which they lie."""
    if x.dtype.kind not in "uifb" or x.ndim not in (2, 3, 4) or not x.size:
        raise ValueError(f"{place} is {x.dtype} {list(x.shape)}; expected numbers [N, H, W] or [N, H, W, C]")
    if x.dtype == np.float16 or x.dtype == np.bool_:
        x = x.astype(np.float32)
    sizes: tuple[int, ...] = x.shape[1:]
    stored: Shape
    rows_NP = x.reshape(len(x), -1)
    if x.ndim == 4:
        last, first = sizes[2] in (1, 2, 3, 4), sizes[0] in (1, 2, 3, 4)
        if order is None:
            if last == first:
                raise ValueError(f"{place} is {list(x.shape)}; expected --pixel-order channels_last or channels_first")
            order = "channels_last" if last else "channels_first"
        stored = (sizes[1], sizes[2], sizes[0]) if order == "channels_first" else (sizes[0], sizes[1], sizes[2])
    elif x.ndim == 3:
        stored = (sizes[0], sizes[1], 1)
    else:
        guessed: Shape | None = shape or square_shape(sizes[0])
        if guessed is None or shape_size(guessed) != sizes[0]:
            raise ValueError(f"{place} is {list(x.shape)}; {ask_for_shape(sizes[0])}")
        stored = guessed
        if stored[2] > 1 and order is None and (order := guess_order(rows_NP, stored)) is None:
            raise ValueError(f"{place} is {list(x.shape)}; expected --pixel-order channels_last or channels_first")
    if shape is not None and shape != stored:
        raise ValueError(f"{place} holds images of {list(stored)}; expected {list(shape)}")
    return rows_NP, stored, order


def _labels(place: str, y: np.ndarray, images: int) -> np.ndarray:
    """Labels, one an image."""
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim == 2 and y.dtype.kind in "uifb" and y.shape[1] > 1:
        one_hot = np.isin(y, (0, 1)).all() and (y.sum(axis=1) == 1).all()
        if one_hot:
            y = y.argmax(axis=1)
    if y.ndim != 1 or y.dtype.kind not in "uifbUS" or len(y) != images:
        raise ValueError(f"{place} are {y.dtype} {list(y.shape)}; expected one label for each of {images} images")
    return y.astype(np.int64) if y.dtype == np.bool_ else y
