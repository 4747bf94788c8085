"""What every reader returns: images, labels, class names. NumPy only."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """Labelled images, held in memory as the files have them.

    Attributes:
        name: Data set name as results files show it, such as ``cifar10``.
        images_NHWC: Pixels, uint8 ``[N, H, W, C]``.
        labels_N: Class of each image, int32 ``[N]``, from 0 to ``len(class_names) - 1``.
        class_names: One name a class.
        source: Where the images were read from, for messages and ``config.json``.

    Raises:
        ValueError: If shapes, types or labels break the rules above.
    """

    name: str
    images_NHWC: np.ndarray
    labels_N: np.ndarray
    class_names: tuple[str, ...]
    source: str

    def __post_init__(self) -> None:
        if self.images_NHWC.ndim != 4 or self.images_NHWC.dtype != np.uint8:
            raise ValueError(
                f"{self.source}: images have shape {self.images_NHWC.shape} and type {self.images_NHWC.dtype}; "
                "expected uint8 [N, H, W, C]"
            )
        if self.labels_N.shape != (len(self.images_NHWC),) or self.labels_N.dtype != np.int32:
            raise ValueError(
                f"{self.source}: labels have shape {self.labels_N.shape} and type {self.labels_N.dtype}; "
                f"expected int32 [{len(self.images_NHWC)}]"
            )
        if len(self) and not (self.labels_N.min() >= 0 and self.labels_N.max() < len(self.class_names)):
            wrong = int(np.flatnonzero((self.labels_N < 0) | (self.labels_N >= len(self.class_names)))[0])
            raise ValueError(
                f"{self.source}: label {self.labels_N[wrong]} of image {wrong} is out of range; "
                f"expected 0 to {len(self.class_names) - 1}"
            )

    def __len__(self) -> int:
        return len(self.images_NHWC)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width and channels of every image."""
        height, width, channels = self.images_NHWC.shape[1:]
        return height, width, channels

    def subset(self, index: np.ndarray) -> "Dataset":
        """The samples at these positions, copied."""
        return dataclasses.replace(self, images_NHWC=self.images_NHWC[index], labels_N=self.labels_N[index])

    def channel_moments(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of each channel over all pixels, in pixel units; a constant channel counts as 1.

        Exact: they come from a histogram of the 256 values.
        """
        values = np.arange(256)
        means, deviations = [], []
        for channel in range(self.images_NHWC.shape[-1]):
            counts = np.bincount(self.images_NHWC[..., channel].ravel(), minlength=256)
            mean = float((counts * values).sum() / counts.sum())
            means.append(mean)
            deviations.append(float(np.sqrt((counts * (values - mean) ** 2).sum() / counts.sum())) or 1.0)
        return tuple(means), tuple(deviations)


@dataclasses.dataclass(frozen=True, eq=False)
class Splits:
    """The training and test sets of one data set. ``test`` is None where the files hold none."""

    train: Dataset
    test: Dataset | None
