"""Pixels as people store them: how many make which image, in which order, in which range. NumPy only."""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from cnnjax.datasets.base import PixelOrder, Shape, shape_text

RANGES = "whole numbers 0 to 255 or 0 to 16, or numbers 0 to 1 or -1 to 1"

# Two readings of the channels' order are told apart where one is at most this rough in comparison with the other.
_CLEARLY = 0.85
# A change below this, in 255ths, is what is lost in writing numbers down.
_EXACT = 0.002
_BLOCK = 1 << 20


def shape_size(shape: Shape) -> int:
    """Values of one image."""
    height, width, channels = shape
    return height * width * channels


def square_shape(pixels: int) -> Shape | None:
    """The shape of a square image of this many values, grey or RGB; no count is both. None where it is neither."""
    for channels in (1, 3):
        side = math.isqrt(pixels // channels)
        if side >= 2 and side * side * channels == pixels:
            return side, side, channels
    return None


def possible_shapes(pixels: int, most: int = 5) -> list[Shape]:
    """Shapes of this many values, the nearest to a square first; at most 4 times as wide as high or the reverse."""
    found = []
    for channels in (1, 3, 4):
        for height in range(2, pixels // channels + 1 if pixels % channels == 0 else 0):
            width, left = divmod(pixels // channels, height)
            if not left and 0.25 <= height / width <= 4:
                found.append((height, width, channels))
    ranked = sorted(found, key=lambda s: (abs(math.log(s[0] / s[1])), (1, 3, 4).index(s[2]), s[0]))
    return ranked[:most]


def ask_for_shape(pixels: int) -> str:
    """The end of a message on this many values an image, with the shapes to choose from."""
    shapes = possible_shapes(pixels)
    if not shapes:
        return f"{pixels} values an image make no square image and no other usual shape"
    choice = " or ".join(shape_text(shape) for shape in shapes)
    return f"{pixels} values an image make no square image: give --image-shape, such as {choice}"


def guess_order(values_NP: np.ndarray, shape: Shape) -> PixelOrder | None:
    """The order of channels in which neighbouring pixels are more alike.

    Args:
        values_NP: Numbers of each image, as they lie in the file.
        shape: Height, width and channels.

    Returns:
        ``channels_last`` for ``r g b r g b ...``, ``channels_first`` for a plane of each; None where neither is
        clearly smoother, as for noise.
    """
    _, width, channels = shape
    rows = values_NP[:: max(1, len(values_NP) // 256)][:256].astype(np.float32)

    def roughness(*steps: int) -> float:
        return sum(float(np.abs(rows[:, step:] - rows[:, :-step]).mean()) for step in steps)

    last, first = roughness(channels, channels * width), roughness(1, width)
    if last < _CLEARLY * first:
        return "channels_last"
    return "channels_first" if first < _CLEARLY * last else None


def arrange(values_NP: np.ndarray, shape: Shape, order: PixelOrder | None) -> np.ndarray:
    """Images ``[N, H, W, C]`` from rows of numbers."""
    height, width, channels = shape
    if order == "channels_first" and channels > 1:
        planes = values_NP.reshape(-1, channels, height, width)
        return np.ascontiguousarray(planes.transpose(0, 2, 3, 1))
    return values_NP.reshape(-1, height, width, channels)


@dataclasses.dataclass(frozen=True)
class Extent:
    """Smallest and largest value of some pixels, and whether all are whole numbers."""

    low: float
    high: float
    whole: bool

    def __or__(self, other: "Extent") -> "Extent":
        return Extent(min(self.low, other.low), max(self.high, other.high), self.whole and other.whole)

    def __str__(self) -> str:
        return f"{'whole numbers' if self.whole else 'numbers'} {self.low:g} to {self.high:g}"


def extent(values: np.ndarray) -> Extent:
    """The `Extent` of some numbers, of which there is at least one."""
    whole = values.dtype.kind in "iub" or all((block == np.floor(block)).all() for block in _blocks(values))
    return Extent(float(values.min()), float(values.max()), bool(whole))


@dataclasses.dataclass(frozen=True)
class Scale:
    """How numbers become uint8: ``(value + offset) * factor``. One for all parts of a data set."""

    factor: float
    offset: float = 0.0

    @property
    def low(self) -> float:
        """Smallest number that becomes a pixel."""
        return 0.0 - self.offset

    @property
    def high(self) -> float:
        """Largest number that becomes a pixel."""
        return 255 // self.factor - self.offset if self.factor >= 1 and self.factor != 127.5 else 1.0

    def apply(self, values: np.ndarray) -> tuple[np.ndarray, float]:
        """The pixels, and the largest rounding among them in 255ths."""
        if self == Scale(1) and values.dtype == np.uint8:
            return values, 0.0
        pixels, largest = np.empty(values.shape, np.uint8), 0.0
        for block, place in zip(_blocks(values), _blocks(pixels), strict=True):
            exact = (block + np.float64(self.offset)) * self.factor
            nearest = np.clip(np.rint(exact), 0, 255)
            place[...] = nearest
            largest = max(largest, float(np.abs(exact - nearest).max()))
        return pixels, largest

    def describe(self, found: Extent, rounding: float) -> str:
        """What was done, in words."""
        if self.factor == 1 and not self.offset:
            done = "kept as they are" if rounding <= _EXACT else "kept"
        else:
            done = "mapped to 0 to 255" if self.offset else f"times {self.factor:g}"
            done += ", exactly" if rounding <= _EXACT else ""
        if rounding > _EXACT:
            done += f" and rounded, by at most {rounding:.2g} of 255"
        return f"pixels are {found}, {done}"


def find_scale(found: Extent) -> Scale | None:
    """The scale that numbers of this extent must have; None where it cannot be told.

    Few levels are spread by a whole factor, 0 to 16 by 15, so that nothing is rounded.
    """
    low, high = found.low, found.high
    if found.whole and low >= 0 and high <= 255:
        return Scale({1: 255, 15: 17, 16: 15}.get(int(high), 1))
    tiny = 1e-6
    if low >= 0 and high <= 1 + tiny:
        return Scale(255)
    if low >= -1 - tiny and high <= 1 + tiny:
        return Scale(127.5, 1.0)
    if low >= 0 and not found.whole and (high == 16 or 32 < high <= 255):
        return Scale(15 if high == 16 else 1)
    return None


def shared_scale(train: Extent, other: Extent) -> Scale | None:
    """The scale that suits the training set and another part of a data set; None where their ranges differ."""
    scale, together = find_scale(train), find_scale(train | other)
    if scale is None or together is None or (together != scale and not (train.whole and other.whole)):
        return None
    # Fractions up to 1 beside pixels up to 255 would all become 0 or 1.
    return None if not other.whole and other.high <= 1 < scale.high else together


def limits(found: Extent) -> tuple[float, float]:
    """Between which numbers values would have to lie, where `find_scale` gives None, to find one that does not."""
    if found.low < 0:
        return (-1.0, 1.0) if found.high <= 1 else (0.0, 255.0)
    return (0.0, 255.0) if found.high > 255 else (0.0, 1.0)


def _blocks(values: np.ndarray) -> Iterator[np.ndarray]:
    """Views of some rows each, which keep the memory of a calculation small."""
    rows = max(1, _BLOCK // max(1, values[:1].size))
    return (values[start : start + rows] for start in range(0, len(values), rows))
