"""Which column of a CSV file is the label, and which image the others make: by flags, by names, by evidence."""

import dataclasses
import re
from collections.abc import Sequence

import numpy as np

from cnnjax.datasets.base import ReadOptions, Shape, shape_text
from cnnjax.datasets.csv_form import LABEL_NAMES, Form
from cnnjax.datasets.labels import number
from cnnjax.datasets.pixels import Extent, ask_for_shape, shape_size, square_shape

PLACES = ("first", "last", "none")


@dataclasses.dataclass(frozen=True)
class Columns:
    """What the columns of a file are.

    Attributes:
        shape: Height, width and channels of the images.
        labels: Columns that may hold the label: none, one, or the first and the last, of which the values decide.
        why: How that is known, in words.
    """

    shape: Shape
    labels: tuple[int, ...]
    why: str


def find_columns(form: Form, options: ReadOptions) -> Columns:
    """What the columns are, as far as flags, names and their number tell.

    Raises:
        ValueError: If they do not tell it, or contradict each other; with what to say on the command line.
    """
    inner = [index for index in range(form.columns) if index not in form.id_columns]
    count = len(inner)
    label, why = _named(form, options.label_column, inner)
    shape = options.image_shape
    if label == "none" or (label is None and shape is not None and shape_size(shape) == count):
        return Columns(_shape(form, count, shape), (), why or "no column is left for a label")
    if label is not None:
        return Columns(_shape(form, count - 1, shape, int(label)), (int(label),), why)
    ends = (inner[0], inner[-1])
    if shape is not None:
        return Columns(_shape(form, count - 1, shape), ends, "")
    without, beside = square_shape(count), square_shape(count - 1)
    if form.names and without and _alike([form.names[index] for index in inner]) == count:
        return Columns(without, (), "all column names are alike")
    if without and beside:
        raise ValueError(
            f"{form.path}: {count} columns are {shape_text(without)} without a label, or {shape_text(beside)} with "
            f"one; expected --image-shape {shape_text(without)} or {shape_text(beside)}"
        )
    if without:
        return Columns(without, (), f"{count} columns are just an image")
    if beside:
        return Columns(beside, ends, "")
    raise ValueError(
        f"{form.path}: has {count} columns{_texts(form, inner)}; with a label, {ask_for_shape(count - 1)}; without, "
        f"{ask_for_shape(count)}"
    )


def same_columns(form: Form, train: Form, shape: Shape, label: int) -> Columns:
    """What the columns of another part of the data set are, which is written as its training set.

    Args:
        form: The other file.
        train: The training set's file.
        shape: The shape of its images.
        label: Its label column.

    Returns:
        The columns, with a label or without one.

    Raises:
        ValueError: If the images are of another size, or the pixels in another order.
    """
    inner = [index for index in range(form.columns) if index not in form.id_columns]
    pixels = shape_size(shape)
    if len(inner) not in (pixels, pixels + 1):
        raise ValueError(
            f"{form.path}: has {len(inner)} columns; expected {pixels + 1}, or {pixels} without labels, as "
            f"{train.path.name} has images of {shape_text(shape)}"
        )
    labels: tuple[int, ...] = ()
    if len(inner) > pixels:
        from_end = train.columns - label
        labels = (inner[-from_end] if from_end < label else inner[label - len(train.id_columns)],)
        if form.names and train.names:
            matching = [index for index in inner if form.names[index] == train.names[label]]
            if len(matching) != 1:
                named = f"{len(matching)} columns {train.names[label]}"
                raise ValueError(f"{form.path}: has {named}; expected one, as in {train.path.name}")
            labels = (matching[0],)
    if form.names and train.names:
        mine = [form.names[index] for index in inner if index not in labels]
        others = [train.names[i] for i in range(train.columns) if i != label and i not in train.id_columns]
        if mine != others and sorted(mine) == sorted(others):
            wrong = next(i for i in range(pixels) if mine[i] != others[i])
            raise ValueError(
                f"{form.path}: has {mine[wrong]} where {train.path.name} has {others[wrong]}; expected the same order"
            )
    return Columns(shape, labels, "")


def choose_label(form: Form, ends: Sequence[np.ndarray], inside: Extent) -> tuple[int, str]:
    """Which end of the rows is the label.

    Args:
        form: The file.
        ends: Texts of the first and the last column.
        inside: Extent of all columns between them, which are pixels in any case.

    Returns:
        0 or 1, and how that is known.

    Raises:
        ValueError: If both could be; shows both readings.
    """
    kinds = [np.unique(end.astype(str)) for end in ends]
    names = [form.column(0 if not form.id_columns else 1), form.column(form.columns - 1)]
    tests = (
        (_is_text, "has texts"),
        (lambda kind: _reaches_outside(kind, inside), "has values that no pixel has"),
        (lambda kind: len(kind) > 1, "is the only one of the two that changes"),
        (lambda kind: inside.whole and _is_fraction(kind), "has fractions, where pixels are whole numbers"),
        (lambda kind: not inside.whole and not _is_fraction(kind), "has whole numbers, where pixels have fractions"),
        (lambda kind: _counts_up(kind, len(ends[0])), "counts up from its lowest class as labels do"),
    )
    for test, words in tests:
        first, last = (test(kind) for kind in kinds)
        if first != last:
            index = int(last)
            return index, f"{names[index]} {words}"
    shown = [", ".join(kind[:4].tolist()) + (" ..." if len(kind) > 4 else "") for kind in kinds]
    raise ValueError(
        f"{form.path}: the label could be {names[0]} ({len(kinds[0])} values: {shown[0]}) or {names[1]} "
        f"({len(kinds[1])} values: {shown[1]}); expected --label-column first or --label-column last"
    )


