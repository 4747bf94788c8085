"""Images in CSV files, as people have them: one image a row, its label somewhere; or a folder with train.csv.

What a file does not say is found out (`cnnjax.datasets.csv_columns`) and said; what cannot be found out is asked for.
"""

import dataclasses
import re
import shlex
import warnings
from collections.abc import Iterator
from os.path import isfile
from pathlib import Path

import numpy as np

from cnnjax.datasets.base import Dataset, PixelOrder, ReadOptions, Shape, Splits, shape_text
from cnnjax.datasets.csv_columns import PLACES, Columns, choose_label, find_columns, same_columns
from cnnjax.datasets.csv_form import EXPECTED, SPACES, Form, fault, line_of, look
from cnnjax.datasets.files import GZIP_ERRORS, damaged, holds, is_gzip
from cnnjax.datasets.labels import Encoded, encode
from cnnjax.datasets.pixels import (
    RANGES,
    Extent,
    Scale,
    arrange,
    extent,
    find_scale,
    guess_order,
    limits,
    shape_size,
    shared_scale,
)

_SUFFIX = r"\.(csv|tsv)(\.gz)?"
_TRAIN = re.compile(rf"(.*[-_. ])?train(ing)?{_SUFFIX}", re.IGNORECASE)
_TESTS = ("test", "val", "valid", "validation")

# Values of a table that pandas holds at a time.
_VALUES = 1 << 21


def detect(path: Path) -> bool:
    """Whether ``path`` is a CSV file by its name, or a folder with one for training."""
    if isfile(path):
        return re.fullmatch(rf".*{_SUFFIX}", path.name, re.IGNORECASE) is not None
    return path.is_dir() and bool(_training_files(path))


def read(path: Path, options: ReadOptions | None = None) -> Splits:
    """Images from a CSV file, or from a folder with ``train.csv`` and ``test.csv``.

    Args:
        path: The file, or a folder with one file named ``train`` and, if there is one, ``test`` (or ``val``), as in
            ``mnist_train.csv``. Plain or gzipped.
        options: What the files do not say themselves.

    Returns:
        Training and test set, images uint8 ``[N, H, W, C]``; a test file without labels is in ``unlabelled_NHWC``.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If a file is damaged, or what it means is not clear; names line, column and value, or the option to
            give.
    """
    options = options or ReadOptions()
    train_path, others = _folder_files(path) if path.is_dir() else (path, [])
    form = look(train_path)
    columns = find_columns(form, options)
    if not columns.labels:
        more = "" if options.label_column else ", which --label-column first or last would name"
        raise ValueError(f"{form.path}: has no labels to train on ({columns.why}); expected a column with them{more}")
    train = read_table(form, columns)
    parts = [train]
    for other in others:
        form = look(other)
        parts.append(read_table(form, same_columns(form, train.form, columns.shape, train.label_index)))
        if parts[-1].labels is not None:
            break
    scale = _common_scale(parts)
    order = _order(train, columns.shape, options)
    encoded = _encode(parts, options)
    labels = iter(encoded.parts)
    name, said = _name(path, train_path), []
    datasets, unlabelled, notes = [], None, []
    for part in parts:
        pixels_NP, rounding = scale.apply(part.values_NP)
        images_NHWC = arrange(pixels_NP, columns.shape, order)
        source = str(part.form.path)
        size = "x".join(map(str, columns.shape))
        said.append(f"{source}: {len(pixels_NP):,} images of {size}; {scale.describe(part.extent, rounding)}")
        if part.labels is not None:
            datasets.append(Dataset(name, images_NHWC, next(labels), encoded.class_names, source))
        else:
            unlabelled = images_NHWC if unlabelled is None else unlabelled
            notes.append(f"{source} has no labels: its images can only be predicted, so they are no test set")
    said[0] += f"; {train.why}; {encoded.describe()}"
    read_as = _read_as(train, columns.shape, order, encoded)
    flags = " ".join(f"--{option.replace('_', '-')} {shlex.quote(value)}" for option, value in read_as.items())
    said.append(f"{path} read as with {flags}")
    test = datasets[1] if len(datasets) > 1 else None
    scaled = scale.factor, scale.offset
    return Splits(datasets[0], test, unlabelled, tuple(notes), tuple(said), read_as, scaled)


