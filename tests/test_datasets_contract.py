"""What every reader must do, whatever the format. A new reader joins by a line in CASES."""

from pathlib import Path

import dataset_files as files
import numpy as np
import PIL.Image
import pytest

from cnnjax.datasets import READERS, Splits, load, reader_names
from cnnjax.datasets.cifar import CIFAR10_CLASSES

NAMES10 = (*files.TRAIN_BATCHES, "test_batch")
NAMES100 = ("train", "test")
IMAGES = {name: files.random_images(2, seed) for seed, name in enumerate((*NAMES10, *NAMES100))}
LABELS10 = {name: [seed, 9 - seed] for seed, name in enumerate(NAMES10)}
LABELS100 = {"train": [99, 0], "test": [42, 7]}
DUMPS = {
    "py2": files.python2_pickle,
    "py3-0": files.python3_pickle(0),
    "py3-2": files.python3_pickle(2),
    "py3-4": files.python3_pickle(4),
    "py3-5-text": files.python3_pickle(5, text_keys=True),
}


def pick(source: dict, names: tuple) -> dict:
    return {name: source[name] for name in names}


def cifar10_binary(folder: Path) -> Path:
    return files.write_cifar10_binary(folder, pick(IMAGES, NAMES10), LABELS10)


def cifar100_binary(folder: Path) -> Path:
    return files.write_cifar100_binary(folder, pick(IMAGES, NAMES100), LABELS100)


def cifar10_python(dump):
    return lambda folder: files.write_cifar_python(folder, pick(IMAGES, NAMES10), LABELS10, dump, "cifar10")


def cifar100_python(dump):
    return lambda folder: files.write_cifar_python(folder, pick(IMAGES, NAMES100), LABELS100, dump, "cifar100")


EXPECTED10 = {
    "name": "cifar10",
    "train": np.concatenate([IMAGES[name] for name in files.TRAIN_BATCHES]),
    "train_labels": [label for name in files.TRAIN_BATCHES for label in LABELS10[name]],
    "test": IMAGES["test_batch"],
    "test_labels": LABELS10["test_batch"],
    "classes": files.CIFAR10_NAMES,
}
EXPECTED100 = {
    "name": "cifar100",
    "train": IMAGES["train"],
    "train_labels": LABELS100["train"],
    "test": IMAGES["test"],
    "test_labels": LABELS100["test"],
    "classes": files.FINE_NAMES,
}


def idx_expected(name: str) -> dict:
    return {
        "name": name,
        "train": files.random_images(3, 0, (5, 4))[..., np.newaxis],
        "train_labels": [0, 1, 2],
        "test": files.random_images(2, 1, (5, 4))[..., np.newaxis],
        "test_labels": [0, 1],
        "classes": tuple("0123456789" if "mnist" in name else "012"),
    }


def colour_idx(folder: Path) -> Path:
    files.write_idx(folder / "train-images-idx4-ubyte", files.random_images(3, 0, (5, 4, 3)))
    files.write_idx(folder / "train-labels-idx1-ubyte", np.array([0, 1, 2], np.uint8))
    files.write_idx(folder / "t10k-images-idx4-ubyte.gz", files.random_images(2, 1, (5, 4, 3)), gzipped=True)
    files.write_idx(folder / "t10k-labels-idx1-ubyte.gz", np.array([0, 1], np.uint8), gzipped=True)
    return folder


COLOUR_EXPECTED = idx_expected("idx") | {
    "train": files.random_images(3, 0, (5, 4, 3)),
    "test": files.random_images(2, 1, (5, 4, 3)),
}


def inside(write, name: str):
    """The data set one folder below the path given."""

    def write_below(folder: Path) -> Path:
        write(folder / name)
        (folder / "notes").mkdir()
        return folder

    return write_below


def archived(write, top: str, name: str = "archive.tar.gz", give: str = "file"):
    def write_archive(folder: Path) -> Path:
        path = files.tar_gz(folder / name, write(folder.parent / "unpacked"), top)
        return path if give == "file" else folder

    return write_archive


