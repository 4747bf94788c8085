"""Labelled images in CSV files: the label first, then the pixels of a square grey image, row by row."""

import math
import warnings
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from cnnjax.datasets.base import Dataset
from cnnjax.datasets.files import file_beginning

_EXPECTED = "a header 'label,pixel0,pixel1,...' and rows of whole numbers"


def read_labelled(path: Path, name: str, max_value: int, num_classes: int = 10) -> Dataset:
    """Images from a CSV file with the header ``label,pixel0,pixel1,...``.

    Args:
        path: The file.
        name: Name of the data set.
        max_value: Largest pixel value, at most 255.
        num_classes: Number of classes; labels run from 0.

    Returns:
        Images uint8 ``[N, side, side, 1]`` with the values in the file.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is not such a file, or a value is missing, not a whole number, or out of range.
    """
    import pandas as pd

    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected {_EXPECTED}")
    try:
        with warnings.catch_warnings():
            # A first row longer than the header is only a warning, and its last values would be dropped.
            warnings.simplefilter("error", pd.errors.ParserWarning)
            table = pd.read_csv(path, index_col=False, skip_blank_lines=False)
    except (pd.errors.ParserError, pd.errors.EmptyDataError, pd.errors.ParserWarning, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: begins with {file_beginning(path)} ({reason}); expected {_EXPECTED}") from None
    pixels = len(table.columns) - 1
    side = math.isqrt(max(pixels, 0))
    if table.columns[0] != "label" or not pixels:
        raise ValueError(f"{path}: begins with {file_beginning(path)}; expected {_EXPECTED}")
    if side * side != pixels:
        raise ValueError(f"{path}: has {pixels} pixels a row; expected a square number, such as {side * side}")
    if not len(table):
        raise ValueError(f"{path}: has a header and no rows; expected {_EXPECTED}")
    for column, limit in zip(table.columns, [num_classes - 1] + [max_value] * pixels, strict=True):
        values = table[column]
        if not pd.api.types.is_integer_dtype(values.dtype):
            # One odd cell turns its whole column into another type, so the file is read again as it is written.
            cells = pd.read_csv(path, index_col=False, skip_blank_lines=False, dtype=str, na_filter=False)[column]
            odd = np.asarray(~cells.fillna("").str.fullmatch(r"-?\d{1,15}"))
            raise _wrong(path, column, odd, cells.fillna(""), "a whole number")
        outside = np.asarray((values < 0) | (values > limit))
        if outside.any():
            raise _wrong(path, column, outside, values, f"0 to {limit}")
    images_NHWC = table.iloc[:, 1:].to_numpy(np.uint8).reshape(-1, side, side, 1)
    names = tuple(str(label) for label in range(num_classes))
    return Dataset(name, images_NHWC, table["label"].to_numpy(np.int32), names, str(path))


def _wrong(path: Path, column: str, wrong: np.ndarray, values: Iterable[object], expected: str) -> ValueError:
    """The error for the first wrong value of a column."""
    row = int(np.argmax(wrong))
    value = str(list(values)[row])[:30]
    # Line 1 is the header.
    return ValueError(f"{path}: line {row + 2} has {column} {value or 'empty'}; expected {expected}")
