"""From layer records to a Flax module: `init` and `apply`. Knows no mesh, no optimiser, no data.

Dimension letters: B batch, H height, W width, C channels, I input and O output features.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from cnnjax import networks, ops, spatial
from cnnjax.networks import Init, Network, Shape
from cnnjax.spatial import Rows

Variables = Mapping[str, Any]


def initializer(record: Init):
    """Flax initialiser ``(key, shape, dtype) -> array`` of an `Init` record.

    Draws are made in float32 and then cast, so that a float64 run starts from the same weights as a float32 one.
    """

    def draw(key: jax.Array, shape: Shape, dtype: Any) -> jax.Array:
        match record.kind:
            case "constant":
                return jnp.full(shape, record.scale, dtype)
            case "truncated_normal":
                values = jax.random.truncated_normal(key, -2, 2, shape, jnp.float32) * record.scale
            case _:
                values = getattr(nn.initializers, record.kind)()(key, shape, jnp.float32)
        return values.astype(dtype)

    return draw


class CNN(nn.Module):
    """The layers of a network, one after another; parameter paths are those of `networks.named_layers`.

    Attributes:
        layers: Layer records.
        dtype: Type that convolutions and dense layers compute in.
        param_dtype: Type of parameters and batch statistics.
        span: First and one past the last of the layers that act. Their names and random draws are those that they
            have in the whole network.
    """

    layers: Network
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    span: tuple[int, int | None] = (0, None)

    @nn.compact
    def __call__(self, x: jax.Array, call: "Call", rows: Rows | None = None) -> tuple[jax.Array, Rows | None]:
        """Images ``[B, H, W, C]`` to logits ``[B, classes]``, and how rows are split at the end; see `apply`."""
        x = x.astype(self.dtype)
        for i, (name, layer) in list(enumerate(networks.named_layers(self.layers)))[slice(*self.span)]:
            match layer:
                case networks.Conv():
                    kernel = (*layer.kernel, x.shape[-1], layer.features)
                    w_HWIO, bias = _Weights(layer, kernel, self.param_dtype, name=name)()
                    w_HWIO = w_HWIO.astype(self.dtype)

                    def convolve(x, padding, w_HWIO=w_HWIO, layer=layer):
                        return ops.conv2d(x, w_HWIO, layer.strides, padding)

                    x, rows = spatial.windowed(convolve, x, rows, layer.kernel, layer.strides, layer.padding, 0.0)
                    x = x if bias is None else x + bias.astype(self.dtype)
                case networks.Dense():
                    w_IO, bias = _Weights(layer, (x.shape[-1], layer.features), self.param_dtype, name=name)()
                    x = x @ w_IO.astype(self.dtype)
                    x = x if bias is None else x + bias.astype(self.dtype)
                case networks.BatchNorm():
                    x = _BatchNorm(layer, self.param_dtype, name=name)(x, call, rows).astype(self.dtype)
                case networks.Relu():
                    x = nn.relu(x)
                case networks.MaxPool():

                    def pool(x, padding, layer=layer):
                        return ops.max_pool(x, layer.window, layer.strides, padding)

                    x, rows = spatial.windowed(pool, x, rows, layer.window, layer.strides, layer.padding, -jnp.inf)
                case networks.AvgPool(window=None):
                    x, rows = spatial.mean(x, rows) if rows else jnp.mean(x, (1, 2), keepdims=True), None
                case networks.AvgPool():
                    window = layer.window or ops.image_size(x)

                    def average(x, padding, window=window, layer=layer):
                        return ops.avg_pool(x, window, layer.strides)

                    x, rows = spatial.windowed(average, x, rows, window, layer.strides, "VALID", 0.0)
                case networks.Flatten():
                    x, rows = spatial.gather(x, rows) if rows else x, None
                    x = x.reshape(x.shape[0], -1)
                case networks.Dropout():
                    if call.train and layer.rate:
                        if call.sample_keys_B is None:
                            raise ValueError(f"{name}: training needs sample_keys_B, one random key a sample")
                        keys_B = jax.vmap(jax.random.fold_in, (0, None))(call.sample_keys_B, i)
                        x = ops.dropout(x, layer.rate, keys_B)
                case networks.Residual():
                    block = _Residual(layer, self.dtype, self.param_dtype, name=name)
                    x, rows = block(x, call.folded(i), rows)
        return x, rows


@dataclasses.dataclass(frozen=True)
class Call:
    """What every layer is told of one application; the fields are those of `apply`."""

    train: bool
    sample_keys_B: jax.Array | None = None
    weight_B: jax.Array | None = None
    batch_axes: tuple[str, ...] = ()

    def folded(self, number: int) -> "Call":
        """The same with keys of its own for a block, so that layers draw independently."""
        if self.sample_keys_B is None:
            return self
        keys_B = jax.vmap(jax.random.fold_in, (0, None))(self.sample_keys_B, number)
        return dataclasses.replace(self, sample_keys_B=keys_B)


class _Weights(nn.Module):
    layer: networks.Conv | networks.Dense
    shape: Shape
    param_dtype: Any

    @nn.compact
    def __call__(self) -> tuple[jax.Array, jax.Array | None]:
        kernel = self.param("kernel", initializer(self.layer.kernel_init), self.shape, self.param_dtype)
        if not self.layer.use_bias:
            return kernel, None
        return kernel, self.param("bias", initializer(self.layer.bias_init), self.shape[-1:], self.param_dtype)


class _BatchNorm(nn.Module):
    layer: networks.BatchNorm
    param_dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, call: Call, rows: Rows | None) -> jax.Array:
        layer, shape = self.layer, x.shape[-1:]
        moving_mean = self.variable("batch_stats", "mean", jnp.zeros, shape, self.param_dtype)
        moving_var = self.variable("batch_stats", "var", jnp.ones, shape, self.param_dtype)
        if call.train:
            mean, var = ops.batch_moments(x, call.weight_B, call.batch_axes, rows)
            if not self.is_initializing():
                # A micro-batch or a device may hold padding alone, which has no statistics to follow.
                some = True if call.weight_B is None else ops.psum(jnp.sum(call.weight_B), call.batch_axes) > 0
                for moving, value in ((moving_mean, mean), (moving_var, var)):
                    followed = layer.momentum * moving.value + (1 - layer.momentum) * value
                    moving.value = jnp.where(some, followed, moving.value)
        else:
            mean, var = moving_mean.value, moving_var.value
        factor = jax.lax.rsqrt(var + layer.epsilon)
        if layer.use_scale:
            factor *= self.param("scale", initializer(layer.scale_init), shape, self.param_dtype)
        y = (x - mean) * factor
        if layer.use_bias:
            y += self.param("bias", initializer(layer.bias_init), shape, self.param_dtype)
        return y


class _Residual(nn.Module):
    layer: networks.Residual
    dtype: Any
    param_dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, call: Call, rows: Rows | None) -> tuple[jax.Array, Rows | None]:
        body, body_rows = CNN(self.layer.body, self.dtype, self.param_dtype, name="body")(x, call.folded(0), rows)
        if not self.layer.shortcut:
            return body + x, body_rows
        cnn = CNN(self.layer.shortcut, self.dtype, self.param_dtype, name="shortcut")
        return body + cnn(x, call.folded(1), rows)[0], body_rows


def init(key: jax.Array, network: Network, input_shape: Shape, *, param_dtype: Any = jnp.float32) -> Variables:
    """Initial parameters and batch statistics.

    Args:
        key: Random key; parameters are a function of it alone, on any mesh.
        network: Layer records.
        input_shape: ``(height, width, channels)`` of one image.
        param_dtype: Type of every array.

    Returns:
        ``{"params": ..., "batch_stats": ...}``, the latter an empty dict in a network without batch norm.

    Raises:
        ValueError: If a layer cannot take the shape that reaches it.
    """
    networks.output_shape(network, input_shape)
    x_BHWC = jnp.zeros((1, *input_shape), param_dtype)
    variables = CNN(network, param_dtype, param_dtype).init(key, x_BHWC, Call(train=False))
    return {"params": variables["params"], "batch_stats": variables.get("batch_stats", {})}


def apply(
    network: Network,
    variables: Variables,
    x_BHWC: jax.Array,
    *,
    train: bool,
    sample_keys_B: jax.Array | None = None,
    weight_B: jax.Array | None = None,
    dtype: Any = jnp.float32,
    batch_axes: tuple[str, ...] = (),
    rows: Rows | None = None,
    span: tuple[int, int | None] = (0, None),
) -> tuple[jax.Array, Any]:
    """Logits of a batch of images, or what a span of the layers makes of what reaches the first of them.

    Args:
        network: Layer records.
        variables: From `init`, or the like-named fields of a train state.
        x_BHWC: Scaled images.
        train: Whether dropout acts and batch norm uses, and then follows, the statistics of the batch.
        sample_keys_B: One random key a sample, for dropout; needed where ``train`` and the network has dropout.
        weight_B: 1 for samples that count, 0 for padding, which batch norm leaves out; None where all count.
        dtype: Type that the layers compute in.
        batch_axes: Manual mesh axes over which batch norm sums, inside `jax.shard_map`; none under plain jit.
        rows: How the rows of the images are split, inside `jax.shard_map`; None where they are whole.
        span: First and one past the last of the layers to apply. Only their variables are read.

    Returns:
        ``(logits_BC, batch_stats)``; the statistics are unchanged where ``train`` is False.
    """
    module = CNN(network, dtype, next((leaf.dtype for leaf in jax.tree.leaves(variables)), dtype), span)
    call = Call(train, sample_keys_B, weight_B, batch_axes)
    (logits_BC, _), updated = module.apply(variables, x_BHWC, call, rows, mutable=["batch_stats"])
    return logits_BC, updated.get("batch_stats", {})
