"""Does a layout change the numbers? Trains each layout from the same seed and compares it with one device.

    python -m experiments.equivalence --x64
    python -m experiments.equivalence --network resnet18_cifar --steps 3 --layouts "data=8;fsdp=4/shard_map;data=4/3"

Everything that could depend on the layout is on: flips, crops, brightness, contrast, dropout, label smoothing,
momentum, weight decay, a moving average, batch norm, and a padded batch in every epoch. Exit codes: 0 every layout
agrees, 1 some layout does not, 2 a mistake in flags or data.
"""

import dataclasses
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np

from cnnjax import compile_cache, datasets, networks, partition
from cnnjax.augment import Augmentation
from cnnjax.config import TrainConfig
from cnnjax.datasets.base import Dataset
from cnnjax.datasets.order import batches, epoch_order
from cnnjax.feed import Feed
from cnnjax.losses import Objective
from cnnjax.optim import OptimizerConfig, make_optimizer, make_schedule
from cnnjax.partition import Layout
from cnnjax.step import Recipe, TrainState
from cnnjax.strategy import compile_steps
from experiments.training import command_line

STRATEGIES = get_args(get_type_hints(TrainConfig)["strategy"])
TOLERANCE_X64 = 1e-9  # of every column
TOLERANCE = 1e-5  # of the first loss; float32 rounding then grows from step to step


@dataclasses.dataclass(frozen=True)
class Options:
    """Trains each layout for some steps and prints how far its numbers are from those of one device."""

    network: str = "cifar10_slim"
    """Name of the network; `python -m cnnjax.networks` lists them."""
    data: str | None = None
    """Data set, as for training. Default: $CNNJAX_DATA, then data/downloads/, then a download of CIFAR-10, then the
    shipped digits."""
    layouts: str | None = None
    """MESH[/STRATEGY][/MICROBATCHES], several with ; between them, such as "data=8;fsdp=4/shard_map;data=4/3".
    Default: every axis and strategy, as far as the devices reach."""
    x64: bool = False
    """Compute in float64, where every number must agree to 1e-9; in float32 only the first loss is judged, to 1e-5."""
    steps: int = 20
    """Updates."""
    batch_size: int = 100
    """Images a step."""
    lr: float = 0.01
    """Peak learning rate. The higher it is, the faster rounding grows from step to step: at 0.05, 20 images a step, 20
    steps of resnet18_cifar bring 1e-16 to 1e-9."""
    seed: int = 0
    """Decides initial weights, the order of images, augmentation and dropout."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}; allowed: 1 or more")
        if not 0 < self.lr < float("inf"):
            raise ValueError(f"--lr is {self.lr}; allowed: above 0")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"--seed is {self.seed}; allowed: 0 to 4294967295")


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to run the same training: what ``--mesh``, ``--strategy`` and ``--microbatches`` would say."""

    mesh: str
    strategy: str = "jit"
    microbatches: int = 1

    def __str__(self) -> str:
        return "/".join([self.mesh, self.strategy, *([str(self.microbatches)] if self.microbatches > 1 else [])])

    @property
    def devices(self) -> int:
        """Devices that it needs; 1 where an axis takes all that are left."""
        return int(np.prod([max(size, 1) for size in partition.parse_mesh(self.mesh).values()]))

    @property
    def one_device(self) -> "Case":
        """What it is compared with: the same micro-batches, whose batch-norm statistics are apart."""
        return Case("data=1", microbatches=self.microbatches)

    def layout(self) -> Layout:
        """Raises `ValueError` where there are too few devices, or the strategy does not know an axis."""
        layout = Layout(partition.make_mesh(self.mesh)[0], self.microbatches)
        partition.check_layout(self.strategy, layout)
        return layout


