"""Plots of a run's page: SVG that takes the page's colours, and PNG for elsewhere."""

import base64
import colorsys
import dataclasses
import html
import io
import re
import warnings
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.image import imsave
from matplotlib.lines import Line2D
from matplotlib.ticker import LogFormatterSciNotation, MaxNLocator

# Drawn in this colour, and shown in that of the page's text. No other part of a plot has it.
_INK = "#010203"
# Legible on white as on black.
_PALETTE = (
    "#2f80d8",
    "#e0762d",
    "#2f9e57",
    "#d1495b",
    "#8d6cc9",
    "#8a6d4b",
    "#d367b4",
    "#7d858c",
    "#a0a01f",
    "#1fa3b5",
)
_HIT, _MISS = (47, 128, 216), (224, 86, 45)
_STYLE: Any = {
    "text.parse_math": False,  # names are names, also those with dollars
    "svg.fonttype": "none",
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "font.size": 10,
}
MAX_POINTS = 800
MAX_FILTERS, MAX_INPUTS = 64, 8


@dataclasses.dataclass(frozen=True)
class Curve:
    """One line of a plot.

    Attributes:
        run: Number of the run, which decides the colour.
        kind: ``train`` (solid) or ``val`` (dashed).
        x_T: Epochs or steps.
        y_T: Values; those that are no finite number leave a gap.
    """

    run: int
    kind: str
    x_T: np.ndarray
    y_T: np.ndarray

    @property
    def finite(self) -> bool:
        """Whether there is anything to draw."""
        return bool(np.isfinite(self.y_T).any())


def colours(count: int) -> list[str]:
    """One colour a run."""
    if count <= len(_PALETTE):
        return list(_PALETTE[:count])
    return [mpl.colors.to_hex(colorsys.hls_to_rgb(i / count, 0.5, 0.55)) for i in range(count)]


