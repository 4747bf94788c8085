"""From the files of results to tables, plots and one HTML page. Knows files alone, and imports no JAX."""

import base64
import csv
import dataclasses
import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

# Names of Keras's CSVLogger, of any version, that mean the same.
_CURVES = {
    f"{part}{name}": f"{part}accuracy"
    for part in ("", "val_")
    for name in ("acc", "categorical_accuracy", "sparse_categorical_accuracy", "binary_accuracy")
}
_CURVE_NAMES = ("loss", "accuracy", "val_loss", "val_accuracy")

# ---------------------------------------------------------------------------------------------------------------------
# Results that are there already
# ---------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Curves:
    """Losses and accuracies by epoch: columns ``epoch``, from 1, and those of `_CURVE_NAMES` that are there."""

    name: str
    table: pd.DataFrame


@dataclasses.dataclass(frozen=True)
class Predictions:
    """Predicted classes by image number, as text."""

    name: str
    labels: pd.Series


def read_results(path: Path) -> Curves | Predictions:
    """Reads curves (``metrics.csv``, Keras's CSVLogger of any version) or predictions (``ImageId,Label``).

    Raises:
        ValueError: If the file is neither; names what it has and what is expected.
    """
    table = _read_table(path, "--csv")
    for old, new in _CURVES.items():
        if old in table.columns and new not in table.columns:
            table = table.rename(columns={old: new})
    columns = {name.strip().lower(): name for name in table.columns}
    if {"imageid", "label"} <= columns.keys():
        given = pd.Series(table[columns["label"]].to_numpy(), index=table[columns["imageid"]])
        return Predictions(path.stem, _labels(given, f"--csv {path}"))
    found = [name for name in _CURVE_NAMES if name in table.columns]
    if not found or not len(table):
        raise ValueError(
            f"--csv {path}: {len(table)} rows of {', '.join(table.columns)}; expected ImageId and Label, or "
            f"some of {', '.join((*_CURVE_NAMES, *_CURVES))}"
        )
    curves = pd.DataFrame({name: _numbers(table[name], path) for name in found})
    epochs = _numbers(table["epoch"], path) if "epoch" in table.columns else pd.Series(table.index)
    if (again := epochs[epochs.duplicated()]).size:
        row = again.index[0]
        raise ValueError(
            f"--csv {path}: epoch {again.iloc[0]:g} comes again in row {row + 2}; a file holds the epochs of one run"
        )
    epochs = epochs - epochs.min() + 1  # CSVLogger counts from 0, metrics.csv from 1
    return Curves(path.stem, pd.concat([epochs.rename("epoch"), curves], axis=1))


