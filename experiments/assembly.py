"""From options and data to what is trained: the network, its loss and its optimiser."""

import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from cnnjax import datasets, networks, partition
from cnnjax.augment import Augmentation
from cnnjax.config import TrainConfig, flag, parse_aggregate, parse_class_weights, parse_image_shape
from cnnjax.datasets.base import Dataset, Splits
from cnnjax.datasets.order import num_batches, split_validation
from cnnjax.losses import Objective
from cnnjax.optim import OptimizerConfig, make_optimizer, make_schedule
from cnnjax.partition import Layout
from cnnjax.replicas import Aggregate, stale, stale_schedule
from cnnjax.step import Recipe

MODEL_FILE = "model.json"

Moments = tuple[tuple[float, ...], tuple[float, ...]]


@dataclasses.dataclass(frozen=True)
class Facts:
    """What a network has of the data that it is trained on; ``model.json`` of a run, which predicting needs.

    Attributes:
        dataset: Its name.
        samples: Training images.
        image_shape: ``(height, width, channels)`` of the images.
        class_names: Of the classes; empty for regression.
        class_counts: Training images of each class.
        label_moments: Mean and standard deviation of the training labels, for regression.
        moments: Mean and deviation of each channel of the training images, in pixel units, where they are used.
        pixel_scale: ``(factor, offset)`` that make pixels of a file's numbers, as `cnnjax.datasets.pixels.Scale`.
    """

    dataset: str
    samples: int
    image_shape: tuple[int, int, int]
    class_names: tuple[str, ...]
    class_counts: tuple[int, ...]
    label_moments: tuple[float, float] | None
    moments: Moments | None
    pixel_scale: tuple[float, float] | None

    @classmethod
    def of(cls, config: TrainConfig, training: Dataset, splits: Splits) -> "Facts":
        """Reads them off the training images."""
        is_class = training.task == "classification"
        labels_N = training.labels_N
        counts = np.bincount(labels_N, minlength=len(training.class_names)).tolist() if is_class else ()
        moments = config.scaling == "standardize" or config.cutout
        return cls(
            dataset=training.name,
            samples=len(training),
            image_shape=training.image_shape,
            class_names=training.class_names,
            class_counts=tuple(counts),
            # Labels that are all the same have no deviation to count in.
            label_moments=None
            if is_class
            else (float(labels_N.mean(dtype=float)), float(labels_N.std(dtype=float)) or 1),
            moments=training.channel_moments() if moments else None,
            pixel_scale=splits.pixel_scale,
        )

    def to_json(self) -> str:
        """As a JSON object."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str) -> "Facts":
        """Reads what `to_json` wrote.

        Raises:
            ValueError: If the text is not such an object; names ``source``.
        """
        try:
            return cls(**{name: _tuples(value) for name, value in json.loads(text).items()})
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{source}: not the facts of a run: {error}") from None


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def make_layout(config: TrainConfig) -> tuple[Layout, str]:
    """The layout that the flags ask for, and one line that says what it runs on.

    Raises:
        ValueError: If there is no such layout here, or the strategy does not know it.
    """
    mesh, line = partition.make_mesh(config.mesh)
    layout = Layout(
        mesh, config.microbatches, strict=config.strict_sharding, bn_scope=config.bn_scope,
        stages=partition.parse_stages(config.stages),
    )  # fmt: skip
    partition.check_layout(config.strategy, layout)
    return layout, line


def read_data(
    config: TrainConfig,
    fill: Callable[[str], dict[str, Any]],
    default_data: str,
    default_shape: tuple[int, int, int],
    quiet: bool,
) -> tuple[datasets.Found, TrainConfig]:
    """The data, and the options with those that depend on it filled in.

    Args:
        config: Options.
        fill: Data set name to the options that are still open then.
        default_data: Data set to look for where ``--data`` is not given.
        default_shape: Shape of the shipped digits where nothing else is said.
        quiet: Whether to leave out the progress bar of a download.

    Raises:
        FileNotFoundError: If the data is not there.
        ValueError: If it cannot be read.
    """
    read_options = datasets.ReadOptions(
        parse_image_shape(config.image_shape), config.pixel_order, config.label_column, config.task
    )
    found = datasets.load(
        config.data, default=default_data, image_shape=default_shape, options=read_options, quiet=quiet
    )
    options = {**fill(found.splits.train.name), **found.splits.read_as}
    if config.crop_to is not None:
        options["crop_padding"] = 0  # one crop or the other
    still_open = {name: value for name, value in options.items() if getattr(config, name) in (None, "auto")}
    return found, dataclasses.replace(config, **still_open)


def choose(config: TrainConfig, splits: Splits) -> tuple[Dataset, Dataset]:
    """The training set and the validation set.

    Raises:
        ValueError: If there is nothing to validate on; names the flag.
    """
    training, validation = splits.train, splits.test
    if config.validation_split:
        try:
            kept, held_out = split_validation(len(training), config.validation_split, config.seed)
        except ValueError as error:
            raise ValueError(f"--validation-split is {config.validation_split}: {error}") from None
        return training.subset(kept), training.subset(held_out)
    if validation is None:
        why = "".join(f" ({note})" for note in splits.notes)
        raise ValueError(f"--data {training.source} has no test images{why}: give --validation-split, such as 0.1")
    return training, validation


def input_shape(config: TrainConfig, image_shape: tuple[int, int, int]) -> tuple[int, int, int]:
    """Shape in which images reach the network, after ``--crop-to``.

    Raises:
        ValueError: If the images are smaller than that.
    """
    height, width, channels = image_shape
    if config.crop_to is None:
        return image_shape
    if config.crop_to > min(height, width):
        raise ValueError(f"--crop-to is {config.crop_to}; allowed: 1 to {min(height, width)}, the images' size")
    return config.crop_to, config.crop_to, channels


def outputs(config: TrainConfig, facts: Facts) -> int:
    """Outputs of the network: one a class, or one number.

    Raises:
        ValueError: If ``--classes`` is below those of the data.
    """
    if facts.label_moments is not None:
        return 1
    in_data = len(facts.class_names)
    classes = config.classes or in_data
    if classes < in_data:
        raise ValueError(f"--classes is {classes}, but {facts.dataset} has {in_data}; allowed: {in_data} or more")
    return classes


def class_weights(config: TrainConfig, facts: Facts) -> tuple[float, ...] | None:
    """What ``--class-weights`` asks for; ``balanced`` is images / (classes * images of the class), as in scikit-learn.

    Raises:
        ValueError: If there is not one number a class.
    """
    weights, classes = parse_class_weights(config.class_weights), outputs(config, facts)
    if isinstance(weights, str):
        counts = np.zeros(classes)
        counts[: len(facts.class_counts)] = facts.class_counts
        return tuple((facts.samples / (np.count_nonzero(counts) * np.maximum(counts, 1))).tolist())
    if weights is not None and len(weights) != classes:
        raise ValueError(f"--class-weights has {len(weights)} numbers, but there are {classes} classes")
    return weights


def make_network(config: TrainConfig, facts: Facts) -> networks.Network:
    """The layers, which must take the images.

    Raises:
        ValueError: If they do not.
    """
    network = networks.build_cnn(config.network, outputs(config, facts))
    height, width, channels = input_shape(config, facts.image_shape)
    try:
        networks.output_shape(network, (height, width, channels))
    except ValueError as error:
        images = f"{height}x{width}x{channels} images of {facts.dataset}"
        if config.crop_to is not None:
            images += f" after --crop-to {config.crop_to}"
        raise ValueError(f"--network {config.network} cannot take the {images}: {error}") from None
    return network


def make_recipe(config: TrainConfig, facts: Facts) -> Recipe:
    """Network, loss and optimiser.

    Raises:
        ValueError: If options and data do not fit together; names the flag.
    """
    for name in ("label_smoothing", "class_weights", "classes"):
        if facts.label_moments is not None and getattr(config, name):
            raise ValueError(f"{flag(name)} is {getattr(config, name)}, but the labels are numbers, not classes")
    if config.batch_size == 1 and config.mixup:
        raise ValueError("--batch-size is 1, but --mixup mixes images of a batch; allowed: 2 or more")
    network = make_network(config, facts)
    optimizer, total_steps = _optimizer(config, num_batches(facts.samples, config.batch_size))
    mean, std = facts.moments or (None, None)
    standardize = config.scaling == "standardize"
    augmentation = Augmentation(
        config.flip == "on", config.crop_padding or 0, config.crop_to, config.brightness, config.contrast,
        config.translate, config.cutout, mean or (0.0,),
    )  # fmt: skip
    weights = class_weights(config, facts)
    return Recipe(
        network=network,
        optimizer=stale(make_optimizer(optimizer, total_steps), config.stale),
        schedule=stale_schedule(make_schedule(optimizer, total_steps), config.stale),
        seed=config.seed,
        augmentation=augmentation,
        scaling=config.scaling,
        mean=mean if standardize else None,
        std=std if standardize else None,
        objective=Objective(config.label_smoothing, weights, facts.label_moments, config.mixup, config.flip_test),
        l2=config.weight_decay if config.weight_decay_kind == "loss" else 0.0,
        clip_norm=config.clip_norm,
        ema=config.ema,
        aggregate=Aggregate(*shares, config.batch_size) if (shares := parse_aggregate(config.aggregate)) else None,
        dtype=jnp.float64 if config.x64 else jnp.dtype(config.dtype),
        param_dtype=jnp.float64 if config.x64 else jnp.float32,
    )


def _optimizer(config: TrainConfig, epoch_steps: int) -> tuple[OptimizerConfig, int]:
    """The optimiser's options, and the steps that its schedule spans."""
    total_steps = (config.epochs or 1) * epoch_steps
    shared = {f.name for f in dataclasses.fields(OptimizerConfig)} & {f.name for f in dataclasses.fields(TrainConfig)}
    warmup_steps = round(config.warmup_epochs * epoch_steps)
    if warmup_steps >= total_steps:
        raise ValueError(f"--warmup-epochs is {config.warmup_epochs}; allowed: below --epochs, {config.epochs}")
    if config.schedule == "onecycle" and total_steps < 4:
        raise ValueError(f"--schedule onecycle needs at least 4 steps, but --epochs {config.epochs} has {total_steps}")
    try:
        optimizer = OptimizerConfig(
            **{name: getattr(config, name) for name in shared},
            warmup_steps=warmup_steps,
            adjustable=config.plateau > 0,
            decay_steps=max(round(config.decay_epochs * epoch_steps), 1) if config.schedule == "exponential" else None,
        )
    except ValueError as error:
        raise ValueError(re.sub(rf"\b({'|'.join(shared)})\b", lambda name: flag(name[0]), str(error))) from None
    return optimizer, total_steps


def assemble(config: TrainConfig, splits: Splits) -> tuple[Recipe, Dataset, Dataset]:
    """Recipe, training set and validation set.

    Raises:
        ValueError: If options and data do not fit together; names the flag.
    """
    training, validation = choose(config, splits)
    return make_recipe(config, Facts.of(config, training, splits)), training, validation
