"""Trains a CNN on CIFAR-10, on any mesh.

    python -m experiments.cifar10 --mesh data=4

Where CIFAR-10 is neither on disk nor to be downloaded, it trains on the shipped handwritten digits, and says so.
"""

import sys
from typing import Any

from cnnjax.config import TrainConfig
from experiments.training import main

PRESETS = {
    "default": TrainConfig(weight_decay=5e-4),
    # The 2018 TensorFlow cluster: raw pixels, plain SGD, a tenth of the rate every 350 epochs, nothing else.
    "ancestor": TrainConfig(
        optimizer="sgd", lr=0.1, schedule="exponential", decay_epochs=350, decay_rate=0.1, scaling="none",
        flip="off", crop_padding=0, epochs=50,
    ),
}  # fmt: skip


def fill(dataset: str) -> dict[str, Any]:
    """Options that depend on the data: a mirrored digit is no digit, and 1,438 images need more passes."""
    if dataset.startswith("cifar"):
        return {"epochs": 8, "flip": "on", "crop_padding": 4}
    return {"epochs": 40 if dataset == "digits" else 10, "flip": "off", "crop_padding": 2}


if __name__ == "__main__":
    sys.exit(main("cifar10", "Trains a CNN on CIFAR-10.", PRESETS, fill))
