"""Which data set is meant, where it lies, and which reader fits."""

import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path

from cnnjax.datasets import cifar, csv, folder, idx, npz, tfds
from cnnjax.datasets.base import ReadOptions, Splits
from cnnjax.datasets.digits import load_digits
from cnnjax.datasets.download import CIFAR10_FILES, CIFAR100_FILES, MNIST_FILES, DownloadError, RemoteFile, download
from cnnjax.datasets.files import DATA, DOWNLOADS, file_beginning, holds

_VARIABLE = "CNNJAX_DATA"
_DIGITS = "digits"


@dataclasses.dataclass(frozen=True)
class Reader:
    """A format that can be read.

    Attributes:
        name: What to write before the colon in ``--data name:path``.
        title: Name for messages.
        detect: Whether such files are at a path. It looks at names and first bytes only.
        read: Reads them; those that take options take them as the second argument.
        takes: Which of the `ReadOptions` mean something for such files.
    """

    name: str
    title: str
    detect: Callable[[Path], bool]
    read: Callable[..., Splits]
    takes: tuple[str, ...] = ("task",)

    def open(self, path: Path, options: ReadOptions) -> Splits:
        """Reads files with what the user says of them.

        Raises:
            ValueError: If that means nothing for such files, or for the reasons of ``read``.
        """
        for option, value in options.flags().items():
            if option not in self.takes:
                name = "--" + option.replace("_", "-")
                allowed = ", ".join(reader.name for reader in READERS if option in reader.takes)
                raise ValueError(f"{name} is {value}, but {self.title} says that itself; allowed with: {allowed}")
        if self.takes != ("task",):
            return self.read(path, options)
        splits = self.read(path)
        if options.task != "regression":
            return splits
        test = splits.test and splits.test.as_regression()
        return dataclasses.replace(splits, train=splits.train.as_regression(), test=test)


# Without a name, every reader that detects its files is a candidate. A new format is one more line.
READERS = (
    Reader("cifar10", "CIFAR-10", cifar.detect_cifar10, cifar.read_cifar10),
    Reader("cifar100", "CIFAR-100", cifar.detect_cifar100, cifar.read_cifar100),
    Reader("idx", "IDX (MNIST)", idx.detect, idx.read),
    Reader("csv", "CSV", csv.detect, csv.read, ("image_shape", "pixel_order", "label_column", "task")),
    Reader("npz", "NumPy .npz", npz.detect, npz.read, ("image_shape", "pixel_order", "task")),
    Reader("folder", "a folder of images for each class", folder.detect, folder.read, ("image_shape", "task")),
    Reader("tfds", "TensorFlow Datasets", tfds.detect, tfds.read),
)


@dataclasses.dataclass(frozen=True)
class KnownSet:
    """A published data set, which can be asked for by name and downloaded."""

    title: str
    reader: Reader
    files: tuple[RemoteFile, ...]


_BY_NAME = {reader.name: reader for reader in READERS}
_MNIST = dataclasses.replace(_BY_NAME["idx"], title="MNIST", read=functools.partial(idx.read, name="mnist"))

