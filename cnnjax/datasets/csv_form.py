"""How a CSV file is written: separator, header, comments; and where it is wrong, in which line."""

import csv
import dataclasses
import gzip
import itertools
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from cnnjax.datasets.files import GZIP_ERRORS, damaged, file_beginning, is_gzip
from cnnjax.datasets.labels import number

EXPECTED = "a row of numbers for each image, separated by commas, semicolons, tabs or spaces, with or without a header"
SPACES = " "

LABEL_NAMES = frozenset(
    ("label", "labels", "class", "classes", "target", "targets", "y", "category", "digit", "label_id", "class_id")
)
_ID_NAMES = frozenset(("", "id", "index", "imageid", "image_id", "unnamed: 0", "rowid", "row_id"))
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+([eE][+-]?\d+)?")
_LONGEST_LINE = 1 << 24


@dataclasses.dataclass(frozen=True)
class Form:
    """How one file is written.

    Attributes:
        path: The file.
        separator: What stands between values; a space stands for any white space.
        decimal: The decimal mark.
        skip: Lines in front of the first row of values.
        names: The header, or None.
        columns: Values in a row.
        first_row: The first row of values.
    """

    path: Path
    separator: str
    decimal: str
    skip: int
    names: tuple[str, ...] | None
    columns: int
    first_row: tuple[str, ...]

    @property
    def id_columns(self) -> tuple[int, ...]:
        """Columns that number the images, by their names; only the first can be one."""
        return (0,) if self.names and self.names[0].lower() in _ID_NAMES else ()

    def column(self, index: int) -> str:
        """A column in words, for messages."""
        return f"column {self.names[index] or index + 1}" if self.names else f"column {index + 1}"

    def number(self, text: str) -> float | None:
        """The number in a cell, or None."""
        if self.decimal == ",":
            return None if "." in text else number(text.replace(",", ".", 1))
        return number(text)


