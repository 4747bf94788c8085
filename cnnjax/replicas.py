"""Updates that do not wait for the slowest: k of N replicas, and stale gradients.

On real clusters the time of a synchronous step is that of its slowest worker. Two remedies change the numbers, and
that change is what this module reproduces, on any layout and without a slow worker: leave the slowest out of the mean
(``replicas_to_aggregate`` of TensorFlow's SyncReplicasOptimizer; Chen et al. 2016, https://arxiv.org/abs/1604.00981),
or go on with gradients of older parameters. What they gain in time is `experiments.stragglers`.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from cnnjax.partition import Layout


@dataclasses.dataclass(frozen=True)
class Aggregate:
    """Which samples of a batch count: those of ``kept`` of ``replicas``, drawn anew each step.

    Replica r has samples r * c to (r + 1) * c of the batch, with c = ceil(batch_size / replicas), whatever the mesh.

    Attributes:
        kept: 1 to ``replicas``.
        replicas: Shares of the batch.
        batch_size: Samples of a whole batch.

    Raises:
        ValueError: If a replica would have no samples.
    """

    kept: int
    replicas: int
    batch_size: int

    def __post_init__(self) -> None:
        if (shares := -(-self.batch_size // self.share)) < self.replicas:
            raise ValueError(
                f"--aggregate is {self.kept}/{self.replicas}, but --batch-size {self.batch_size} gives only {shares} "
                f"shares of {self.share}; allowed: K/N with a batch size that N divides, or not far from one"
            )

    @property
    def share(self) -> int:
        """Samples of a replica; the last may have fewer."""
        return -(-self.batch_size // self.replicas)


def keep_fastest(aggregate: Aggregate, layout: Layout, seed: int, step: Any, weight_B: jax.Array) -> jax.Array:
    """Weights of a batch with those of the slowest replicas set to 0.

    Losses, gradients, metrics and batch-norm statistics are weighted by them, so dropped samples count for nothing.
    In a batch that padding fills up, the replicas without samples are dropped before others.

    Args:
        aggregate: How many of how many.
        layout: Where the rows of the batch lie.
        seed: With ``step``, decides who is slow.
        step: Updates done.
        weight_B: Weights of the rows that the step sees: all, or those of its device where the layout is manual.
    """
    place = layout.rows(aggregate.batch_size)
    replica_B = jnp.asarray(np.maximum(place, 0) // aggregate.share)  # rows that fill up weigh nothing anyway
    if layout.manual is not None:
        own = len(place) // layout.ways
        replica_B = lax.dynamic_slice_in_dim(replica_B, lax.axis_index(layout.batch_axes) * own, own)
    count_R = layout.total(jax.ops.segment_sum(weight_B, replica_B, aggregate.replicas))
    # Streams 0 and 1 of the seed are the initial weights' and the samples'.
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 2), step)
    latency_R = jax.random.uniform(key, (aggregate.replicas,), jnp.float32) + (count_R == 0)
    rank_R = jnp.argsort(jnp.argsort(latency_R))
    return weight_B * (rank_R < aggregate.kept)[replica_B].astype(weight_B.dtype)


class StaleState(NamedTuple):
    """State of `stale`.

    Attributes:
        steps: Steps so far.
        held: The last gradients, the oldest first.
        inner: State of the optimiser, which has seen those before.
    """

    steps: jax.Array
    held: tuple[Any, ...]
    inner: Any


def stale(optimizer: optax.GradientTransformation, steps: int) -> optax.GradientTransformation:
    """Applies each gradient ``steps`` steps after it was computed.

    Until the first is due nothing moves: updates are zero, and the optimiser's moments, counters and weight decay rest.
    From then on every gradient meets the moments and the learning rate that it would have met without delay.

    Args:
        optimizer: What makes updates of gradients.
        steps: 0 or more; 0 gives the optimiser itself.
    """
    if steps == 0:
        return optimizer

    def init(params: Any) -> StaleState:
        held = tuple(jax.tree.map(jnp.zeros_like, params) for _ in range(steps))
        return StaleState(jnp.zeros((), jnp.int32), held, optimizer.init(params))

    def update(grads: Any, state: StaleState, params: Any = None) -> tuple[Any, StaleState]:
        updates, inner = optimizer.update(state.held[0], state.inner, params)
        due = state.steps >= steps
        updates = jax.tree.map(lambda u: jnp.where(due, u, jnp.zeros_like(u)), updates)
        inner = jax.tree.map(lambda new, old: jnp.where(due, new, old), inner, state.inner)
        return updates, StaleState(optax.safe_increment(state.steps), (*state.held[1:], grads), inner)

    return optax.GradientTransformation(init, update)


def stale_schedule(schedule: optax.Schedule, steps: int) -> optax.Schedule:
    """The learning rate that `stale` applies at a step: 0 until the first gradient is due, then that of its own step.

    Args:
        schedule: Learning rate of a step.
        steps: 0 or more; 0 gives the schedule itself.
    """
    if steps == 0:
        return schedule
    return lambda step: jnp.where(jnp.asarray(step) >= steps, schedule(jnp.maximum(jnp.asarray(step) - steps, 0)), 0.0)
