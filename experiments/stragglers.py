"""What waiting for the slowest replica costs, and what not waiting costs.

    python -m experiments.stragglers
    python -m experiments.stragglers --sigma 0.3 --slow-probability 0.01 --aggregate 14/16 --stale 2

First the time of a step on 1 to 4,096 replicas, whose latencies are drawn: synchronous (the slowest decides), the K
fastest of N (`--aggregate` of training), gradients that are applied late (`--stale` of training: a replica goes on
while at most that many updates are outstanding), and without any waiting. Then a small network is trained on the
shipped digits with each kind of update: its accuracy over the simulated seconds. Nothing is slow in truth, so this
takes less than a minute on a laptop. Writes ``step_times.csv``, ``training.csv``, ``stragglers.png`` and
``config.json``.
"""

import csv
import dataclasses
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from cnnjax import networks, partition, rundir
from cnnjax.config import TrainConfig
from cnnjax.datasets.digits import load_digits
from cnnjax.datasets.order import batches, epoch_order
from cnnjax.feed import Feed
from cnnjax.optim import OptimizerConfig, make_optimizer, make_schedule
from cnnjax.partition import Layout
from cnnjax.replicas import Aggregate, stale, stale_schedule
from cnnjax.step import Recipe
from cnnjax.strategy import compile_steps
from experiments.training import command_line

REPLICAS = tuple(4**power for power in range(7))
EVALUATE_EVERY = 10  # steps


