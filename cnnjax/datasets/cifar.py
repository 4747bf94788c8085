"""CIFAR-10 and CIFAR-100, in the binary and the Python version, from a folder or straight from the ``.tar.gz``.

The data set: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.
https://www.cs.toronto.edu/~kriz/cifar.html
"""

import dataclasses
import functools
import gzip
import tarfile
from collections.abc import Callable, Collection, Iterator, Mapping
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
    is_gzip,
)
from cnnjax.datasets.safe_pickle import read_pickle

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR100_CLASSES = tuple(str(label) for label in range(100))

_IMAGE_BYTES = 3 * 32 * 32

# The largest published file has 155 MB. A larger one in an archive would only fill the memory.
_LARGEST_MEMBER = 1 << 30


@dataclasses.dataclass(frozen=True)
class _Layout:
    """One of the four published forms."""

    dataset: str
    title: str
    folder: str
    archive: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    meta: str
    meta_key: str
    # Name and number of classes of each label of an image, in the order of the file; the last is the one returned.
    labels: tuple[tuple[str, int], ...]
    default_names: tuple[str, ...]
    parse: Callable[[bytes, str, "_Layout"], tuple[np.ndarray, np.ndarray]]
    # How many of its files make an incomplete folder one of this form; two where the names say little.
    telling: int = 1

    @property
    def batches(self) -> tuple[str, ...]:
        return self.train + self.test


def _parse_binary(data: bytes, file: str, layout: _Layout) -> tuple[np.ndarray, np.ndarray]:
    """Pixels ``[N, 3072]`` and labels ``[N]`` of one file of records, as views."""
    record_bytes = len(layout.labels) + _IMAGE_BYTES
    if not data or len(data) % record_bytes:
        raise ValueError(
            f"{file}: holds {len(data)} bytes and begins with {beginning(data)}; "
            f"expected whole records of {record_bytes} bytes"
        )
    records = np.frombuffer(data, np.uint8).reshape(-1, record_bytes)
    for column, (kind, count) in enumerate(layout.labels):
        wrong = np.flatnonzero(records[:, column] >= count)
        if len(wrong):
            record = int(wrong[0])
            where = f"record {record} (byte {record * record_bytes + column})"
            raise ValueError(f"{file}: {where} has {kind} {records[record, column]}; expected 0 to {count - 1}")
    return records[:, len(layout.labels) :], records[:, len(layout.labels) - 1]


def _parse_python(data: bytes, file: str, layout: _Layout) -> tuple[np.ndarray, np.ndarray]:
    """Pixels ``[N, 3072]`` and labels ``[N]`` of one pickled batch."""
    key, count = layout.labels[-1]
    batch = _read_dict(data, file)
    for needed in ("data", key):
        if needed not in batch:
            raise ValueError(f"{file}: the batch has {_names(batch)}; expected 'data' and {key!r}")
    pixels, labels = batch["data"], batch[key]
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape[1:] != (_IMAGE_BYTES,):
        found = f"{pixels.dtype} {list(pixels.shape)}" if isinstance(pixels, np.ndarray) else type(pixels).__name__
        raise ValueError(f"{file}: 'data' is {found}; expected uint8 [N, {_IMAGE_BYTES}]")
    if isinstance(labels, np.ndarray) and labels.ndim == 1:
        labels = labels.tolist()
    if not isinstance(labels, list):
        raise ValueError(f"{file}: {key!r} is {type(labels).__name__}; expected a list of numbers")
    if not len(pixels) or len(labels) != len(pixels):
        raise ValueError(f"{file}: holds {len(pixels)} images and {len(labels)} {key}; expected one label an image")
    for index, label in enumerate(labels):
        if type(label) is not int or not 0 <= label < count:
            shown = label if type(label) is int and abs(label) < 1 << 63 else f"a {type(label).__name__}"
            raise ValueError(f"{file}: image {index} has label {shown}; expected 0 to {count - 1}")
    return pixels, np.array(labels, np.int32)


_TRAIN10 = tuple(f"data_batch_{number}" for number in range(1, 6))

