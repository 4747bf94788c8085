"""Learning-rate schedules and optimisers, assembled from optax.

A step is one parameter update; step 0 is the first. Every schedule is a plain function of the step, so the rate that
an update uses can be read and logged without looking into the optimiser's state.
"""

import dataclasses
import math
from typing import Any, Literal, NamedTuple, get_args

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

OptimizerName = Literal["sgd", "momentum", "nesterov", "adam", "adamw"]
ScheduleName = Literal["constant", "cosine", "exponential", "time", "onecycle"]
WeightDecayKind = Literal["decoupled", "loss"]


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """An optimiser and its schedule.

    Attributes:
        optimizer: ``sgd``; ``momentum`` and ``nesterov`` (SGD with one of the two); ``adam``; ``adamw``, which is
            ``adam`` with decoupled weight decay.
        lr: Learning rate at the end of the warm-up.
        momentum: Decay of the velocity per step. Read by ``momentum`` and ``nesterov``.
        b1: Adam's decay of the first moment per step.
        b2: Adam's decay of the second moment per step.
        eps: Adam's epsilon, added outside the square root.
        schedule: What follows the warm-up, with t steps counted from its end. ``constant``; ``cosine``: half a cosine
            from ``lr`` down to ``lr * final_lr_fraction`` at the last step; ``exponential``:
            ``lr * decay_rate ** (t / decay_steps)``; ``time``: ``lr / (1 + time_decay * t)``, the ``decay`` argument
            of Keras 1 and 2; ``onecycle``: without a warm-up, half a cosine from ``lr / 25`` up to ``lr`` in the first
            30% of the steps, then half a cosine down to ``lr / 250,000``, the defaults of torch's ``OneCycleLR``.
        warmup_steps: Steps over which the rate grows linearly from 0 to ``lr``; 0 is off.
        decay_steps: Steps between two decays of ``exponential``.
        decay_rate: Factor of each decay of ``exponential``.
        staircase: Whether ``exponential`` decays in jumps, with ``t / decay_steps`` rounded down.
        time_decay: Decay of ``time`` per step.
        final_lr_fraction: End of ``cosine`` as a fraction of ``lr``.
        weight_decay: Strength, 0 is off. Leaves named ``kernel`` decay; biases and normalisation do not.
        adjustable: Whether the rate has a factor in the optimiser's state, see `set_rate_factor`.
        weight_decay_kind: ``decoupled``: the optimiser subtracts ``rate * weight_decay * w``, as AdamW does.
            ``loss``: the optimiser does nothing and the loss must add `l2_penalty`.

    Raises:
        ValueError: A value is outside its range, or two options contradict each other.
    """

    optimizer: OptimizerName
    lr: float
    momentum: float = 0.9
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    schedule: ScheduleName = "constant"
    warmup_steps: int = 0
    decay_steps: int | None = None
    decay_rate: float = 0.1
    staircase: bool = True
    time_decay: float = 1e-6
    final_lr_fraction: float = 0.0
    weight_decay: float = 0.0
    weight_decay_kind: WeightDecayKind = "decoupled"
    adjustable: bool = False

    def __post_init__(self):
        for name, choices in (
            ("optimizer", OptimizerName),
            ("schedule", ScheduleName),
            ("weight_decay_kind", WeightDecayKind),
        ):
            value = getattr(self, name)
            _require(value in get_args(choices), name, repr(value), f"one of {', '.join(get_args(choices))}")
        _require(0 < self.lr < math.inf, "lr", self.lr, "finite and above 0")
        for name in ("momentum", "b1", "b2"):
            value = getattr(self, name)
            _require(0 <= value < 1, name, value, "at least 0 and below 1")
        _require(0 < self.eps < math.inf, "eps", self.eps, "finite and above 0")
        _require(self.warmup_steps >= 0, "warmup_steps", self.warmup_steps, "at least 0")
        if self.decay_steps is not None or self.schedule == "exponential":
            _require(
                self.decay_steps is not None and self.decay_steps >= 1,
                "decay_steps",
                self.decay_steps,
                "at least 1 (schedule 'exponential' needs it)",
            )
        _require(0 < self.decay_rate <= 1, "decay_rate", self.decay_rate, "above 0 and at most 1")
        _require(0 <= self.time_decay < math.inf, "time_decay", self.time_decay, "finite and at least 0")
        _require(0 <= self.final_lr_fraction <= 1, "final_lr_fraction", self.final_lr_fraction, "from 0 to 1")
        _require(0 <= self.weight_decay < math.inf, "weight_decay", self.weight_decay, "finite and at least 0")
        if self.schedule == "onecycle":
            _require(self.warmup_steps == 0, "warmup_steps", self.warmup_steps, "0 with schedule 'onecycle'")
        # Frameworks disagree on what Adam with weight decay means, so neither reading is taken silently.
        if self.weight_decay and (self.optimizer, self.weight_decay_kind) in {("adam", "decoupled"), ("adamw", "loss")}:
            raise ValueError(
                f"weight_decay is {self.weight_decay} with optimizer {self.optimizer!r} and weight_decay_kind "
                f"{self.weight_decay_kind!r}; allowed are 'adamw' with 'decoupled' and 'adam' with 'loss'"
            )


