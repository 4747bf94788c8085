"""Readers of image data sets, and the search for the one that is meant. NumPy only: JAX is not needed to read files."""

from cnnjax.datasets.base import Dataset, ReadOptions, Splits
from cnnjax.datasets.search import READERS, Found, Reader, load, reader_names
from cnnjax.datasets.unseen import Unseen, read_unseen

__all__ = [
    "READERS",
    "Dataset",
    "Found",
    "ReadOptions",
    "Reader",
    "Splits",
    "Unseen",
    "load",
    "read_unseen",
    "reader_names",
]
