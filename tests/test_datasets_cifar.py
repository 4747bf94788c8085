"""CIFAR readers: what goes wrong is named, and the real files come out right."""

import gzip
import time

import dataset_files as files
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cnnjax.datasets import cifar
from cnnjax.datasets.cifar import detect_cifar10, detect_cifar100, read_cifar10, read_cifar100

NAMES10 = (*files.TRAIN_BATCHES, "test_batch")


@pytest.fixture
def binary(tmp_path):
    return files.small_cifar10(tmp_path / "cifar-10-batches-bin")


def python_folder(folder, change=None, keys="cifar10"):
    """The Python version with one image a file, after ``change`` has edited the dict of each batch."""
    names = NAMES10 if keys == "cifar10" else ("train", "test")

    def dump(batch):
        if change is not None and b"data" in batch:
            change(batch)
        return files.python3_pickle(4)(batch)

    images = {name: files.random_images(1, seed) for seed, name in enumerate(names)}
    return files.write_cifar_python(folder, images, {name: [1] for name in names}, dump, keys)


def test_truncated_file(binary):
    path = binary / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(
        ValueError, match=r"data_batch_3\.bin: holds 3072 bytes .*; expected whole records of 3073 bytes"
    ):
        read_cifar10(binary)


def test_empty_file(binary):
    (binary / "test_batch.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"test_batch\.bin: holds 0 bytes and begins with nothing .*; expected whole"):
        read_cifar10(binary)


@pytest.mark.parametrize("size", [500, 3073])
def test_web_page_in_place_of_a_batch(binary, size):
    page = b"<!DOCTYPE html><html><head><title>404 Not Found</title>".ljust(size, b" ")
    (binary / "data_batch_1.bin").write_bytes(page)
    with pytest.raises(ValueError, match=r"data_batch_1\.bin: .*(DOCTYPE|label 60); expected|DOCTYPE.*; expected"):
        read_cifar10(binary)


def test_label_out_of_range(binary):
    image = files.random_images(1, 0)[0]
    records = [files.cifar10_record(image, label) for label in (1, 2, 11, 99)]
    (binary / "data_batch_2.bin").write_bytes(b"".join(records))
    with pytest.raises(ValueError, match=r"data_batch_2\.bin: record 2 \(byte 6146\) has label 11; expected 0 to 9"):
        read_cifar10(binary)


@pytest.mark.parametrize(
    ("coarse", "fine", "message"),
    [(20, 5, r"record 1 \(byte 3074\) has coarse label 20; expected 0 to 19"),
     (0, 100, r"record 1 \(byte 3075\) has fine label 100; expected 0 to 99")],
)  # fmt: skip
def test_label_out_of_range_in_cifar100(tmp_path, coarse, fine, message):
    folder = files.small_cifar100(tmp_path / "c")
    image = files.random_images(1, 0)[0]
    data = files.cifar100_record(image, 19, 99) + files.cifar100_record(image, coarse, fine)
    (folder / "train.bin").write_bytes(data)
    with pytest.raises(ValueError, match=rf"train\.bin: {message}"):
        read_cifar100(folder)


def test_missing_files_are_all_named(binary):
    for name in ("data_batch_2.bin", "data_batch_5.bin", "test_batch.bin"):
        (binary / name).unlink()
    message = r"data_batch_2\.bin, data_batch_5\.bin, test_batch\.bin missing; expected the files of CIFAR-10"
    for path in (binary, binary.parent):
        with pytest.raises(FileNotFoundError, match=message):
            read_cifar10(path)


def test_missing_files_in_an_archive(binary, tmp_path):
    (binary / "data_batch_4.bin").unlink()
    path = files.tar_gz(tmp_path / "x.tar.gz", binary, "top")
    with pytest.raises(FileNotFoundError, match=r"x\.tar\.gz: data_batch_4\.bin missing; expected"):
        read_cifar10(path)


def test_missing_file_of_cifar100(tmp_path):
    folder = files.small_cifar100(tmp_path / "c")
    (folder / "test.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"test\.bin missing"):
        read_cifar100(folder)


def test_a_file_named_test_is_no_cifar100(tmp_path):
    (tmp_path / "test").write_text("echo hello")
    (tmp_path / "train").mkdir()
    assert not detect_cifar100(tmp_path)


def test_files_with_several_and_few_records(binary):
    images = files.random_images(3, 9)
    records = [files.cifar10_record(image, label) for label, image in enumerate(images)]
    (binary / "data_batch_1.bin").write_bytes(b"".join(records))
    train = read_cifar10(binary).train
    assert train.labels_N.tolist() == [0, 1, 2, 1, 2, 3, 4]
    np.testing.assert_array_equal(train.images_NHWC[:3], images)


@pytest.mark.parametrize("meta", [b"one\ntwo\n", b"", b"<html>\n" * 12])
def test_foreign_meta_file(binary, meta):
    (binary / "batches.meta.txt").write_bytes(meta)
    with pytest.raises(ValueError, match=r"batches\.meta\.txt: holds \d+ class names; expected 10"):
        read_cifar10(binary)


def test_binary_is_preferred_to_python(binary):
    python_folder(binary.parent / "cifar-10-batches-py")
    assert read_cifar10(binary.parent).train.source == str(binary)
    (binary / "data_batch_1.bin").unlink()
    assert read_cifar10(binary.parent).train.source.endswith("-py")


def test_both_forms_in_one_folder(binary, tmp_path):
    for path in python_folder(tmp_path / "py").iterdir():
        path.rename(binary / path.name)
    assert read_cifar10(binary).train.labels_N.tolist() == [0, 1, 2, 3, 4]


def test_several_folders(binary):
    for name in ("one", "two"):
        files.small_cifar10(binary.parent / "sets" / name)
    with pytest.raises(ValueError, match=r"several folders hold such a data set \(one, two\); expected one"):
        read_cifar10(binary.parent / "sets")


def set_data(value):
    return lambda batch: batch.update({b"data": value})


def set_labels(value):
    return lambda batch: batch.update({b"labels": value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda batch: batch.pop(b"data"), "expected 'data' and 'labels'"),
        (lambda batch: batch.pop(b"labels"), "expected 'data' and 'labels'"),
        (set_data(np.zeros((1, 3072), np.int64)), r"'data' is int64 \[1, 3072\]; expected uint8 \[N, 3072\]"),
        (set_data(np.zeros((1, 3073), np.uint8)), r"'data' is uint8 \[1, 3073\]; expected uint8 \[N, 3072\]"),
        (set_data([1, 2]), "'data' is list; expected uint8"),
        (set_data(np.zeros((0, 3072), np.uint8)), "holds 0 images and 1 labels; expected one label an image"),
        (set_labels([1, 2]), "holds 1 images and 2 labels; expected one label an image"),
        (set_labels([10]), "image 0 has label 10; expected 0 to 9"),
        (set_labels([-1]), "image 0 has label -1; expected 0 to 9"),
        (set_labels([10**5000]), "image 0 has label a int; expected 0 to 9"),
        (set_labels(["cat"]), "image 0 has label a str; expected 0 to 9"),
        (set_labels([1.0]), "image 0 has label a float; expected 0 to 9"),
        (set_labels("cat"), "'labels' is str; expected a list of numbers"),
    ],
)
def test_wrong_python_batch(tmp_path, change, message):
    folder = python_folder(tmp_path / "py", change)
    with pytest.raises(ValueError, match=rf"py/data_batch_1: .*{message}") as error:
        read_cifar10(folder)
    assert "\n" not in str(error.value)


def test_python_batch_that_is_no_dict(tmp_path):
    folder = python_folder(tmp_path / "py")
    (folder / "test_batch").write_bytes(b"\x80\x02].")
    with pytest.raises(ValueError, match="test_batch: holds a list; expected a dict"):
        read_cifar10(folder)


@pytest.mark.parametrize("labels", [np.array([3]), np.array([3], np.uint8), [np.int64(3)]])
def test_labels_saved_as_numpy(tmp_path, labels):
    folder = python_folder(tmp_path / "py", set_labels(labels))
    assert read_cifar10(folder).train.labels_N.tolist() == [3] * 5


def test_wrong_python_meta(tmp_path):
    folder = python_folder(tmp_path / "py", keys="cifar100")
    (folder / "meta").write_bytes(files.python2_pickle({b"fine_label_names": [b"apple"]}))
    with pytest.raises(ValueError, match="py/meta: holds 1 class names; expected 100"):
        read_cifar100(folder)


@pytest.fixture
def archive(binary, tmp_path):
    return files.tar_gz(tmp_path / "cifar-10-binary.tar.gz", binary, "cifar-10-batches-bin")


def test_web_page_in_place_of_an_archive(archive, tmp_path):
    archive.write_text("<!DOCTYPE html><html>")
    with pytest.raises(ValueError, match=r"binary\.tar\.gz: begins with '<!DOCTYPE html><html' .*; expected CIFAR-10"):
        read_cifar10(archive)
    lone = tmp_path / "lone"
    lone.mkdir()
    archive.rename(lone / archive.name)
    with pytest.raises(
        ValueError, match=r"binary\.tar\.gz: begins with '<!DOCTYPE html><html'; expected a whole \.tar"
    ):
        read_cifar10(lone)


def test_gzipped_web_page(archive):
    archive.write_bytes(gzip.compress(b"<!DOCTYPE html><html>" * 100))
    with pytest.raises(ValueError, match=r"binary\.tar\.gz: the file is damaged or cut short .*; expected a whole"):
        read_cifar10(archive)


@pytest.mark.parametrize("share", [0.001, 0.3, 0.6, 0.9, 0.99999])
def test_archive_cut_short(archive, share):
    data = archive.read_bytes()
    archive.write_bytes(data[: max(20, int(len(data) * share))])
    with pytest.raises(ValueError, match=r"binary\.tar\.gz: the file is damaged or cut short .*; expected a whole"):
        read_cifar10(archive)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_archive_with_a_changed_byte(archive, share):
    data = bytearray(archive.read_bytes())
    data[int(len(data) * share)] ^= 0x10
    archive.write_bytes(data)
    with pytest.raises(ValueError, match=r"binary\.tar\.gz: the file is damaged or cut short .*; expected a whole"):
        read_cifar10(archive)


def test_archive_with_a_bomb(archive, monkeypatch):
    monkeypatch.setattr(cifar, "_LARGEST_MEMBER", 3000)
    with pytest.raises(
        ValueError, match=r"holds cifar-10-batches-bin/data_batch_1\.bin of 3073 bytes; expected at most"
    ):
        read_cifar10(archive)


def test_archive_is_not_unpacked(archive, binary):
    before = sorted(archive.parent.rglob("*"))
    read_cifar10(archive)
    assert sorted(archive.parent.rglob("*")) == before


def test_foreign_archive(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("hello")
    path = files.tar_gz(tmp_path / "notes.tar.gz", tmp_path / "notes", "notes")
    assert not detect_cifar10(path)
    with pytest.raises(ValueError, match=r"notes\.tar\.gz: begins with .* and is no archive of cifar10"):
        read_cifar10(path)


def test_one_image_pixel_by_pixel(binary):
    data = (binary / "test_batch.bin").read_bytes()
    image = read_cifar10(binary).test.images_NHWC[0]
    for y in range(32):
        for x in range(32):
            assert image[y, x].tolist() == [data[1 + c * 1024 + y * 32 + x] for c in range(3)]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2**32)), min_size=1, max_size=3))