_LAYOUTS = (
    _Layout(
        dataset="cifar10",
        title="CIFAR-10, binary version",
        folder="cifar-10-batches-bin",
        archive="cifar-10-binary.tar.gz",
        train=tuple(f"{name}.bin" for name in _TRAIN10),
        test=("test_batch.bin",),
        meta="batches.meta.txt",
        meta_key="",
        labels=(("label", 10),),
        default_names=CIFAR10_CLASSES,
        parse=_parse_binary,
    ),
    _Layout(
        dataset="cifar10",
        title="CIFAR-10, Python version",
        folder="cifar-10-batches-py",
        archive="cifar-10-python.tar.gz",
        train=_TRAIN10,
        test=("test_batch",),
        meta="batches.meta",
        meta_key="label_names",
        labels=(("labels", 10),),
        default_names=CIFAR10_CLASSES,
        parse=_parse_python,
    ),
    _Layout(
        dataset="cifar100",
        title="CIFAR-100, binary version",
        folder="cifar-100-binary",
        archive="cifar-100-binary.tar.gz",
        train=("train.bin",),
        test=("test.bin",),
        meta="fine_label_names.txt",
        meta_key="",
        labels=(("coarse label", 20), ("fine label", 100)),
        default_names=CIFAR100_CLASSES,
        parse=_parse_binary,
    ),
    _Layout(
        dataset="cifar100",
        title="CIFAR-100, Python version",
        folder="cifar-100-python",
        archive="cifar-100-python.tar.gz",
        train=("train",),
        test=("test",),
        meta="meta",
        meta_key="fine_label_names",
        labels=(("fine_labels", 100),),
        default_names=CIFAR100_CLASSES,
        parse=_parse_python,
        telling=2,
    ),
)


def detect_cifar10(path: Path) -> bool:
    """Whether CIFAR-10 is at ``path``: its folder, the parent of its folder, or an archive of it."""
    return _find(path, "cifar10") is not None


def detect_cifar100(path: Path) -> bool:
    """Whether CIFAR-100 is at ``path``: its folder, the parent of its folder, or an archive of it."""
    return _find(path, "cifar100") is not None


def read_cifar10(path: Path) -> Splits:
    """CIFAR-10 from its folder, the parent of its folder, or its ``.tar.gz``.

    Args:
        path: Where the files are. The binary version is preferred to the Python version, a folder to an archive.

    Returns:
        Training and test set, images uint8 ``[N, 32, 32, 3]``.

    Raises:
        FileNotFoundError: If there is no CIFAR-10 at ``path``, or a batch file is missing.
        ValueError: If a file is damaged, foreign or holds a label out of range.
    """
    return _read(path, "cifar10")


def read_cifar100(path: Path) -> Splits:
    """CIFAR-100 with its 100 fine labels, from its folder, the parent of its folder, or its ``.tar.gz``.

    Args:
        path: Where the files are. The binary version is preferred to the Python version, a folder to an archive.

    Returns:
        Training and test set, images uint8 ``[N, 32, 32, 3]``.

    Raises:
        FileNotFoundError: If there is no CIFAR-100 at ``path``, or a file is missing.
        ValueError: If a file is damaged, foreign or holds a label out of range.
    """
    return _read(path, "cifar100")


def _read(path: Path, dataset: str) -> Splits:
    found = _find(path, dataset)
    if found is None:
        expected = " or ".join(layout.title for layout in _LAYOUTS if layout.dataset == dataset)
        if not path.exists():
            raise FileNotFoundError(f"{path}: no such file or folder; expected {expected}")
        if path.is_dir():
            raise FileNotFoundError(f"{path}: the folder holds no {dataset} files; expected {expected}")
        raise ValueError(
            f"{path}: begins with {file_beginning(path)} and is no archive of {dataset}; expected {expected}"
        )
    place, layout = found
    files = _folder_files(place, layout) if place.is_dir() else _archive_files(place, layout)
    missing = [name for name in layout.batches if name not in files]
    if missing:
        raise FileNotFoundError(f"{place}: {', '.join(missing)} missing; expected the files of {layout.title}")
    names = layout.default_names
    if layout.meta in files:
        names = _class_names(files[layout.meta], f"{place}/{layout.meta}", layout)
    return Splits(
        train=_assemble({name: files[name] for name in layout.train}, layout, names, place),
        test=_assemble({name: files[name] for name in layout.test}, layout, names, place),
    )


def _assemble(files: Mapping[str, bytes], layout: _Layout, names: tuple[str, ...], place: Path) -> Dataset:
    batches = [layout.parse(data, f"{place}/{name}", layout) for name, data in files.items()]
    total = sum(len(pixels) for pixels, _ in batches)
    images_NHWC = np.empty((total, 32, 32, 3), np.uint8)
    labels_N = np.empty(total, np.int32)
    start = 0
    for pixels, labels in batches:
        stop = start + len(pixels)
        images_NHWC[start:stop] = pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        labels_N[start:stop] = labels
        start = stop
    return Dataset(layout.dataset, images_NHWC, labels_N, names, str(place))