def read_alone(path: Path, options: ReadOptions, scale: Scale) -> tuple[np.ndarray, np.ndarray | None]:
    """Reads one file as another one was read.

    Args:
        path: The file, with labels or without.
        options: Those that said how the other one was read, with ``image_shape``.
        scale: Its scale of pixels.

    Returns:
        Images, uint8 ``[N, H, W, C]``, and labels as they are written, or None.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is damaged, or its columns or pixels are others; names line, column and value.
    """
    form = look(path)
    shape = options.image_shape
    assert shape is not None
    inner, pixels = form.columns - len(form.id_columns), shape_size(shape)
    if inner not in (pixels, pixels + 1):
        expected = f"{pixels}, or {pixels + 1} with a label, as the images of training are {shape_text(shape)}"
        raise ValueError(f"{path}: has {inner} columns; expected {expected}")
    if inner == pixels:
        options = dataclasses.replace(options, label_column="none")
    table = read_table(form, find_columns(form, options))
    if not scale.low <= table.extent.low <= table.extent.high <= scale.high:
        raise _outside(table, scale.low, scale.high, f"{scale.low:g} to {scale.high:g}, as in training")
    pixels_NP, _ = scale.apply(table.values_NP)
    images_NHWC = arrange(pixels_NP, shape, _order(table, shape, options))
    return images_NHWC, None if table.labels is None else _with_points(table.labels, form)


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """The values of one file.

    Attributes:
        form: How it is written.
        values_NP: Pixels, one image a row: uint8 where all are whole numbers from 0 to 255, else float32.
        extent: Their smallest and largest value.
        labels: Labels as they are written, or None.
        label_index: The label's column, or -1.
        why: How that is known, in words.
    """

    form: Form
    values_NP: np.ndarray
    extent: Extent
    labels: np.ndarray | None
    label_index: int
    why: str


def read_table(form: Form, columns: Columns) -> Table:
    """Reads the values of a file, in pieces, so that no more than the pixels are ever held.

    Raises:
        ValueError: If a value is missing or no number, or it is not clear which column is the label.
    """
    pieces: list[np.ndarray] = []
    extents: list[Extent] = []
    texts: dict[int, list[np.ndarray]] = {index: [] for index in columns.labels}
    try:
        for frame in _frames(form, columns.labels):
            for index in texts:
                texts[index].append(frame.pop(index).to_numpy(object))
            for index in form.id_columns:
                frame.pop(index)
            if not {dtype.kind for dtype in frame.dtypes} <= set("iuf"):
                raise _fault(form, columns.labels)
            values = frame.to_numpy()
            if values.dtype.kind not in "iuf" or not np.isfinite(values).all():
                raise _fault(form, columns.labels)
            extents.append(found := extent(values))
            pieces.append(_narrow(values, found))
    except GZIP_ERRORS as error:
        raise damaged(form.path, error, EXPECTED) from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{form.path}: is no UTF-8 text ({error.reason}); expected {EXPECTED}") from None
    inside = extents[0]
    for other in extents[1:]:
        inside |= other
    columns_of_text = {index: np.concatenate(part) for index, part in texts.items()}
    if len(columns.labels) < 2:
        index = columns.labels[0] if columns.labels else -1
        return Table(form, _joined(pieces), inside, columns_of_text.get(index), index, columns.why)
    ends = [_with_points(columns_of_text[index], form) for index in columns.labels]
    chosen, why = choose_label(form, ends, inside)
    label, pixel = columns.labels[chosen], columns.labels[1 - chosen]
    cells = [form.number(str(cell)) for cell in columns_of_text[pixel]]
    if None in cells:
        raise _fault(form, (label,))
    column_N = np.array(cells, np.float64)
    inside |= extent(column_N)
    values_NP = _joined(pieces, _narrow(column_N, extent(column_N)), first=chosen == 1)
    return Table(form, values_NP, inside, columns_of_text[label], label, why)


