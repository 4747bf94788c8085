"""How the functions of `cnnjax.step` are spread over devices: strategies jit, shard_map and pmap."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from cnnjax import partition, pipeline
from cnnjax.losses import Objective
from cnnjax.networks import Shape
from cnnjax.partition import Layout
from cnnjax.step import Recipe, TrainState, create_state, eval_step, train_step


@dataclasses.dataclass(frozen=True)
class Steps:
    """The functions above, jitted for one layout.

    Attributes:
        init: ``() -> state``, born with its shardings.
        train: ``(state, batch) -> (state, metrics)``; the state given is donated, so do not use it again.
        evaluate: ``(state, batch) -> metrics``.
        state_shardings: Tree of shardings like the state.
        objective: What is trained for and measured.
        notes: What the layout could not split, and the stages of ``pipe``.
    """

    init: Callable[[], TrainState]
    train: Any
    evaluate: Any
    state_shardings: Any
    objective: Objective
    notes: tuple[str, ...] = ()


def compile_steps(recipe: Recipe, layout: Layout, input_shape: Shape, strategy: str = "jit") -> Steps:
    """Spreads the steps over the mesh.

    Args:
        recipe: What to train.
        layout: Where.
        input_shape: ``(height, width, channels)`` of one image, after cropping.
        strategy: ``jit``: the compiler partitions the functions, guided by the shardings of state and batch.
            ``shard_map``: each device runs them on its part, with the collectives of `Layout` (axes data and fsdp).
            ``pmap``: the same over one axis, through the older interface.

    Raises:
        ValueError: If the strategy does not know an axis of the mesh, or the layout is strict and does not divide.
    """
    partition.check_layout(strategy, layout)
    if "pipe" in layout.mesh.shape:
        pipe = pipeline.Pipeline(recipe, layout, input_shape)
        return Steps(pipe.init, pipe.train, pipe.evaluate, pipe.state_shardings, recipe.objective, pipe.notes)
    init = partial(create_state, recipe, input_shape)
    shardings, notes = partition.state_shardings(jax.eval_shape(init), layout, recipe.network)
    if strategy != "jit":
        layout = dataclasses.replace(layout, manual=jax.tree.map(lambda s: s.spec, shardings.params))
    elif layout.size("fsdp") > 1:
        layout = dataclasses.replace(layout, gathered=jax.tree.map(partition.without_fsdp, shardings.params))
    train: Callable = partial(train_step, recipe, layout)
    evaluate: Callable = partial(eval_step, recipe, layout)
    state, whole, batch = jax.tree.map(lambda s: s.spec, shardings), P(), P(layout.batch_axes)
    sums = dict.fromkeys((*recipe.objective.measures, "count"), whole)
    samples = tuple(recipe.objective.samples)
    if strategy == "shard_map":
        spread = partial(jax.shard_map, mesh=layout.mesh, in_specs=(state, batch), check_vma=False)
        train = spread(train, out_specs=(state, whole))
        evaluate = spread(evaluate, out_specs=sums | dict.fromkeys(samples, batch))
    elif strategy == "pmap":
        devices = layout.mesh.devices.tolist()
        train = partition.over_leading(train, devices, out_axes=None)
        evaluate = partition.over_leading(evaluate, devices, dict.fromkeys(sums) | dict.fromkeys(samples, 0))
    placed = (shardings, layout.batch_sharding)
    return Steps(
        init=jax.jit(init, out_shardings=shardings),
        train=jax.jit(train, in_shardings=placed, out_shardings=(shardings, layout.replicated), donate_argnums=0),
        evaluate=jax.jit(evaluate, in_shardings=placed, out_shardings=layout.replicated),
        state_shardings=shardings,
        objective=recipe.objective,
        notes=tuple(notes),
    )
