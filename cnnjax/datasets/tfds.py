"""Data sets that TensorFlow Datasets has prepared, in its ArrayRecord format; reading them loads no TensorFlow."""

import importlib
import os
from os.path import isfile
from pathlib import Path
from typing import Any

import numpy as np

from cnnjax.datasets.base import Dataset, Splits
from cnnjax.datasets.files import holds

EXPECTED = "the name of a data set prepared by TensorFlow Datasets, or its folder, which has dataset_info.json"

_INSTALL = "pip install tensorflow-datasets array-record importlib_resources"
_TESTS = ("test", "validation")


def detect(path: Path) -> bool:
    """Whether a data set prepared by TensorFlow Datasets is at ``path``."""
    return _prepared(path) is not None


def read(path: Path) -> Splits:
    """A data set prepared by TensorFlow Datasets.

    Args:
        path: Its name, such as ``mnist`` or ``mnist:3.0.1`` or ``emnist/letters``; or its folder, with
            ``dataset_info.json`` or one folder of a version that has it. A name is looked for where the package keeps
            its data: ``$TFDS_DATA_DIR``, else ``~/tensorflow_datasets``. Nothing is downloaded.

    Returns:
        Training and test set (or, without one, the validation set), images uint8 ``[N, H, W, C]``.

    Raises:
        FileNotFoundError: If there is no such data set; with the command that gets it.
        ValueError: If it is in another format, or holds no images with one label each. Or if the package is not
            installed; with the command that installs it.
    """
    folder = _prepared(path)
    if folder is None and (path.exists() or path.is_absolute()):
        found = f"holds {holds(path)}" if path.is_dir() else "is a file" if path.exists() else "no such folder"
        raise FileNotFoundError(f"{path}: {found}; expected {EXPECTED}")
    tfds = _package()
    builder = tfds.builder_from_directory(str(folder)) if folder else _builder(tfds, str(path))
    try:
        sources = builder.as_data_source()
    except (NotImplementedError, ValueError, OSError, ImportError, AssertionError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"{builder.data_dir}: cannot be read without TensorFlow ({reason}); expected the format array_record: "
            f"{_prepare(builder.name)}"
        ) from None
    test = next((name for name in _TESTS if name in sources), None)
    if "train" not in sources:
        raise ValueError(f"{builder.data_dir}: has the splits {', '.join(sources)}; expected train")
    keys = _keys(builder)
    names = getattr(builder.info.features[keys[1]], "names", None)
    arrays = [_arrays(sources[name], keys, f"{builder.data_dir}: {name}") for name in ("train", test) if name]
    if not names:
        names = [str(label) for label in range(1 + max(int(labels_N.max()) for _, labels_N in arrays))]
    datasets = [Dataset(builder.name, *both, tuple(names), str(builder.data_dir)) for both in arrays]
    return Splits(datasets[0], datasets[1] if test else None)


def _prepared(path: Path) -> Path | None:
    """The folder of a prepared version, at ``path`` or below it, the newest first."""
    if isfile(path / "dataset_info.json"):
        return path
    if not path.is_dir():
        return None
    found = [info.parent for info in path.glob("*/dataset_info.json") if isfile(info)]
    return max(found, key=lambda folder: [int(n) if n.isdigit() else -1 for n in folder.name.split(".")], default=None)


def _package() -> Any:
    try:
        return importlib.import_module("tensorflow_datasets")
    except ModuleNotFoundError as error:
        raise ValueError(f"tfds: needs {error.name}, which is not installed: {_INSTALL}") from None


def _builder(tfds: Any, name: str) -> Any:
    """The builder of a data set by name, whose files are there."""
    errors = (ValueError, tfds.core.registered.DatasetNotFoundError, AssertionError)
    try:
        # The package reads the variable once, when it is imported; here it counts at the call.
        builder = tfds.builder(name, data_dir=os.environ.get("TFDS_DATA_DIR"), try_gcs=False)
    except errors as error:
        reason = " ".join(str(error).partition("Available")[0].split())[:200]
        raise FileNotFoundError(f"tfds:{name}: there is no such data set ({reason}); expected {EXPECTED}") from None
    if not Path(builder.data_path, "dataset_info.json").is_file():
        raise FileNotFoundError(
            f"tfds:{name}: not found in {builder.data_path}; expected it there, or in $TFDS_DATA_DIR: {_prepare(name)}"
        )
    return builder


def _prepare(name: str) -> str:
    call = f"tensorflow_datasets.builder('{name}', file_format='array_record').download_and_prepare()"
    return f'python -c "import tensorflow_datasets; {call}" downloads and writes it'


def _keys(builder: Any) -> tuple[str, str]:
    """Names of image and label in each example."""
    keys = builder.info.supervised_keys
    features = list(builder.info.features or ())
    image, label = keys[:2] if keys else ("image", "label")
    if image not in features or label not in features:
        raise ValueError(f"{builder.data_dir}: has the features {', '.join(features)}; expected image and label")
    return image, label


def _arrays(source: Any, keys: tuple[str, str], place: str) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of one split."""
    images_NHWC, labels_N = None, np.empty(len(source), np.int32)
    for index in range(len(source)):
        example = source[index]
        image_HWC, label = np.asarray(example[keys[0]]), np.asarray(example[keys[1]])
        if image_HWC.ndim != 3 or image_HWC.dtype != np.uint8 or label.ndim or label.dtype.kind not in "iu":
            found = f"{image_HWC.dtype} {list(image_HWC.shape)} with a label {label.dtype} {list(label.shape)}"
            raise ValueError(f"{place}: example {index} is {found}; expected an image uint8 [H, W, C] with one class")
        if images_NHWC is None:
            images_NHWC = np.empty((len(source), *image_HWC.shape), np.uint8)
        if image_HWC.shape != images_NHWC.shape[1:]:
            sizes = f"{list(image_HWC.shape)}, but example 0 is {list(images_NHWC.shape[1:])}"
            raise ValueError(f"{place}: example {index} is {sizes}; expected images of one size")
        images_NHWC[index], labels_N[index] = image_HWC, label
    if images_NHWC is None:
        raise ValueError(f"{place}: has no examples; expected some")
    return images_NHWC, labels_N
