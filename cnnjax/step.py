"""One step of training and of evaluation. This is the file to edit.

A batch is ``{"image": [B, H, W, C], "label": int32 [B], "weight": float32 [B], "index": int32 [B]}``: weight 0 marks
padding, index is the sample's number in the data set. Labels to approach are float32. Mixup adds ``other_image`` and
``other_label``, of what each sample is mixed with. The functions see the whole batch; where its rows live is the mesh's
business (`cnnjax.strategy`).
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from cnnjax import model, optim, replicas, spatial
from cnnjax.augment import Augmentation, Scaling, augment, mixup_share, other_keys, sample_keys, scale
from cnnjax.losses import Objective, views
from cnnjax.networks import Network, Shape
from cnnjax.partition import Layout

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]


class TrainState(flax.struct.PyTreeNode):
    """All that a step changes."""

    step: jax.Array
    params: Any
    batch_stats: Any
    opt_state: Any
    ema: Any  # moving average of params, or None
    loss_scale: optim.LossScale | None = None  # of float16


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
    objective: Objective = Objective()  # noqa: RUF009 (it is frozen)
    l2: float = 0.0  # weight decay in the loss
    clip_norm: float = 0.0  # largest norm of the gradient; 0 is off
    ema: float = 0.0
    aggregate: replicas.Aggregate | None = None  # None: every sample counts
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
        loss_scale=optim.LossScale.first() if recipe.dtype == jnp.float16 else None,
    )


def train_keys(recipe: Recipe, step: Any, index_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One key a sample for augmentation, and one for dropout."""
    step_key = jax.random.fold_in(jax.random.fold_in(jax.random.key(recipe.seed), 1), step)
    augment_key, dropout_key = jax.random.split(step_key)
    return sample_keys(augment_key, index_B), sample_keys(dropout_key, index_B)


def preprocess(recipe: Recipe, batch: Batch, keys_B: jax.Array | None, *, train: bool) -> jax.Array:
    """Pixels as the network takes them: augmented, scaled, and if asked for mixed or, in evaluation, also mirrored."""

    def pixels(name: str, keys_B: jax.Array | None) -> jax.Array:
        x_BHWC = augment(recipe.augmentation, keys_B, batch[name].astype(recipe.param_dtype), train=train)
        return scale(x_BHWC, recipe.scaling, recipe.mean, recipe.std)

    x_BHWC = pixels("image", keys_B)
    if keys_B is not None and recipe.objective.mixup:
        share_B111 = mixup_share(keys_B, recipe.objective.mixup).astype(x_BHWC.dtype)[:, None, None, None]
        x_BHWC = share_B111 * x_BHWC + (1 - share_B111) * pixels("other_image", other_keys(keys_B))
    return views(x_BHWC) if recipe.objective.flip_test and not train else x_BHWC


def batch_sums(recipe: Recipe, values: Metrics, weight_B: jax.Array) -> Metrics:
    """What `Objective.measure` gives, summed over the samples that count, and their weight."""
    values = {name: values[name] for name in recipe.objective.measures} | {"count": jnp.ones_like(values["loss"])}
    return {name: jnp.sum(weight_B * values_B) for name, values_B in values.items()}


def loss_fn(recipe: Recipe, layout: Layout, params: Any, batch_stats: Any, batch: Batch, step: Any, count: Any):
    """What a part of a batch adds to the mean loss over the ``count`` samples of the whole batch."""
    augment_keys_B, dropout_keys_B = train_keys(recipe, step, batch["index"])
    x_BHWC = preprocess(recipe, batch, augment_keys_B, train=True)
    variables = {"params": layout.whole(params), "batch_stats": batch_stats}
    outputs_BC, batch_stats = forward(recipe, layout, variables, x_BHWC, dropout_keys_B, batch["weight"], train=True)
    sums = batch_sums(recipe, recipe.objective.measure(outputs_BC, batch, augment_keys_B), batch["weight"])
    loss = sums["loss"] / (count * recipe.objective.unit)
    if recipe.l2:
        loss += optim.l2_penalty(variables["params"], recipe.l2) / layout.parts
    return loss, (batch_stats, sums)