PEOPLE = {
    "train": files.random_images(4, 5, (5, 5))[..., np.newaxis],
    "train_labels": [0, 1, 0, 1],
    "test": files.random_images(2, 6, (5, 5))[..., np.newaxis],
    "test_labels": [1, 0],
    "classes": ("0", "1"),
}
PEOPLE["train"][0, 0, 0] = 255  # so that the range can be told


def people(write):
    """A data set of one's own, by a function of the folder, the name of the part, its images and its labels."""

    def write_parts(folder: Path) -> Path:
        folder.mkdir(parents=True)
        for part in ("train", "test"):
            write(folder, part, PEOPLE[part], PEOPLE[f"{part}_labels"])
        return folder

    return write_parts


def csv_part(folder: Path, part: str, images_NHWC: np.ndarray, labels: list[int]) -> None:
    rows = [[label, *image.ravel()] for label, image in zip(labels, images_NHWC, strict=True)]
    header = ",".join(["label", *(f"pixel{i}" for i in range(images_NHWC[0].size))])
    (folder / f"{part}.csv").write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]))


def png_part(folder: Path, part: str, images_NHWC: np.ndarray, labels: list[int]) -> None:
    for number, (label, image) in enumerate(zip(labels, images_NHWC, strict=True)):
        place = folder / part / str(label)
        place.mkdir(parents=True, exist_ok=True)
        PIL.Image.fromarray(image[..., 0]).save(place / f"{number}.png")


def npz(folder: Path) -> Path:
    folder.mkdir(parents=True)
    arrays = {f"{name}_{part}": PEOPLE[key] for part in ("train", "test")
              for name, key in (("x", part), ("y", f"{part}_labels"))}  # fmt: skip
    np.savez(folder / "digits.npz", **arrays)
    return folder / "digits.npz"


# A folder of class folders is read class by class.
SORTED_PEOPLE = PEOPLE | {
    "train": PEOPLE["train"][[0, 2, 1, 3]],
    "train_labels": [0, 0, 1, 1],
    "test": PEOPLE["test"][[1, 0]],
    "test_labels": [0, 1],
}

# id: (reader, writer, what is expected)
CASES = {
    "csv": ("csv", people(csv_part), PEOPLE | {"name": "given"}),
    "npz": ("npz", npz, PEOPLE | {"name": "digits"}),
    "folder": ("folder", people(png_part), SORTED_PEOPLE | {"name": "given"}),
    "cifar10-bin": ("cifar10", cifar10_binary, EXPECTED10),
    "cifar10-bin-parent": ("cifar10", inside(cifar10_binary, "cifar-10-batches-bin"), EXPECTED10),
    "cifar10-bin-odd-parent": ("cifar10", inside(cifar10_binary, "my images"), EXPECTED10),
    "cifar10-bin-tar": ("cifar10", archived(cifar10_binary, "cifar-10-batches-bin"), EXPECTED10),
    "cifar10-bin-tar-odd": ("cifar10", archived(cifar10_binary, "./a/b", "x.tgz"), EXPECTED10),
    "cifar10-bin-tar-flat": ("cifar10", archived(cifar10_binary, ""), EXPECTED10),
    "cifar10-bin-tar-parent": (
        "cifar10",
        archived(cifar10_binary, "cifar-10-batches-bin", "cifar-10-binary.tar.gz", "folder"),
        EXPECTED10,
    ),
    "cifar100-bin": ("cifar100", cifar100_binary, EXPECTED100),
    "cifar100-bin-parent": ("cifar100", inside(cifar100_binary, "cifar-100-binary"), EXPECTED100),
    "cifar100-bin-tar": ("cifar100", archived(cifar100_binary, "cifar-100-binary"), EXPECTED100),
    **{f"cifar10-{name}": ("cifar10", cifar10_python(dump), EXPECTED10) for name, dump in DUMPS.items()},
    **{f"cifar100-{name}": ("cifar100", cifar100_python(dump), EXPECTED100) for name, dump in DUMPS.items()},
    "cifar10-py2-parent": ("cifar10", inside(cifar10_python(files.python2_pickle), "cifar-10-batches-py"), EXPECTED10),
    "cifar10-py2-tar": ("cifar10", archived(cifar10_python(files.python2_pickle), "cifar-10-batches-py"), EXPECTED10),
    "cifar100-py2-tar": ("cifar100", archived(cifar100_python(files.python2_pickle), "cifar-100-python"), EXPECTED100),
    "idx": ("idx", files.write_mnist, idx_expected("idx")),
    "idx-gz": (
        "idx",
        lambda folder: files.write_mnist(folder, end="-idx{dim}-ubyte.gz", gzipped=True),
        idx_expected("idx"),
    ),
    "idx-gz-in-disguise": ("idx", lambda folder: files.write_mnist(folder, gzipped=True), idx_expected("idx")),
    "idx-dot": ("idx", lambda folder: files.write_mnist(folder, end=".idx{dim}-ubyte"), idx_expected("idx")),
    "idx-colour": ("idx", colour_idx, COLOUR_EXPECTED),
    "mnist-raw": ("idx", inside(files.write_mnist, "MNIST/raw"), idx_expected("mnist")),
    "fashion-mnist": ("idx", inside(files.write_mnist, "Fashion-MNIST"), idx_expected("fashion-mnist")),
}


