"""Images of another size."""

import dataclasses

import numpy as np

from cnnjax.datasets.base import Dataset


def resize(images_NHW: np.ndarray, height: int, width: int) -> np.ndarray:
    """Bilinear resize with half-pixel centres; shrinking averages, as ``jax.image.resize`` and Pillow do.

    Args:
        images_NHW: One channel of each image.
        height: New height.
        width: New width.

    Returns:
        float32 ``[N, height, width]``.
    """
    rows = _weights(images_NHW.shape[1], height)
    columns = _weights(images_NHW.shape[2], width)
    return rows @ images_NHW.astype(np.float32) @ columns.T


def resized(dataset: Dataset, height: int, width: int) -> Dataset:
    """The data set with images of another height and width, rounded to whole pixel values."""
    if dataset.image_shape[:2] == (height, width):
        return dataset
    channels = [resize(dataset.images_NHWC[..., c], height, width) for c in range(dataset.image_shape[2])]
    return dataclasses.replace(dataset, images_NHWC=np.rint(np.stack(channels, -1)).astype(np.uint8))


def _weights(old: int, new: int) -> np.ndarray:
    """How much each of ``old`` pixels counts for each of ``new`` ones, ``[new, old]``."""
    scale = old / new
    centres = (np.arange(new) + 0.5) * scale - 0.5
    distances = np.abs(centres[:, np.newaxis] - np.arange(old)) / max(scale, 1)
    weights = np.maximum(0, 1 - distances)
    # At the edge the triangle reaches outside the image; what is left there counts in full.
    return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)
