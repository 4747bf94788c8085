"""What is wrong with data or a training, in words. It stays silent where nothing is."""

from cnnjax.diagnose.curves import examine_curves
from cnnjax.diagnose.data import examine_data, image_hashes
from cnnjax.diagnose.findings import Finding, as_dicts, in_words, most_severe_first
from cnnjax.diagnose.training import examine_training

__all__ = [
    "Finding",
    "as_dicts",
    "examine_curves",
    "examine_data",
    "examine_training",
    "image_hashes",
    "in_words",
    "most_severe_first",
]
