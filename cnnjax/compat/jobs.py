"""Jobs: what every framework is given, and the results that come back. See `runners/protocol.py` for the files."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cnnjax import augment, model, networks
from cnnjax.datasets.base import Dataset
from cnnjax.datasets.order import batches, epoch_order
from cnnjax.networks import Network, Shape

SCALINGS = ("none", "unit", "standardize", "per_image", "minmax")


def describe(network: Network, input_shape: Shape, prefix: str = "") -> list[dict[str, Any]]:
    """A network as JSON: its records with every shape and padding worked out.

    Args:
        network: Layer records.
        input_shape: Of what reaches the first of them, without the batch.
        prefix: Of the names.

    Returns:
        One dict a layer: ``kind``, ``name``, ``input_shape``, ``output_shape``, the fields of the record; ``pads``
        ``[[top, bottom], [left, right]]`` where it has a window; ``body`` and ``shortcut`` as such lists.
    """
    layers, shape = [], tuple(input_shape)
    for name, record in networks.named_layers(network):
        after = _output_shape(record, shape)
        layer: dict[str, Any] = {"kind": type(record).__name__, "name": prefix + name}
        layer |= {"input_shape": list(shape), "output_shape": list(after)}
        match record:
            case networks.Residual():
                for part in ("body", "shortcut"):
                    layer[part] = describe(getattr(record, part), shape, f"{prefix}{name}/{part}/")
            case _:
                layer |= dataclasses.asdict(record)
                layer.pop("padding", None)
        match record:
            case networks.Conv():
                layer["pads"] = networks.pad_widths(shape[:2], record.kernel, record.strides, record.padding)  # type: ignore[arg-type]
            case networks.MaxPool():
                layer["pads"] = networks.pad_widths(shape[:2], record.window, record.strides, record.padding)  # type: ignore[arg-type]
            case networks.AvgPool():
                layer["window"] = list(record.window or shape[:2])
            case _:
                pass
        layers.append(layer)
        shape = after
    return layers


def records(layers: Sequence[Mapping[str, Any]]) -> Network:
    """Undoes `describe`, but for the padding, which stays worked out."""
    network = []
    for layer in layers:
        kind = getattr(networks, layer["kind"])
        values: dict[str, Any] = {}
        for field in dataclasses.fields(kind):
            value = layer["pads"] if field.name == "padding" else layer[field.name]
            if kind is networks.Residual:
                value = records(value)
            elif isinstance(value, dict):
                value = networks.Init(**value)
            values[field.name] = _tuples(value) if isinstance(value, list) else value
        network.append(kind(**values))
    return tuple(network)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _output_shape(record: networks.Layer, shape: Shape) -> Shape:
    if len(shape) == 3:
        return networks.output_shape((record,), shape)
    return (record.features,) if isinstance(record, networks.Dense) else shape


def without_dropout(network: Network) -> Network:
    """The same layers, under the same names, with every dropout rate 0."""

    def quiet(record: networks.Layer) -> networks.Layer:
        match record:
            case networks.Dropout():
                return networks.Dropout(0.0)
            case networks.Residual():
                return networks.Residual(without_dropout(record.body), without_dropout(record.shortcut))
            case _:
                return record

    return tuple(map(quiet, network))


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """Update rule and its constants, as in `cnnjax.optim.OptimizerConfig`."""

    name: str = "nesterov"  # sgd, momentum, nesterov, adam
    momentum: float = 0.9
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to train, for all frameworks alike.

    Attributes:
        name: Of the network.
        network: Layer records.
        train: Images to train on.
        test: Images to predict, or None.
        scaling: One of `SCALINGS`.
        batch_size: Images a step.
        learning_rates: One a step; their number is that of the steps.
        optimizer: Update rule.
        seed: Of initial weights, order and dropout.
        dtype: ``float32`` or ``float64``.
        evaluate: Whether to predict the test images after each epoch.
    """

    name: str
    network: Network
    train: Dataset
    test: Dataset | None
    scaling: str
    batch_size: int
    learning_rates: Sequence[float]
    optimizer: Optimizer = Optimizer()
    seed: int = 0
    dtype: str = "float32"
    evaluate: bool = True


