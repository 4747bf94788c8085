"""Writers of small data sets in the published formats, byte by byte, and the way to the real ones."""

import gzip
import io
import os
import pickle
import struct
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]

TRAIN_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
CIFAR10_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FINE_NAMES = tuple(f"fine {label}" for label in range(100))

# Read once, since tests of the search change the variable.
_GIVEN = os.environ.get("CNNJAX_DATA", "")
_REAL_FOLDERS = {"cifar10": "cifar-10-batches-bin", "mnist": "mnist"}


def real_data(name: str) -> Path:
    """Folder of a real data set in ``$CNNJAX_DATA``; skips the test without it, fails it if ``$CNNJAX_STRICT`` is 1."""
    path = Path(_GIVEN) / _REAL_FOLDERS[name]
    if _GIVEN and path.is_dir():
        return path
    message = f"CNNJAX_DATA={_GIVEN!r} has no {_REAL_FOLDERS[name]}"
    if os.environ.get("CNNJAX_STRICT") == "1":
        pytest.fail(message)
    pytest.skip(message)


def run_python(code: str, **environment: str) -> subprocess.Popen:
    """A new Python that can import this checkout."""
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def random_images(count: int, seed: int, shape: tuple[int, ...] = (32, 32, 3)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def planes(image: np.ndarray) -> bytes:
    """One image as CIFAR stores it: the red plane row by row, then green, then blue."""
    return bytes(int(image[y, x, c]) for c in range(3) for y in range(32) for x in range(32))


def cifar10_record(image: np.ndarray, label: int) -> bytes:
    return bytes([label]) + planes(image)


def cifar100_record(image: np.ndarray, coarse: int, fine: int) -> bytes:
    return bytes([coarse, fine]) + planes(image)


def write_cifar10_binary(folder: Path, images: dict, labels: dict, meta: bool = True) -> Path:
    """Write one file for each entry of ``images`` and ``labels``, which are keyed by batch name."""
    folder.mkdir(parents=True)
    for name in images:
        records = [cifar10_record(image, label) for image, label in zip(images[name], labels[name], strict=True)]
        (folder / f"{name}.bin").write_bytes(b"".join(records))
    if meta:
        (folder / "batches.meta.txt").write_text("\n".join(CIFAR10_NAMES) + "\n\n")
    return folder


def write_cifar100_binary(folder: Path, images: dict, labels: dict, meta: bool = True) -> Path:
    folder.mkdir(parents=True)
    for name in images:
        pairs = zip(images[name], labels[name], strict=True)
        records = [cifar100_record(image, label % 20, label) for image, label in pairs]
        (folder / f"{name}.bin").write_bytes(b"".join(records))
    if meta:
        (folder / "fine_label_names.txt").write_text("\n".join(FINE_NAMES) + "\n")
    return folder


def write_cifar_python(folder: Path, images: dict, labels: dict, dump, keys: str, meta: bool = True) -> Path:
    """Write the Python version; ``keys`` is ``cifar10`` or ``cifar100``, ``dump`` makes bytes of a dict."""
    folder.mkdir(parents=True)
    for name in images:
        data = np.frombuffer(b"".join(planes(image) for image in images[name]), np.uint8).reshape(-1, 3072)
        batch: dict = {b"batch_label": name.encode(), b"data": data}
        batch[b"filenames"] = [f"image_{index}.png".encode() for index in range(len(data))]
        if keys == "cifar10":
            batch[b"labels"] = [int(label) for label in labels[name]]
        else:
            batch[b"fine_labels"] = [int(label) for label in labels[name]]
            batch[b"coarse_labels"] = [int(label) % 20 for label in labels[name]]
        (folder / name).write_bytes(dump(batch))
    if meta and keys == "cifar10":
        names = [name.encode() for name in CIFAR10_NAMES]
        (folder / "batches.meta").write_bytes(dump({b"label_names": names, b"num_vis": 3072}))
    elif meta:
        (folder / "meta").write_bytes(dump({b"fine_label_names": [name.encode() for name in FINE_NAMES]}))
    return folder


def python3_pickle(protocol: int, text_keys: bool = False):
    """A ``dump`` for `write_cifar_python`, as people save the batches again with Python 3."""

    def dump(value: dict) -> bytes:
        return pickle.dumps({key.decode(): item for key, item in value.items()} if text_keys else value, protocol)

    return dump


def python2_pickle(value: object) -> bytes:
    """A pickle as Python 2 and NumPy 1 wrote it: protocol 2, byte strings as SHORT_BINSTRING or BINSTRING."""
    output = bytearray(b"\x80\x02")
    memo = [0]

    def remember() -> None:
        memo[0] += 1
        output.extend(b"q" + bytes([memo[0]]) if memo[0] < 256 else b"r" + struct.pack("<I", memo[0]))

    def write(item: object) -> None:
        if isinstance(item, dict):
            output.extend(b"}")
            remember()
            output.extend(b"(")
            for key, entry in item.items():
                write(key)
                write(entry)
            output.extend(b"u")
        elif isinstance(item, list):
            output.extend(b"]")
            remember()
            output.extend(b"(")
            for entry in item:
                write(entry)
            output.extend(b"e")
        elif isinstance(item, bytes):
            output.extend(b"U" + bytes([len(item)]) if len(item) < 256 else b"T" + struct.pack("<i", len(item)))
            output.extend(item)
            remember()
        elif isinstance(item, int):
            small = 0 <= item < 256
            output.extend(b"K" + bytes([item]) if small else b"J" + struct.pack("<i", item))
        elif isinstance(item, np.ndarray):
            output.extend(b"cnumpy.core.multiarray\n_reconstruct\n")
            remember()
            output.extend(b"cnumpy\nndarray\n")
            remember()
            output.extend(b"K\x00\x85U\x01b")
            remember()
            output.extend(b"\x87R")
            remember()
            output.extend(b"(K\x01")
            for size in item.shape:
                output.extend(b"M" + struct.pack("<H", size))
            output.extend({1: b"\x85", 2: b"\x86"}[item.ndim])
            output.extend(b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R")
            remember()
            output.extend(b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89")
            write(item.tobytes())
            output.extend(b"tb")
        else:
            raise TypeError(type(item))

    write(value)
    return bytes(output + b".")


def tar_gz(path: Path, folder: Path, top: str) -> Path:
    """Pack the files of ``folder`` under the name ``top``, after a folder entry as in the published archives."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        if top:
            entry = tarfile.TarInfo(top)
            entry.type = tarfile.DIRTYPE
            archive.addfile(entry)
        for file in sorted(folder.iterdir()):
            data = file.read_bytes()
            member = tarfile.TarInfo(f"{top}/{file.name}" if top else file.name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def idx_bytes(array: np.ndarray, kind: int = 8) -> bytes:
    header = bytes([0, 0, kind, array.ndim]) + b"".join(struct.pack(">I", size) for size in array.shape)
    return header + bytes(int(value) for value in array.reshape(-1))


def write_idx(path: Path, array: np.ndarray, gzipped: bool = False) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(idx_bytes(array)) if gzipped else idx_bytes(array))
    return path


def write_mnist(folder: Path, count: int = 3, end: str = "-idx{dim}-ubyte", gzipped: bool = False) -> Path:
    """A small MNIST: ``count`` training images and two test images of 5x4 pixels."""
    for seed, (prefix, number) in enumerate((("train", count), ("t10k", 2))):
        images = random_images(number, seed, (5, 4))
        labels = np.arange(number, dtype=np.uint8)
        write_idx(folder / f"{prefix}-images{end.format(dim=3)}", images, gzipped)
        write_idx(folder / f"{prefix}-labels{end.format(dim=1)}", labels, gzipped)
    return folder


def small_cifar10(folder: Path, meta: bool = True) -> Path:
    """CIFAR-10, binary, one image a batch."""
    names = (*TRAIN_BATCHES, "test_batch")
    images = {name: random_images(1, seed) for seed, name in enumerate(names)}
    return write_cifar10_binary(folder, images, {name: [seed] for seed, name in enumerate(names)}, meta)


def small_cifar100(folder: Path) -> Path:
    """CIFAR-100, binary, one image a file."""
    return write_cifar100_binary(
        folder, {"train": random_images(1, 0), "test": random_images(1, 1)}, {"train": [99], "test": [7]}
    )