def train_step(recipe: Recipe, layout: Layout, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    """One update. The metrics are sums over the batch, of the parameters before the update."""
    if recipe.aggregate is not None:
        kept_B = replicas.keep_fastest(recipe.aggregate, layout, recipe.seed, state.step, batch["weight"])
        batch = batch | {"weight": kept_B}
    count = jnp.maximum(layout.total(jnp.sum(batch["weight"])), 1)
    factor = 1 if state.loss_scale is None else state.loss_scale.factor  # keeps float16 gradients above 0

    def gradients(batch_stats, part):
        def loss(params):
            value, others = loss_fn(recipe, layout, params, batch_stats, part, state.step, count)
            return value * factor, others

        (_, (batch_stats, sums)), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        return batch_stats, (grads, sums)

    if layout.microbatches == 1:
        batch_stats, (grads, sums) = gradients(state.batch_stats, batch)
    else:
        batch_stats, (grads, sums) = accumulate(gradients, state.batch_stats, layout.split(batch))
    grads, sums = jax.tree.map(lambda g: g / factor, layout.reduced(grads)), layout.total(sums)
    batch_stats = layout.mean(batch_stats, jnp.sum(batch["weight"]))
    norm = layout.norm(grads)
    if recipe.clip_norm:
        grads = optim.clip(grads, norm, recipe.clip_norm)

    updates, opt_state = recipe.optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    ema = optim.ema_update(state.ema, params, recipe.ema, state.step) if recipe.ema else None
    rate = recipe.schedule(optim.updates_done(state)) * optim.rate_factor(opt_state)
    metrics = sums | {"grad_norm": norm, "learning_rate": rate}
    after = TrainState(state.step + 1, params, batch_stats, opt_state, ema, state.loss_scale)
    return optim.skip_overflow(state, after, metrics)


def eval_step(recipe: Recipe, layout: Layout, state: TrainState, batch: Batch) -> Metrics:
    """Sums over the batch, and `Objective.samples`; uses the moving average where there is one."""
    params = layout.whole(state.ema if recipe.ema else state.params)
    variables = {"params": params, "batch_stats": state.batch_stats}
    x_BHWC = preprocess(recipe, batch, None, train=False)
    outputs_BC, _ = forward(recipe, layout, variables, x_BHWC, None, None, train=False)
    values = recipe.objective.measure(outputs_BC, batch)
    sums = layout.total(batch_sums(recipe, values, batch["weight"]))
    return sums | {name: values[measure] for name, measure in recipe.objective.samples.items()}


def forward(recipe: Recipe, layout: Layout, variables, x_BHWC, sample_keys_B, weight_B, *, train: bool):
    """`model.apply`; where ``space`` splits rows, inside a shard_map over that axis alone."""
    apply = partial(model.apply, recipe.network, train=train, dtype=recipe.dtype, batch_axes=layout.bn_axes)
    if layout.size("space") == 1:
        return apply(variables, x_BHWC, sample_keys_B=sample_keys_B, weight_B=weight_B)
    rows = spatial.Rows("space", layout.size("space"), x_BHWC.shape[1])
    split = jax.shard_map(
        lambda variables, x_BHWC, sample_keys_B, weight_B: apply(
            variables, x_BHWC, sample_keys_B=sample_keys_B, weight_B=weight_B, rows=rows
        ),
        mesh=layout.mesh, axis_names={"space"}, in_specs=(P(), P(None, "space"), P(), P()), out_specs=P(),
    )  # fmt: skip
    return split(variables, spatial.pad(x_BHWC, rows), sample_keys_B, weight_B)


def accumulate(gradients: Callable, batch_stats: Any, parts: Batch):
    """Runs `gradients` over micro-batches one after another and sums what it gives."""
    first = jax.tree.map(lambda x: x[0], parts)
    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(gradients, batch_stats, first)[1])

    def add(carry, part):
        batch_stats, more = gradients(carry[0], part)
        return (batch_stats, jax.tree.map(jnp.add, carry[1], more)), None

    return lax.scan(add, (batch_stats, zeros), parts)[0]
