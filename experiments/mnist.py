"""Trains the 2016 project's networks on MNIST with their own hyper-parameters.

python -m experiments.mnist --data idx:FOLDER
"""

import sys
from typing import Any

from cnnjax.config import TrainConfig
from experiments.training import main

PRESETS = {
    # As the 2016 project ran it in Keras: momentum with Nesterov's correction, a rate that hardly decays.
    "default": TrainConfig(
        network="cnn2d_3layer_fullconnected_3layer_mnist", optimizer="nesterov", lr=0.05, momentum=0.9,
        schedule="time", time_decay=1e-6, batch_size=1000, epochs=10, scaling="unit", flip="off", crop_padding=0,
    ),
    # As it ran the smaller network in native TensorFlow.
    "tensorflow": TrainConfig(
        network="cnn2d_2layer_full_connected_2layer", optimizer="adam", lr=5e-4, schedule="constant", batch_size=50,
        epochs=10, scaling="minmax", flip="off", crop_padding=0,
    ),
}  # fmt: skip


def fill(dataset: str) -> dict[str, Any]:
    """Nothing is left open: the presets state it all."""
    return {}


if __name__ == "__main__":
    sys.exit(main("mnist", "Trains the networks of 2016 on MNIST.", PRESETS, fill, default_data="mnist"))
