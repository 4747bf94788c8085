"""Sums over an epoch, and the files of a run: ``metrics.csv``, ``steps.jsonl``, ``predictions.csv``.

Every line reaches the operating system as it is written, so a killed process loses none before its last checkpoint;
what it wrote after that checkpoint is cut off when the run resumes.
"""

import csv
import dataclasses
import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cnnjax.config import UsageError

COLUMNS = (
    *("network", "dataset", "framework", "backend", "mesh", "strategy", "bn_scope", "dtype", "seed"),
    *("epoch", "step", "loss", "accuracy", "val_loss", "val_accuracy", "learning_rate"),
    *("compile_s", "train_s", "eval_s", "images_per_s"),
)


# Further columns, at the end.
TOP5_COLUMNS = ("top5_accuracy", "val_top5_accuracy")  # of more than ten classes
NUMBER_COLUMNS = ("mae", "r2", "val_mae", "val_r2")  # of regression, whose accuracies are empty


def more_columns(task: str, classes: int) -> tuple[str, ...]:
    """Further columns of such data."""
    if task == "regression":
        return NUMBER_COLUMNS
    return TOP5_COLUMNS if classes > 10 else ()


@dataclasses.dataclass
class Sums:
    """Measures of the samples seen so far, in float64, and the seconds that they took.

    Means of unequal batches are wrong; sums are not.

    Attributes:
        loss: Cross-entropies, or squared errors.
        correct: Samples whose largest logit is at their label.
        top5: Samples whose label is among the five largest logits.
        absolute: Absolute errors.
        label: Labels that are numbers, less a constant.
        label_square: Squares of these.
        count: Weights of the samples.
        train_s: Seconds.
    """

    loss: float = 0.0
    correct: float = 0.0
    top5: float = 0.0
    absolute: float = 0.0
    label: float = 0.0
    label_square: float = 0.0
    count: float = 0.0
    train_s: float = 0.0

    def add(self, metrics: dict[str, Any]) -> None:
        """Adds the sums of one batch."""
        for name in vars(self).keys() & metrics.keys():
            setattr(self, name, getattr(self, name) + float(metrics[name]))

    def _mean(self, total: float) -> float:
        return total / self.count if self.count else float("nan")

    @property
    def mean_loss(self) -> float:
        """Sample-weighted mean loss; NaN where nothing was seen."""
        return self._mean(self.loss)

    @property
    def accuracy(self) -> float:
        """Share of samples whose largest logit is at their label; NaN where nothing was seen."""
        return self._mean(self.correct)

    def means(self, task: str, classes: int) -> dict[str, float]:
        """What is said of these samples: ``loss``, and by task ``accuracy, top5_accuracy`` or ``mae, r2``."""
        if task == "classification":
            top5 = {"top5_accuracy": self._mean(self.top5)} if classes > 5 else {}
            return {"loss": self.mean_loss, "accuracy": self.accuracy} | top5
        spread = self.label_square - self.label * self._mean(self.label)
        r2 = 1 - self.loss / spread if spread > 0 else float("nan")
        return {"loss": self.mean_loss, "mae": self._mean(self.absolute), "r2": r2}


def replace_file(path: Path, text: str) -> None:
    """Writes a file so that a reader, or a crash, sees either the old text or the new one."""
    new = path.with_name(path.name + ".new")
    new.write_text(text)
    os.replace(new, path)


class MetricsFile:
    """``metrics.csv``: one row an epoch, columns `COLUMNS` and some more."""

    def __init__(self, path: Path, epochs_done: int, more: tuple[str, ...] = ()):
        """Keeps the rows of the first ``epochs_done`` epochs of a file that is there; else starts it.

        Raises:
            UsageError: If the file has other columns.
        """
        columns = (*COLUMNS, *more)
        kept = []
        if path.exists():
            with path.open(newline="") as file:
                rows = csv.DictReader(file)
                if (found := tuple(rows.fieldnames or ())) != columns:
                    raise UsageError(f"{path}: the columns are {','.join(found)}; expected {','.join(columns)}")
                # A killed process can leave a row half written; it belongs to an epoch that is not done.
                for row in rows:
                    if None not in row.values() and row["epoch"].isdecimal() and int(row["epoch"]) <= epochs_done:
                        kept.append(row)
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept)
        replace_file(path, text.getvalue())
        self._file = path.open("a", newline="")
        self._writer = csv.DictWriter(self._file, columns, lineterminator="\n")

    def write(self, row: dict[str, Any]) -> None:
        """Appends one row; None is an empty cell."""
        self._writer.writerow(row)
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class StepsFile:
    """``steps.jsonl``: one JSON object a logged step."""

    def __init__(self, path: Path, steps_done: int):
        """Keeps the lines up to ``steps_done`` of a file that is there; else starts it."""
        kept = []
        if path.exists():
            for line in path.read_text().splitlines():
                try:
                    if json.loads(line)["step"] <= steps_done:
                        kept.append(line + "\n")
                except ValueError:
                    break  # half written
        replace_file(path, "".join(kept))
        self._file = path.open("a")

    def write(self, **values: Any) -> None:
        """Appends one line; non-finite numbers are written as NaN and Infinity, as Python and pandas read them."""
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def write_predictions(
    path: Path, predicted: Sequence[Any], names: Sequence[str] | None = None, more: Mapping[str, Sequence] | None = None
) -> None:
    """Writes ``ImageId,Label`` rows, in the order of the data set; images without names are counted from 1.

    Args:
        path: File.
        predicted: What is written of each image.
        names: Of the images.
        more: Further columns.
    """
    more = more or {}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("ImageId", "Label", *more))
    writer.writerows(zip(names or range(1, len(predicted) + 1), predicted, *more.values(), strict=True))
    replace_file(path, text.getvalue())