def check(splits: Splits, expected: dict, path: Path) -> None:
    assert splits.test is not None
    for dataset, split in ((splits.train, "train"), (splits.test, "test")):
        assert dataset.name == expected["name"]
        assert dataset.images_NHWC.dtype == np.uint8
        assert dataset.images_NHWC.flags.c_contiguous
        np.testing.assert_array_equal(dataset.images_NHWC, expected[split])
        assert dataset.labels_N.dtype == np.int32
        assert dataset.labels_N.tolist() == expected[f"{split}_labels"]
        assert dataset.class_names == expected["classes"]
        assert dataset.source.startswith(str(path))
        assert Path(dataset.source).exists()
        assert len(dataset) == len(expected[split])
        assert dataset.image_shape == expected[split].shape[1:]


@pytest.mark.parametrize("case", CASES)
def test_reader(case, tmp_path):
    reader, write, expected = CASES[case]
    path = write(tmp_path / "given")
    found = load(str(path), default="mnist")
    assert found.notes == ()
    check(found.splits, expected, path)
    check(load(f"{reader}:{path}").splits, expected, path)
    others = [other.name for other in READERS if other.name != reader and other.detect(path)]
    assert others == []


def test_every_reader_has_a_case():
    # tfds needs another package, and has its own.
    assert {reader.name for reader in READERS} == {"tfds"} | {reader for reader, _, _ in CASES.values()}
    assert set(reader_names()) >= {reader.name for reader in READERS}


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_no_data_set(reader, tmp_path):
    (tmp_path / "notes.txt").write_text("nothing here")
    (tmp_path / "empty").mkdir()
    for path in (tmp_path, tmp_path / "empty", tmp_path / "notes.txt", tmp_path / "absent"):
        assert not reader.detect(path)
        with pytest.raises((FileNotFoundError, ValueError), match="; expected ") as error:
            reader.read(path)
        assert str(path) in str(error.value)
        assert "\n" not in str(error.value)


def test_class_names_without_meta_file(tmp_path):
    files.small_cifar10(tmp_path / "ten", meta=False)
    assert load(str(tmp_path / "ten")).splits.train.class_names == CIFAR10_CLASSES == files.CIFAR10_NAMES
    files.write_cifar100_binary(
        tmp_path / "hundred", pick(IMAGES, NAMES100), {"train": [99, 0], "test": [1, 2]}, meta=False
    )
    assert load(str(tmp_path / "hundred")).splits.test.class_names == tuple(str(label) for label in range(100))
