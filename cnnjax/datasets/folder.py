"""A folder for each class with its images as files: ``train/cat/1.png``, or ``cat/1.png`` without a test set."""

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np

from cnnjax.datasets.base import Dataset, ReadOptions, Shape, Splits
from cnnjax.datasets.files import holds, subfolders
from cnnjax.datasets.labels import encode
from cnnjax.datasets.resize import resize

EXPECTED = "a folder for each class with its images, or train/ and test/ (or val/) with such folders"

_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
_TRAIN = ("train", "training")
_TESTS = ("test", "testing", "val", "valid", "validation")
_GREY = ("1", "L", "LA", "La")
# What Pillow raises for a file that is cut short or changed.
_DAMAGED = (OSError, ValueError, SyntaxError, EOFError, IndexError)
_READ = (*_GREY, "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr")


def detect(path: Path) -> bool:
    """Whether ``path`` has folders of images, at least two or below one for training."""
    if not path.is_dir():
        return False
    return any(_classes(path / name) for name in _TRAIN) or len(_classes(path)) > 1


def read(path: Path, options: ReadOptions | None = None) -> Splits:
    """Images from a folder for each class.

    Images are turned as their camera says, transparency is dropped, and if any image has colours all get 3 channels.

    Args:
        path: Folder of class folders, or of ``train`` and ``test`` (or ``val``) with class folders in them.
        options: With ``image_shape``, images are resized to it and get its channels.

    Returns:
        Training and test set, images uint8 ``[N, H, W, C]``; classes in the order of numbers or of the alphabet.

    Raises:
        FileNotFoundError: If there is no such folder.
        ValueError: If a file is no image, or images differ in size and none is given; names the file. Or if Pillow is
            not installed; with the command that installs it.
    """
    options = options or ReadOptions()
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: no such folder; expected {EXPECTED}")
    train = next((path / name for name in _TRAIN if _classes(path / name)), path)
    test = None
    if train != path:
        test = next((path / name for name in _TESTS if _classes(path / name)), None)
    if not _classes(train):
        raise FileNotFoundError(f"{path}: holds {holds(path)}; expected {EXPECTED}")
    folders = [folder for folder in (train, test) if folder is not None]
    files = [_files(folder) for folder in folders]
    shape, note = _common_shape([file for part in files for file, _ in part], options.image_shape)
    encoded = encode(
        [np.array([label for _, label in part]) for part in files],
        options.task,
        lambda part, row: f"{files[part][row][0]}: its folder {files[part][row][1]}",
    )
    known = {label for _, label in files[0]}
    for file, label in files[-1]:
        if label not in known and encoded.class_names:
            raise ValueError(f"{file}: its class {label} has no images in {train}; expected a class that has")
    datasets, said = [], []
    for folder, part, labels_N in zip(folders, files, encoded.parts, strict=True):
        images_NHWC = np.empty((len(part), *shape), np.uint8)
        for place, (file, _) in zip(images_NHWC, part, strict=True):
            place[...] = _pixels(file, shape)
        datasets.append(Dataset(path.resolve().name.lower(), images_NHWC, labels_N, encoded.class_names, str(folder)))
        said.append(f"{folder}: {len(part):,} images of {'x'.join(map(str, shape))}{note}")
    said[0] += f"; {encoded.describe()}"
    return Splits(datasets[0], datasets[1] if test is not None else None, said=tuple(said))


def read_flat(path: Path, shape: Shape) -> tuple[np.ndarray, list[str]]:
    """One image file, or those of a folder without class folders.

    Args:
        path: File or folder.
        shape: Height, width and channels, to which images are resized.

    Returns:
        Images, uint8 ``[N, H, W, C]``, in the order of their names, and these names.

    Raises:
        FileNotFoundError: If there are none.
        ValueError: If a file is no image, or Pillow is not installed.
    """
    files = [path] if path.is_file() else sorted(entry for entry in path.iterdir() if is_image(entry.name))
    if not files:
        raise FileNotFoundError(f"{path}: holds {holds(path)}; expected images ({', '.join(_SUFFIXES)})")
    _common_shape(files, shape)
    return np.stack([_pixels(file, shape) for file in files]), [file.name for file in files]


def is_image(name: str) -> bool:
    """Whether a file's name is that of an image."""
    return name.lower().endswith(_SUFFIXES) and not name.startswith(".")


