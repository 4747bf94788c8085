"""Where data is found: each place in its turn, and never another data set unseen."""

import hashlib
import http.server
import threading

import dataset_files as files
import numpy as np
import pytest

from cnnjax.datasets import load, reader_names, search
from cnnjax.datasets.download import RemoteFile


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.delenv("CNNJAX_DATA", raising=False)
    monkeypatch.setenv("CNNJAX_OFFLINE", "1")


@pytest.fixture
def downloads(tmp_path):
    return tmp_path / "downloads"


def test_explicit_path(tmp_path, monkeypatch):
    monkeypatch.setenv("CNNJAX_DATA", str(tmp_path / "nowhere"))
    folder = files.small_cifar100(tmp_path / "c")
    found = load(str(folder))
    assert (found.splits.train.name, found.splits.train.source, found.notes) == ("cifar100", str(folder), ())


def test_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    files.small_cifar10(tmp_path / "c")
    assert load("~/c").splits.train.source == str(tmp_path / "c")
    assert load("cifar10:~/c").splits.train.source == str(tmp_path / "c")


def test_named_reader_wins(tmp_path):
    files.small_cifar10(tmp_path / "cifar-10-batches-bin")
    files.write_mnist(tmp_path / "mnist")
    assert load(f"cifar10:{tmp_path}").splits.train.name == "cifar10"
    assert load(f"idx:{tmp_path}", default="cifar10").splits.train.name == "mnist"
    assert load(f"mnist:{tmp_path}").splits.train.name == "mnist"
    with pytest.raises(FileNotFoundError, match="holds no cifar100 files; expected CIFAR-100, binary"):
        load(f"cifar100:{tmp_path}")


def test_default_decides_between_several(tmp_path):
    files.small_cifar10(tmp_path / "cifar-10-batches-bin")
    files.write_mnist(tmp_path / "mnist")
    assert load(str(tmp_path)).splits.train.name == "cifar10"
    assert load(str(tmp_path), default="mnist").splits.train.name == "mnist"
    message = r"holds several data sets \(cifar10, idx\); expected one: name it, as in --data cifar10:"
    for default in ("cifar100", "digits"):
        with pytest.raises(ValueError, match=message):
            load(str(tmp_path), default=default)


@pytest.mark.parametrize("data", ["absent", "", "csv2:absent"])
def test_path_that_does_not_exist(tmp_path, monkeypatch, data):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=rf"--data {data}: no such file or folder; expected a path") as error:
        load(data)
    for name in (*reader_names(), "digits"):
        assert name in str(error.value)


def test_no_path_after_the_name():
    with pytest.raises(ValueError, match="--data cifar10:: no path after the colon; expected cifar10:PATH"):
        load("cifar10:")


def test_folder_with_nothing_to_read(tmp_path):
    for number in range(11):
        (tmp_path / f"{number:02}.txt").write_text("x")
    (tmp_path / "00").mkdir()
    with pytest.raises(
        ValueError, match=r"the folder holds 00\.txt, 00/, .* and 4 more; expected CIFAR-10, CIFAR-100, IDX"
    ):
        load(str(tmp_path))


def test_file_that_nobody_reads(tmp_path):
    (tmp_path / "x.tar.gz").write_text("<!DOCTYPE html>")
    with pytest.raises(ValueError, match="the file begins with '<!DOCTYPE html>'; expected CIFAR-10, CIFAR-100"):
        load(str(tmp_path / "x.tar.gz"))


def test_one_file_of_a_folder(tmp_path):
    folder = files.small_cifar10(tmp_path / "c")
    with pytest.raises(ValueError, match=r"Its folder .*/c has CIFAR-10: give that"):
        load(str(folder / "data_batch_1.bin"))


@pytest.mark.parametrize("data", [None, "cifar10"])
def test_variable(tmp_path, monkeypatch, downloads, data):
    files.small_cifar10(tmp_path / "a" / "cifar-10-batches-bin")
    files.small_cifar10(downloads / "cifar-10-batches-bin")
    for given in (tmp_path / "a", tmp_path / "a" / "cifar-10-batches-bin"):
        monkeypatch.setenv("CNNJAX_DATA", str(given))
        found = load(data, downloads=downloads)
        assert found.splits.train.source == str(tmp_path / "a" / "cifar-10-batches-bin")
        assert found.notes == ()