def write(plan: Plan, path: Path, weights: Mapping[str, np.ndarray] | None = None) -> None:
    """Writes the job directory, which must not exist yet.

    Args:
        plan: What to train.
        path: The directory.
        weights: Initial weights by name; where None, those that the plan's seed gives.

    Raises:
        ValueError: If the scaling or the dtype is unknown, or the network cannot take the images.
    """
    if plan.scaling not in SCALINGS:
        raise ValueError(f"--scaling is {plan.scaling!r}; allowed: {', '.join(SCALINGS)}")
    shape = plan.train.image_shape
    layers = describe(plan.network, shape)
    order_TB, epoch_ends = sample_order(len(plan.train), plan.batch_size, len(plan.learning_rates), plan.seed)
    test = plan.test if plan.test is not None else plan.train.subset(np.arange(0))
    factor, offset = np.ones(shape[-1]), np.zeros(shape[-1])
    if plan.scaling == "unit":
        factor /= 255
    elif plan.scaling == "standardize":
        mean, std = map(np.asarray, plan.train.channel_moments())
        factor, offset = 1 / std, -mean / std
    job = {
        "name": plan.name, "dataset": plan.train.name, "network": layers, "classes": layers[-1]["output_shape"][0],
        "input_shape": shape, "dtype": plan.dtype, "seed": plan.seed, "optimizer": dataclasses.asdict(plan.optimizer),
        "epoch_ends": epoch_ends, "evaluate": plan.evaluate and len(test) > 0,
    }  # fmt: skip
    arrays = {
        "images": _stored(plan, plan.train), "labels": plan.train.labels_N, "test_images": _stored(plan, test),
        "test_labels": test.labels_N, "order": order_TB,
        "learning_rates": np.asarray(plan.learning_rates, np.float64),
    }  # fmt: skip
    path.mkdir(parents=True)
    for name, array in arrays.items():
        np.save(path / f"{name}.npy", array)
    np.savez(path / "scaling.npz", factor=factor, offset=offset)
    weights = initial_weights(plan.network, shape, plan.seed) if weights is None else weights
    np.savez(path / "initial_weights.npz", **weights)  # type: ignore[arg-type]
    (path / "job.json").write_text(json.dumps(job, indent=1) + "\n")


def _stored(plan: Plan, images: Dataset) -> np.ndarray:
    """Pixels as the files of a job have them: untouched, unless each image is scaled by itself."""
    if plan.scaling not in ("per_image", "minmax"):
        return images.images_NHWC
    with jax.enable_x64(True):
        chunks = np.array_split(images.images_NHWC, max(1, len(images) // 1000))
        scaled = [augment.scale(jnp.asarray(chunk, jnp.float64), plan.scaling) for chunk in chunks]  # type: ignore[arg-type]
        return np.concatenate(scaled).astype(plan.dtype)


def sample_order(size: int, batch_size: int, steps: int, seed: int) -> tuple[np.ndarray, list[int]]:
    """The images of each step, int32 ``[steps, batch_size]`` filled up with -1, and the steps at which epochs end."""
    rows: list[np.ndarray] = []
    ends: list[int] = []
    while len(rows) < steps:
        for batch in batches(epoch_order(seed, len(ends), size), batch_size):
            rows.append(np.where(batch.weight > 0, batch.index, -1))
        ends.append(min(len(rows), steps))
    return np.stack(rows[:steps]).astype(np.int32), ends


def initial_weights(network: Network, input_shape: Shape, seed: int) -> dict[str, np.ndarray]:
    """Those that a training of cnnjax with this seed starts from, float32 arrays by path, statistics included."""
    variables = model.init(jax.random.fold_in(jax.random.key(seed), 0), network, input_shape)
    return flat(variables["params"]) | flat(variables["batch_stats"])


def flat(tree: Any) -> dict[str, np.ndarray]:
    """A tree of arrays as a dict by path, such as ``residual_1/body/conv_1/kernel``."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {"/".join(key.key for key in path): np.asarray(leaf) for path, leaf in leaves}


def filled(tree: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """A tree like ``tree`` with the arrays of `flat`."""

    def value(path: Any, leaf: Any) -> Any:
        return jnp.asarray(arrays["/".join(key.key for key in path)], leaf.dtype)

    return jax.tree_util.tree_map_with_path(value, tree)
