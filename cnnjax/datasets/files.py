"""Where files lie, and what to say of one that is not what a reader expected. Standard library only."""

import gzip
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

# The repository root: the shipped digits and the downloads lie in its data/ folder.
DATA = Path(__file__).resolve().parents[2] / "data"
DOWNLOADS = DATA / "downloads"

_CHUNK = 1 << 20


def beginning(data: bytes) -> str:
    """The first bytes of a file as text for a message, such as ``'<!DOCTYPE html>'``."""
    return repr(bytes(data[:20]).decode("latin-1")) if data else "nothing (it is empty)"


def file_beginning(path: Path) -> str:
    """`beginning` of the file at ``path``."""
    with path.open("rb") as stream:
        return beginning(stream.read(20))


def holds(folder: Path) -> str:
    """What a folder holds, in a few words, for a message."""
    names = sorted(entry.name + ("/" if entry.is_dir() else "") for entry in folder.iterdir())
    if not names:
        return "nothing"
    shown = ", ".join(names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"


def is_gzip(path: Path) -> bool:
    """Whether a file is gzipped, by its first bytes; the name says little about it."""
    with path.open("rb") as stream:
        return stream.read(2) == b"\x1f\x8b"


class Readable(Protocol):
    """An open file, compressed or not."""

    def read(self, size: int, /) -> bytes:
        """At most ``size`` bytes, fewer at the end."""


def read_up_to(stream: Readable, size: int) -> bytes:
    """At most ``size`` bytes; memory grows with what arrives, not with the ``size`` that a header claims."""
    chunks = []
    while size > 0 and (chunk := stream.read(min(size, _CHUNK))):
        chunks.append(chunk)
        size -= len(chunk)
    return b"".join(chunks)


def damaged(path: Path, error: Exception, expected: str) -> ValueError:
    """The error to raise for a compressed file that cannot be unpacked to its end."""
    return ValueError(f"{path}: the file is damaged or cut short ({error}); expected {expected}")


# What unpacking a damaged gzip file raises.
GZIP_ERRORS = (gzip.BadGzipFile, EOFError, zlib.error)


def subfolders(path: Path) -> list[Path]:
    """The folders directly inside ``path``, by name."""
    return sorted(entry for entry in path.iterdir() if entry.is_dir())


# os.path.isfile, not Path.is_file: it answers False for a folder that may not be entered, such as lost+found.


def choose_folder(path: Path, usual: Iterable[str], fits: Callable[[Path], bool]) -> Path | None:
    """The folder that fits: ``path``, one with a usual name in it, or else its only subfolder that does.

    Args:
        path: The folder given.
        usual: Names of subfolders to prefer, best first.
        fits: Whether a folder holds the data set.

    Returns:
        The folder, or None where none fits.

    Raises:
        ValueError: If several subfolders fit and none has a usual name.
    """
    for folder in (path, *(path / name for name in usual)):
        if folder.is_dir() and fits(folder):
            return folder
    found = [folder for folder in subfolders(path) if fits(folder)]
    if len(found) > 1:
        names = ", ".join(folder.name for folder in found)
        raise ValueError(f"{path}: several folders hold such a data set ({names}); expected one: give its path")
    return found[0] if found else None