@pytest.mark.parametrize("data", [None, "cifar10"])
def test_variable_never_falls_back(tmp_path, monkeypatch, downloads, data):
    files.small_cifar10(downloads / "cifar-10-batches-bin")
    monkeypatch.setenv("CNNJAX_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match=r"CNNJAX_DATA=.*/nowhere: no such folder; expected .* CIFAR-10"):
        load(data, downloads=downloads)
    files.write_mnist(tmp_path / "data" / "mnist")
    monkeypatch.setenv("CNNJAX_DATA", str(tmp_path / "data"))
    with pytest.raises(FileNotFoundError, match=r"CNNJAX_DATA=.*/data: the folder holds mnist/; expected .* CIFAR-10"):
        load(data, downloads=downloads)
    assert load("mnist", downloads=downloads).splits.train.name == "mnist"


def test_variable_with_a_damaged_data_set(tmp_path, monkeypatch):
    folder = files.small_cifar10(tmp_path / "cifar-10-batches-bin")
    (folder / "data_batch_1.bin").write_bytes(b"short")
    monkeypatch.setenv("CNNJAX_DATA", str(tmp_path))
    with pytest.raises(ValueError, match=r"data_batch_1\.bin: holds 5 bytes"):
        load(None)
    (folder / "data_batch_1.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"data_batch_1\.bin missing"):
        load(None)


@pytest.mark.parametrize("data", [None, "cifar10"])
def test_downloads(tmp_path, downloads, data):
    path = files.tar_gz(
        downloads / "cifar-10-binary.tar.gz", files.small_cifar10(tmp_path / "c"), "cifar-10-batches-bin"
    )
    found = load(data, downloads=downloads)
    assert (found.splits.train.source, found.notes) == (str(path), ())


def test_fallback(downloads):
    found = load(None, image_shape=(28, 24, 1), downloads=downloads)
    assert found.splits.train.name == "digits"
    assert found.splits.train.image_shape == (28, 24, 1)
    assert found.notes == (
        f"CIFAR-10 was not found (looked in {downloads}; CNNJAX_DATA is not set) and could not be downloaded "
        "(CNNJAX_OFFLINE is set): training on the 1,797 digits shipped with cnnjax, resized to 28x24x1. "
        "Give --data PATH or set CNNJAX_DATA.",
    )


def test_no_fallback_for_a_named_set(downloads):
    with pytest.raises(
        FileNotFoundError, match=r"MNIST was not found .* \(CNNJAX_OFFLINE is set\)\. Give --data PATH or"
    ):
        load("mnist", downloads=downloads)


@pytest.mark.parametrize("arguments", [{"data": "digits"}, {"data": None, "default": "digits"}])
def test_digits_by_name(arguments, downloads):
    found = load(**arguments, downloads=downloads)
    assert (found.splits.train.name, found.splits.train.image_shape, found.notes) == ("digits", (32, 32, 3), ())


def test_unknown_default():
    with pytest.raises(
        ValueError, match="data set 'cifar' is unknown; expected one of cifar10, cifar100, mnist, digits"
    ):
        load(None, default="cifar")


@pytest.fixture
def published(tmp_path, monkeypatch):
    """A server with a small MNIST, known under that name; gives the folder that it serves."""
    folder = files.write_mnist(tmp_path / "server", end="-idx{dim}-ubyte.gz", gzipped=True)

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments):
            super().__init__(*arguments, directory=str(folder))

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    remote = tuple(
        RemoteFile(
            f"http://127.0.0.1:{server.server_port}/{path.name}",
            hashlib.md5(path.read_bytes()).hexdigest(),
            f"mnist/{path.name}",
        )
        for path in sorted(folder.iterdir())
    )
    known = search.KnownSet("MNIST", search.KNOWN["mnist"].reader, remote)
    monkeypatch.setitem(search.KNOWN, "mnist", known)
    monkeypatch.setenv("CNNJAX_OFFLINE", "0")
    monkeypatch.delenv("http_proxy", raising=False)
    yield folder
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("data", [None, "mnist"])
def test_download(published, downloads, monkeypatch, data):
    found = load(data, default="mnist", quiet=True, downloads=downloads)
    assert (found.splits.train.name, found.splits.train.source) == ("mnist", str(downloads / "mnist"))
    assert found.notes == ()
    monkeypatch.setenv("CNNJAX_OFFLINE", "1")
    again = load(data, default="mnist", downloads=downloads)
    np.testing.assert_array_equal(again.splits.train.images_NHWC, found.splits.train.images_NHWC)


def test_broken_off_download_is_finished(published, downloads):
    load("mnist", quiet=True, downloads=downloads)
    for name in ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"):
        (downloads / "mnist" / name).unlink()
    assert load("mnist", quiet=True, downloads=downloads).splits.test is not None


def test_failed_download_falls_back_only_by_default(published, downloads):
    (published / "train-labels-idx1-ubyte.gz").unlink()
    found = load(None, default="mnist", quiet=True, downloads=downloads)
    assert found.splits.train.name == "digits"
    assert "could not be downloaded (http://127.0.0.1" in found.notes[0]
    assert "HTTP 404" in found.notes[0]
    with pytest.raises(FileNotFoundError, match=r"MNIST was not found .* HTTP 404"):
        load("mnist", quiet=True, downloads=downloads)


def test_light_imports():
    # A stand-in for the package itself, whose own imports are not the readers' affair.
    code = f"""
import sys, types
sys.modules["cnnjax"] = types.ModuleType("cnnjax")
sys.modules["cnnjax"].__path__ = [{str(files.ROOT / "cnnjax")!r}]
import cnnjax.datasets
print(sorted({{"jax", "pandas", "rich", "tensorflow", "torch"}} & set(sys.modules)))
"""
    output, error = files.run_python(code).communicate(timeout=60)
    assert (output, error) == ("[]\n", "")


@pytest.mark.realdata
@pytest.mark.parametrize("name", ["cifar10", "mnist"])
def test_real_data_through_the_variable(name, monkeypatch):
    folder = files.real_data(name)
    monkeypatch.setenv("CNNJAX_DATA", str(folder.parent))
    found = load(None, default=name)
    assert (found.splits.train.name, found.splits.train.source, found.notes) == (name, str(folder), ())