def make_schedule(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """Builds the learning rate as a function of the step.

    Args:
        config: See `OptimizerConfig`.
        total_steps: Planned steps of the whole run, warm-up included. ``cosine`` reaches its end at this step.

    Returns:
        A function from the step (an int or an integer array) to the rate of that step's update.

    Raises:
        ValueError: ``total_steps`` does not exceed the warm-up, or is below 4 with ``onecycle``.

    Example:
        >>> schedule = make_schedule(OptimizerConfig("sgd", 0.1, schedule="exponential", decay_steps=100), 1000)
        >>> [round(float(schedule(step)), 6) for step in (0, 99, 100, 200)]
        [0.1, 0.1, 0.01, 0.001]
    """
    if total_steps <= config.warmup_steps:
        raise ValueError(
            f"total_steps is {total_steps} and warmup_steps is {config.warmup_steps}; "
            "total_steps must be at least 1 and above warmup_steps"
        )
    if config.schedule == "onecycle" and total_steps < 4:
        raise ValueError(f"total_steps is {total_steps}; schedule 'onecycle' needs at least 4")
    after_warmup = _after_warmup(config, total_steps - config.warmup_steps)
    if not config.warmup_steps:
        return after_warmup
    warmup = _in_float(optax.linear_schedule(0.0, config.lr, config.warmup_steps))
    return optax.join_schedules([warmup, after_warmup], [config.warmup_steps])


def make_optimizer(config: OptimizerConfig, total_steps: int) -> optax.GradientTransformation:
    """Builds the optimiser.

    With velocity v and rate r, ``momentum`` is ``v = m v + g; w -= r v`` and ``nesterov`` is
    ``v = m v + g; w -= r (m v + g)``: the rate multiplies the velocity as it leaves, as in torch and in TensorFlow 1.
    Keras keeps the rate inside the velocity: ``v = m v - r g; w += v``, or ``w += m v - r g``. While the rate is
    constant the two give the same weights. When it changes, Keras's velocity still carries gradients at their older
    rates: after a drop Keras moves faster for about ``1 / (1 - m)`` steps.

    Args:
        config: See `OptimizerConfig`.
        total_steps: As for `make_schedule`.

    Returns:
        An optax transformation whose state is a plain pytree of arrays. Its ``update`` needs the parameters as soon as
        weight decay is decoupled, so always pass them.

    Raises:
        ValueError: As `make_schedule`.
    """
    parts = [_direction(config)]
    if config.weight_decay and config.weight_decay_kind == "decoupled":
        # After the moments, so that they do not see the decay; before the rate, so that the decay follows it.
        parts.append(optax.add_decayed_weights(config.weight_decay, mask=kernel_mask))
    parts.append(optax.scale_by_learning_rate(make_schedule(config, total_steps)))
    if config.adjustable:
        parts.append(_scale_by_rate_factor())
    return optax.chain(*parts)


class RateFactor(NamedTuple):
    """State of an adjustable learning rate: what the schedule's rate is multiplied by, a scalar."""

    rate_factor: jax.Array


def _scale_by_rate_factor() -> optax.GradientTransformation:
    def update(updates: Any, state: RateFactor, params: Any = None) -> tuple[Any, RateFactor]:
        return jax.tree.map(lambda u: (u * state.rate_factor).astype(u.dtype), updates), state

    return optax.GradientTransformation(lambda _: RateFactor(jnp.ones((), float)), update)


def rate_factor(opt_state: Any) -> Any:
    """The factor of the learning rate in an optimiser's state; 1 where it is not adjustable."""
    return optax.tree.get(opt_state, "rate_factor", 1.0)


def set_rate_factor(opt_state: Any, factor: float) -> Any:
    """The same state with another factor of the learning rate, where the old one was."""
    old = rate_factor(opt_state)
    return optax.tree.set(opt_state, rate_factor=jax.device_put(np.asarray(factor, old.dtype), old.sharding))


def clip(grads: Any, norm: jax.Array, limit: float) -> Any:
    """Gradients scaled down to a global norm of at most ``limit``, as torch's ``clip_grad_norm_``.

    Args:
        grads: Pytree; only the part that a device holds.
        norm: Euclidean norm of the whole gradient, a scalar.
        limit: Above 0.
    """
    factor = jnp.minimum(1, limit / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny))
    return jax.tree.map(lambda g: (g * factor).astype(g.dtype), grads)