def _classes(folder: Path) -> list[Path]:
    """The folders below that hold images, at any depth."""
    try:
        return [sub for sub in subfolders(folder) if next(_walk(sub), None) is not None] if folder.is_dir() else []
    except OSError:  # one that may not be entered, such as lost+found, is not the user's
        return []


def _walk(folder: Path) -> Iterator[Path]:
    for base, folders, names in os.walk(folder):
        folders.sort()
        yield from (Path(base) / name for name in sorted(names) if is_image(name))


def _files(folder: Path) -> list[tuple[Path, str]]:
    """Every image with the name of its class."""
    found = []
    for sub in subfolders(folder):
        if sub.name.startswith("."):
            continue
        images = [(file, sub.name) for file in _walk(sub)]
        if not images:
            raise ValueError(f"{sub}: holds {holds(sub)}; expected images ({', '.join(_SUFFIXES)}), or no such folder")
        found += images
    return found


def _pillow() -> ModuleType:
    try:
        import PIL.Image
        import PIL.ImageOps
    except ModuleNotFoundError:
        raise ValueError("folder: needs Pillow, which is not installed: pip install pillow") from None
    return PIL


def _open(file: Path):
    """The image of a file, its pixels not read yet."""
    pillow = _pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pillow.Image.DecompressionBombWarning)
            image = pillow.Image.open(file)
    except (OSError, ValueError, SyntaxError, pillow.Image.DecompressionBombWarning,
            pillow.Image.DecompressionBombError) as error:  # fmt: skip
        raise _damaged(file, error) from None
    if image.mode not in _READ:
        image.close()
        raise ValueError(f"{file}: has pixels of mode {image.mode}; expected 8 bits a channel ({', '.join(_READ)})")
    return image


def _damaged(file: Path, error: Exception) -> ValueError:
    reason = " ".join(str(error).replace(str(file), "it").split())
    return ValueError(f"{file}: cannot be read as an image ({reason}); expected a whole image file")


def _common_shape(files: list[Path], given: Shape | None) -> tuple[Shape, str]:
    """The shape that all images get, from their headers, and what is done for it in words."""
    if given is not None and given[2] not in (1, 3):
        raise ValueError(f"--image-shape has {given[2]} channels; images in files have 1 or 3")
    colour = False
    sizes: dict[tuple[int, int], Path] = {}
    for file in files:
        with _open(file) as image:
            try:
                # Turned by a quarter, width and height change places.
                turned = image.getexif().get(0x0112, 1) in (5, 6, 7, 8)
            except _DAMAGED as error:
                raise _damaged(file, error) from None
            size = image.size if turned else image.size[::-1]
            sizes.setdefault(size, file)
            colour = colour or image.mode not in _GREY
    (height, width), first = next(iter(sizes.items()))
    channels = 3 if colour else 1
    if given is not None:
        resized = any(size != given[:2] for size in sizes)
        recoloured = "" if given[2] == channels else ", made grey" if given[2] == 1 else ", grey in three channels"
        return given, (", resized" if resized else "") + recoloured
    if len(sizes) > 1:
        (other_height, other_width), other = list(sizes.items())[1]
        raise ValueError(
            f"{other}: is {other_height}x{other_width}, but {first} is {height}x{width}; expected one size, or "
            f"--image-shape to resize to, such as {height},{width},{channels}"
        )
    return (height, width, channels), ""


def _pixels(file: Path, shape: Shape) -> np.ndarray:
    """Pixels of one file, uint8 ``[H, W, C]``."""
    pillow = _pillow()
    height, width, channels = shape
    with _open(file) as image:
        try:
            upright = pillow.ImageOps.exif_transpose(image)
            if upright.mode in ("P", "PA", "LA", "La", "RGBa"):
                upright = upright.convert("RGBA")
            pixels_HWC = np.asarray(upright.convert("L" if channels == 1 else "RGB"))
        except _DAMAGED as error:
            raise _damaged(file, error) from None
    if channels == 1:
        pixels_HWC = pixels_HWC[..., np.newaxis]
    if pixels_HWC.shape[:2] == (height, width):
        return pixels_HWC
    planes_CHW = resize(pixels_HWC.transpose(2, 0, 1), height, width)
    return np.rint(planes_CHW.transpose(1, 2, 0)).astype(np.uint8)
