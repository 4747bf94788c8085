"""Trains a small CNN on the handwritten digits that come with the code: nothing to download, done in moments.

python -m experiments.digits
"""

import sys
from typing import Any

from cnnjax.config import TrainConfig
from experiments.training import main

PRESETS = {
    "default": TrainConfig(
        network="cnn2d_2layer_fullconnected_2layer", image_shape="16,16,1", optimizer="adam", lr=1e-3, batch_size=64,
        epochs=12, flip="off", crop_padding=1,
    ),
}  # fmt: skip


def fill(dataset: str) -> dict[str, Any]:
    """Nothing is left open: the preset states it all."""
    return {}


if __name__ == "__main__":
    sys.exit(main("digits", "Trains a CNN on the shipped digits.", PRESETS, fill, default_data="digits"))