def _read_table(path: Path, flag: str) -> pd.DataFrame:
    """The cells of a CSV file as text.

    Raises:
        ValueError: If it cannot be read, or a row has more or fewer cells than the header; names the flag and the row.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        table = pd.read_csv(io.StringIO(text), skipinitialspace=True, dtype=str, keep_default_na=False)
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
        raise ValueError(f"{flag} {path}: it cannot be read as CSV: {' '.join(str(error).split())}") from None
    except OSError as error:
        raise ValueError(f"{flag} {path}: {error.strerror}") from None
    # pandas takes surplus cells for names of rows or drops them, and fills up what is lacking.
    for number, row in enumerate(csv.reader(io.StringIO(text), skipinitialspace=True), start=1):
        if row and len(row) != len(table.columns):
            raise ValueError(f"{flag} {path}: row {number} has {len(row)} cells; the header has {len(table.columns)}")
    return table


def _numbers(column: pd.Series, path: Path) -> pd.Series:
    """A column of numbers, where a cell may be empty or NaN."""
    numbers = pd.to_numeric(column, errors="coerce")
    wrong = numbers.isna() & ~column.str.strip().str.lower().isin(["", "nan", "na", "none"])
    if wrong.any():
        row = int(wrong.argmax())
        raise ValueError(f"--csv {path}: row {row + 2}, column {column.name}: {column.iloc[row]!r} is no number")
    return numbers


def _labels(given: pd.Series, source: str) -> pd.Series:
    """Labels by image number, as the same text however they were written."""
    numbers = pd.to_numeric(given.index.to_series(), errors="coerce")
    labels = given.str.strip().str.removesuffix(".0")  # a column with a gap somewhere is written as 3.0, not 3
    ids = given.index.to_series() if numbers.isna().any() else numbers  # files have names
    if not len(given) or ids.duplicated().any() or (ids == "").any() or (labels == "").any():
        raise ValueError(f"{source}: ImageId and Label must be there once for every image")
    as_numbers = pd.to_numeric(labels, errors="coerce")
    if (as_numbers % 1 == 0).all():  # 03 is 3
        labels = as_numbers.astype("int64").astype(str)
    return pd.Series(labels.to_numpy(), index=ids.to_numpy())


def read_truth(path: Path) -> pd.Series:
    """True labels by image number from 1: ``ImageId,Label``, or the first column named label, class or target.

    Raises:
        ValueError: If there is no such column, or a label is missing or there twice.
    """
    table = _read_table(path, "--truth")
    columns = {name.strip().lower(): name for name in table.columns}
    name = next((columns[name] for name in ("label", "labels", "class", "target", "y") if name in columns), None)
    if name is None:
        raise ValueError(f"--truth {path}: its columns are {', '.join(table.columns[:8])}; expected one named label")
    index = table[columns["imageid"]] if "imageid" in columns else np.arange(1, len(table) + 1)
    return _labels(pd.Series(table[name].to_numpy(), index=index), f"--truth {path}")


def agreement(predictions: Mapping[str, pd.Series], truth: pd.Series | None = None) -> pd.DataFrame:
    """Share of images on which any two agree; with the truth, a column ``accuracy``. Only images that both have count.

    Raises:
        ValueError: If two have no image in common.
    """

    def share(one: pd.Series, other: pd.Series, names: tuple[str, str]) -> float:
        both = one.index.intersection(other.index)
        if not len(both):
            raise ValueError(f"{names[0]} and {names[1]} have no image in common")
        return float((one.loc[both] == other.loc[both]).mean())

    rows = {
        name: {other: share(labels, predictions[other], (name, other)) for other in predictions}
        | ({} if truth is None else {"accuracy": share(labels, truth, (name, "the truth"))})
        for name, labels in predictions.items()
    }
    return pd.DataFrame.from_dict(rows, orient="index")


def curve_summary(curves: Sequence[Curves]) -> pd.DataFrame:
    """One row a file: epochs, last and best values."""
    rows = {}
    for one in curves:
        row: dict[str, float] = {"epochs": len(one.table)}
        for name in _CURVE_NAMES:
            if name in one.table:
                row[name] = one.table[name].iloc[-1]
        for name in ("val_accuracy", "accuracy"):
            if name in one.table:
                best = one.table[name].max()
                row[f"best_{name}"] = best
                break
        rows[one.name] = row
    return pd.DataFrame.from_dict(rows, orient="index")


# ---------------------------------------------------------------------------------------------------------------------
# Plots
# ---------------------------------------------------------------------------------------------------------------------


def lines_plot(
    lines: Mapping[str, tuple[np.ndarray, np.ndarray]], x_label: str, y_label: str, log: bool = False
) -> Figure:
    """One line a name. On a log axis zeros are not shown."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, (x, y) in lines.items():
        y = np.asarray(y, float)
        axes.plot(
            x, np.where(y > 0, y, np.nan) if log else y, label=name, linewidth=1.2, marker="." if len(x) < 30 else ""
        )
    axes.set(xlabel=x_label, ylabel=y_label)
    if log and any((np.asarray(y, float) > 0).any() for _, y in lines.values()):
        axes.set_yscale("log")
    axes.grid(alpha=0.3)
    if lines:
        axes.legend(fontsize="small", ncols=2)
    return figure


def bars_plot(values: Mapping[str, float], label: str) -> Figure:
    """One horizontal bar a name, with its number."""
    figure = Figure(figsize=(8, 0.6 + 0.35 * max(len(values), 2)), layout="constrained")
    axes = figure.subplots()
    names = list(values)[::-1]
    axes.bar_label(axes.barh(names, [values[name] for name in names]), fmt="%.0f", padding=3)
    axes.set_xlabel(label)
    axes.margins(x=0.12)
    return figure


# ---------------------------------------------------------------------------------------------------------------------
# Text and page
# ---------------------------------------------------------------------------------------------------------------------


