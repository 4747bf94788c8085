"""The page of one or several run directories: what was trained, how it went, and what it got wrong."""

import dataclasses
import html
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from cnnjax.report import Section, html_table, page, plots
from cnnjax.report.plots import Curve
from cnnjax.report.rundirs import Run, printable

MOST_MISTAKES = 36
_LOG_SPAN = 50  # a curve that falls further is drawn on a logarithmic axis


@dataclasses.dataclass
class Page:
    """A page that is being made, and its plots as files by name."""

    runs: Sequence[Run]
    sections: list[Section] = dataclasses.field(default_factory=list)
    files: dict[str, bytes] = dataclasses.field(default_factory=dict)

    def file(self, what: str, number: int | None = None) -> str:
        """Name of a plot's file; numbered by run where there are several."""
        return f"report_{what}.png" if number is None or len(self.runs) == 1 else f"report_{what}_{number + 1}.png"

    def by_run(self, title: str, part: Callable[[int, Run], str], text: str = "") -> None:
        """A section of what each run has of its own; none where no run has anything."""
        found = [(run.name, part(number, run)) for number, run in enumerate(self.runs)]
        heading = "<h3>{}</h3>" if len(self.runs) > 1 else ""
        markup = "".join(heading.format(html.escape(name)) + one for name, one in found if one)
        if markup:
            self.sections.append(Section(title, text, markup=markup))


def runs_page(runs: Sequence[Run]) -> tuple[str, dict[str, bytes]]:
    """The page as HTML, and its plots as PNG files by name."""
    made = Page(runs)
    made.sections.append(Section("Summary", markup=_facts_table(runs, _summary)))
    _add_findings(made)
    _add_curves(made)
    made.by_run("Evaluation", lambda number, run: _evaluation(made, number, run))
    text = "The samples with the largest loss, the worst first. The index counts the samples of the set from 0."
    made.by_run("Worst mistakes", lambda number, run: _mistakes(made, number, run), text)
    made.by_run("Filters of the first layer", lambda number, run: _filters(made, number, run))
    _add_options(made)
    if any(run.environment for run in runs):
        made.sections.append(Section("Environment", markup=_facts_table(runs, _environment)))
    made.by_run("Reproduce", lambda number, run: _command(run))
    made.by_run("Not shown", lambda number, run: _bullets(run.notes))
    title = f"Run {runs[0].name}" if len(runs) == 1 else f"{len(runs)} runs"
    return page(title, made.sections), made.files


# ---------------------------------------------------------------------------------------------------------------------
# Words and tables
# ---------------------------------------------------------------------------------------------------------------------