def _class_names(data: bytes, file: str, layout: _Layout) -> tuple[str, ...]:
    count = layout.labels[-1][1]
    if layout.meta_key:
        values = _read_dict(data, file).get(layout.meta_key)
        names = [_text(value) for value in values] if isinstance(values, (list, tuple)) else []
    else:
        names = [line.strip() for line in data.decode("utf-8", "replace").splitlines() if line.strip()]
    if len(names) != count or not all(names):
        raise ValueError(f"{file}: holds {len(names)} class names; expected {count}")
    return tuple(names)


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value if isinstance(value, str) else ""


def _read_dict(data: bytes, file: str) -> dict[str, object]:
    value = read_pickle(data, file)
    if not isinstance(value, dict):
        raise ValueError(f"{file}: holds a {type(value).__name__}; expected a dict")
    return value


def _names(batch: Mapping[str, object]) -> str:
    names = [repr(name[:30]) for name in list(batch)[:8]]
    return ", ".join(names) if names else "no entries"


def _find(path: Path, dataset: str) -> tuple[Path, _Layout] | None:
    """Where the data set is and in which form: a whole folder before an archive before a folder with files missing."""
    layouts = [layout for layout in _LAYOUTS if layout.dataset == dataset]
    if path.is_file():
        layout = _archive_layout(path)
        return (path, layout) if layout in layouts and layout is not None else None
    if not path.is_dir():
        return None
    for fits in (_is_whole, _is_part):
        for layout in layouts:
            folder = choose_folder(path, [layout.folder], functools.partial(fits, layout=layout))
            if folder is not None:
                return folder, layout
        for layout in layouts:
            if (path / layout.archive).is_file():
                return path / layout.archive, layout
    return None


def _is_whole(folder: Path, layout: _Layout) -> bool:
    return all(isfile(folder / name) for name in layout.batches)


def _is_part(folder: Path, layout: _Layout) -> bool:
    return len(_present(folder, layout)) >= layout.telling


def _present(folder: Path, layout: _Layout) -> list[str]:
    return [name for name in (*layout.batches, layout.meta) if isfile(folder / name)]


def _folder_files(folder: Path, layout: _Layout) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in _present(folder, layout)}


def _members(path: Path, wanted: Collection[str]) -> Iterator[tuple[str, bytes]]:
    """The files in a ``.tar.gz`` by full name, in one pass, with the contents of those whose last name is wanted."""
    expected = "a whole .tar.gz archive"
    if not is_gzip(path):
        raise ValueError(f"{path}: begins with {file_beginning(path)}; expected {expected}")
    try:
        with gzip.open(path) as unpacked, tarfile.open(fileobj=unpacked, mode="r|") as archive:
            for member in archive:
                if not member.isreg():
                    continue
                data = b""
                if member.name.rpartition("/")[2] in wanted:
                    if member.size > _LARGEST_MEMBER:
                        found = f"{member.name} of {member.size} bytes"
                        raise ValueError(f"{path}: holds {found}; expected at most {_LARGEST_MEMBER} bytes")
                    stream = archive.extractfile(member)
                    data = stream.read() if stream else b""
                yield member.name, data
            # The checksum stands at the very end.
            while unpacked.read(1 << 20):
                pass
    except (tarfile.TarError, *GZIP_ERRORS) as error:
        raise damaged(path, error, expected) from None


def _archive_files(path: Path, layout: _Layout) -> dict[str, bytes]:
    """The wanted files of an archive, in memory. They may lie in any folder of it, but all in the same."""
    wanted = {*layout.batches, layout.meta}
    folders: dict[str, dict[str, bytes]] = {}
    for full_name, data in _members(path, wanted):
        folder, _, name = full_name.rpartition("/")
        if name in wanted:
            folders.setdefault(folder, {})[name] = data
    return max(folders.values(), key=len, default={})


def _archive_layout(path: Path) -> _Layout | None:
    """The form that an archive holds, by the first file with a telling name; None for any other file."""
    if not is_gzip(path) or not path.name.endswith((".tar.gz", ".tgz")):
        return None
    status = path.stat()
    return _scan_archive(path, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=8)
def _scan_archive(path: Path, changed: int, size: int) -> _Layout | None:
    for full_name, _ in _members(path, ()):
        name = full_name.rpartition("/")[2]
        for layout in _LAYOUTS:
            if name in layout.batches:
                return layout
    return None
