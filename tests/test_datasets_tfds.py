"""Data sets of TensorFlow Datasets, built here by the package itself, read and trained on."""

import importlib.util
import io
import os
import subprocess
import sys
from pathlib import Path

import dataset_files as files
import numpy as np
import PIL.Image
import pytest

from cnnjax.datasets import load
from cnnjax.datasets.tfds import detect

IMAGES = {"train": files.random_images(30, 0, (8, 8, 3)), "test": files.random_images(10, 1, (8, 8, 3))}

BUILD = """
import pickle, sys
import tensorflow_datasets as tfds

class Tiny(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.0.0")

    @classmethod
    def get_metadata(cls):
        from tensorflow_datasets.core import dataset_metadata
        return dataset_metadata.DatasetMetadata(description="d", citation="c", tags=[])

    def _info(self):
        features = {"image": tfds.features.Image(shape=(8, 8, 3), encoding_format="png"),
                    "label": tfds.features.ClassLabel(names=["cat", "dog"])}
        return self.dataset_info_from_configs(
            features=tfds.features.FeaturesDict(features), supervised_keys=("image", "label"))

    def _split_generators(self, dl_manager):
        return {name: self._generate_examples(name) for name in PNGS}

    def _generate_examples(self, name):
        for i, png in enumerate(PNGS[name]):
            yield i, {"image": png, "label": i % 2}

PNGS = pickle.load(sys.stdin.buffer)
import io
PNGS = {name: [io.BytesIO(png) for png in pngs] for name, pngs in PNGS.items()}
Tiny(data_dir=sys.argv[1], file_format="array_record").download_and_prepare()
"""


def needs_package() -> None:
    lacking = [name for name in ("tensorflow_datasets", "array_record") if importlib.util.find_spec(name) is None]
    if lacking and os.environ.get("CNNJAX_STRICT") == "1":
        pytest.fail(f"not installed: {', '.join(lacking)}")
    if lacking:
        pytest.skip(f"not installed: {', '.join(lacking)}")


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A folder of data sets with one in it."""
    needs_package()
    import pickle

    def png(image_HWC: np.ndarray) -> bytes:
        file = io.BytesIO()
        PIL.Image.fromarray(image_HWC).save(file, "PNG")
        return file.getvalue()

    folder = tmp_path_factory.mktemp("tfds")
    pngs = pickle.dumps({name: [png(image) for image in images] for name, images in IMAGES.items()})
    subprocess.run([sys.executable, "-c", BUILD, str(folder)], input=pngs, check=True, capture_output=True)
    return folder


def rows(images_NHWC: np.ndarray, labels_N: np.ndarray) -> list[tuple[bytes, int]]:
    return sorted((image.tobytes(), int(label)) for image, label in zip(images_NHWC, labels_N, strict=True))


@pytest.mark.compat
@pytest.mark.parametrize("given", ["{}/tiny/1.0.0", "{}/tiny", "tfds:{}/tiny", "tfds:{}/tiny/1.0.0"])
def test_a_folder(home, given):
    splits = load(given.format(home)).splits
    assert splits.test is not None and splits.train.class_names == ("cat", "dog")
    # The package shuffles what it writes.
    for dataset, name in ((splits.train, "train"), (splits.test, "test")):
        expected = IMAGES[name]
        assert rows(dataset.images_NHWC, dataset.labels_N) == rows(expected, np.arange(len(expected)) % 2)


@pytest.mark.compat
def test_it_trains_without_tensorflow(home, tmp_path):
    code = (
        "import sys; from experiments.cifar10 import *; from experiments.training import main\n"
        f"code = main('x', 'x', PRESETS, fill, arguments=['--data', 'tfds:{home}/tiny', '--network', "
        f"'cnn2d_1layer_fullconnected_1layer', '--steps', '2', '--epochs', '1', '--run-dir', r'{tmp_path / 'run'}'])\n"
        "print('tensorflow' in sys.modules); sys.exit(code)"
    )
    done = files.run_python(code)
    printed, said = done.communicate(timeout=300)
    assert done.returncode == 0, said
    assert printed.splitlines()[-1] == "False"
    assert (tmp_path / "run" / "predictions.csv").read_text().count("\n") == 11


def test_what_is_not_there_is_named_with_the_way_to_get_it(tmp_path):
    assert not detect(tmp_path)
    with pytest.raises(FileNotFoundError, match="expected the name of a data set prepared by TensorFlow Datasets"):
        load(f"tfds:{tmp_path / 'nowhere'}")
    if importlib.util.find_spec("tensorflow_datasets") is None:
        with pytest.raises(ValueError, match="tfds: needs tensorflow_datasets, which is not installed: pip install"):
            load("tfds:mnist")


@pytest.mark.compat
def test_names(home, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(home))
    for name in ("tiny", "tiny:1.0.0"):
        train = load(f"tfds:{name}").splits.train
        assert (train.name, len(train), train.source) == ("tiny", 30, str(home / "tiny" / "1.0.0"))
    with pytest.raises(
        FileNotFoundError, match=r"tfds:mnist: not found in .*builder\('mnist', file_format='array_record'"
    ):
        load("tfds:mnist")
    with pytest.raises(FileNotFoundError, match="tfds:nonesuch: there is no such data set"):
        load("tfds:nonesuch")