def look(path: Path) -> Form:
    """Reads the first lines of a file to see how it is written.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is no such file, or its first rows do not fit each other.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected {EXPECTED}")
    lines: list[tuple[int, str]] = []
    skipped = 0
    try:
        with open_text(path) as stream:
            for line in _lines(stream, path):
                if not line.strip() or (line.startswith("#") and not lines):
                    skipped += 1
                    continue
                lines.append((skipped, line.rstrip("\r\n")))
                skipped += 1
                if len(lines) == 20:
                    break
    except GZIP_ERRORS as error:
        raise damaged(path, error, EXPECTED) from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is no UTF-8 text ({error.reason}); expected {EXPECTED}") from None
    if not lines:
        raise ValueError(f"{path}: has no rows and begins with {file_beginning(path)}; expected {EXPECTED}")
    separator = _separator([line for _, line in lines])
    rows = [split(line, separator) for _, line in lines]
    names = tuple(name.strip() for name in rows[0]) if _is_header(rows) else None
    start = 0 if names is None else 1
    if len(rows) == start:
        raise ValueError(f"{path}: has a header and no rows; expected {EXPECTED}")
    first_row, skip = rows[start], lines[start][0]
    if len(first_row) == 1:
        raise ValueError(f"{path}: line {skip + 1} begins with {first_row[0][:30]!r}; expected {EXPECTED}")
    if names is not None and len(names) != len(first_row):
        raise ValueError(
            f"{path}: line {skip + 1} has {len(first_row)} values; expected {len(names)}, as the header in line "
            f"{lines[0][0] + 1} has"
        )
    usual = statistics.mode(map(len, rows[start:]))
    if names is None and len(first_row) != usual:
        raise ValueError(
            f"{path}: line {skip + 1} has {len(first_row)} values; expected {usual}, as the next ones have"
        )
    if not first_row[-1].strip() and (names is None or not names[-1]):
        raise ValueError(
            f"{path}: line {skip + 1} ends with an empty cell, behind a last {separator!r}; expected a value in each"
        )
    comma = separator != "," and any(_DECIMAL_COMMA.fullmatch(cell.strip()) for row in rows for cell in row)
    return Form(path, separator, "," if comma else ".", skip, names, len(first_row), tuple(first_row))


def open_text(path: Path) -> IO[str]:
    """A file as text, gzipped or not, with or without a byte order mark."""
    if is_gzip(path):
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def split(line: str, separator: str) -> list[str]:
    """The cells of one line."""
    if separator == SPACES:
        return line.split()
    try:
        return next(csv.reader([line], delimiter=separator, skipinitialspace=True), [])
    except csv.Error:
        return line.split(separator)


def rows(form: Form) -> Iterator[tuple[int, Sequence[str]]]:
    """The rows of values with the numbers of their lines, counted from 1; empty lines are passed over."""
    with open_text(form.path) as stream:
        for _ in itertools.islice(stream, form.skip):
            pass
        if form.separator == SPACES:
            for line_number, line in enumerate(stream, form.skip + 1):
                if cells := line.split():
                    yield line_number, cells
            return
        reader = csv.reader(stream, delimiter=form.separator, skipinitialspace=True)
        before = 0
        while True:
            try:
                row = next(reader, None)
            except csv.Error as error:
                raise ValueError(f"{form.path}: line {form.skip + before + 1}: {error}; expected {EXPECTED}") from None
            if row is None:
                return
            if row and (len(row) > 1 or row[0].strip()):
                yield form.skip + before + 1, row
            before = reader.line_num


def line_of(form: Form, row: int) -> int:
    """The line of a row of values, counted from 0."""
    return next(itertools.islice(rows(form), row, None))[0]


def fault(form: Form, labels: Sequence[int], fits: Callable[[float], bool], expected: str) -> ValueError | None:
    """The error for the first thing that is wrong in a file.

    Args:
        form: The file.
        labels: Columns that need not be numbers.
        fits: Whether a number may be a pixel.
        expected: What may, in words.

    Returns:
        It, with line, column and value; or None where nothing is wrong.
    """
    passed = {*labels, *form.id_columns}
    for line, cells in rows(form):
        if len(cells) != form.columns:
            return ValueError(f"{form.path}: line {line} has {len(cells)} values; expected {form.columns}")
        for index, cell in enumerate(cells):
            if index in passed:
                continue
            value = form.number(cell)
            if value is None or not fits(value):
                shown = repr(cell.strip()[:30]) if value is None else cell.strip()[:30]
                found = shown if cell.strip() else "an empty cell"
                wanted = "a number" if value is None else expected
                return ValueError(f"{form.path}: line {line}, {form.column(index)} is {found}; expected {wanted}")
    return None


def _lines(stream: IO[str], path: Path) -> Iterator[str]:
    while line := stream.readline(_LONGEST_LINE):
        if "\0" in line or len(line) == _LONGEST_LINE:
            raise ValueError(f"{path}: begins with {file_beginning(path)} and is no text; expected {EXPECTED}")
        yield line


def _separator(lines: list[str]) -> str:
    """The separator that makes most cells of the first lines; a comma may also be the decimal mark in half of them."""
    counts = {mark: max(len(split(line, mark)) for line in lines[:2]) for mark in ("\t", ";", "|", ",", SPACES)}
    most = max(counts.values())
    return next(mark for mark, count in counts.items() if 2 * count >= most)


def _is_header(rows: list[list[str]]) -> bool:
    """Whether the first row has names: texts, or numbers that count on as no pixels do."""
    first = [cell.strip() for cell in rows[0]]
    values = [number(cell.replace(",", ".", 1)) for cell in first]
    texts = [index for index, value in enumerate(values) if value is None]
    if 2 * sum(bool(first[index]) for index in texts) > len(first):
        return True
    counted = [value for value in values if value is not None]
    if len(counted) > 8 and {after - before for before, after in itertools.pairwise(counted)} == {1.0}:
        return True
    below = rows[1] if len(rows) > 1 else []
    return any(
        first[index].lower() in LABEL_NAMES and index < len(below) and number(below[index]) is not None
        for index in texts
    )