KNOWN = {
    "cifar10": KnownSet("CIFAR-10", _BY_NAME["cifar10"], CIFAR10_FILES),
    "cifar100": KnownSet("CIFAR-100", _BY_NAME["cifar100"], CIFAR100_FILES),
    "mnist": KnownSet("MNIST", _MNIST, MNIST_FILES),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    """What `load` found.

    Attributes:
        splits: The data.
        notes: Sentences that every output should repeat, such as that another data set stands in.
    """

    splits: Splits
    notes: tuple[str, ...] = ()


def reader_names() -> tuple[str, ...]:
    """What may stand before the colon in ``--data name:path``."""
    return tuple(dict.fromkeys([*_BY_NAME, *KNOWN]))


def load(
    data: str | None,
    *,
    default: str = "cifar10",
    image_shape: tuple[int, int, int] = (32, 32, 3),
    options: ReadOptions | None = None,
    quiet: bool = False,
    downloads: Path = DOWNLOADS,
) -> Found:
    """Find a data set and read it.

    Args:
        data: A path; ``reader:path``; the name of a known data set, to be looked for in ``$CNNJAX_DATA``, then among
            the downloads, then to be downloaded; ``digits`` for those shipped; or None, to look for ``default`` in the
            same way, with the shipped digits where it cannot be downloaded.
        default: Name of the data set to look for when ``data`` is None, and to prefer in a folder with several.
        image_shape: Height, width and channels of the shipped digits, unless ``options`` has others.
        options: What the user says of the files.
        quiet: Whether to leave out the progress bar of a download.
        downloads: Folder of downloaded files.

    Returns:
        The data, and notes to repeat in every output.

    Raises:
        FileNotFoundError: If the data set that was asked for is not there. ``$CNNJAX_DATA`` asks for one too.
        ValueError: If files are damaged or foreign, or the choice is not clear.
    """
    if default != _DIGITS and default not in KNOWN:
        raise ValueError(f"data set {default!r} is unknown; expected one of {', '.join([*KNOWN, _DIGITS])}")
    name = default if data is None else data
    options = options or ReadOptions()
    shipped = dataclasses.replace(options, image_shape=None)
    digits = Reader(_DIGITS, "the shipped digits", lambda path: False, lambda path: load_digits(image_shape))
    image_shape = options.image_shape or image_shape
    if name == _DIGITS:
        return Found(digits.open(DATA, shipped))
    if name in KNOWN:
        try:
            return Found(_search(KNOWN[name], options, quiet, downloads))
        except _NotDownloadedError as error:
            if data is not None:
                raise FileNotFoundError(f"{error}. Give --data PATH or set {_VARIABLE}") from None
            height, width, channels = image_shape
            splits = digits.open(DATA, shipped)
            count = len(splits.train) + (len(splits.test) if splits.test else 0)
            size = f"{height}x{width}x{channels}"
            standing_in = f"training on the {count:,} digits shipped with cnnjax, resized to {size}"
            return Found(splits, (f"{error}: {standing_in}. Give --data PATH or set {_VARIABLE}.",))
    splits = _read_named(name, default, options)
    return Found(splits, splits.notes)


class _NotDownloadedError(Exception):
    """A known data set is neither on this machine nor to be had."""


def _search(known: KnownSet, options: ReadOptions, quiet: bool, downloads: Path) -> Splits:
    """Look for a known data set in each place in turn."""
    reader = known.reader
    if given := os.environ.get(_VARIABLE):
        # Whoever sets the variable means it: a fallback would train on other data unseen.
        folder = Path(given).expanduser()
        if not folder.exists():
            raise FileNotFoundError(f"{_VARIABLE}={given}: no such folder; expected one that is or has {known.title}")
        if not reader.detect(folder):
            raise FileNotFoundError(
                f"{_VARIABLE}={given}: {_contents(folder)}; expected one that is or has {known.title}"
            )
        return reader.open(folder, options)
    present = [file for file in known.files if (downloads / file.target).exists()]
    # Between the first and the last file of a broken-off download there is a data set, but not a whole one.
    if len(present) in (0, len(known.files)) and reader.detect(downloads):
        return reader.open(downloads, options)
    try:
        download(known.files, downloads, quiet)
    except DownloadError as error:
        looked = f"looked in {downloads}; {_VARIABLE} is not set"
        raise _NotDownloadedError(
            f"{known.title} was not found ({looked}) and could not be downloaded ({error})"
        ) from None
    return reader.open(downloads, options)


def _read_named(data: str, default: str, options: ReadOptions) -> Splits:
    """Read ``reader:path``, or a path by the reader that fits."""
    name, colon, rest = data.partition(":")
    if colon and name in reader_names():
        if not rest:
            raise ValueError(f"--data {data}: no path after the colon; expected {name}:PATH")
        reader = KNOWN[name].reader if name in KNOWN else _BY_NAME[name]
        return reader.open(Path(rest).expanduser(), options)
    path = Path(data).expanduser()
    if not data or not path.exists():
        names = ", ".join([*KNOWN, _DIGITS])
        raise FileNotFoundError(
            f"--data {data}: no such file or folder; expected a path, READER:PATH with a reader among "
            f"{', '.join(reader_names())}, or one of {names}"
        )
    fitting = [reader for reader in READERS if reader.detect(path)]
    if len(fitting) > 1:
        preferred = KNOWN[default].reader.name if default in KNOWN else default
        fitting = [reader for reader in fitting if reader.name == preferred] or fitting
    if len(fitting) > 1:
        names = ", ".join(reader.name for reader in fitting)
        raise ValueError(
            f"--data {data}: holds several data sets ({names}); expected one: name it, as in "
            f"--data {fitting[0].name}:{data}"
        )
    if fitting:
        return fitting[0].open(path, options)
    titles = ", ".join(reader.title for reader in READERS)
    parent = path.resolve().parent
    in_parent = [reader.title for reader in READERS if path.is_file() and reader.detect(parent)]
    hint = f". Its folder {parent} has {' and '.join(in_parent)}: give that" if in_parent else ""
    raise ValueError(f"--data {data}: {_contents(path)}; expected {titles}{hint}")


def _contents(path: Path) -> str:
    return f"the folder holds {holds(path)}" if path.is_dir() else f"the file begins with {file_beginning(path)}"
