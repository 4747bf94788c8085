"""What is wrong with a training, found by some real steps of it.

Steps run on the layout asked for. What is looked at inside the network (activations, gradients by layer) is computed on
one device, from the same parameters.
"""

import dataclasses
import itertools
import math
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from cnnjax import model, networks, partition
from cnnjax.datasets.base import Dataset
from cnnjax.datasets.order import batches, epoch_order
from cnnjax.diagnose.findings import Finding, Severity
from cnnjax.diagnose.memory import examine_memory
from cnnjax.feed import Feed, gather
from cnnjax.losses import Objective
from cnnjax.networks import Shape
from cnnjax.partition import Layout
from cnnjax.step import Recipe, TrainState, loss_fn, preprocess
from cnnjax.strategy import Steps, compile_steps

FIT_IMAGES, FIT_STEPS = 32, 80  # that any network which can learn at all learns by heart
ENOUGH_IMAGES = 2_000  # after fewer, a loss as of guessing is no sign of anything


@dataclasses.dataclass(frozen=True)
class Probe:
    """Some steps of a training.

    Attributes:
        losses_T: Mean loss of each step, in the unit of its gradient; ends early at one that is no number.
        accuracy: Of the last quarter of the steps; NaN for regression.
        state: After them.
        waited: Share of the time that steps waited for data.
        step_s: Seconds a step.
    """

    losses_T: np.ndarray
    accuracy: float
    state: TrainState
    waited: float
    step_s: float

    @property
    def first(self) -> float:
        """Loss before the first update."""
        return float(self.losses_T[0])

    @property
    def last(self) -> float:
        """Mean loss of the last quarter; infinite where it stopped being a number."""
        late = self.losses_T[-max(len(self.losses_T) // 4, 1) :]
        return float(late.mean()) if np.isfinite(late).all() else math.inf


def examine_training(
    recipe: Recipe,
    layout: Layout,
    input_shape: Shape,
    train: Dataset,
    batch_size: int,
    steps: int = 60,
    strategy: str = "jit",
) -> list[Finding]:
    """Trains for some steps and looks at what happens.

    Args:
        recipe: What is to be trained.
        layout: Where.
        input_shape: ``(height, width, channels)`` of one image as the network takes it.
        train: Training set.
        batch_size: Images a step.
        steps: How many to take.
        strategy: As for `compile_steps`.

    Returns:
        What was found; of faults that follow from another one, that one alone.
    """
    made = compile_steps(recipe, layout, input_shape, strategy)
    if memory := examine_memory(made, recipe.objective, layout, batch_size, train.image_shape):
        return memory
    seen = Seen.of(recipe, train, layout, batch_size)
    findings = _input_scale(recipe, seen)
    start = made.init()
    before = jax.device_get(start)
    findings += _gradients(recipe, before, seen)
    probe = _train(made, start, recipe, layout, train, batch_size, steps)
    chance = 1.0 if recipe.objective.label_moments else math.log(seen.outputs)
    findings += _first_loss(recipe, probe, chance, seen)
    findings += _progress(recipe, layout, input_shape, train, batch_size, steps, strategy, probe, chance, seen)
    findings += _dead_relus(recipe, jax.device_get(probe.state), seen)
    if probe.waited > 0.5 and probe.step_s > 0.005:
        findings.append(
            Finding(
                "warning", "slow_input",
                f"steps waited for data {probe.waited:.0%} of the time ({1000 * probe.step_s:.1f} ms a step)",
                "devices stand idle", "a smaller --batch-size, or see what else uses the processor",
            )
        )  # fmt: skip
    return findings


# ---------------------------------------------------------------------------------------------------------------------
# Steps
# ---------------------------------------------------------------------------------------------------------------------


def _order(recipe: Recipe, train: Dataset, batch_size: int) -> Iterator[Any]:
    for epoch in itertools.count():
        yield from batches(epoch_order(recipe.seed, epoch, len(train)), batch_size)


def _train(
    made: Steps, state: TrainState, recipe: Recipe, layout: Layout, train: Dataset, batch_size: int, steps: int
) -> Probe:
    losses, hits, count, start, waited = [], 0.0, 0.0, time.perf_counter(), 0.0
    order = itertools.islice(_order(recipe, train, batch_size), steps)
    with Feed(train, order, layout, mixup=bool(recipe.objective.mixup)) as feed:
        for number, batch in enumerate(feed):
            state, metrics = made.train(state, batch)
            values = {name: float(value) for name, value in jax.device_get(metrics).items()}
            if number == 0:  # compiling does not count
                start, feed.waited_s = time.perf_counter(), 0.0
            if not values["count"]:
                continue  # float16 overflowed
            losses.append(values["loss"] / values["count"] / recipe.objective.unit)
            if not math.isfinite(losses[-1]) or not math.isfinite(values["grad_norm"]):
                losses[-1] = math.inf
                break
            if number >= steps - steps // 4:
                hits, count = hits + values.get("correct", math.nan), count + values["count"]
        waited = feed.waited_s
    seconds = time.perf_counter() - start
    taken = max(len(losses) - 1, 1)
    accuracy = hits / count if count else math.nan
    return Probe(np.array(losses or [math.inf]), accuracy, state, waited / max(seconds, 1e-9), seconds / taken)


def _with_rate(recipe: Recipe, factor: float) -> Recipe:
    return dataclasses.replace(recipe, optimizer=optax.chain(recipe.optimizer, optax.scale(factor)))


def _progress(
    recipe: Recipe,
    layout: Layout,
    input_shape: Shape,
    train: Dataset,
    batch_size: int,
    steps: int,
    strategy: str,
    probe: Probe,
    chance: float,
    seen: "Seen",
) -> list[Finding]:
    """Why the loss does not fall, if it does not."""
    still_falling = 1.03 * chance < probe.last < 0.93 * probe.first  # from a loss far above that of guessing
    if probe.last < 0.97 * chance or still_falling:
        return []
    if float(recipe.schedule(steps - 1)) < 0.2 * max(float(recipe.schedule(s)) for s in range(0, 100 * steps, steps)):
        return []  # still warming up
    if len(probe.losses_T) * batch_size < ENOUGH_IMAGES and probe.last < 3 * chance:
        return []

    def again(factor: float) -> Probe:
        made = compile_steps(_with_rate(recipe, factor), layout, input_shape, strategy)
        return _train(made, made.init(), recipe, layout, train, batch_size, steps)

    rate = float(recipe.schedule(0))
    ended = "is no number" if math.isinf(probe.last) else f"is {probe.last:.4g}"
    what = f"the loss was {probe.first:.4g} before training and {ended} after {len(probe.losses_T)} steps"

    def try_rates(factors: tuple[float, ...], severity: Severity, why: str) -> list[Finding]:
        for factor in factors:
            if (other := again(factor).last) < 0.9 * chance:
                tried = f"at a learning rate of {rate:.3g}; {rate * factor:.3g} brings it to {other:.3g}"
                return [Finding(severity, "learning_rate", f"{what}, {tried}", why, f"--lr {rate * factor:.3g}")]
        return []

    why = "updates that are too large jump over what they look for, or to infinity"
    if found := try_rates((0.1, 0.01, 0.001), "error", why):
        return found
    if math.isinf(probe.last):
        return [
            Finding(
                "error", "diverges", f"{what}, at a learning rate of {rate:.3g} and at a thousandth of it",
                "the first updates already throw the weights to infinity",
                "--scaling standardize, smaller initial weights, or batch norm",
            )
        ]  # fmt: skip
    fitted = fit_few(recipe, seen)
    guessing = f"{what}, as guessing gives {chance:.4g}"
    if fitted > 0.5 * chance:
        return [
            Finding(
                "error", "dead",
                f"{guessing}; even {FIT_IMAGES} images were not learned by heart (loss {fitted:.3g} after {FIT_STEPS} "
                "steps)",
                "no gradient reaches the weights, or it is far too large or small",
                "--scaling standardize, another --lr or --optimizer; see what is said of relus and gradients",
            )
        ]  # fmt: skip
    if found := try_rates((10, 100, 1000, 10_000), "warning", "training takes many times as long as it needs to"):
        return found
    if probe.first > 2 * chance:
        return [
            Finding(
                "error", "stuck", f"{guessing}; from there it does not fall",
                "the first updates, which are large where the first loss is, have pushed the network where no gradient "
                "leads back",
                "--scaling standardize, --warmup-epochs 1, --clip-norm 1 or a smaller --lr",
            )
        ]  # fmt: skip
    return [
        Finding(
            "error", "labels",
            f"{guessing}; but {FIT_IMAGES} images were learned by heart (loss {fitted:.3g})",
            "the network can learn, but what it learns of some images does not hold for others: labels may not belong "
            "to their images",
            "look at some images beside their labels: was one of the two sorted or shuffled alone?",
        )
    ]  # fmt: skip


def fit_few(recipe: Recipe, seen: "Seen") -> float:
    """Loss of a few images after steps on them alone, on one device, without what makes training harder."""
    plain = Objective(label_moments=recipe.objective.label_moments)
    network = tuple(
        dataclasses.replace(layer, rate=0.0) if isinstance(layer, networks.Dropout) else layer
        for layer in recipe.network
    )
    easy = dataclasses.replace(
        recipe, network=network, objective=plain, l2=0.0, clip_norm=1.0, optimizer=optax.adam(1e-3),
        schedule=optax.constant_schedule(1e-3), aggregate=None, ema=0.0,
        augmentation=dataclasses.replace(type(recipe.augmentation)(), crop_to=recipe.augmentation.crop_to),
    )  # fmt: skip
    layout = Layout(partition.make_mesh("data=1")[0])
    made = compile_steps(easy, layout, seen.input_shape)
    few = {name: values[:FIT_IMAGES] for name, values in seen.batch.items() if not name.startswith("other_")}
    few = jax.device_put(few, layout.batch_sharding)
    state, loss = made.init(), math.inf
    for _ in range(FIT_STEPS):
        state, metrics = made.train(state, few)
        loss = float(metrics["loss"] / metrics["count"]) / plain.unit
    return loss if math.isfinite(loss) else math.inf


# ---------------------------------------------------------------------------------------------------------------------
# Inside the network
# ---------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Seen:
    """One batch as the network sees it, on one device.

    Attributes:
        batch: As `cnnjax.feed.gather` gives it.
        x_BHWC: Augmented and scaled.
        outputs: Of the network.
    """

    batch: dict[str, jax.Array]
    x_BHWC: jax.Array
    outputs: int

    @property
    def input_shape(self) -> Shape:
        """Height, width and channels of one image."""
        height, width, channels = self.x_BHWC.shape[1:]
        return height, width, channels

    @classmethod
    def of(cls, recipe: Recipe, train: Dataset, layout: Layout, batch_size: int) -> "Seen":
        """The first batch; of large ones, 256 images."""
        size = min(batch_size, 256, len(train))
        indices = next(_order(recipe, train, size))
        one = Layout(partition.make_mesh("data=1")[0])
        host = gather(train, indices, one, mixup=bool(recipe.objective.mixup))
        batch = {name: jnp.asarray(values) for name, values in host.items()}
        x_BHWC = preprocess(recipe, batch, None, train=False)
        x_BHWC = x_BHWC[::2] if recipe.objective.flip_test else x_BHWC
        height, width, channels = x_BHWC.shape[1:]
        (outputs,) = networks.output_shape(recipe.network, (height, width, channels))
        return cls(batch, x_BHWC, outputs)


def _input_scale(recipe: Recipe, seen: Seen) -> list[Finding]:
    """Batch norm right after the first layer makes up for any scale."""
    mean, deviation = float(jnp.mean(seen.x_BHWC)), float(jnp.std(seen.x_BHWC))
    normalised = any(isinstance(layer, networks.BatchNorm) for layer in recipe.network[:2])
    if normalised or (abs(mean) < 10 and 0.02 < deviation < 10):
        return []
    return [
        Finding(
            "warning", "input_scale",
            f"pixels reach the network with mean {mean:.3g} and deviation {deviation:.3g} (scaling {recipe.scaling})",
            "initial weights are made for values of about 1: others make the first activations, and so all gradients, "
            "as many times too large or small",
            "--scaling standardize" if recipe.scaling != "standardize" else "look at the images",
        )
    ]  # fmt: skip


def _first_loss(recipe: Recipe, probe: Probe, chance: float, seen: Seen) -> list[Finding]:
    if recipe.objective.label_moments is not None or recipe.objective.class_weights is not None:
        return []
    about = f"guessing among {seen.outputs} classes gives ln {seen.outputs} = {chance:.4g}"
    if probe.first > 6 * chance:
        return [
            Finding(
                "warning", "initial_loss", f"the loss before training is {probe.first:.4g}; {about}",
                "the network starts out sure of wrong answers, and first has to unlearn them",
                "--scaling standardize, or smaller initial weights of the last layer",
            )
        ]  # fmt: skip
    if probe.first < 0.5 * chance:
        return [
            Finding(
                "warning", "initial_loss", f"the loss before training is {probe.first:.4g}; {about}",
                "what was not trained cannot know better than that: the labels may be nearly all the same, or be in "
                "the images",
                "look at the labels, and at what is in the images",
            )
        ]  # fmt: skip
    return []


def _dead_relus(recipe: Recipe, state: TrainState, seen: Seen) -> list[Finding]:
    """Relus that give 0 for every image, of channels at every place."""
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    dead = []
    x, done = seen.x_BHWC, 0
    for number, (name, layer) in enumerate(networks.named_layers(recipe.network)):
        if not isinstance(layer, networks.Relu):
            continue
        x, _ = model.apply(recipe.network, variables, x, train=False, dtype=recipe.dtype, span=(done, number + 1))
        done = number + 1
        silent_C = np.asarray(jnp.all(x <= 0, tuple(range(x.ndim - 1))))
        dead.append((name, int(silent_C.sum()), len(silent_C)))
    worst = [(name, count, of) for name, count, of in dead if count > 0.6 * of]
    if not worst:
        return []
    listed = ", ".join(f"{name}: {count} of {of}" for name, count, of in worst)
    return [
        Finding(
            "error" if any(count == of for _, count, of in worst) else "warning", "dead_relus",
            f"relus that are 0 for every one of {len(x)} images: {listed}",
            "no gradient passes a relu at 0, so that these never come back",
            "a smaller --lr, --scaling standardize, initial biases of 0, or batch norm before the relu",
        )
    ]  # fmt: skip


def _gradients(recipe: Recipe, state: TrainState, seen: Seen) -> list[Finding]:
    """Norms of the first gradient by layer."""
    one = Layout(partition.make_mesh("data=1")[0])
    count = jnp.sum(seen.batch["weight"])
    arguments = (state.batch_stats, seen.batch, jnp.int32(0), count)
    grads = jax.jit(jax.grad(lambda params: loss_fn(recipe, one, params, *arguments)[0]))(state.params)
    norms = {
        jax.tree_util.keystr(path, simple=True, separator="/"): float(jnp.linalg.norm(leaf.astype(float)))
        for path, leaf in jax.tree_util.tree_leaves_with_path(grads)
        if leaf.ndim > 1
    }
    if not norms:
        return []
    largest, smallest = max(norms, key=lambda name: norms[name]), min(norms, key=lambda name: norms[name])
    if not all(map(math.isfinite, norms.values())) or norms[largest] > 1e4:
        return [
            Finding(
                "warning", "exploding_gradients",
                f"the first gradient of {largest} has norm {norms[largest]:.3g}, that of {smallest} "
                f"{norms[smallest]:.3g}",
                "one update throws the weights far away", "--scaling standardize, --clip-norm 1, or batch norm",
            )
        ]  # fmt: skip
    sizes = {
        jax.tree_util.keystr(path, simple=True, separator="/"): float(jnp.linalg.norm(leaf.astype(float)))
        for path, leaf in jax.tree_util.tree_leaves_with_path(state.params)
    }
    # Healthy ones, resnet18_cifar among them, are above 1e-3.
    small = {name: norm for name, norm in norms.items() if 0 < norm < 1e-5 * sizes[name]}
    if small:
        smallest = min(small, key=lambda name: small[name])
        return [
            Finding(
                "warning", "vanishing_gradients",
                f"the first gradients of {len(small)} of {len(norms)} kernels are below 1e-5 of the weights, the "
                f"smallest that of {smallest} with {norms[smallest]:.3g}",
                "these layers do not learn", "larger initial weights, batch norm, or fewer layers without blocks",
            )
        ]  # fmt: skip
    return []