def default_cases() -> list[Case]:
    """Every axis, strategy and kind of micro-batch, on at most 8 devices."""
    jit = ("data=8", "fsdp=4", "model=4", "space=2", "data=2,model=2", "data=2,space=2", "data=2,fsdp=2,model=2")
    cases = [Case(mesh) for mesh in jit]
    cases += [Case(mesh, "shard_map") for mesh in ("data=4", "fsdp=4", "data=2,fsdp=2")]
    cases += [Case("data=4", "pmap"), Case("data=4", microbatches=3)]
    if "pipe" in partition.AXES:
        pipes = ("pipe=2", "pipe=3", "data=2,pipe=2", "data=2,model=2,pipe=2")
        cases += [Case(mesh, microbatches=4) for mesh in pipes]
    return cases


def parse_cases(text: str) -> list[Case]:
    """Reads ``--layouts``.

    Raises:
        ValueError: Names the part that cannot be read and what is allowed.
    """
    cases = []
    for part in filter(None, map(str.strip, text.split(";"))):
        mesh, *more = (word.strip() for word in part.split("/"))
        strategies = [word for word in more if word in STRATEGIES]
        microbatches = [int(word) for word in more if word.isdecimal() and int(word) >= 1]
        if len(more) != len(strategies) + len(microbatches) or len(strategies) > 1 or len(microbatches) > 1:
            raise ValueError(
                f"--layouts: {part!r} is not MESH[/STRATEGY][/MICROBATCHES], with a strategy of "
                f"{', '.join(STRATEGIES)} and 1 micro-batch or more"
            )
        partition.parse_mesh(mesh)
        cases.append(Case(mesh, (strategies or ["jit"])[0], (microbatches or [1])[0]))
    if not cases:
        raise ValueError(f"--layouts is {text!r}; allowed: MESH[/STRATEGY][/MICROBATCHES], several with ; between")
    return cases


# ---------------------------------------------------------------------------------------------------------------------
# Training and comparing; the tests use these too
# ---------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is trained, wherever it runs."""

    recipe: Recipe
    images: Dataset
    evaluated: Dataset
    batch_size: int
    steps: int


