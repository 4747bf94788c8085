"""What every reader returns: images, labels, class names. NumPy only."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

import numpy as np

Task = Literal["classification", "regression"]
PixelOrder = Literal["channels_last", "channels_first"]
Shape = tuple[int, int, int]


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """Labelled images, held in memory as the files have them.

    Attributes:
        name: Data set name as results files show it, such as ``cifar10``.
        images_NHWC: Pixels, uint8 ``[N, H, W, C]``.
        labels_N: Class of each image, int32 ``[N]``, from 0 to ``len(class_names) - 1``; or, for regression, the finite
            number that belongs to each image, float32 ``[N]``.
        class_names: One name a class; empty for regression.
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
        kind = np.int32 if self.class_names else np.float32
        if self.labels_N.shape != (len(self.images_NHWC),) or self.labels_N.dtype != kind:
            raise ValueError(
                f"{self.source}: labels have shape {self.labels_N.shape} and type {self.labels_N.dtype}; "
                f"expected {np.dtype(kind).name} [{len(self.images_NHWC)}]"
                + ("" if self.class_names else ", as there are no class names")
            )
        if not self.class_names:
            if not np.isfinite(self.labels_N).all():
                wrong = int(np.flatnonzero(~np.isfinite(self.labels_N))[0])
                raise ValueError(f"{self.source}: label of image {wrong} is {self.labels_N[wrong]}; expected a number")
            return
        if len(self) and not (self.labels_N.min() >= 0 and self.labels_N.max() < len(self.class_names)):
            wrong = int(np.flatnonzero((self.labels_N < 0) | (self.labels_N >= len(self.class_names)))[0])
            raise ValueError(
                f"{self.source}: label {self.labels_N[wrong]} of image {wrong} is out of range; "
                f"expected 0 to {len(self.class_names) - 1}"
            )

    def __len__(self) -> int:
        return len(self.images_NHWC)

    @property
    def task(self) -> Task:
        """What the labels are for: to be told apart, or to be approached as numbers."""
        return "classification" if self.class_names else "regression"

    @property
    def image_shape(self) -> Shape:
        """Height, width and channels of every image."""
        height, width, channels = self.images_NHWC.shape[1:]
        return height, width, channels

    def subset(self, index: np.ndarray) -> "Dataset":
        """The samples at these positions, copied."""
        return dataclasses.replace(self, images_NHWC=self.images_NHWC[index], labels_N=self.labels_N[index])

    def written_labels(self, predicted_N: np.ndarray) -> list:
        """Predictions as ``predictions.csv`` has them.

        A class is written by its name where all names are whole numbers, else by its number; for regression, the value.
        """
        try:
            names = [int(name) for name in self.class_names]
        except ValueError:
            names = []
        return [names[value] if names and value < len(names) else value for value in predicted_N.tolist()]

    def as_regression(self) -> "Dataset":
        """The same images, with the class names as the numbers that belong to them.

        Raises:
            ValueError: If they are no numbers.
        """
        try:
            values = np.array([float(name) for name in self.class_names], np.float32)
        except ValueError:
            names = ", ".join(self.class_names[:3])
            raise ValueError(
                f"--task regression: the classes of {self.source} are {names} ...; expected numbers"
            ) from None
        return dataclasses.replace(self, labels_N=values[self.labels_N], class_names=()) if self.class_names else self

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
    """The parts of one data set.

    Attributes:
        train: Training set.
        test: Test set; None where the files hold none.
        unlabelled_NHWC: Images without labels, uint8, which can only be predicted; None where the files hold none.
        notes: Sentences that every output should repeat.
        said: Sentences on what was found in the files, to be printed once.
        read_as: What was found, as values of the options that would say it: see `ReadOptions.flags`.
        pixel_scale: ``(factor, offset)`` of the `cnnjax.datasets.pixels.Scale` that made pixels of a file's numbers;
            None where the files hold pixels.
    """

    train: Dataset
    test: Dataset | None
    unlabelled_NHWC: np.ndarray | None = None
    notes: tuple[str, ...] = ()
    said: tuple[str, ...] = ()
    read_as: Mapping[str, str] = dataclasses.field(default_factory=dict)
    pixel_scale: tuple[float, float] | None = None


@dataclasses.dataclass(frozen=True)
class ReadOptions:
    """What a user can say of files that do not say it themselves; None leaves it to the reader.

    Attributes:
        image_shape: Height, width, channels.
        pixel_order: Whether the channels of a pixel lie together, or each channel is an image of its own.
        label_column: Name of the column with the labels; or ``first``, ``last``, ``none``.
        task: Whether labels are classes or numbers.
    """

    image_shape: Shape | None = None
    pixel_order: PixelOrder | None = None
    label_column: str | None = None
    task: Task | None = None

    def flags(self) -> dict[str, str]:
        """Those that are given, as they are written on the command line."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        return {name: shape_text(value) if name == "image_shape" else value for name, value in given.items()}


def shape_text(shape: tuple[int, ...]) -> str:
    """A shape as ``--image-shape`` has it, such as ``28,28,1``."""
    return ",".join(map(str, shape))