def shown(value: Any) -> str:
    """A value as text: numbers to four digits, nothing for what is not there, JSON for lists and objects."""
    if value is None or (isinstance(value, float) and np.isnan(value)):
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return printable(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _facts_table(runs: Sequence[Run], facts: Callable[[Run], Mapping[str, Any]]) -> str:
    """A row a fact, a column a run; facts that no run has are left out."""
    columns = [{name: shown(value) for name, value in facts(run).items()} for run in runs]
    names = dict.fromkeys(name for column in columns for name, value in column.items() if value)
    table = pd.DataFrame([[column.get(name, "") for column in columns] for name in names],
                         index=list(names), columns=[run.name for run in runs])  # fmt: skip
    return html_table(table, "facts")


def _bullets(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{html.escape(printable(line))}</li>" for line in lines) + "</ul>" if lines else ""


def _summary(run: Run) -> dict[str, Any]:
    table = run.metrics
    facts: dict[str, Any] = {name: run.config.get(name) for name in ("network", "mesh", "strategy", "dtype", "seed")}
    if not len(table):
        return facts | {"epochs": 0}
    last = table.iloc[-1]
    facts |= {name: last[name] for name in ("dataset", "backend") if name in table.columns}
    asked = run.config.get("epochs")
    facts["epochs"] = f"{last['epoch']:.0f}" + (f" of {shown(asked)}" if asked is not None else "")
    facts["steps"] = f"{last['step']:.0f}"
    for name in ("loss", "val_loss", "accuracy", "val_accuracy", "top5_accuracy", "val_top5_accuracy", "mae", "val_mae",
                 "r2", "val_r2"):  # fmt: skip
        facts[name] = float(last[name])
    for name, best in (("val_accuracy", table["val_accuracy"].max()), ("val_r2", table["val_r2"].max())):
        if np.isfinite(best):
            epoch = table["epoch"].iloc[int(table[name].argmax())]
            facts[f"best {name}"] = f"{best:.4g} in epoch {epoch:.0f}"
    facts["images/s"] = float(table["images_per_s"].median())
    facts["training s"], facts["compilation s"] = float(table["train_s"].sum()), float(table["compile_s"].sum())
    return facts


def _add_findings(made: Page) -> None:
    if all(run.findings is None for run in made.runs):
        return

    def cards(_: int, run: Run) -> str:
        if run.findings is None:
            return '<p class="muted">no diagnosis.json</p>'
        return "".join(_finding(one) for one in run.findings) or '<p class="muted">Nothing was found.</p>'

    made.by_run("Diagnosis", cards)


def _finding(one: Mapping[str, str]) -> str:
    rows = [("seen", one["seen"]), ("why", one["why"]), ("change", one["change"])]
    body = "".join(f"<dt>{name}</dt><dd>{html.escape(printable(text))}</dd>" for name, text in rows if text)
    title = html.escape(printable(f"{one['severity']}: {one['check']}"))
    return f'<div class="finding {one["severity"]}"><h3>{title}</h3><dl>{body}</dl></div>'


def _add_options(made: Page) -> None:
    names = dict.fromkeys(name for run in made.runs for name in run.config)
    values = {name: {shown(run.config.get(name)) for run in made.runs} for name in names}
    different = [name for name in names if len(values[name]) > 1]
    parts = []
    if len(made.runs) > 1:
        if different:
            parts.append(_facts_table(made.runs, lambda run: {name: run.config.get(name) for name in different}))
        text = "These differ between the runs." if different else "All runs have the same options."
        parts.insert(0, f"<p>{text}</p>")
    if names:
        every = _facts_table(made.runs, lambda run: run.config)
        parts.append(f"<details><summary>All options</summary>{every}</details>")
    made.sections.append(Section("Options", markup="".join(parts)))


def _environment(run: Run) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for name, value in run.environment.items():
        if isinstance(value, dict):
            facts |= {f"{name}: {key}": one for key, one in value.items()}
        elif name != "command":
            facts[name] = ", ".join(map(shown, value)) if isinstance(value, list) else value
    return facts


def _command(run: Run) -> str:
    command = run.environment.get("command")
    if not isinstance(command, list) or not command:
        return ""
    text = f"<pre>{html.escape(printable(shlex.join(map(str, command))))}</pre>"
    commit = run.environment.get("git_commit")
    where = f" at the commit {shown(commit)}" if commit else ""
    note = f"As it was called{where}. A run directory that is there is not overwritten: give it another --run-dir."
    return text + f'<p class="muted">{html.escape(note)}</p>'


# ---------------------------------------------------------------------------------------------------------------------
# Curves
# ---------------------------------------------------------------------------------------------------------------------

# Name of the plot, heading, and the columns of training and validation.
_BY_EPOCH = (
    ("loss", "Loss", "loss", "val_loss"),
    ("accuracy", "Accuracy", "accuracy", "val_accuracy"),
    ("top5_accuracy", "Top-5 accuracy", "top5_accuracy", "val_top5_accuracy"),
    ("mae", "Mean absolute error", "mae", "val_mae"),
    ("r2", "R²", "r2", "val_r2"),
)


def _add_curves(made: Page) -> None:
    cards = []
    for name, title, train, val in _BY_EPOCH:
        found = [
            Curve(number, kind, run.metrics["epoch"].to_numpy(), run.metrics[column].to_numpy())
            for number, run in enumerate(made.runs)
            for kind, column in (("train", train), ("val", val))
        ]
        cards.append(_curves_card(made, name, f"{title} by epoch", found, "epoch", name.replace("_", " ")))
    for name, title in (("loss", "Loss"), ("accuracy", "Accuracy"), ("learning_rate", "Learning rate")):
        found = [
            Curve(number, "train", run.steps["step"].to_numpy(), run.steps[name].to_numpy())
            for number, run in enumerate(made.runs)
        ]
        if name == "learning_rate" and not any(curve.finite for curve in found):
            found = [
                Curve(number, "train", run.metrics["step"].to_numpy(), run.metrics[name].to_numpy())
                for number, run in enumerate(made.runs)
            ]
        file = name if name == "learning_rate" else f"{name}_by_step"
        cards.append(_curves_card(made, file, f"{title} by step", found, "step", name.replace("_", " ")))
    found = [
        Curve(number, "train", run.metrics["epoch"].to_numpy(), run.metrics["images_per_s"].to_numpy())
        for number, run in enumerate(made.runs)
    ]
    cards.append(_curves_card(made, "throughput", "Throughput by epoch", found, "epoch", "images/s"))
    if any(cards):
        key = [
            f'<li><span style="color:{colour}"></span>{html.escape(run.name)}</li>'
            for run, colour in zip(made.runs, plots.colours(len(made.runs)), strict=True)
            if len(made.runs) > 1
        ]
        key += ["<li><span></span>training</li>", '<li><span class="val"></span>validation</li>']
        markup = f'<ul class="key">{"".join(key)}</ul><div class="plots">{"".join(cards)}</div>'
        made.sections.append(Section("Curves", markup=markup))


def _curves_card(made: Page, name: str, title: str, found: Sequence[Curve], x_label: str, y_label: str) -> str:
    found = [curve for curve in found if curve.finite]
    if not found:
        return ""
    y_T = np.concatenate([curve.y_T[np.isfinite(curve.y_T)] for curve in found])
    log = name.startswith("loss") and y_T.min() >= 0 and y_T.max() > _LOG_SPAN * max(np.quantile(y_T, 0.05), 1e-300)
    figure = plots.curves(name, found, x_label, y_label + " (log)" * bool(log), len(made.runs), bool(log))
    notes = []
    longest = max(len(curve.y_T) for curve in found)
    if longest > plots.MAX_POINTS:
        notes.append(
            f"Thinned from up to {longest:,} points: the line is the mean of each stretch, the band goes from its "
            "smallest value to its largest."
        )
    if odd := sum(int((~np.isfinite(curve.y_T)).sum()) for curve in found if name.startswith("loss")):
        notes.append(f"{odd:,} values are missing or no finite number, and are not shown.")
    kinds = len({curve.kind for curve in found}) > 1
    card = _figure(figure, name, title, " ".join(notes))
    plots.add_legend(figure, [run.name for run in made.runs], kinds)
    made.files[made.file(name)] = plots.png(figure)
    return card


def _figure(figure: Figure, name: str, title: str, note: str = "", kind: str = "plot") -> str:
    """A plot with its heading and a note."""
    picture = plots.svg(figure, name, title)
    caption = f"<figcaption>{html.escape(note)}</figcaption>" if note else ""
    return f'<figure><h3>{html.escape(title)}</h3><div class="{kind}">{picture}</div>{caption}</figure>'


# ---------------------------------------------------------------------------------------------------------------------
# Samples and filters
# ---------------------------------------------------------------------------------------------------------------------


def _evaluation(made: Page, number: int, run: Run) -> str:
    if not run.evaluation:
        return ""
    found = run.evaluation
    names = {"images": "images", "loss": "loss", "accuracy": "accuracy", "top5_accuracy": "top-5 accuracy",
             "mae": "mean absolute error", "rmse": "root of the mean squared error", "r2": "R²"}  # fmt: skip
    facts = [f"{label} {shown(found[name])}" for name, label in names.items() if found.get(name) is not None]
    text = f"On the {shown(found.get('data')) or 'evaluated'} set: {', '.join(facts)}."
    parts = [f"<p>{html.escape(text)}</p>"]
    if run.confusion_CC is not None:
        figure = plots.confusion(run.confusion_CC, run.classes)
        note = "Rows are true classes; blue was right, red was taken for another; the stronger, the more of its row."
        parts.append(_figure(figure, f"confusion-{number}", "Confusion matrix", note, "square"))
        made.files[made.file("confusion", number)] = plots.png(figure)
        parts.append(_confused(run.confusion_CC, run.classes))
    if found["per_class"]:
        table = pd.DataFrame(found["per_class"])
        table["accuracy"] = pd.to_numeric(table["accuracy"], errors="coerce")
        table = table.sort_values("accuracy", kind="stable").map(shown).set_index("class")
        parts.append(f"<h3>Classes, the worst first</h3>{html_table(table)}")
    return "".join(parts)


def _confused(counts_CC: np.ndarray, classes: Sequence[str], most: int = 10) -> str:
    """The classes that are most often taken for another."""
    wrong_CC = counts_CC * (1 - np.eye(len(counts_CC)))
    rows, columns = np.unravel_index(np.argsort(-wrong_CC, axis=None, kind="stable")[:most], wrong_CC.shape)
    pairs = [
        {"true": classes[row], "predicted": classes[column], "images": f"{wrong_CC[row, column]:g}",
         "share of the true class": shown(float(wrong_CC[row, column] / counts_CC[row].sum()))}
        for row, column in zip(rows, columns, strict=True) if wrong_CC[row, column] > 0
    ]  # fmt: skip
    if not pairs:
        return ""
    return f"<h3>Most often confused</h3>{html_table(pd.DataFrame(pairs).set_index('true'))}"


def _mistakes(made: Page, number: int, run: Run) -> str:
    found = run.mistakes
    if found is None or not len(found.label_K):
        return ""
    most = MOST_MISTAKES if len(made.runs) == 1 else MOST_MISTAKES // 3

    def named(value: Any) -> str:
        if float(value).is_integer() and 0 <= value < len(run.classes):
            return run.classes[int(value)]
        return f"{value:.4g}"

    images, captions, parts = [], [], []
    columns = (found.image_KHWC, found.label_K, found.predicted_K, found.loss_K, found.index_K)
    for image_HWC, label, predicted, loss, index in zip(*(column[:most] for column in columns), strict=True):
        images.append(plots.picture(image_HWC))
        lines = [f"true {named(label)}", f"predicted {named(predicted)}", f"loss {loss:.4g}, index {index:g}"]
        captions.append("\n".join(plots.short(line, 22) for line in lines))
        caption = "<br>".join(map(html.escape, lines))
        parts.append(f"<figure>{plots.img(images[-1], lines[0])}<figcaption>{caption}</figcaption></figure>")
    made.files[made.file("mistakes", number)] = plots.png(plots.pictures(images, captions))
    return f'<div class="mistakes">{"".join(parts)}</div>'


def _filters(made: Page, number: int, run: Run) -> str:
    if run.kernel_HWIO is None:
        return ""
    height, width, channels, outputs = run.kernel_HWIO.shape
    tiles = plots.filter_tiles(run.kernel_HWIO)
    factor = max(2, min(12, 800 // tiles.shape[1]))
    made.files[made.file("filters", number)] = plots.image_png(plots.magnified(tiles, factor))
    finite = np.abs(run.kernel_HWIO[np.isfinite(run.kernel_HWIO)])
    colour = "in colour" if channels == 3 else "in grey" + (", a row for each input" if channels > 1 else "")
    inputs = f"{channels} input channel" + "s" * (channels > 1)
    text = (f"{outputs} filters of {height} x {width}, {inputs}, {colour}. Zero is mid-grey; black and white are "
            f"-{finite.max(initial=0):.3g} and {finite.max(initial=0):.3g}.")  # fmt: skip
    left_out = [f"{plots.MAX_FILTERS} filters"] * (outputs > plots.MAX_FILTERS)
    left_out += [f"{plots.MAX_INPUTS} inputs"] * (channels > plots.MAX_INPUTS)
    text += f" The first {' and '.join(left_out)} are shown." if left_out else ""
    picture = plots.img(tiles, f"{outputs} filters").replace(
        "<img", f'<img width="{tiles.shape[1] * factor}" height="{tiles.shape[0] * factor}"'
    )
    return f'<p>{html.escape(text)}</p><div class="filters">{picture}</div>'
