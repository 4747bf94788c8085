"""Run directories as they are: finished, still going on, or broken off. What cannot be read is left out and noted."""

import dataclasses
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd

Part = TypeVar("Part")

_NUMBERS = (
    *("epoch", "step", "loss", "accuracy", "val_loss", "val_accuracy", "top5_accuracy", "val_top5_accuracy"),
    *("mae", "r2", "val_mae", "val_r2", "learning_rate", "compile_s", "train_s", "eval_s", "images_per_s"),
)
SEVERITIES = ("error", "warning", "note")


@dataclasses.dataclass(frozen=True)
class Mistakes:
    """The samples with the largest loss, worst first.

    Attributes:
        image_KHWC: uint8.
        label_K: Class numbers, or floats of a regression.
        predicted_K: Likewise.
        loss_K: Their losses.
        index_K: Their positions in the data set, from 0.
    """

    image_KHWC: np.ndarray
    label_K: np.ndarray
    predicted_K: np.ndarray
    loss_K: np.ndarray
    index_K: np.ndarray


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run directory says. A part that is not there is empty, or None.

    Attributes:
        name: Folder name, or the path as given where two folders share one.
        folder: Where it is.
        config: ``config.json``.
        environment: ``environment.json``.
        metrics: ``metrics.csv``, a row an epoch, all of `_NUMBERS` as float columns.
        steps: ``steps.jsonl``, a row a logged step: step, loss, accuracy, learning_rate.
        evaluation: ``evaluation.json`` without its matrix.
        confusion_CC: Its matrix, counts; rows are true classes, columns predicted ones.
        mistakes: ``mistakes.npz``.
        kernel_HWIO: ``filters.npz``.
        findings: ``diagnosis.json``, the most severe first; None without that file.
        notes: Files that are not there or cannot be read, one sentence each.
    """

    name: str
    folder: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    metrics: pd.DataFrame
    steps: pd.DataFrame
    evaluation: dict[str, Any]
    confusion_CC: np.ndarray | None
    mistakes: Mistakes | None
    kernel_HWIO: np.ndarray | None
    findings: list[dict[str, str]] | None
    notes: tuple[str, ...]

    @property
    def classes(self) -> list[str]:
        """Names of the classes, where the evaluation says them."""
        return self.evaluation.get("classes", [])


def printable(text: str) -> str:
    """The text without what UTF-8 cannot hold, as in file names of another encoding."""
    return text.encode("utf-8", "replace").decode("utf-8")


def read_runs(paths: Sequence[str | Path]) -> list[Run]:
    """Reads run directories.

    Raises:
        ValueError: If one is no run directory, or is given twice.
    """
    folders = [Path(path) for path in paths]
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    seen: set[Path] = set()
    for folder in folders:
        if not (folder / "config.json").is_file():
            what = "it has no config.json" if folder.is_dir() else "there is no such folder"
            raise ValueError(f"RUN {folder}: {what}; expected the folder of a run, as --run-dir names it")
        if folder.resolve() in seen:
            raise ValueError(f"RUN {folder} is given twice")
        seen.add(folder.resolve())
    return [_read_run(folder, printable(name)) for folder, name in zip(folders, names, strict=True)]


def _read_run(folder: Path, name: str) -> Run:
    notes: list[str] = []

    def read(file: str, parse: Callable[[Path], Part], otherwise: Part) -> Part:
        if not (folder / file).exists():
            notes.append(f"{file} is not there")
            return otherwise
        try:
            return parse(folder / file)
        # A killed run leaves half a file, and the parsers answer that with errors of many kinds. One bad file must not
        # cost the rest of the page.
        except Exception as error:
            notes.append(f"{file} cannot be read: {' '.join(str(error).split())[:200] or type(error).__name__}")
            return otherwise

    def steps(path: Path) -> pd.DataFrame:
        table, odd = _steps(path)
        if odd:
            notes.append(f"steps.jsonl: {odd} lines are no JSON objects and are left out")
        return table

    nothing: tuple[dict[str, Any], np.ndarray | None] = ({}, None)
    config: dict[str, Any] = read("config.json", _json_object, {})
    environment: dict[str, Any] = read("environment.json", _json_object, {})
    metrics = read("metrics.csv", _metrics, _numbers(pd.DataFrame()))
    steps_table = read("steps.jsonl", steps, pd.DataFrame({name: [] for name in _STEP_COLUMNS}, dtype=float))
    evaluation, confusion_CC = read("evaluation.json", _evaluation, nothing)
    mistakes: Mistakes | None = read("mistakes.npz", _mistakes, None)
    kernel_HWIO: np.ndarray | None = read("filters.npz", _kernel, None)
    findings: list[dict[str, str]] | None = read("diagnosis.json", _findings, None)
    return Run(name, folder, config, environment, metrics, steps_table, evaluation, confusion_CC, mistakes,
               kernel_HWIO, findings, tuple(notes))  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# One file each; whatever is wrong with it, they raise
# ---------------------------------------------------------------------------------------------------------------------


def _json_object(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text("utf-8"))
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object")
    return found


def _numbers(table: pd.DataFrame) -> pd.DataFrame:
    """All of `_NUMBERS` as columns of floats; other columns stay."""
    for name in _NUMBERS:
        column = table[name] if name in table.columns else pd.Series(np.nan, index=table.index)
        table[name] = pd.to_numeric(column, errors="coerce").astype(float)
    return table


def _metrics(path: Path) -> pd.DataFrame:
    text = path.read_text("utf-8")
    lines = text.splitlines(keepends=True)
    # The last row of a run that goes on, or was killed, may be half written.
    if len(lines) > 1 and lines[-1].count(",") < lines[0].count(","):
        lines.pop()
    table = _numbers(pd.read_csv(io.StringIO("".join(lines))))
    return table[np.isfinite(table["epoch"])].reset_index(drop=True)


_STEP_COLUMNS = ("step", "loss", "accuracy", "learning_rate")


def _steps(path: Path) -> tuple[pd.DataFrame, int]:
    """The rows, and how many lines are odd; a last line without its end is not."""
    columns: dict[str, list[float]] = {name: [] for name in _STEP_COLUMNS}
    *lines, unfinished = path.read_text("utf-8", errors="replace").split("\n")
    odd = 0
    for line in [*lines, unfinished]:
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            values = [float("nan" if row.get(name) is None else row[name]) for name in _STEP_COLUMNS]
        except (ValueError, TypeError, AttributeError):
            odd += line is not unfinished
            continue
        if np.isfinite(values[0]):
            for name, value in zip(_STEP_COLUMNS, values, strict=True):
                columns[name].append(value)
    return pd.DataFrame(columns, dtype=float), odd


def _evaluation(path: Path) -> tuple[dict[str, Any], np.ndarray | None]:
    found = _json_object(path)
    confusion = found.pop("confusion", None)
    if found.get("classes") is not None:
        found["classes"] = [printable(str(name)) for name in found["classes"]]
    else:
        found.pop("classes", None)
    found["per_class"] = [
        {name: row.get(name) for name in ("class", "images", "accuracy", "precision")}
        for row in found.get("per_class") or []
    ]
    if confusion is None:
        return found, None
    confusion_CC = np.asarray(confusion, float)
    classes = len(found.get("classes", confusion_CC))
    if confusion_CC.shape != (classes, classes) or not classes or not np.isfinite(confusion_CC).all():
        raise ValueError(f"confusion has the shape {confusion_CC.shape}; expected {classes} x {classes} counts")
    found.setdefault("classes", [str(number) for number in range(classes)])
    return found, confusion_CC


def _mistakes(path: Path) -> Mistakes:
    with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
        arrays = [np.asarray(file[name]) for name in ("image", "label", "predicted", "loss", "index")]
    image_KHWC, *others = arrays
    lengths = {len(image_KHWC), *(len(array_K) for array_K in others)}
    if image_KHWC.ndim != 4 or image_KHWC.dtype != np.uint8 or len(lengths) > 1 or {a.ndim for a in others} != {1}:
        raise ValueError(
            f"image is {image_KHWC.dtype} {image_KHWC.shape}; expected uint8 [K,H,W,C] and K of the others"
        )
    return Mistakes(*arrays)


def _kernel(path: Path) -> np.ndarray:
    with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
        kernel_HWIO = np.asarray(file["kernel"], float)
    if kernel_HWIO.ndim != 4 or not kernel_HWIO.size:
        raise ValueError(f"kernel has the shape {kernel_HWIO.shape}; expected [H,W,I,O]")
    return kernel_HWIO


def _findings(path: Path) -> list[dict[str, str]]:
    found = json.loads(path.read_text("utf-8"))
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise ValueError("it is no list of findings")
    texts = [{name: str(one.get(name, "")) for name in ("severity", "check", "seen", "why", "change")} for one in found]
    known = [one | {"severity": one["severity"] if one["severity"] in SEVERITIES else "note"} for one in texts]
    return sorted(known, key=lambda one: SEVERITIES.index(one["severity"]))
