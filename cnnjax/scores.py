"""What a run scored on images that it did not train on: ``evaluation.json``, and the worst mistakes as pictures.

NumPy in float64, on predictions that are already on the host.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cnnjax.datasets.base import Dataset
from cnnjax.metrics import replace_file, write_predictions

MISTAKES = 36  # pictures kept


def confusion_matrix(labels_N: np.ndarray, predicted_N: np.ndarray, classes: int) -> np.ndarray:
    """How many images of each class (rows) were taken for each class (columns), int64 ``[classes, classes]``."""
    pairs = labels_N.astype(np.int64) * classes + predicted_N
    return np.bincount(pairs, minlength=classes * classes).reshape(classes, classes)


def class_scores(
    labels_N: np.ndarray, predicted_N: np.ndarray, class_names: Sequence[str], outputs: int
) -> dict[str, Any]:
    """Confusion matrix, and for each class how many of its images were found and how many of its finds were right.

    Args:
        labels_N: True classes.
        predicted_N: Predicted classes, below ``outputs``.
        class_names: Of the data.
        outputs: Classes that the network tells apart, at least as many; those without a name get their number.

    Returns:
        As ``evaluation.json`` has it: ``classes``, ``confusion``, ``per_class``. A share of nothing is None.
    """
    names = [*class_names, *map(str, range(len(class_names), outputs))]
    counts = confusion_matrix(labels_N, predicted_N, outputs)
    hits, images, finds = counts.diagonal(), counts.sum(1), counts.sum(0)

    def share(hit: int, of: int) -> float | None:
        return float(hit / of) if of else None

    per_class = [
        {"class": name, "images": int(of), "accuracy": share(hit, of), "precision": share(hit, found)}
        for name, hit, of, found in zip(names, hits, images, finds, strict=True)
    ]
    return {"classes": names, "confusion": counts.tolist(), "per_class": per_class}


def number_scores(labels_N: np.ndarray, predicted_N: np.ndarray) -> dict[str, float | None]:
    """Mean absolute error, root of the mean squared error, and R2, which is None where all labels are the same."""
    labels_N, errors_N = labels_N.astype(np.float64), predicted_N.astype(np.float64) - labels_N
    spread = np.square(labels_N - labels_N.mean()).sum()
    return {
        "mae": float(np.abs(errors_N).mean()),
        "rmse": float(np.sqrt(np.square(errors_N).mean())),
        "r2": float(1 - np.square(errors_N).sum() / spread) if spread else None,
    }


def worst(dataset: Dataset, predicted_N: np.ndarray, losses_N: np.ndarray) -> dict[str, np.ndarray]:
    """The images with the largest losses among those whose class was missed; for regression, of all.

    Args:
        dataset: Images and labels.
        predicted_N: Predictions, in its order.
        losses_N: Of each image.

    Returns:
        As ``mistakes.npz`` has it, worst first: ``image`` uint8 ``[K, H, W, C]``, ``label``, ``predicted``, ``loss``,
        and ``index``, the place in the data set; K at most `MISTAKES`.
    """
    missed_N = predicted_N != dataset.labels_N
    order = np.argsort(-losses_N, kind="stable")
    index_K = order[missed_N[order]][:MISTAKES].astype(np.int64)
    return {
        "image": dataset.images_NHWC[index_K],
        "label": dataset.labels_N[index_K],
        "predicted": predicted_N[index_K],
        "loss": losses_N[index_K].astype(np.float64),
        "index": index_K,
    }


def write(
    folder: Path,
    dataset: Dataset,
    predicted_N: np.ndarray,
    losses_N: np.ndarray,
    facts: dict[str, Any],
    filters_HWIO: np.ndarray | None = None,
) -> None:
    """Writes ``predictions.csv``, ``evaluation.json``, ``mistakes.npz`` and ``filters.npz``.

    Args:
        folder: Where.
        dataset: What was predicted.
        predicted_N: Predictions, in its order.
        losses_N: Of each image.
        facts: First in ``evaluation.json``.
        filters_HWIO: Kernel of the first convolution, if there is one.
    """
    write_predictions(folder / "predictions.csv", dataset.written_labels(predicted_N))
    if dataset.task == "regression":
        more: dict[str, Any] = number_scores(dataset.labels_N, predicted_N)
    else:
        outputs = max(len(dataset.class_names), int(predicted_N.max(initial=0)) + 1)
        more = class_scores(dataset.labels_N, predicted_N, dataset.class_names, outputs)
    values = {"task": dataset.task, "images": len(dataset), **facts, **more}
    replace_file(folder / "evaluation.json", json.dumps(values, indent=1) + "\n")
    arrays: dict[str, Any] = dict(worst(dataset, predicted_N, losses_N))
    np.savez(folder / "mistakes.npz", **arrays)
    if filters_HWIO is not None:
        np.savez(folder / "filters.npz", kernel=filters_HWIO.astype(np.float32))
