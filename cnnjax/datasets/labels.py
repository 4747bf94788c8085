"""Labels as people store them: numbers with gaps, names, or values to be approached. NumPy only."""

import dataclasses
import re
from collections.abc import Callable, Sequence

import numpy as np

from cnnjax.datasets.base import Task

_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*", re.ASCII)

# So many different labels, in more than half of the rows, are no classes but numbers or names of the images.
_MANY = 100


@dataclasses.dataclass(frozen=True, eq=False)
class Encoded:
    """Labels as a `Dataset` has them.

    Attributes:
        parts: Labels of each part of the data set: int32 classes, or float32 values for regression.
        class_names: One name a class, as the files write it; empty for regression.
    """

    parts: tuple[np.ndarray, ...]
    class_names: tuple[str, ...]

    @property
    def task(self) -> Task:
        """Which of the two it is."""
        return "classification" if self.class_names else "regression"

    def describe(self) -> str:
        """What the labels are, in words."""
        if not self.class_names:
            values = np.concatenate(self.parts)
            return f"labels are numbers from {values.min():g} to {values.max():g}"
        names = self.class_names
        shown = ", ".join(names if len(names) <= 10 else (*names[:3], "...", names[-1]))
        return f"{len(names)} classes ({shown})"


def number(text: str) -> float | None:
    """The number that a text is, or None; a NaN, an underscore and the like are none."""
    return float(text) if _NUMBER.fullmatch(text) else None


def encode(parts: Sequence[np.ndarray], task: Task | None, where: Callable[[int, int], str]) -> Encoded:
    """Classes or values from labels as they are written.

    Whole numbers and names are classes, in the order of the numbers or of the alphabet, so that labels may start at 1
    and have gaps. Real numbers are values for regression.

    Args:
        parts: Labels of the training set, then of other parts; texts or numbers ``[N]``.
        task: What they are for; None decides by what they look like.
        where: Part and row to the words that name the place, for messages.

    Raises:
        ValueError: If a label is missing, or it is not clear what they are.
    """
    texts = np.concatenate([np.char.strip(np.asarray(part).astype(str)) for part in parts])
    ends = np.cumsum([len(part) for part in parts])

    def place(row: int) -> str:
        part = int(np.searchsorted(ends, row, side="right"))
        return where(part, row - int(ends[part] - len(parts[part])))

    kinds, first, index_N, counts = np.unique(texts, return_index=True, return_inverse=True, return_counts=True)
    if kinds[0] == "":
        raise ValueError(f"{place(int(first[0]))} is empty; expected a label")
    values = [number(kind) for kind in kinds.tolist()]
    odd = [i for i, value in enumerate(values) if value is None]
    if odd:
        rare = all(counts[i] == 1 for i in odd) and len(odd) <= max(1, len(texts) // 100) and 2 * len(odd) <= len(texts)
        if task == "regression" or (task is None and rare):
            row = int(min(first[i] for i in odd))
            more = "" if task else ", as the others are; --task classification takes it for the name of a class"
            raise ValueError(f"{place(row)} is {str(texts[row])[:30]!r}; expected a number{more}")
        names, class_of = tuple(kinds.tolist()), np.arange(len(kinds))
    else:
        numbers = np.array(values, np.float64)
        whole = bool((numbers == np.floor(numbers)).all())
        if task == "regression" or (task is None and not whole):
            values_N = numbers[index_N].astype(np.float32)
            if not np.isfinite(values_N).all():
                row = int(np.flatnonzero(~np.isfinite(values_N))[0])
                raise ValueError(f"{place(row)} is {texts[row]}; expected a number that float32 can hold")
            return Encoded(tuple(np.split(values_N, ends[:-1])), ())
        different, class_of = np.unique(numbers, return_inverse=True)
        names = tuple(str(int(value)) if value == int(value) else repr(float(value)) for value in different)
    if task is None and len(names) > _MANY and 2 * len(names) > len(parts[0]):
        what = "names of images" if odd else "values, which --task regression would approach,"
        raise ValueError(
            f"{place(0)} is {texts[0]}, and there are {len(names)} different labels in {len(texts)} rows, which look "
            f"like {what} and not like classes; expected fewer, or --task classification"
        )
    labels_N = class_of[index_N].astype(np.int32)
    split = tuple(np.split(labels_N, ends[:-1]))
    if (only := np.unique(split[0])).size == 1:
        every = f"as all {len(split[0])} labels for training are"
        raise ValueError(f"{place(0)} is {names[only[0]]}, {every}; expected two classes or more")
    return Encoded(split, names)