def thinned(x_T: np.ndarray, y_T: np.ndarray, stretches: int = MAX_POINTS // 2) -> tuple[np.ndarray, ...]:
    """A long curve in ``stretches`` of as many points each; values that are no finite number are left out.

    Returns:
        Of each stretch the mean of x, and mean, smallest and largest of y.
    """
    finite_T = np.isfinite(y_T)
    parts = [part for part in np.array_split(np.flatnonzero(finite_T), stretches) if len(part)]
    return (
        np.array([x_T[part].mean() for part in parts]), np.array([y_T[part].mean() for part in parts]),
        np.array([y_T[part].min() for part in parts]), np.array([y_T[part].max() for part in parts]),
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Figures
# ---------------------------------------------------------------------------------------------------------------------


class _PlainLog(LogFormatterSciNotation):
    """Labels where Matplotlib puts them, as plain numbers."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:g}" if super().__call__(x, pos) else ""


def curves(name: str, curves: Sequence[Curve], x_label: str, y_label: str, runs: int, log: bool = False) -> Figure:
    """Lines in the colours of their runs; in SVG each is the group ``NAME-KIND-RUN``.

    Of a curve of more than `MAX_POINTS` the means of its stretches are a line, in a band from smallest to largest. The
    values are on a logarithmic axis with ``log``, where those of 0 or less are not shown.
    """
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(4.6, 3.1), layout="constrained")
        axes = figure.subplots()
        palette = colours(runs)
        for curve in curves:
            x_T, y_T = curve.x_T, curve.y_T
            if len(x_T) > MAX_POINTS:
                x_T, y_T, low_T, high_T = thinned(x_T, y_T)
                axes.fill_between(x_T, low_T, high_T, color=palette[curve.run], alpha=0.3, linewidth=0)
            alone = np.isfinite(y_T).sum() < 25
            (line,) = axes.plot(
                x_T, np.where(y_T > 0, y_T, np.nan) if log else y_T, color=palette[curve.run],
                linestyle="--" if curve.kind == "val" else "-", linewidth=1.4, marker="." if alone else "",
            )  # fmt: skip
            line.set_gid(f"{name}-{curve.kind}-{curve.run}")
        axes.set(xlabel=x_label, ylabel=y_label)
        if log:
            axes.set_yscale("log")
            # Powers are written in mathematical text, which SVG with real text shows as its source.
            axes.yaxis.set_major_formatter(_PlainLog())
            axes.yaxis.set_minor_formatter(_PlainLog(minor_thresholds=(2, 0.5)))
        if x_label == "epoch":
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        axes.grid(alpha=0.25, color="#808080", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def add_legend(figure: Figure, names: Sequence[str], kinds: bool) -> None:
    """Names of the runs, and with ``kinds`` of the two line styles, below a plot."""
    handles = [Line2D([], [], color=colour) for colour in colours(len(names))] if len(names) > 1 else []
    labels = [short(name, 40) for name in names] if handles else []
    if kinds:
        handles += [Line2D([], [], color=_INK, linestyle=style) for style in ("-", "--")]
        labels += ["train", "validation"]
    if handles:
        with mpl.rc_context(_STYLE):
            # Matplotlib leaves out labels that begin with an underscore.
            labels = [f" {label}" if label.startswith("_") else label for label in labels]
            columns = 1 if max(map(len, labels)) > 20 else 2
            rows = -(-len(labels) // columns)
            figure.set_figheight(figure.get_figheight() + 0.2 * rows)
            figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)


def confusion(counts_CC: np.ndarray, classes: Sequence[str]) -> Figure:
    """Shares of each true class that were taken for each other one; up to 15 classes with counts."""
    classes_count = len(classes)
    total_C1 = counts_CC.sum(1, keepdims=True)
    share_CC = np.divide(counts_CC, total_C1, out=np.zeros_like(counts_CC), where=total_C1 > 0)
    hit_CC = np.eye(classes_count, dtype=bool)[..., None]
    # The root lets single mistakes show; the page's own colour shines through where there are none.
    image_CC4 = np.concatenate([np.where(hit_CC, _HIT, _MISS) / 255, 0.9 * np.sqrt(share_CC)[..., None]], -1)
    with mpl.rc_context(_STYLE):
        side = 5.6 if classes_count <= 15 else 7.5
        figure = Figure(figsize=(side, side), layout="constrained")
        axes = figure.subplots()
        axes.imshow(image_CC4, interpolation="nearest")
        shown = np.arange(0, classes_count, -(-classes_count // 50))
        size = 9 if classes_count <= 15 else 6
        names = [short(classes[int(number)], 16) for number in shown]
        axes.set_xticks(shown, names, rotation=90, fontsize=size)
        axes.set_yticks(shown, names, fontsize=size)
        axes.set(xlabel="predicted", ylabel="true")
        if classes_count <= 15:
            for row, column in np.argwhere(counts_CC > 0):
                axes.text(column, row, f"{counts_CC[row, column]:g}", ha="center", va="center", fontsize=8)
    return figure


def pictures(images: Sequence[np.ndarray], captions: Sequence[str]) -> Figure:
    """Small pictures in rows of six."""
    rows = -(-len(images) // 6)
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(9, 1.9 * rows + 0.1), layout="constrained")
        for place, (image, caption) in enumerate(zip(images, captions, strict=True), start=1):
            axes = figure.add_subplot(rows, 6, place)
            axes.imshow(image, interpolation="nearest")
            axes.set_title(caption, fontsize=7)
            axes.set_axis_off()
    return figure


def short(text: str, length: int) -> str:
    """The text, cut off where it is longer."""
    return text if len(text) <= length else text[: length - 1] + "…"


# ---------------------------------------------------------------------------------------------------------------------
# Pictures
# ---------------------------------------------------------------------------------------------------------------------


def picture(image_HWC: np.ndarray, limit: int = 64) -> np.ndarray:
    """A sample as uint8 RGB; sides above ``limit`` shrink by averaging blocks, other than 1 or 3 channels to grey."""
    height, width, channels = image_HWC.shape
    factor = max(1, -(-max(height, width) // limit))
    if factor > 1 and min(height, width) >= factor:
        kept = image_HWC[: height // factor * factor, : width // factor * factor].astype(float)
        image_HWC = kept.reshape(height // factor, factor, width // factor, factor, channels).mean((1, 3))
    if channels != 3:
        image_HWC = np.repeat(image_HWC.mean(-1, keepdims=True), 3, -1)
    return np.round(image_HWC).astype(np.uint8)


def filter_tiles(kernel_HWIO: np.ndarray, outputs: int = MAX_FILTERS, inputs: int = MAX_INPUTS) -> np.ndarray:
    """The filters of a convolution side by side, as uint8 RGBA; zero is mid-grey, what lies between is transparent.

    Filters of three input channels are in colour, 16 in a row. Others are grey, a column for each output channel and a
    row for each input channel, or 16 in a row where there is one.
    """
    kernel_HWIO = kernel_HWIO[..., :inputs, :outputs] if kernel_HWIO.shape[2] != 3 else kernel_HWIO[..., :outputs]
    height, width, channels, count = kernel_HWIO.shape
    finite = np.abs(kernel_HWIO[np.isfinite(kernel_HWIO)])
    scale = float(finite.max(initial=0)) or 1.0
    grey_HWIO = np.nan_to_num(127.5 + 127.5 * kernel_HWIO / scale, nan=127.5, posinf=255, neginf=0)
    if channels == 3:
        tiles = [grey_HWIO[..., o] for o in range(count)]
    else:
        tiles = [np.repeat(grey_HWIO[..., i, o, None], 3, -1) for i in range(channels) for o in range(count)]
    columns = min(count, 16) if channels in (1, 3) else count
    rows = -(-len(tiles) // columns)
    mosaic = np.zeros((rows * (height + 1) - 1, columns * (width + 1) - 1, 4), np.uint8)
    for place, tile in enumerate(tiles):
        top, left = place // columns * (height + 1), place % columns * (width + 1)
        mosaic[top : top + height, left : left + width] = np.dstack([np.round(tile), np.full((height, width), 255)])
    return mosaic


def magnified(image: np.ndarray, factor: int) -> np.ndarray:
    """Every pixel as a square of ``factor`` pixels."""
    return image.repeat(factor, 0).repeat(factor, 1)


def image_png(image: np.ndarray) -> bytes:
    """A picture as a file, pixel by pixel."""
    out = io.BytesIO()
    imsave(out, image, format="png", metadata={"Software": ""})
    return out.getvalue()


def img(image: np.ndarray, about: str) -> str:
    """A picture as HTML."""
    code = base64.b64encode(image_png(image)).decode()
    return f'<img alt="{html.escape(about)}" src="data:image/png;base64,{code}">'


# ---------------------------------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------------------------------


def _saved(figure: Figure, kind: str, options: dict[str, Any]) -> bytes:
    out = io.BytesIO()
    with warnings.catch_warnings(), mpl.rc_context(_STYLE | {"svg.hashsalt": "cnnjax"}):
        # A browser has other fonts.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(out, format=kind, **options)
    return out.getvalue()


def png(figure: Figure) -> bytes:
    """The figure as a file, dark on white."""
    return _saved(figure, "png", {"dpi": 150, "metadata": {"Software": None}})


def svg(figure: Figure, name: str, about: str) -> str:
    """The figure as part of a page, without a background, in the colour of the page's text.

    Args:
        figure: What to show.
        name: Unlike that of any other on the page.
        about: What a screen reader says.
    """
    unsaid = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    text = _saved(figure, "svg", {"transparent": True, "dpi": 200, "metadata": unsaid}).decode()
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    head, body = re.sub(r"<!--.*?-->|font-family: [^;]*; ", "", text, flags=re.DOTALL).split(">", 1)
    box = re.search(r'viewBox="[^"]*"', head)
    # Matplotlib counts its groups anew in every figure, and an id may be only once on a page.
    body = re.sub(r'<g id="[a-z]+[0-9a-z]*(\.[a-z]+)?_\d+">', "<g>", body)
    body = re.sub(r'(?<=id=")(?=[mpCh][0-9a-f]+[_"])|(?<=href="#)|(?<=url\(#)', f"{name}-", body)
    return f'<svg role="img" aria-label="{html.escape(about)}" {box[0] if box else ""}>{body}'