@dataclasses.dataclass(frozen=True)
class Options:
    """Simulates replicas of uneven speed, and trains with updates that do not wait for the slowest."""

    median: float = 0.3
    """Median seconds that a replica takes for its share of a step."""
    sigma: float = 0.1
    """Standard deviation of the logarithm of those seconds (log-normal)."""
    slow_probability: float = 0.002
    """Probability that a replica is slow in a step, as when its machine pauses."""
    slow_factor: float = 8.0
    """How many times longer it then takes."""
    aggregate: str = "15/16"
    """K/N: each step takes the gradients of the K fastest of N replicas. The table of times keeps the same share."""
    stale: int = 4
    """Steps that gradients are applied late."""
    trials: int = 500
    """Simulated steps for each number of replicas."""
    train_steps: int = 150
    """Updates of each training."""
    batch_size: int = 128
    """Images a step, over all replicas."""
    lr: float = 0.1
    """Learning rate."""
    momentum: float = 0.0
    """Momentum. Late gradients act as momentum of their own, and with 0.9 on top a rate of 0.05 does not converge."""
    seed: int = 0
    """Decides latencies, initial weights and the order of images."""
    run_dir: str | None = None
    """Folder to write. Default: runs/stragglers-TIME."""

    def __post_init__(self) -> None:
        ranges = {
            "median": (self.median > 0, "above 0"),
            "sigma": (self.sigma >= 0, "0 or more"),
            "slow_probability": (0 <= self.slow_probability <= 1, "0 to 1"),
            "slow_factor": (self.slow_factor >= 1, "1 or more"),
            "trials": (self.trials >= 2, "2 or more"),
            "train_steps": (self.train_steps >= 1, "1 or more"),
        }
        for name, (ok, allowed) in ranges.items():
            if not ok:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}; allowed: {allowed}")
        self.train_config()  # checks the others
        self.shares()

    def train_config(self) -> TrainConfig:
        """The options that training has too."""
        return TrainConfig(aggregate=self.aggregate, stale=self.stale, batch_size=self.batch_size, lr=self.lr,
                           momentum=self.momentum, seed=self.seed, run_dir=self.run_dir)  # fmt: skip

    def shares(self) -> Aggregate:
        """Replicas of the training, of which some are kept."""
        kept, replicas = map(int, self.aggregate.split("/"))
        return Aggregate(kept, replicas, self.batch_size)

    def kept_of(self, replicas: int) -> int:
        """The share of ``--aggregate`` of another number of replicas, rounded up."""
        shares = self.shares()
        return -(-shares.kept * replicas // shares.replicas)


# ---------------------------------------------------------------------------------------------------------------------
# Time
# ---------------------------------------------------------------------------------------------------------------------


def latencies(options: Options, rng: np.random.Generator, steps: int, replicas: int) -> np.ndarray:
    """Seconds that each replica takes for each step, ``[steps, replicas]``."""
    seconds_TR = options.median * np.exp(options.sigma * rng.standard_normal((steps, replicas)))
    return np.where(rng.random((steps, replicas)) < options.slow_probability, options.slow_factor, 1.0) * seconds_TR


def aggregate_clock(seconds_TR: np.ndarray, kept: int) -> np.ndarray:
    """When each update happens, in seconds ``[T]``, if a step ends with the ``kept``-th fastest replica.

    The others give up and start the next step with the rest. With ``kept`` equal to the replicas it is a synchronous
    step.
    """
    return np.cumsum(np.partition(seconds_TR, kept - 1, axis=1)[:, kept - 1])


def stale_clock(seconds_TR: np.ndarray, late: int) -> np.ndarray:
    """When each update happens, in seconds ``[T]``, if a replica may be ``late`` steps ahead of the updates.

    An update waits for the gradients of all replicas; a replica starts step t when it is done with step t - 1, and
    update t - 1 - late has happened.
    """
    done_R, updates = np.zeros(seconds_TR.shape[1]), np.zeros(len(seconds_TR))
    for t, seconds_R in enumerate(seconds_TR):
        ready = updates[t - 1 - late] if t > late else 0.0
        done_R = np.maximum(done_R, ready) + seconds_R
        updates[t] = done_R.max()
    return updates


def asynchronous_seconds(seconds_TR: np.ndarray) -> float:
    """Seconds for as many gradients as there are replicas, if none ever waits."""
    return seconds_TR.shape[1] / float(np.sum(1 / seconds_TR.mean(0)))


def step_times(options: Options) -> list[dict[str, Any]]:
    """Mean seconds a step for each number of replicas, and the standard error of the synchronous one."""
    rows = []
    for replicas in REPLICAS:
        rng = np.random.default_rng([options.seed, replicas])
        seconds_TR = latencies(options, rng, options.trials, replicas)
        kept = options.kept_of(replicas)
        slowest_T = seconds_TR.max(1)
        rows.append({
            "replicas": replicas,
            "kept": kept,
            "synchronous_s": float(slowest_T.mean()),
            "standard_error_s": float(slowest_T.std(ddof=1) / np.sqrt(options.trials)),
            "aggregate_s": float(aggregate_clock(seconds_TR, kept)[-1] / options.trials),
            "stale_s": float(stale_clock(seconds_TR, options.stale)[-1] / options.trials),
            "asynchronous_s": asynchronous_seconds(seconds_TR),
        })  # fmt: skip
    return rows


# ---------------------------------------------------------------------------------------------------------------------
# Accuracy
# ---------------------------------------------------------------------------------------------------------------------


def train(options: Options, aggregate: Aggregate | None, late: int) -> list[tuple[int, float, float]]:
    """Trains on the digits; returns (step, test loss, test accuracy) every `EVALUATE_EVERY` steps and at the end."""
    splits = load_digits((8, 8, 1))
    config = OptimizerConfig("momentum", options.lr, options.momentum)
    schedule = make_schedule(config, options.train_steps)
    recipe = Recipe(
        networks.build_cnn("cnn2d_1layer_fullconnected_1layer", 10),
        stale(make_optimizer(config, options.train_steps), late), stale_schedule(schedule, late),
        seed=options.seed, scaling="unit", aggregate=aggregate,
    )  # fmt: skip
    layout = Layout(partition.make_mesh("data=1")[0])
    steps = compile_steps(recipe, layout, splits.train.image_shape)
    assert splits.test is not None
    with Feed(splits.test, batches(np.arange(len(splits.test)), len(splits.test)), layout) as feed:
        (test,) = feed
    state, curve = steps.init(), []
    epochs = (epoch_order(options.seed, epoch, len(splits.train)) for epoch in itertools.count())
    order = itertools.chain.from_iterable(batches(order_N, options.batch_size) for order_N in epochs)
    with Feed(splits.train, order, layout) as feed:
        for step, batch in enumerate(itertools.islice(feed, options.train_steps), start=1):
            state, _ = steps.train(state, batch)
            if step % EVALUATE_EVERY == 0 or step == options.train_steps:
                sums = jax.device_get(steps.evaluate(state, test))
                curve.append((step, float(sums["loss"] / sums["count"]), float(sums["correct"] / sums["count"])))
    return curve


def trainings(options: Options) -> list[dict[str, Any]]:
    """The curve of each kind of update, with the seconds that its steps would have taken."""
    shares = options.shares()
    rng = np.random.default_rng([options.seed, 0])
    seconds_TR = latencies(options, rng, options.train_steps, shares.replicas)
    kept, late = shares.kept, options.stale
    kinds = [
        ("synchronous", None, 0, aggregate_clock(seconds_TR, shares.replicas)),
        (
            f"aggregate {options.aggregate}",
            shares if kept < shares.replicas else None,
            0,
            aggregate_clock(seconds_TR, kept),
        ),
        (f"stale {late}", None, late, stale_clock(seconds_TR, late)),
    ]
    return [
        {
            "update": name,
            "step": step,
            "seconds": float(clock_T[step - 1]),
            "test_loss": loss,
            "test_accuracy": accuracy,
        }
        for name, aggregate, steps_late, clock_T in kinds
        for step, loss, accuracy in train(options, aggregate, steps_late)
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Output
# ---------------------------------------------------------------------------------------------------------------------


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """One line a row, with the keys as header."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def plot(path: Path, options: Options, times: list[dict[str, Any]], curves: list[dict[str, Any]]) -> None:
    """Seconds a step over the replicas, and test accuracy over simulated seconds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    names = {
        "synchronous_s": "synchronous",
        "aggregate_s": f"fastest {options.aggregate}",
        "stale_s": f"stale {options.stale}",
        "asynchronous_s": "asynchronous",
    }
    for column, name in names.items():
        left.plot([row["replicas"] for row in times], [row[column] for row in times], marker="o", label=name)
    left.set(xscale="log", xlabel="replicas", ylabel="seconds a step", ylim=(0, None))
    left.legend()
    for name in dict.fromkeys(row["update"] for row in curves):
        own = [row for row in curves if row["update"] == name]
        right.plot([row["seconds"] for row in own], [row["test_accuracy"] for row in own], marker=".", label=name)
    right.set(xlabel=f"simulated seconds, {options.shares().replicas} replicas", ylabel="test accuracy (digits)")
    right.legend()
    figure.savefig(path, dpi=120)


def run(options: Options) -> Path:
    """Simulates, trains, prints and writes; returns the folder."""
    try:
        import matplotlib  # noqa: F401 (before the work, since the plot comes last)
    except ImportError:
        raise ValueError("the plot needs matplotlib: pip install matplotlib") from None
    folder, _ = rundir.find_run("stragglers", options.train_config())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(options), indent=2) + "\n")

    print(f"seconds a step: median {options.median} s, sigma {options.sigma}, {options.slow_probability:.2%} of shares "
          f"{options.slow_factor:g} times slower; mean of {options.trials} simulated steps")  # fmt: skip
    times = step_times(options)
    late = f"stale {options.stale}"
    print(f"{'replicas':>8}  {'synchronous':>18}  {'K of N':>9}  {'seconds':>8}  {late:>9}  {'asynchronous':>12}")
    for row in times:
        print(f"{row['replicas']:>8}  {row['synchronous_s']:>9.3f} +- {row['standard_error_s']:.3f}  "
              f"{row['kept']:>4}/{row['replicas']:<4}  {row['aggregate_s']:>8.3f}  {row['stale_s']:>9.3f}  "
              f"{row['asynchronous_s']:>12.3f}")  # fmt: skip
    write_csv(folder / "step_times.csv", times)

    replicas = options.shares().replicas
    print(f"\ntraining on the shipped digits: {options.train_steps} steps of {options.batch_size}, "
          f"seed {options.seed}; the time is simulated, for {replicas} replicas", flush=True)  # fmt: skip
    curves = trainings(options)
    print(f"{'update':<18} {'seconds':>8} {'test loss':>10} {'test accuracy':>14} {'seconds to 90%':>15}")
    for name in dict.fromkeys(row["update"] for row in curves):
        own = [row for row in curves if row["update"] == name]
        reached = next((f"{row['seconds']:.1f}" for row in own if row["test_accuracy"] >= 0.9), "never")
        last = own[-1]
        print(f"{name:<18} {last['seconds']:>8.1f} {last['test_loss']:>10.4f} {last['test_accuracy']:>14.4f} "
              f"{reached:>15}")  # fmt: skip
    write_csv(folder / "training.csv", curves)
    plot(folder / "stragglers.png", options, times, curves)
    print(f"\nwritten to {folder}")
    return folder


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0, or 2 for a mistake in flags or files."""
    try:
        run(command_line(Options, "stragglers", sys.argv[1:] if arguments is None else arguments))
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
