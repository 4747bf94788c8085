"""One step of training and of evaluation. This is the file to edit.

A batch is ``{"image": [B, H, W, C], "label": int32 [B], "weight": float32 [B], "index": int32 [B]}``: weight 0 marks
padding, index is the sample's number in the data set. The functions see the whole batch; where its rows live is the
mesh's business (`compile_steps`).
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from cnnjax import model, optim, partition
from cnnjax.augment import Augmentation, Scaling, augment, sample_keys, scale
from cnnjax.networks import Network, Shape

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]


class TrainState(flax.struct.PyTreeNode):
    """All that a step changes."""

    step: jax.Array
    params: Any
    batch_stats: Any
    opt_state: Any
    ema: Any  # moving average of params, or None


@dataclasses.dataclass(frozen=True)
class Recipe:
    """All that a step needs and does not change."""

    network: Network
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    seed: int = 0
    augmentation: Augmentation = Augmentation()  # noqa: RUF009 (it is frozen)
    scaling: Scaling = "none"
    mean: tuple[float, ...] | None = None  # per channel of the training images, for scaling="standardize"
    std: tuple[float, ...] | None = None
    label_smoothing: float = 0.0
    l2: float = 0.0  # weight decay in the loss
    ema: float = 0.0
    dtype: Any = jnp.float32  # of convolutions and dense layers
    param_dtype: Any = jnp.float32


def create_state(recipe: Recipe, input_shape: Shape) -> TrainState:
    """The state before step 0, a function of ``recipe.seed``."""
    key = jax.random.fold_in(jax.random.key(recipe.seed), 0)
    variables = model.init(key, recipe.network, input_shape, param_dtype=recipe.param_dtype)
    params = variables["params"]
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        batch_stats=variables["batch_stats"],
        opt_state=recipe.optimizer.init(params),
        ema=jax.tree.map(jnp.copy, params) if recipe.ema else None,
    )


def preprocess(recipe: Recipe, batch: Batch, keys_B: jax.Array | None, *, train: bool) -> jax.Array:
    """Pixels as the network takes them: augmented, then scaled."""
    x_BHWC = batch["image"].astype(recipe.param_dtype)
    x_BHWC = augment(recipe.augmentation, keys_B, x_BHWC, train=train)
    return scale(x_BHWC, recipe.scaling, recipe.mean, recipe.std)


def loss_and_metrics(logits_BC: jax.Array, batch: Batch, smoothing: float = 0.0) -> tuple[jax.Array, Metrics]:
    """Mean cross-entropy over the samples that count, and its parts as sums."""
    weight_B = batch["weight"]
    logits_BC = logits_BC.astype(jnp.promote_types(logits_BC.dtype, jnp.float32))
    one_hot_BC = jax.nn.one_hot(batch["label"], logits_BC.shape[-1], dtype=logits_BC.dtype)
    losses_B = optax.softmax_cross_entropy(logits_BC, optax.smooth_labels(one_hot_BC, smoothing))
    loss = jnp.sum(weight_B * losses_B)
    hits = jnp.sum(weight_B * (jnp.argmax(logits_BC, -1) == batch["label"]))
    count = jnp.sum(weight_B)
    return loss / jnp.maximum(count, 1), {"loss": loss, "correct": hits, "count": count}


def train_step(recipe: Recipe, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    """One update. The metrics are sums over the batch, of the parameters before the update."""
    step_key = jax.random.fold_in(jax.random.fold_in(jax.random.key(recipe.seed), 1), state.step)
    augment_keys_B, dropout_keys_B = (sample_keys(key, batch["index"]) for key in jax.random.split(step_key))
    x_BHWC = preprocess(recipe, batch, augment_keys_B, train=True)

    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits_BC, batch_stats = model.apply(
            recipe.network, variables, x_BHWC, train=True,
            sample_keys_B=dropout_keys_B, weight_B=batch["weight"], dtype=recipe.dtype,
        )  # fmt: skip
        loss, metrics = loss_and_metrics(logits_BC, batch, recipe.label_smoothing)
        if recipe.l2:
            loss += optim.l2_penalty(params, recipe.l2)
        return loss, (batch_stats, metrics)

    (_, (batch_stats, metrics)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    updates, opt_state = recipe.optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    ema = optim.ema_update(state.ema, params, recipe.ema, state.step) if recipe.ema else None
    metrics |= {"grad_norm": optax.tree.norm(grads), "learning_rate": recipe.schedule(state.step)}
    new_state = TrainState(step=state.step + 1, params=params, batch_stats=batch_stats, opt_state=opt_state, ema=ema)
    return new_state, metrics


def eval_step(recipe: Recipe, state: TrainState, batch: Batch) -> Metrics:
    """Sums over the batch, and each sample's predicted class; uses the moving average where there is one."""
    variables = {"params": state.ema if recipe.ema else state.params, "batch_stats": state.batch_stats}
    x_BHWC = preprocess(recipe, batch, None, train=False)
    logits_BC, _ = model.apply(recipe.network, variables, x_BHWC, train=False, dtype=recipe.dtype)
    _, metrics = loss_and_metrics(logits_BC, batch)
    return metrics | {"predicted": jnp.argmax(logits_BC, -1).astype(jnp.int32)}


@dataclasses.dataclass(frozen=True)
class Steps:
    """The functions above, jitted for one mesh.

    Attributes:
        init: ``() -> state``, born with its shardings.
        train: ``(state, batch) -> (state, metrics)``; the state given is donated, so do not use it again.
        evaluate: ``(state, batch) -> metrics``.
        state_shardings: Tree of shardings like the state.
        batch_sharding: Sharding of every array of a batch.
    """

    init: Callable[[], TrainState]
    train: Any
    evaluate: Any
    state_shardings: Any
    batch_sharding: Any


def compile_steps(recipe: Recipe, mesh: Mesh, input_shape: Shape) -> Steps:
    """Strategy ``jit``: the compiler partitions the functions above, guided by the shardings of state and batch."""
    init = partial(create_state, recipe, input_shape)
    state = partition.state_shardings(jax.eval_shape(init), mesh)
    batch, whole = partition.batch_sharding(mesh), partition.replicated(mesh)
    return Steps(
        init=jax.jit(init, out_shardings=state),
        train=jax.jit(
            partial(train_step, recipe), in_shardings=(state, batch), out_shardings=(state, whole), donate_argnums=0
        ),
        evaluate=jax.jit(partial(eval_step, recipe), in_shardings=(state, batch), out_shardings=whole),
        state_shardings=state,
        batch_sharding=batch,
    )
