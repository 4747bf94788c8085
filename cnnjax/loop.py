"""`fit`: the only place that iterates, times, logs and decides when to evaluate, save and stop."""

import contextlib
import dataclasses
import itertools
import math
import signal
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from cnnjax import optim, rundir, scores
from cnnjax.checkpoint import Checkpoints
from cnnjax.config import TrainConfig, UsageError, parse_interval
from cnnjax.console import Console
from cnnjax.datasets.base import Dataset
from cnnjax.datasets.order import batches, epoch_order, num_batches
from cnnjax.distributed import Processes
from cnnjax.evaluation import Evaluation, evaluate
from cnnjax.feed import Feed, abstract_batch
from cnnjax.metrics import Sums
from cnnjax.partition import Layout
from cnnjax.patience import Rules
from cnnjax.record import Record
from cnnjax.rundir import RunDirectory
from cnnjax.signals import Stop
from cnnjax.step import TrainState
from cnnjax.strategy import Steps


class NotFinite(Exception):
    """The loss or the gradients stopped being numbers."""


@dataclasses.dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
        step: Updates done.
        accuracy: On the test set, or where there is none on the validation images; None where a signal came first, or
            labels are numbers.
        stopped_by: The signal that ended the run early, or None.
    """

    step: int
    accuracy: float | None = None
    stopped_by: signal.Signals | None = None


@dataclasses.dataclass
class Position:
    """How far a run is: ``batch`` batches of ``epoch`` (from 0) are done, with these sums."""

    epoch: int = 0
    batch: int = 0
    learning_rate: float = 0.0  # of the last step
    sums: Sums = dataclasses.field(default_factory=Sums)


@jax.jit
def _finite(leaves: list[jax.Array]) -> jax.Array:
    return jnp.array([jnp.isfinite(leaf).all() for leaf in leaves]).all()


def _all_finite(tree: Any) -> bool:
    """One call for all arrays that share their devices: with ``pipe``, each stage has its own."""
    groups: dict[frozenset, list[jax.Array]] = {}
    for leaf in jax.tree.leaves(tree):
        groups.setdefault(frozenset(leaf.sharding.device_set), []).append(leaf)
    return all([bool(_finite(leaves)) for leaves in groups.values()])


class Fit:
    """One training run. `run` does it all; the other methods are its parts, in the order in which they act."""

    def __init__(
        self,
        steps: Steps,
        layout: Layout,
        train: Dataset,
        validation: Dataset,
        test: Dataset | None,
        config: TrainConfig,
        folder: RunDirectory,
        console: Console,
        processes: Processes | None = None,
    ):
        """Prepares; nothing runs yet.

        Args:
            steps: The jitted step functions.
            layout: Their layout.
            train: Images to train on.
            validation: Images behind ``val_loss`` and ``val_accuracy``.
            test: Images behind ``predictions.csv``, evaluated once at the end; may be ``validation`` itself, which
                also serves where it is None.
            config: Options, with ``epochs`` set.
            folder: Where the run is written.
            console: Where it is shown.
            processes: Those that train together; this one alone where None.
        """
        if config.epochs is None:
            raise ValueError("config.epochs is None; fit needs a number of epochs")
        self.steps, self.layout = steps, layout
        self.train, self.validation, self.test = train, validation, validation if test is None else test
        self.config, self.folder, self.console = config, folder, console
        self.has_test = test is not None
        self.epochs = config.epochs
        self.epoch_batches = num_batches(len(train), config.batch_size)
        self.total_steps = min(self.epochs * self.epoch_batches, config.steps or self.epochs * self.epoch_batches)
        self.position = Position()
        self.rules = self._rules()
        self.overflows = 0  # steps in a row whose float16 gradients were no numbers
        self.step = 0  # updates whose metrics are in position.sums
        self.compile_s = self.trained_s = self.waited_s = 0.0  # of this process
        self.processes = processes or Processes()
        self.stop = Stop(layout.mesh, self.processes.count, folder.writes)

    def run(self, begun: Callable[[], None] = lambda: None, compiled: Callable[[], None] = lambda: None) -> Result:
        """Trains until the end, a signal, or a loss that is no number.

        Args:
            begun: Called once it is certain that this run can go on from what is in its directory.
            compiled: Called when both steps are compiled.

        Raises:
            NotFinite: If loss or gradients are NaN or infinite; the message names the step, the learning rate and the
                last good checkpoint.
            UsageError: If the checkpoint to resume from cannot be read or belongs to other data.
        """
        self.checkpoints = Checkpoints(self.folder.checkpoints, self.config.keep)
        with self.processes.closing(self.checkpoints), self.stop.heard():
            state = self._first_state()
            # Only now: a run that cannot be resumed like this keeps its options.
            rundir.write_config(self.folder, self.config)
            rundir.write_environment(self.folder, self.layout.mesh, self.train.source)
            begun()
            if self.step >= self.total_steps or self._over():
                self.console.say(f"the run is complete already: {self.step} steps are done")
            position = self.position.epoch, self.step
            self.record = Record(self.folder, self.config, self.train, self.layout, *position)
            with contextlib.closing(self.record):
                self._compile(state)
                compiled()
                self.console.start(self.total_steps, self.step)
                try:
                    state, validated = self._epochs(state)
                finally:
                    self.console.stop()
            return self._finish(state, validated)

    # -- start --------------------------------------------------------------------------------------------------------

    def _rules(self, numbers: dict[str, Any] | None = None) -> Rules:
        config = self.config
        return Rules(config.plateau, config.plateau_factor, config.early_stopping, numbers)

    def _identity(self) -> dict[str, Any]:
        return {"dataset": self.train.name, "samples": len(self.train)}

    def _first_state(self) -> TrainState:
        newest = self.processes.from_first(self.checkpoints.newest) if self.config.resume else None
        if newest is None:
            return self.steps.init()
        abstract = jax.eval_shape(self.steps.init)
        state, saved = self.checkpoints.restore(newest, abstract, self.steps.state_shardings)
        if (was := saved["data"]) != (now := self._identity()):
            raise UsageError(
                f"--resume {self.folder.path}: the run trains on {was['samples']} images of {was['dataset']}, "
                f"but --data gives {now['samples']} of {now['dataset']}"
            )
        self.step = newest
        self.total_steps = max(self.total_steps, self.step)  # --steps or --epochs may be lower than before
        del saved["data"]
        self.rules = self._rules(saved.pop("rules", None))
        self.position = Position(**saved | {"sums": Sums(**saved["sums"])})
        self.console.say(f"resumed from step {newest} (epoch {self.position.epoch + 1})")
        return state

    def _compile(self, state: TrainState) -> None:
        """Compiles both steps ahead, so that no epoch's time holds a compilation."""
        start = time.perf_counter()
        batch = abstract_batch(self.steps.objective, self.layout, self.config.batch_size, self.train.image_shape)
        seen = {name: array for name, array in batch.items() if not name.startswith("other_")}
        self.train_step = self.steps.train.lower(state, batch).compile()
        self.eval_step = self.steps.evaluate.lower(state, seen).compile()
        jax.block_until_ready(self.stop.vote())
        self.compile_s = time.perf_counter() - start

    # -- the epochs ---------------------------------------------------------------------------------------------------

    def _epochs(self, state: TrainState) -> tuple[TrainState, Evaluation | None]:
        """Trains and evaluates to the end of the run or to a signal; returns the evaluation made at the end."""
        validated = None
        every, unit = parse_interval(self.config.checkpoint_every)
        while not self._over():
            state = self._train_epoch(state)
            at_end, epoch_done = self.step >= self.total_steps, self.position.batch == self.epoch_batches
            if not (at_end or epoch_done):
                break  # a signal came
            number = self.position.epoch + 1
            validated = None
            if at_end or number % self.config.eval_every == 0:
                validated = self._evaluate(state, self.validation)
                if validated is None:
                    break  # a signal came; the checkpoint stands before this evaluation
            self._write_epoch(validated)
            improved = False
            if validated is not None:
                state = self._heed_loss(state, validated.sums.mean_loss)
                improved = self.rules.best_step == self.step
                at_end = at_end or self.rules.over
            if epoch_done:  # else --steps ended the run within the epoch, and more steps would go on from there
                self.position = Position(epoch=number, learning_rate=self.position.learning_rate)
            due = every and (number if unit == "epochs" else self.step) % every == 0
            if due or at_end or improved:
                self._save(state, validated, improved)
            if at_end or self.stop.signal is not None:
                break
        return state, validated

    def _over(self) -> bool:
        """Whether nothing is left to train."""
        return self.rules.over or (self.step >= self.total_steps and not self.position.batch)

    def _heed_loss(self, state: TrainState, val_loss: float) -> TrainState:
        """Does what the rules of `cnnjax.patience` say."""
        for sentence in self.rules.see(val_loss, self.step):
            self.console.say(f"epoch {self.position.epoch + 1}: {sentence}")
        if self.rules.plateau is None:
            return state
        return state.replace(opt_state=optim.set_rate_factor(state.opt_state, self.rules.plateau.rate_factor))

    def _train_epoch(self, state: TrainState) -> TrainState:
        """Steps to the end of the epoch or of the run, or to a signal."""
        config, position = self.config, self.position
        every, unit = parse_interval(config.checkpoint_every)
        order_N = epoch_order(config.seed, position.epoch, len(self.train))
        last = min(self.epoch_batches, position.batch + self.total_steps - self.step)
        start = time.perf_counter()
        order = batches(order_N, config.batch_size, start=position.batch)
        with Feed(self.train, order, self.layout, mixup=bool(self.steps.objective.mixup)) as feed:
            running: Any = None
            for batch in itertools.islice(feed, last - position.batch):
                state, results = self.train_step(state, batch)
                results |= self.stop.vote()
                # Reading waits for the device, so the metrics of a step are read while the next one runs.
                self._read(running)
                running = results
                done = position.batch + 1
                if every and unit == "steps" and (self.step + 1) % every == 0 and done < self.epoch_batches:
                    self._read(running)
                    running = None
                    self._clock(start, feed)
                    self._check(state)
                    self._save(state, None)
                    start = time.perf_counter()
                if self.stop.signal is not None:
                    break
            self._read(running)
            jax.block_until_ready(state)
            self._clock(start, feed)
        self._check(state)
        return state

    def _read(self, results: Any) -> None:
        """Waits for the metrics of the step after ``self.step`` and counts it as done."""
        if results is None:
            return
        values = {name: float(value) for name, value in jax.device_get(results).items()}
        self.stop.heed(values.pop("signal", 0))
        self.position.learning_rate = float(f"{values['learning_rate']:.8g}")
        step = self.step + 1
        if not values["count"]:
            self._skip(step)
            return
        self.overflows = 0
        one = Sums()
        one.add(values)
        means = one.means(self.train.task, self.classes)
        loss = means["loss"]
        for name, value in (("loss", loss), ("norm of the gradients", values["grad_norm"])):
            if not math.isfinite(value):
                raise self._not_finite(step, name, value)
        self.step, self.position.batch = step, self.position.batch + 1
        self.position.sums.add(values)
        written = self.record.step(step, means, self.position.learning_rate, values["grad_norm"])
        if written and self.config.log_style == "tensorflow":
            name, value = list(written.items())[-1]
            self.console.say(f"step {step}, loss = {loss:.6f}, Train {name} = {value:.4f}")
        self.console.progress(step, self.total_steps, self.position.epoch + 1, self.epochs, self._progress_text)

    def _skip(self, step: int) -> None:
        """Counts a step that changed nothing, since its float16 gradients were no numbers."""
        self.step, self.position.batch = step, self.position.batch + 1
        self.overflows += 1
        self.console.say(f"step {step}: float16 gradients overflow; it is left out, and the loss scale halved")
        if self.overflows >= 40:  # from 2**15 to 2**-25
            raise self._not_finite(step, "norm of the gradients, at any loss scale,", float("inf"))

    def _progress_text(self) -> str:
        return _in_words(self.position.sums.means(self.train.task, self.classes))

    def _check(self, state: TrainState) -> None:
        """Finite gradients can still make too large an update; no checkpoint may hold one."""
        if not _all_finite((state.params, state.batch_stats)):
            raise self._not_finite(self.step, "largest parameter", float("inf"))

    def _not_finite(self, step: int, name: str, value: float) -> NotFinite:
        self.checkpoints.wait()
        newest = self.checkpoints.newest()
        good = "there is no checkpoint yet"
        if newest is not None:
            good = f"last good checkpoint: {self.folder.checkpoints / str(newest)}"
        rate = self.position.learning_rate
        return NotFinite(f"stopped: the {name} is {value} at step {step} (learning rate {rate}); {good}")

    def _clock(self, start: float, feed: Feed) -> None:
        """Adds the time since ``start`` to the epoch, and what the loop waited for data in it."""
        seconds, waited = time.perf_counter() - start, feed.waited_s
        feed.waited_s = 0.0
        self.position.sums.train_s += seconds
        self.trained_s += seconds
        self.waited_s += waited

    def _evaluate(self, state: TrainState, dataset: Dataset) -> Evaluation | None:
        """Evaluates every image once; None if a signal came."""
        return evaluate(self.eval_step, state, dataset, self.layout, self.config.batch_size, self.stop.now)

    @property
    def classes(self) -> int:
        """Of the data; 0 for regression."""
        return len(self.train.class_names)

    def _write_epoch(self, validated: Evaluation | None) -> None:
        position = self.position
        numbers = position.epoch + 1, self.step, position.sums, position.learning_rate, self.compile_s
        row, means = self.record.epoch(*numbers, validated)
        self.compile_s = 0.0  # belongs to the first row that this process writes
        self.console.say(
            f"epoch {row['epoch']}/{self.epochs}  step {self.step}  {_in_words(means)}  "
            f"lr {position.learning_rate:.4g}  {row['images_per_s']} images/s  [{self.train.name}]"
        )

    def _save(self, state: TrainState, validated: Evaluation | None, improved: bool = False) -> None:
        """Saves; best is the highest ``val_accuracy``; with early stopping, or regression, the lowest ``val_loss``."""
        position = dataclasses.asdict(self.position) | {"data": self._identity(), "rules": self.rules.numbers}
        rating = None
        if validated is not None and (self.rules.stopping is None or improved):
            by_loss = self.rules.stopping is not None or self.train.task == "regression"
            rating = -validated.sums.mean_loss if by_loss else validated.sums.accuracy
        self.checkpoints.save(self.step, state, position, dataclasses.asdict(self.config), rating)

    # -- end ----------------------------------------------------------------------------------------------------------

    def _finish(self, state: TrainState, validated: Evaluation | None) -> Result:
        if self.stop.signal is None:
            state, validated = self._best(state, validated)
            tested = validated if self.test is self.validation and validated else self._evaluate(state, self.test)
        else:
            tested = None
        if tested is None:
            self._save(state, None)
            self.checkpoints.wait()
            return Result(self.step, stopped_by=self.stop.signal)
        means = tested.sums.means(self.train.task, self.classes)
        name = "test" if self.has_test else "validation"
        self._write_scores(state, tested, name, means)
        self.checkpoints.wait()
        if self.trained_s:
            share = self.waited_s / self.trained_s
            self.console.say(f"the step loop waited for data {share:.1%} of {self.trained_s:.1f} s")
        shown = {measure: value for measure, value in means.items() if measure in ("loss", "mae", "r2")}
        others = ", ".join(f"{measure} {value:.4f}" for measure, value in shown.items())
        first = f"accuracy {means['accuracy']:.4f}, " if "accuracy" in means else ""
        self.console.say(f"final {name} {first}{others} on {len(self.test):,} images  [{self.train.name}]")
        return Result(self.step, means.get("accuracy"))

    def _best(self, state: TrainState, validated: Evaluation | None) -> tuple[TrainState, Evaluation | None]:
        """With early stopping, the state with the lowest ``val_loss``."""
        best, stopping = self.rules.best_step, self.rules.stopping
        if stopping is None or best is None or best == self.step:
            return state, validated
        self.checkpoints.wait()
        abstract = jax.eval_shape(self.steps.init)
        state, _ = self.checkpoints.restore(best, abstract, self.steps.state_shardings)
        self.console.say(f"the weights of step {best}, with the lowest val_loss {stopping.lowest:.4f}, are restored")
        return state, None

    def _write_scores(self, state: TrainState, tested: Evaluation, name: str, means: dict[str, float]) -> None:
        """``predictions.csv``, ``evaluation.json``, ``mistakes.npz`` and ``filters.npz``."""
        params = state.ema if self.config.ema else state.params
        kernel = next((leaf for leaf in jax.tree.leaves(params) if leaf.ndim == 4), None)
        filters = None if kernel is None else self.processes.whole(kernel)
        if self.folder.writes:
            found = tested.predicted_N, tested.losses_N
            scores.write(self.folder.path, self.test, *found, {"data": name, **means}, filters)


def _in_words(means: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in means.items() if not name.endswith("top5_accuracy"))