def make_problem(
    network: networks.Network, train: Dataset, evaluated: Dataset, batch_size: int, steps: int, seed: int = 0,
    lr: float = 0.01,
) -> Problem:  # fmt: skip
    """A training with everything switched on, in float64 if ``jax_enable_x64`` is set, else in float32."""
    config = OptimizerConfig("nesterov", lr, schedule="cosine", warmup_steps=steps // 10, weight_decay=5e-4)
    dtype = jnp.float64 if jax.config.jax_enable_x64 else jnp.float32  # type: ignore[attr-defined]
    mean, std = train.channel_moments()
    recipe = Recipe(
        network, make_optimizer(config, steps + 1), make_schedule(config, steps + 1), seed=seed,
        augmentation=Augmentation(True, 2, brightness=20.0, contrast=(0.7, 1.3)), scaling="standardize",
        mean=mean, std=std, objective=Objective(label_smoothing=0.1), ema=0.9, dtype=dtype, param_dtype=dtype,
    )  # fmt: skip
    return Problem(recipe, train, evaluated, batch_size, steps)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a training gave: a loss and a norm of the gradients a step, and an evaluation of the state at the end."""

    losses_T: np.ndarray
    norms_T: np.ndarray
    state: TrainState
    evaluation: np.ndarray  # loss, hits and samples
    predicted_N: np.ndarray
    compile_s: float
    train_s: float


def train(problem: Problem, case: Case) -> Outcome:
    """Trains from the seed.

    Raises:
        ValueError: If the devices or the strategy do not allow the layout.
    """
    layout = case.layout()
    steps = compile_steps(problem.recipe, layout, problem.images.image_shape, case.strategy)
    state, results, compile_s, train_s = steps.init(), [], 0.0, 0.0
    step: Callable[..., Any] | None = None
    for batch in itertools.islice(_batches(problem, layout), problem.steps):
        if step is None:
            start = time.perf_counter()
            step = steps.train.lower(state, batch).compile()
            compile_s = time.perf_counter() - start
        start = time.perf_counter()
        state, metrics = jax.block_until_ready(step(state, batch))
        train_s += time.perf_counter() - start
        results.append(jax.device_get(metrics))
    measures = (*problem.recipe.objective.measures, "count")
    evaluation, predicted = np.zeros(len(measures)), []
    place = layout.rows(problem.batch_size)
    with Feed(problem.evaluated, batches(np.arange(len(problem.evaluated)), problem.batch_size), layout) as feed:
        for batch in feed:
            sums = jax.device_get(steps.evaluate(state, batch))
            evaluation += [sums[name] for name in measures]
            predicted.append(sums["predicted"][place >= 0][np.argsort(place[place >= 0])])
    losses_T = np.array([float(one["loss"]) / float(one["count"]) for one in results])
    norms_T = np.array([float(one["grad_norm"]) for one in results])
    predicted_N = np.concatenate(predicted)[: len(problem.evaluated)]
    return Outcome(losses_T, norms_T, jax.device_get(state), evaluation, predicted_N, compile_s, train_s)


def _batches(problem: Problem, layout: Layout) -> Iterator[dict[str, jax.Array]]:
    for epoch in itertools.count():
        order_N = epoch_order(problem.recipe.seed, epoch, len(problem.images))
        mixup = bool(problem.recipe.objective.mixup)
        with Feed(problem.images, batches(order_N, problem.batch_size), layout, mixup=mixup) as feed:
            yield from feed


COLUMNS = ("first loss", "loss", "grad norm", "parameters", "optimiser", "batch stats", "evaluation")


def differences(outcome: Outcome, expected: Outcome) -> dict[str, float]:
    """Largest relative difference of two trainings, for each of `COLUMNS`; NaN where anything is no number.

    ``parameters`` include their moving average. Losses, norms and evaluation sums are compared number by number, arrays
    relative to their largest value (see `tree_difference`).
    """
    pairs = [(outcome.losses_T[:1], expected.losses_T[:1]), (outcome.losses_T, expected.losses_T)]
    pairs += [(outcome.norms_T, expected.norms_T)]
    scalars = [float(np.max(np.abs(x - y) / np.abs(y))) for x, y in pairs]
    states = outcome.state, expected.state
    trees = [
        tree_difference(*(part(state) for state in states))
        for part in (lambda s: (s.params, s.ema), lambda s: s.opt_state, lambda s: s.batch_stats)
    ]
    # Hits may be 0.
    sums = np.abs(outcome.evaluation - expected.evaluation) / np.maximum(np.abs(expected.evaluation), 1e-30)
    others = float(np.mean(outcome.predicted_N != expected.predicted_N))  # images whose predicted class differs
    return dict(zip(COLUMNS, [*scalars, *trees, max(float(np.max(sums)), others)], strict=True))


def tree_difference(tree: Any, expected: Any) -> float:
    """Largest difference of any array, relative to the largest value of that array; infinite where integers differ.

    An array below a millionth of the largest one is measured by that instead: where the exact value is zero, such as
    the gradient of a bias that batch norm takes out again, all that is left of it is rounding.

    Raises:
        ValueError: If the trees or their shapes differ.
    """
    if jax.tree.structure(tree) != jax.tree.structure(expected):  # type: ignore[operator]
        raise ValueError("the two trainings have states of different structure")
    pairs = [(np.asarray(x), np.asarray(y)) for x, y in zip(*map(jax.tree.leaves, (tree, expected)), strict=True)]
    if wrong := [(x.shape, y.shape) for x, y in pairs if x.shape != y.shape]:
        raise ValueError(f"the two trainings have arrays of shapes {wrong[0][0]} and {wrong[0][1]}")
    floats = [(x, y) for x, y in pairs if np.issubdtype(y.dtype, np.floating)]
    if any(not np.array_equal(x, y) for x, y in pairs if not np.issubdtype(y.dtype, np.floating)):
        return float("inf")
    floor = max(1e-6 * max((float(np.max(np.abs(y))) for _, y in floats), default=0.0), 1e-30)
    # np.max, unlike max, passes NaN on.
    values = [np.max(np.abs(x - y)) / max(float(np.max(np.abs(y))), floor) for x, y in floats]
    return float(np.max(values)) if values else 0.0


def agrees(values: dict[str, float], x64: bool) -> bool:
    """The verdict: every column in float64, the first loss in float32."""
    return all(values[name] <= TOLERANCE_X64 for name in COLUMNS) if x64 else values["first loss"] <= TOLERANCE


# ---------------------------------------------------------------------------------------------------------------------
# Command
# ---------------------------------------------------------------------------------------------------------------------


def compare(options: Options) -> bool:
    """Prints the table; returns whether every layout agrees."""
    compile_cache.start()
    jax.config.update("jax_enable_x64", options.x64)
    try:
        shape = networks.default_input_shape(options.network)
    except ValueError as error:
        raise ValueError(f"--network: {error}") from None
    cases = default_cases() if options.layouts is None else parse_cases(options.layouts)
    partition.request_cpu_devices(max(case.devices for case in cases))
    left_out = [case for case in cases if options.layouts is None and case.devices > jax.device_count()]
    cases = [case for case in cases if case not in left_out]
    if not cases:
        raise ValueError(f"--layouts: the default ones need 2 devices or more, but there is {jax.device_count()}")
    for case in cases:
        case.layout()  # a mistake in the last layout should not wait for the training of the first
    found = datasets.load(options.data, image_shape=shape)
    images, size = found.splits.train, options.batch_size
    classes = len(images.class_names)
    network = networks.build_cnn(options.network, classes)
    try:
        networks.output_shape(network, images.image_shape)
    except ValueError as error:
        raise ValueError(f"--network {options.network} cannot take the images of {images.name}: {error}") from None
    # Few enough that an epoch ends within the run, with half a batch.
    chosen = images.subset(np.arange(min(len(images), options.steps * 2 // 3 * size + -(-size // 2))))
    evaluated = found.splits.test or images
    evaluated = evaluated.subset(np.arange(min(len(evaluated), 2 * size + -(-size // 2))))
    problem = make_problem(network, chosen, evaluated, size, options.steps, options.seed, options.lr)

    for case in cases:  # and what only the network can tell, such as too many stages
        compile_steps(problem.recipe, case.layout(), chosen.image_shape, case.strategy)

    for note in found.notes:
        print(f"note: {note}")
    kind = "float64" if options.x64 else "float32"
    print(f"{options.network} on {len(chosen):,} images of {images.name}, {options.steps} steps of {size}, {kind}, "
          f"jax {jax.__version__}, {jax.device_count()} {jax.devices()[0].device_kind} devices")  # fmt: skip
    rule = f"every column within {TOLERANCE_X64:.0e}" if options.x64 else f"first loss within {TOLERANCE:.0e}"
    print(f"largest relative difference from one device with the same micro-batches; pass: {rule}", flush=True)
    for case in left_out:
        print(f"left out: {case} needs {case.devices} devices")
    width = max(len(case.mesh) for case in cases)
    print(f"{'layout':<{width}}  {'strategy':<9} {'parts':>5} " + " ".join(f"{name:>11}" for name in COLUMNS)
          + f" {'compile s':>9} {'train s':>8}")  # fmt: skip
    expected: dict[Case, Outcome] = {}
    failed = []
    for case in cases:
        reference = case.one_device
        if reference not in expected:
            expected[reference] = train(problem, reference)
        outcome = train(problem, case)
        values = differences(outcome, expected[reference])
        if not agrees(values, options.x64):
            failed.append(case)
        numbers = " ".join(f"{values[name]:11.1e}" for name in COLUMNS)
        print(f"{case.mesh:<{width}}  {case.strategy:<9} {case.microbatches:>5} {numbers} {outcome.compile_s:>9.1f} "
              f"{outcome.train_s:>8.2f}  {'FAIL' if case in failed else 'pass'}", flush=True)  # fmt: skip
    losses_T = expected[cases[0].one_device].losses_T
    print(f"one device: loss {losses_T[0]:.4f} at step 1, {losses_T[-1]:.4f} at step {len(losses_T)}")
    print(f"{len(cases) - len(failed)} of {len(cases)} layouts agree with one device")
    return not failed


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    try:
        options = command_line(Options, "equivalence", sys.argv[1:] if arguments is None else arguments)
        return 0 if compare(options) else 1
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