def text_table(table: pd.DataFrame) -> str:
    """Columns for a terminal."""
    return table.to_string(float_format=lambda value: f"{value:.4g}", na_rep="-")


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of a page.

    Attributes:
        title: Heading.
        text: A sentence or more, plain text.
        table: Shown below it, if any.
        figure: Likewise.
        markup: HTML shown last, as it is: whoever makes it escapes what is in it.
    """

    title: str
    text: str = ""
    table: pd.DataFrame | None = None
    figure: Figure | None = None
    markup: str = ""


_STYLE = """
:root { color-scheme: light dark; --ink: #1c2127; --muted: #5a646e; --paper: #fff; --card: #f3f5f7; --line: #d8dde2;
  --error: #c2293f; --warning: #a86200; --note: #1d6fc0 }
@media (prefers-color-scheme: dark) { :root { --ink: #e2e6ea; --muted: #9aa4ae; --paper: #15181c; --card: #1f242a;
  --line: #353c44; --error: #ff7486; --warning: #f0ab4b; --note: #6fb2ff } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 1.5rem auto; padding: 0 1rem;
  color: var(--ink); background: var(--paper) }
h1, h2, h3, p, dd, figcaption { overflow-wrap: anywhere } h2 { margin-top: 2.2rem } h3 { margin: 1.2rem 0 .3rem }
p { white-space: pre-wrap; margin: .4rem 0 } img { max-width: 100% }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--card); padding: .6rem .8rem }
.scroll { overflow: auto; margin: .5rem 0 } .long { max-height: 32rem }
.facts td, .facts thead th + th { text-align: left; white-space: normal; overflow-wrap: anywhere; min-width: 8rem }
table { border-collapse: separate; border-spacing: 0; font-size: 13px }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap }
thead th { position: sticky; top: 0; background: var(--paper) } th:first-child { text-align: left }
tbody th { position: sticky; left: 0; background: var(--paper); max-width: 40vw; overflow: hidden;
  text-overflow: ellipsis }
tbody th { font-weight: normal; color: var(--muted) }
svg { width: 100%; height: auto; display: block; font-family: system-ui, sans-serif } figure { margin: 0 }
figcaption, .muted { color: var(--muted); font-size: 13px }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1.2rem }
.plots h3 { margin-top: 0 } .square { max-width: 44rem; overflow-x: auto } .square svg { min-width: 32rem }
.mistakes { display: grid; grid-template-columns: repeat(auto-fill, minmax(8.5rem, 1fr)); gap: .8rem }
.mistakes img, .filters img { image-rendering: pixelated; display: block } .mistakes img { height: 6rem }
.filters { overflow-x: auto } .filters img { max-width: none }
.key { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; padding: 0; list-style: none; overflow-wrap: anywhere }
.key span { display: inline-block; width: 1.6rem; border-top: 3px solid; vertical-align: middle; margin-right: .4rem }
.key .val { border-top-style: dashed }
.finding { border-left: 4px solid var(--line); background: var(--card); padding: .5rem .8rem; margin: .6rem 0 }
.finding h3 { margin: 0 } .finding dl { margin: 0; display: grid; grid-template-columns: auto 1fr; gap: 0 .8rem }
.finding dt { color: var(--muted) } .finding dd { margin: 0 }
.error { border-color: var(--error) } .warning { border-color: var(--warning) } .note { border-color: var(--note) }
.error h3 { color: var(--error) } .warning h3 { color: var(--warning) } .note h3 { color: var(--note) }
"""


def html_table(table: pd.DataFrame, kind: str = "long") -> str:
    """A table that scrolls inside itself where the page is too narrow.

    Args:
        table: What to show; the name of the index heads its column.
        kind: ``long``, which scrolls also where it is too long, or ``facts``, whose texts are broken into lines.
    """
    # One line of heads instead of two.
    table = table.rename_axis(index=None, columns=table.index.name)  # type: ignore[call-overload]
    with pd.option_context("display.max_colwidth", None):
        text = table.to_html(float_format=lambda value: f"{value:.4g}", na_rep="", border=0)
    return f'<div class="scroll {kind}" tabindex="0">{text}</div>'


def page(title: str, sections: Sequence[Section]) -> str:
    """One HTML page that needs no other file, light or dark as the reader's system is."""
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body><h1>{html.escape(title)}</h1>",
    ]
    for section in sections:
        parts.append(f"<h2>{html.escape(section.title)}</h2>")
        if section.text:
            parts.append(f"<p>{html.escape(section.text)}</p>")
        if section.table is not None:
            parts.append(html_table(section.table))
        if section.figure is not None:
            code = base64.b64encode(png(section.figure)).decode()
            parts.append(f'<img alt="{html.escape(section.title)}" src="data:image/png;base64,{code}">')
        if section.markup:
            parts.append(section.markup)
    return "\n".join([*parts, "</body></html>", ""])


def png(figure: Figure) -> bytes:
    """The figure as a file."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110, metadata={"Software": None})
    return out.getvalue()