@settings(max_examples=15, deadline=None)
def test_round_trip(tmp_path_factory, batch):
    folder = tmp_path_factory.mktemp("cifar")
    labels = [label for label, _ in batch]
    images = np.stack([files.random_images(1, seed)[0] for _, seed in batch])
    every = dict.fromkeys(NAMES10, images)
    all_labels = dict.fromkeys(NAMES10, labels)
    files.write_cifar10_binary(folder / "bin", every, all_labels)
    files.write_cifar_python(folder / "py", every, all_labels, files.python2_pickle, "cifar10")
    for form in ("bin", "py"):
        splits = read_cifar10(folder / form)
        np.testing.assert_array_equal(splits.test.images_NHWC, images)
        assert splits.train.labels_N.tolist() == labels * 5


@pytest.mark.realdata
def test_real_cifar10():
    folder = files.real_data("cifar10")
    start = time.perf_counter()
    splits = read_cifar10(folder)
    seconds = time.perf_counter() - start
    assert splits.train.images_NHWC.shape == (50_000, 32, 32, 3)
    assert splits.test.images_NHWC.shape == (10_000, 32, 32, 3)
    assert np.bincount(splits.train.labels_N).tolist() == [5000] * 10
    assert np.bincount(splits.test.labels_N).tolist() == [1000] * 10
    assert splits.train.class_names == files.CIFAR10_NAMES
    for number, record in ((1, 0), (2, 9_999), (5, 1_234)):
        with (folder / f"data_batch_{number}.bin").open("rb") as stream:
            stream.seek(record * 3073)
            data = stream.read(3073)
        index = (number - 1) * 10_000 + record
        assert splits.train.labels_N[index] == data[0]
        assert files.cifar10_record(splits.train.images_NHWC[index], data[0]) == data
    assert seconds < 10