class LossScale(flax.struct.PyTreeNode):
    """Factor of the loss that keeps float16 gradients out of the range where they become 0.

    The rule is that of torch's ``GradScaler``: half after a step whose gradients overflow, which changes nothing else;
    twice after 2,000 steps in a row that do not.

    Attributes:
        factor: A power of two, float32 scalar.
        good_steps: Steps since the factor last changed, int32 scalar.
        skipped: Steps that overflowed, int32 scalar.
    """

    factor: jax.Array
    good_steps: jax.Array
    skipped: jax.Array

    @classmethod
    def first(cls) -> "LossScale":
        """Before step 0."""
        return cls(jnp.float32(2**15), jnp.int32(0), jnp.int32(0))

    def after(self, finite: jax.Array) -> "LossScale":
        """The next one; ``finite`` says whether the gradients of this step are numbers."""
        grows = self.good_steps + 1 >= 2000
        doubled = jnp.minimum(self.factor * 2, 2.0**24)
        return LossScale(
            factor=jnp.where(finite, jnp.where(grows, doubled, self.factor), self.factor / 2),
            good_steps=jnp.where(finite & ~grows, self.good_steps + 1, 0),
            skipped=self.skipped + jnp.where(finite, 0, 1),
        )


def skip_overflow(before: Any, after: Any, metrics: dict[str, jax.Array]) -> tuple[Any, dict[str, jax.Array]]:
    """A step of float16, which changes nothing where its gradients are no numbers.

    Args:
        before: The train state before the step. Where its ``loss_scale`` is None, nothing is done.
        after: That after it.
        metrics: With ``grad_norm``.

    Returns:
        State and metrics. Of a step without numbers the state is the old one with the new number of steps and a smaller
        loss scale; the metrics, ``learning_rate`` apart, are 0, that of ``count`` too.
    """
    if before.loss_scale is None:
        return after, metrics
    finite = jnp.isfinite(metrics["grad_norm"])
    state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, before)
    rate = {"learning_rate": metrics["learning_rate"]}
    metrics = {name: jnp.where(finite, value, 0) for name, value in metrics.items()} | rate
    return state.replace(step=after.step, loss_scale=before.loss_scale.after(finite)), metrics


def updates_done(state: Any) -> jax.Array:
    """Steps of a train state that changed the parameters, which is what schedules count."""
    return state.step if state.loss_scale is None else state.step - state.loss_scale.skipped