def _frames(form: Form, text_columns: tuple[int, ...]) -> Iterator:
    """The file in pieces of some rows, as pandas reads it; the columns of texts stay as they are written."""
    import pandas as pd

    with warnings.catch_warnings():
        # A row that is longer than others is only a warning, and its last values would be dropped.
        warnings.simplefilter("error", pd.errors.ParserWarning)
        try:
            yield from pd.read_csv(
                form.path,
                sep=r"\s+" if form.separator == SPACES else form.separator,
                header=None,
                names=range(form.columns),
                index_col=False,
                skiprows=form.skip,
                dtype=dict.fromkeys(text_columns, object),
                na_filter=False,
                skipinitialspace=True,
                decimal=form.decimal,
                encoding="utf-8",
                compression="gzip" if is_gzip(form.path) else None,
                chunksize=max(1, _VALUES // form.columns),
                low_memory=False,
            )
        except (pd.errors.ParserError, pd.errors.EmptyDataError, pd.errors.ParserWarning) as error:
            raise _fault(form, text_columns, " ".join(str(error).split())) from None


def _fault(form: Form, labels: tuple[int, ...], reason: str = "it cannot be read as numbers") -> ValueError:
    """The error for what pandas could not read; a number too large for it makes objects of a whole column."""
    return fault(form, labels, lambda value: abs(value) < 2.0**63, RANGES) or ValueError(
        f"{form.path}: {reason}; expected {EXPECTED}"
    )


def _narrow(values: np.ndarray, found: Extent) -> np.ndarray:
    if found.whole and found.low >= 0 and found.high <= 255:
        return values.astype(np.uint8, order="C")
    with np.errstate(over="ignore"):
        return values.astype(np.float32, order="C")


def _joined(pieces: list[np.ndarray], column_N: np.ndarray | None = None, first: bool = False) -> np.ndarray:
    """One array of all pieces, which it empties on the way, and of one more column in front or behind."""
    more = 0 if column_N is None else 1
    dtype = np.result_type(*pieces, *([] if column_N is None else [column_N]))
    joined = np.empty((sum(map(len, pieces)), pieces[0].shape[1] + more), dtype)
    start = 0
    while pieces:
        piece = pieces.pop(0)
        joined[start : start + len(piece), more if first else 0 : joined.shape[1] - (0 if first else more)] = piece
        start += len(piece)
    if column_N is not None:
        joined[:, 0 if first else -1] = column_N
    return joined


def _with_points(texts: np.ndarray, form: Form) -> np.ndarray:
    """The texts, with decimal commas as points where they are numbers."""
    texts = texts.astype(str)
    if form.decimal != "," or any(form.number(text) is None for text in np.unique(texts).tolist()):
        return texts
    return np.char.replace(texts, ",", ".")


def _encode(parts: list[Table], options: ReadOptions) -> Encoded:
    """The labels of the parts that have some."""
    labelled = [(part, part.labels) for part in parts if part.labels is not None]

    def where(index: int, row: int) -> str:
        part = labelled[index][0]
        return f"{part.form.path}: line {line_of(part.form, row)}, {part.form.column(part.label_index)}"

    return encode([_with_points(labels, part.form) for part, labels in labelled], options.task, where)


def _common_scale(parts: list[Table]) -> Scale:
    """The one scale of all parts: that of the training set, unless more levels appear elsewhere."""
    train = parts[0]
    scale = find_scale(train.extent)
    if scale is None:
        raise _outside(train, *limits(train.extent), f"{RANGES}, but pixels here are {train.extent}")
    for part in parts[1:]:
        together = shared_scale(train.extent, part.extent)
        if together is None and not scale.low <= part.extent.low <= part.extent.high <= scale.high:
            expected = f"{scale.low:g} to {scale.high:g}, as in {train.form.path.name}"
            raise _outside(part, scale.low, scale.high, expected)
        if together is None:
            raise ValueError(
                f"{part.form.path}: pixels are {part.extent}, but those of {train.form.path.name} are {train.extent}; "
                "expected the same range"
            )
        scale = together
    return scale


def _outside(table: Table, low: float, high: float, expected: str) -> ValueError:
    """The error for the first pixel that is not between these two."""
    labels = () if table.label_index < 0 else (table.label_index,)
    return fault(table.form, labels, lambda value: low <= value <= high, expected) or ValueError(
        f"{table.form.path}: pixels are {table.extent}; expected {expected}"
    )


def _order(train: Table, shape: Shape, options: ReadOptions) -> PixelOrder | None:
    """The order of channels, by flag or by evidence; None where there is one channel."""
    if shape[2] == 1:
        return None
    order = options.pixel_order or guess_order(train.values_NP, shape)
    if order is None:
        raise ValueError(
            f"{train.form.path}: the {shape[2]} values of a pixel could lie together or apart, one plane each, and "
            "neither makes clearly smoother images; expected --pixel-order channels_last or channels_first"
        )
    return order


def _read_as(train: Table, shape: Shape, order: PixelOrder | None, encoded: Encoded) -> dict[str, str]:
    """The options that would say what was found."""
    names, index = train.form.names, train.label_index
    column = "last" if index == train.form.columns - 1 else "first"
    if names and names.count(names[index]) == 1 and names[index] not in ("", *PLACES):
        column = names[index]
    return ReadOptions(shape, order, column, encoded.task).flags()


def _training_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if _TRAIN.fullmatch(path.name) and isfile(path))


def _folder_files(folder: Path) -> tuple[Path, list[Path]]:
    """The training file of a folder, and what may be its test set, best first."""
    found = _training_files(folder)
    if len(found) != 1:
        several = f"holds {' and '.join(path.name for path in found)}" if found else f"holds {holds(folder)}"
        kind = ValueError if found else FileNotFoundError
        raise kind(f"{folder}: {several}; expected one train.csv, or the path of a file")
    match = _TRAIN.fullmatch(found[0].name)
    prefix = re.escape((match and match[1]) or "")
    others = []
    for word in _TESTS:
        pattern = re.compile(rf"{prefix}{word}(ing)?{_SUFFIX}", re.IGNORECASE)
        others += sorted(path for path in folder.iterdir() if pattern.fullmatch(path.name) and isfile(path))
    return found[0], others


def _name(path: Path, train_path: Path) -> str:
    """Name of the data set: that of the folder, or of the file where it says more than ``train``."""
    if path.is_dir() or _TRAIN.fullmatch(path.name):
        return train_path.resolve().parent.name.lower()
    return re.sub(rf"({_SUFFIX}|\.\w+)$", "", path.name, flags=re.IGNORECASE).lower()
