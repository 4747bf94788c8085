"""Downloads that are whole and checked, or not there at all."""

import contextlib
import dataclasses
import hashlib
import http.client
import os
import secrets
import urllib.error
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# An offline machine is to fall back quickly; a slow server may take its time once it has answered.
_CONNECT_SECONDS = 5.0
_READ_SECONDS = 30.0
_CHUNK = 1 << 18


class DownloadError(OSError):
    """A download did not succeed. Nothing of it is left on the disk."""


@dataclasses.dataclass(frozen=True)
class RemoteFile:
    """A file to download.

    Attributes:
        url: Where it is.
        md5: Checksum that its publisher states.
        target: Path to store it under, relative to the download folder.
    """

    url: str
    md5: str
    target: str


_CIFAR = "https://www.cs.toronto.edu/~kriz"
_MNIST = "https://storage.googleapis.com/cvdf-datasets/mnist"

CIFAR10_FILES = (
    RemoteFile(f"{_CIFAR}/cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530", "cifar-10-binary.tar.gz"),
)
CIFAR100_FILES = (
    RemoteFile(f"{_CIFAR}/cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8", "cifar-100-binary.tar.gz"),
)
MNIST_FILES = tuple(
    RemoteFile(f"{_MNIST}/{name}", md5, f"mnist/{name}")
    for name, md5 in (
        ("train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
        ("train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432"),
        ("t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3"),
        ("t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c"),
    )
)


def download(files: Iterable[RemoteFile], folder: Path, quiet: bool = False) -> None:
    """Fetch the files that are not in ``folder`` yet, with a progress bar on stderr.

    Several processes may do so at once: each writes a file of its own and moves it to its name when it is whole.

    Args:
        files: What to fetch.
        folder: Where to store it.
        quiet: Whether to leave out the progress bar.

    Raises:
        DownloadError: If the server cannot be reached, sends something else, or the folder cannot be written, or if
            the environment variable ``CNNJAX_OFFLINE`` is set to anything but 0.
    """
    if os.environ.get("CNNJAX_OFFLINE", "0") not in ("", "0"):
        raise DownloadError("CNNJAX_OFFLINE is set")
    for file in files:
        target = folder / file.target
        if not target.exists():
            _fetch(file, target, quiet)


def _fetch(file: RemoteFile, target: Path, quiet: bool) -> None:
    partial = target.with_name(f"{target.name}.{secrets.token_hex(8)}.part")
    try:
        try:
            digest = _stream(file.url, partial, quiet)
            if digest != file.md5:
                raise DownloadError(f"{file.url}: the file received has md5 {digest}; expected {file.md5}")
            os.replace(partial, target)
        finally:
            # Also after Ctrl-C. Once the file has its name there is nothing to remove.
            partial.unlink(missing_ok=True)
    except DownloadError:
        raise
    except urllib.error.HTTPError as error:
        error.close()
        raise DownloadError(f"{file.url}: HTTP {error.code} {error.reason}") from None
    except urllib.error.URLError as error:
        raise DownloadError(f"{file.url}: {error.reason}") from None
    except (OSError, http.client.HTTPException) as error:
        raise DownloadError(f"{file.url}: {error or type(error).__name__}") from None


def _stream(url: str, path: Path, quiet: bool) -> str:
    """Write what the server sends to ``path`` and return its MD5."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    digest = hashlib.md5(usedforsecurity=False)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    progress = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), disable=quiet)
    opener = urllib.request.build_opener(_HttpHandler, _HttpsHandler)
    with contextlib.ExitStack() as stack:
        response = stack.enter_context(opener.open(url, timeout=_CONNECT_SECONDS))
        path.parent.mkdir(parents=True, exist_ok=True)
        output = stack.enter_context(path.open("xb"))
        stack.enter_context(progress)
        length = response.headers.get("Content-Length", "")
        total = int(length) if length.isdecimal() else None
        task = progress.add_task(f"Downloading {url.rpartition('/')[2]}", total=total)
        received = 0
        while chunk := response.read(_CHUNK):
            output.write(chunk)
            digest.update(chunk)
            received += len(chunk)
            progress.update(task, completed=received)
    if total is not None and received != total:
        raise DownloadError(f"{url}: the connection ended after {received} of {total} bytes")
    return digest.hexdigest()


class _HttpConnection(http.client.HTTPConnection):
    def connect(self) -> None:
        super().connect()
        self.sock.settimeout(_READ_SECONDS)


class _HttpsConnection(http.client.HTTPSConnection):
    def connect(self) -> None:
        super().connect()
        self.sock.settimeout(_READ_SECONDS)


class _HttpHandler(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_HttpConnection, req)


class _HttpsHandler(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_HttpsConnection, req)