def kernel_mask(params: Any) -> Any:
    """Returns a pytree like ``params`` with True at every leaf named ``kernel`` and False elsewhere."""
    return jax.tree_util.tree_map_with_path(lambda path, _: _is_kernel(path), params)


def l2_penalty(params: Any, weight_decay: float) -> jax.Array:
    """Returns ``weight_decay * sum(w ** 2) / 2`` over every leaf named ``kernel``, a scalar.

    The half is that of `tf.nn.l2_loss`, so the gradient is ``weight_decay * w``. The penalty belongs to the whole
    loss, not to a sample: add it once, after the mean over samples. Where each device sees only its part of a kernel,
    the sum is over that part.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    squares = [jnp.sum(jnp.square(leaf)) for path, leaf in leaves if _is_kernel(path)]
    return jnp.asarray(0.5 * weight_decay * sum(squares))


def ema_update(ema_params: Any, params: Any, decay: float, step: jax.typing.ArrayLike) -> Any:
    """Moves the averaged parameters towards the current ones.

    ``ema = d * ema + (1 - d) * params`` with ``d = min(decay, (1 + step) / (10 + step))``, the formula of
    `tf.train.ExponentialMovingAverage(decay, num_updates=step)`: early averages forget the initial weights fast.

    Args:
        ema_params: Pytree of averages; start it as a copy of the parameters.
        params: Pytree of the same structure, after the update.
        decay: Limit of d, from 0 to 1, such as 0.9999.
        step: Updates so far, a non-negative integer.

    Returns:
        The new averages, in the dtypes of ``ema_params``.

    Raises:
        ValueError: ``decay`` is outside [0, 1].
    """
    _require(0 <= decay <= 1, "decay", decay, "from 0 to 1")
    # 1 - d, written without a subtraction in float32, which would lose four digits of 1 - 0.9999.
    rate = jnp.maximum(1 - decay, 9 / (10 + jnp.asarray(step, float)))
    # Under x64 the rate is float64 and would widen float32 averages.
    return optax.tree.cast_like(optax.incremental_update(params, ema_params, rate), ema_params)


def _after_warmup(config: OptimizerConfig, steps: int) -> optax.Schedule:
    lr = config.lr
    if config.schedule == "cosine":
        return _in_float(optax.cosine_decay_schedule(lr, steps, config.final_lr_fraction))
    if config.schedule == "onecycle":
        return _in_float(optax.cosine_onecycle_schedule(steps, lr))
    if config.schedule == "exponential":
        interval = config.decay_steps
        assert interval is not None
        if not config.staircase:
            return _in_float(optax.exponential_decay(lr, interval, config.decay_rate))
        # optax's own staircase divides in float32, which the compiler turns into a product with 1 / interval: for one
        # interval in eight (41, 47, 55, ...) some jumps then come a step late.
        per_interval = _in_float(optax.exponential_decay(lr, 1, config.decay_rate))
        return lambda step: per_interval(step // interval)
    if config.schedule == "time":
        return _in_float(lambda step: lr / (1 + config.time_decay * step))
    return optax.constant_schedule(lr)


def _in_float(schedule: optax.Schedule) -> optax.Schedule:
    # An int32 step times a number is float32 even under x64; a float step has the precision of the run.
    return lambda step: schedule(jnp.asarray(step, float))


def _direction(config: OptimizerConfig) -> optax.GradientTransformation:
    if config.optimizer in ("momentum", "nesterov"):
        return optax.trace(config.momentum, nesterov=config.optimizer == "nesterov")
    if config.optimizer in ("adam", "adamw"):
        return optax.scale_by_adam(config.b1, config.b2, config.eps)
    return optax.identity()


def _is_kernel(path: tuple[Any, ...]) -> bool:
    return jax.tree_util.keystr(path[-1:], simple=True) == "kernel"


def _require(ok: bool, name: str, value: object, allowed: str) -> None:
    if not ok:
        raise ValueError(f"{name} is {value}; it must be {allowed}")
