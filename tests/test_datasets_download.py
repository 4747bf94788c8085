"""Downloads against a real server on this machine: whole and checked, or nothing at all."""

import gzip
import hashlib
import http.server
import signal
import socket
import threading
import time

import dataset_files as files
import pytest

from cnnjax.datasets import download as module
from cnnjax.datasets.download import DownloadError, RemoteFile, download

CONTENT = bytes(range(256)) * 4000
MD5 = hashlib.md5(CONTENT).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.requests.append(self.path)
        if self.path.startswith("/missing"):
            self.send_error(404)
            return
        if self.path.startswith("/moved"):
            self.send_response(302)
            self.send_header("Location", "/good.bin")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        if not self.path.startswith("/unsized"):
            self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        if self.path.startswith("/cut"):
            self.wfile.write(CONTENT[: len(CONTENT) // 2])
        elif self.path.startswith("/slow"):
            self.wfile.write(CONTENT[:1000])
            self.wfile.flush()
            self.server.stop.wait(120)
        elif self.path.startswith("/pausing"):
            self.wfile.write(CONTENT[:1000])
            self.wfile.flush()
            time.sleep(0.5)
            self.wfile.write(CONTENT[1000:])
        else:
            self.wfile.write(CONTENT)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.delenv("CNNJAX_OFFLINE", raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.requests = []
    server.stop = threading.Event()
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.stop.set()
    server.shutdown()
    server.server_close()
    thread.join()


def everything(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("path", ["good.bin", "moved", "unsized"])
def test_success(server, tmp_path, path, capsys):
    download([RemoteFile(f"{server.url}/{path}", MD5, "mnist/good.bin")], tmp_path / "new", quiet=True)
    assert everything(tmp_path) == [tmp_path / "new" / "mnist" / "good.bin"]
    assert (tmp_path / "new" / "mnist" / "good.bin").read_bytes() == CONTENT
    assert capsys.readouterr() == ("", "")


def test_progress_bar_goes_to_stderr(server, tmp_path, capsys):
    download([RemoteFile(f"{server.url}/good.bin", MD5, "good.bin")], tmp_path)
    output = capsys.readouterr()
    assert output.out == ""
    assert "Downloading good.bin" in output.err


def test_what_is_there_is_not_fetched_again(server, tmp_path):
    (tmp_path / "a").write_bytes(b"here")
    wanted = [RemoteFile(f"{server.url}/good.bin", MD5, name) for name in ("a", "b")]
    download(wanted, tmp_path, quiet=True)
    assert (tmp_path / "a").read_bytes() == b"here"
    assert server.requests == ["/good.bin"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("wrong", "the file received has md5 [0-9a-f]{32}; expected 0000"),
        ("cut", f"the connection ended after {len(CONTENT) // 2} of {len(CONTENT)} bytes"),
        ("missing", "HTTP 404 Not Found"),
    ],
)
def test_failure_leaves_nothing(server, tmp_path, path, message):
    with pytest.raises(DownloadError, match=f"{server.url}/{path}: {message}"):
        download([RemoteFile(f"{server.url}/{path}", "0" * 32, "x.bin")], tmp_path, quiet=True)
    assert everything(tmp_path) == []


def test_nobody_listens(server, tmp_path):
    start = time.perf_counter()
    with pytest.raises(DownloadError, match="refused"):
        download([RemoteFile(f"http://127.0.0.1:{closed_port()}/x", MD5, "x")], tmp_path / "new", quiet=True)
    assert time.perf_counter() - start < 2
    assert list(tmp_path.iterdir()) == []


def test_unknown_host(server, tmp_path):
    with pytest.raises(DownloadError, match=r"http://cnnjax\.invalid/x: "):
        download([RemoteFile("http://cnnjax.invalid/x", MD5, "x")], tmp_path, quiet=True)


def test_server_that_stops_sending(server, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_READ_SECONDS", 0.2)
    start = time.perf_counter()
    with pytest.raises(DownloadError, match="timed out"):
        download([RemoteFile(f"{server.url}/slow", MD5, "x")], tmp_path, quiet=True)
    assert time.perf_counter() - start < 4
    assert everything(tmp_path) == []


def test_server_that_pauses_once_it_has_answered(server, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_CONNECT_SECONDS", 0.2)
    download([RemoteFile(f"{server.url}/pausing", MD5, "x")], tmp_path, quiet=True)
    assert (tmp_path / "x").read_bytes() == CONTENT


def test_short_time_to_connect(server, tmp_path, monkeypatch):
    seen = []

    def connect(address, timeout, *_, **__):
        seen.append(timeout)
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", connect)
    for scheme in ("http", "https"):
        with pytest.raises(DownloadError, match="timed out"):
            download([RemoteFile(f"{scheme}://127.0.0.1/x", MD5, "x")], tmp_path, quiet=True)
    assert seen == [5.0, 5.0]


def test_not_https(server, tmp_path):
    with pytest.raises(DownloadError, match="SSL"):
        download([RemoteFile(f"{server.url.replace('http', 'https')}/x", MD5, "x")], tmp_path, quiet=True)


def test_offline_by_request(server, tmp_path, monkeypatch):
    monkeypatch.setenv("CNNJAX_OFFLINE", "1")
    with pytest.raises(DownloadError, match="CNNJAX_OFFLINE is set"):
        download([RemoteFile(f"{server.url}/good.bin", MD5, "x")], tmp_path, quiet=True)
    assert server.requests == []
    monkeypatch.setenv("CNNJAX_OFFLINE", "0")
    download([RemoteFile(f"{server.url}/good.bin", MD5, "x")], tmp_path, quiet=True)


def test_folder_that_cannot_be_made(server, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DownloadError, match="file"):
        download([RemoteFile(f"{server.url}/good.bin", MD5, "x")], tmp_path / "file", quiet=True)


CODE = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # else ignored where tests run in the background
from pathlib import Path
from cnnjax.datasets.download import RemoteFile, download
download([RemoteFile({url!r}, {md5!r}, "x.bin")], Path({folder!r}), quiet=True)
"""


def test_interrupt_leaves_nothing(server, tmp_path):
    code = CODE.format(url=f"{server.url}/slow", md5=MD5, folder=str(tmp_path))
    process = files.run_python(code)
    deadline = time.perf_counter() + 30
    while not everything(tmp_path) and time.perf_counter() < deadline:
        time.sleep(0.02)
    assert [path.suffix for path in everything(tmp_path)] == [".part"]
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert "KeyboardInterrupt" in error
    assert everything(tmp_path) == []


def test_two_processes_at_once(server, tmp_path):
    code = CODE.format(url=f"{server.url}/good.bin", md5=MD5, folder=str(tmp_path))
    for process in [files.run_python(code) for _ in range(2)]:
        _, error = process.communicate(timeout=60)
        assert (process.returncode, error) == (0, "")
    assert everything(tmp_path) == [tmp_path / "x.bin"]
    assert (tmp_path / "x.bin").read_bytes() == CONTENT


def test_many_threads_at_once(server, tmp_path):
    errors = []
    barrier = threading.Barrier(6)

    def work(index):
        barrier.wait()
        path = "good.bin" if index % 2 else "cut"
        try:
            download([RemoteFile(f"{server.url}/{path}", MD5, "x.bin")], tmp_path, quiet=True)
        except DownloadError as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) <= 3
    assert everything(tmp_path) == [tmp_path / "x.bin"]
    assert (tmp_path / "x.bin").read_bytes() == CONTENT


# MD5 of the unpacked files, as they are published alongside; those in the code are of the packed ones.
UNPACKED = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}


@pytest.mark.realdata
@pytest.mark.parametrize("name", UNPACKED)
def test_real_mnist_is_the_published_one(name):
    packed = (files.real_data("mnist") / f"{name}.gz").read_bytes()
    assert hashlib.md5(gzip.decompress(packed)).hexdigest() == UNPACKED[name]
    assert f"mnist/{name}.gz" in [file.target for file in module.MNIST_FILES]