def _named(form: Form, given: str | None, inner: Sequence[int]) -> tuple[int | str | None, str]:
    """The label column as a flag or a name tells it, ``none`` for no label, None where nothing tells."""
    if given in PLACES:
        place: int | str = "none" if given == "none" else inner[0 if given == "first" else -1]
        return place, f"--label-column {given}"
    names = form.names
    if given is not None:
        found = [i for i in inner if names and names[i] == given]
        found = found or [i for i in inner if names and names[i].lower() == given.lower()]
        if len(found) == 1:
            return found[0], f"--label-column {given}"
        has = f"has the columns {', '.join(names[:3])}, ..., {names[-1]}" if names else "has no header"
        if len(found) > 1:
            has = f"has {len(found)} columns of that name"
        allowed = ", ".join(PLACES) + (", or the name of one column" if names else "")
        raise ValueError(f"--label-column is {given!r}, but {form.path} {has}; allowed: {allowed}")
    if names:
        found = [i for i in inner if names[i].lower() in LABEL_NAMES]
        if len(found) > 1:
            several = ", ".join(names[i] for i in found)
            raise ValueError(f"{form.path}: the columns {several} could be the label; expected --label-column NAME")
        if found:
            return found[0], f"column {names[found[0]]} is the label by its name"
        odd = _odd_one([names[i] for i in inner])
        if odd is not None:
            return inner[odd], f"column {names[inner[odd]] or inner[odd] + 1} is the only name unlike the others"
    if not names:
        texts = [i for i in (inner[0], inner[-1]) if number(form.first_row[i].replace(",", ".")) is None]
        if len(texts) == 1 and form.first_row[texts[0]].strip():
            return texts[0], f"{form.column(texts[0])} has texts"
    return None, ""


def _stem(name: str) -> str:
    return re.sub(r"\d+(\.\d+)?", "0", name)


def _alike(names: Sequence[str]) -> int:
    """How many names at most differ in their numbers alone."""
    stems = [_stem(name) for name in names]
    return max(stems.count(stem) for stem in set(stems))


def _odd_one(names: Sequence[str]) -> int | None:
    """The one name, at either end, that is unlike all others, which are alike."""
    if len(names) < 4:
        return None
    for index, others in ((0, names[1:]), (len(names) - 1, names[:-1])):
        if _alike(others) == len(others) and _stem(names[index]) != _stem(others[0]):
            return index
    return None


def _texts(form: Form, columns: Sequence[int]) -> str:
    """What stands in columns that are no pixels, in words; nothing where there is none."""
    found = [i for i in columns if i not in form.id_columns and form.number(form.first_row[i]) is None]
    return f", of which {form.column(found[0])} begins with {form.first_row[found[0]][:30]!r}" if found else ""


def _shape(form: Form, pixels: int, given: Shape | None, label: int | None = None) -> Shape:
    if given is None:
        found = square_shape(pixels)
        if found is None:
            texts = _texts(form, [index for index in range(form.columns) if index != label])
            raise ValueError(f"{form.path}: has {form.columns} columns{texts}; {ask_for_shape(pixels)}")
        return found
    if shape_size(given) != pixels:
        usual = square_shape(pixels)
        raise ValueError(
            f"--image-shape is {shape_text(given)}, which is {shape_size(given)} values, but {form.path} has {pixels} "
            f"for each image; " + (f"expected such as {shape_text(usual)}" if usual else ask_for_shape(pixels))
        )
    return given


def _numbers(kind: np.ndarray) -> list[float | None]:
    return [number(text) for text in kind.tolist()]


def _is_text(kind: np.ndarray) -> bool:
    return any(value is None and text.strip() for value, text in zip(_numbers(kind), kind.tolist(), strict=True))


def _reaches_outside(kind: np.ndarray, inside: Extent) -> bool:
    low, high = -1 if inside.low < 0 else 0, 1 if inside.high <= 1 else 255
    return any(value is not None and not low <= value <= high for value in _numbers(kind))


def _is_fraction(kind: np.ndarray) -> bool:
    return any(value is not None and value != int(value) for value in _numbers(kind))


def _counts_up(kind: np.ndarray, rows: int) -> bool:
    """Whether these are whole numbers from 0 or 1 on without a gap, each several times on average."""
    values = sorted(value for value in _numbers(kind) if value is not None)
    low = values[0] if values else -1
    return low in (0, 1) and values == [low + i for i in range(len(values))] and 3 * len(values) <= rows
