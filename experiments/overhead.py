"""What the training loop costs over a bare Flax loop, and shard_map over jit: all in one run, in turns, medians.

    python -m experiments.overhead [--network cifar10_slim] [--batch-size 128] [--rounds 15] [--steps 20]

The bare loop is what one writes by hand: `flax.linen` layers, optax SGD with Nesterov momentum, one jitted function, a
batch that stays on the device, no augmentation, nothing measured. The package's loop gathers every batch from host
memory, augments, scales, weights its samples, computes the metrics and reads them.
"""

import dataclasses
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

from cnnjax import networks, partition
from cnnjax.augment import Augmentation
from cnnjax.datasets.base import Dataset
from cnnjax.datasets.order import batches, epoch_order
from cnnjax.feed import Feed
from cnnjax.optim import OptimizerConfig, make_optimizer, make_schedule
from cnnjax.step import Recipe
from cnnjax.strategy import compile_steps


@dataclasses.dataclass(frozen=True)
class Options:
    """Compares images a second of the package's loop with a bare Flax loop, and of its strategies with each other."""

    network: str = "cifar10_slim"
    """A sequential network: the bare loop knows no residual blocks."""
    batch_size: int = 128
    """Images a step."""
    rounds: int = 15
    """Turns that each loop takes."""
    steps: int = 20
    """Steps a turn."""


class BareCNN(nn.Module):
    """The layers of a network with Flax's own modules."""

    layers: networks.Network

    @nn.compact
    def __call__(self, x, train: bool):
        """Logits."""
        for layer in self.layers:
            match layer:
                case networks.Conv():
                    x = nn.Conv(layer.features, layer.kernel, layer.strides, layer.padding, use_bias=layer.use_bias)(x)
                case networks.BatchNorm():
                    x = nn.BatchNorm(not train, momentum=layer.momentum, epsilon=layer.epsilon,
                                     use_scale=layer.use_scale, use_bias=layer.use_bias)(x)  # fmt: skip
                case networks.Relu():
                    x = nn.relu(x)
                case networks.MaxPool():
                    x = nn.max_pool(x, layer.window, layer.strides, layer.padding)
                case networks.Flatten():
                    x = x.reshape(len(x), -1)
                case networks.Dropout():
                    x = nn.Dropout(layer.rate, deterministic=not train)(x)
                case networks.Dense():
                    x = nn.Dense(layer.features, use_bias=layer.use_bias)(x)
                case _:
                    raise ValueError(f"--network: the bare loop has no {type(layer).__name__}")
        return x


def bare_loop(network: networks.Network, images: np.ndarray, labels: np.ndarray) -> Callable[[int], float]:
    """Returns ``run(steps) -> seconds`` of the bare loop."""
    model, optimizer = BareCNN(network), optax.sgd(0.05, momentum=0.9, nesterov=True)
    x, y = jnp.asarray(images, jnp.float32) / 255, jnp.asarray(labels)
    variables = model.init(jax.random.key(0), x[:1], False)
    params, stats = variables["params"], variables.get("batch_stats", {})

    @jax.jit
    def step(params, stats, opt_state, key):
        def loss_fn(params):
            logits, new = model.apply({"params": params, "batch_stats": stats}, x, True,
                                      mutable=["batch_stats"], rngs={"dropout": key})  # fmt: skip
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), new.get("batch_stats", {})

        (loss, new_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), new_stats, opt_state, jax.random.fold_in(key, 0), loss

    state = [params, stats, optimizer.init(params), jax.random.key(0)]

    def run(steps: int) -> float:
        start = time.perf_counter()
        for _ in range(steps):
            *state[:], loss = step(*state)
        jax.block_until_ready(loss)
        return time.perf_counter() - start

    return run


def package_loop(
    network: networks.Network, dataset: Dataset, batch_size: int, mesh: str, strategy: str
) -> Callable[[int], float]:
    """Returns ``run(steps) -> seconds`` of the package's loop, with the default experiment's augmentation."""
    config = OptimizerConfig("nesterov", 0.05)
    recipe = Recipe(
        network, make_optimizer(config, 1000), make_schedule(config, 1000), augmentation=Augmentation(True, 4),
        scaling="unit",
    )  # fmt: skip
    layout = partition.Layout(partition.make_mesh(mesh)[0])
    steps = compile_steps(recipe, layout, dataset.image_shape, strategy)
    state = [steps.init()]

    def for_ever() -> Iterator:
        for epoch in itertools.count():
            yield from batches(epoch_order(0, epoch, len(dataset)), batch_size)

    def run(count: int) -> float:
        start = time.perf_counter()
        with Feed(dataset, for_ever(), layout) as feed:
            pending = None
            for batch in itertools.islice(feed, count):
                state[0], metrics = steps.train(state[0], batch)
                if pending is not None:
                    jax.device_get(pending)
                pending = metrics
            jax.block_until_ready(state[0])
        return time.perf_counter() - start

    return run


def main(options: Options) -> None:
    """Measures and prints."""
    network = networks.build_cnn(options.network, 10)
    shape = networks.default_input_shape(options.network)
    partition.request_cpu_devices(2)
    rng = np.random.default_rng(0)
    count = 40 * options.batch_size
    dataset = Dataset(
        "noise", rng.integers(0, 256, (count, *shape), np.uint8), rng.integers(0, 10, count).astype(np.int32),
        tuple(map(str, range(10))), "memory",
    )  # fmt: skip
    size = options.batch_size
    bare = "bare Flax loop"
    loops = {bare: bare_loop(network, dataset.images_NHWC[:size], dataset.labels_N[:size])} | {
        f"{strategy} {mesh}": package_loop(network, dataset, size, mesh, strategy)
        for strategy, mesh in (("jit", "data=1"), ("jit", "data=2"), ("shard_map", "data=2"))
    }
    for loop in loops.values():
        loop(3)
    rates: dict[str, list[float]] = {name: [] for name in loops}
    for turn in range(options.rounds):
        for name, loop in list(loops.items())[:: 1 if turn % 2 else -1]:
            rates[name].append(size * options.steps / loop(options.steps))
    print(f"{options.network}, batch {size}, jax {jax.__version__}, {jax.devices()[0].device_kind}")
    for name, values in rates.items():
        low, middle, high = statistics.quantiles(values, n=4)
        print(f"{name:<16} {middle:8.0f} images/s (quartiles {low:.0f} to {high:.0f}, {len(values)} turns)")
    for name, base in (("jit data=1", bare), ("shard_map data=2", "jit data=2")):
        ratios = [b / a for a, b in zip(rates[base], rates[name], strict=True)]
        print(f"ratio {name} / {base}: {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    try:
        main(tyro.cli(Options, description=__doc__))
    except ValueError as error:
        sys.exit(f"error: {error}")
