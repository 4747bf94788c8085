"""From layer records to a Flax module: `init` and `apply`. Knows no mesh, no optimiser, no data.

Dimension letters: B batch, H height, W width, C channels, I input and O output features.
"""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from cnnjax import networks, ops
from cnnjax.networks import Init, Network, Shape

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
    """

    layers: Network
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool, sample_keys_B=None, weight_B=None) -> jax.Array:
        """Images ``[B, H, W, C]`` to logits ``[B, classes]``; see `apply`."""
        x = x.astype(self.dtype)
        for i, (name, layer) in enumerate(networks.named_layers(self.layers)):
            match layer:
                case networks.Conv():
                    kernel = (*layer.kernel, x.shape[-1], layer.features)
                    w_HWIO, bias = _Weights(layer, kernel, self.param_dtype, name=name)()
                    x = ops.conv2d(x, w_HWIO.astype(self.dtype), layer.strides, layer.padding)
                    x = x if bias is None else x + bias.astype(self.dtype)
                case networks.Dense():
                    w_IO, bias = _Weights(layer, (x.shape[-1], layer.features), self.param_dtype, name=name)()
                    x = x @ w_IO.astype(self.dtype)
                    x = x if bias is None else x + bias.astype(self.dtype)
                case networks.BatchNorm():
                    x = _BatchNorm(layer, self.param_dtype, name=name)(x, train, weight_B).astype(self.dtype)
                case networks.Relu():
                    x = nn.relu(x)
                case networks.MaxPool():
                    x = ops.max_pool(x, layer.window, layer.strides, layer.padding)
                case networks.AvgPool():
                    x = ops.avg_pool(x, layer.window or ops.image_size(x), layer.strides)
                case networks.Flatten():
                    x = x.reshape(x.shape[0], -1)
                case networks.Dropout():
                    if train and layer.rate:
                        if sample_keys_B is None:
                            raise ValueError(f"{name}: training needs sample_keys_B, one random key a sample")
                        keys_B = jax.vmap(jax.random.fold_in, (0, None))(sample_keys_B, i)
                        x = ops.dropout(x, layer.rate, keys_B)
                case networks.Residual():
                    x = _Residual(layer, self.dtype, self.param_dtype, name=name)(
                        x, train, _fold(sample_keys_B, i), weight_B
                    )
        return x


def _fold(sample_keys_B: jax.Array | None, number: int) -> jax.Array | None:
    """Keys of one layer, so that layers draw independently."""
    return None if sample_keys_B is None else jax.vmap(jax.random.fold_in, (0, None))(sample_keys_B, number)


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
    def __call__(self, x: jax.Array, train: bool, weight_B: jax.Array | None) -> jax.Array:
        layer, shape = self.layer, x.shape[-1:]
        moving_mean = self.variable("batch_stats", "mean", jnp.zeros, shape, self.param_dtype)
        moving_var = self.variable("batch_stats", "var", jnp.ones, shape, self.param_dtype)
        if train:
            mean, var = ops.batch_moments(x, weight_B)
            if not self.is_initializing():
                for moving, value in ((moving_mean, mean), (moving_var, var)):
                    moving.value = layer.momentum * moving.value + (1 - layer.momentum) * value
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
    def __call__(self, x: jax.Array, train: bool, sample_keys_B, weight_B) -> jax.Array:
        def branch(layers: Network, name: str, number: int) -> jax.Array:
            if not layers:
                return x
            cnn = CNN(layers, self.dtype, self.param_dtype, name=name)
            return cnn(x, train=train, sample_keys_B=_fold(sample_keys_B, number), weight_B=weight_B)

        return branch(self.layer.body, "body", 0) + branch(self.layer.shortcut, "shortcut", 1)


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
    variables = CNN(network, param_dtype, param_dtype).init(key, x_BHWC, train=False)
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
) -> tuple[jax.Array, Any]:
    """Logits of a batch of images.

    Args:
        network: Layer records.
        variables: From `init`, or the like-named fields of a train state.
        x_BHWC: Scaled images.
        train: Whether dropout acts and batch norm uses, and then follows, the statistics of the batch.
        sample_keys_B: One random key a sample, for dropout; needed where ``train`` and the network has dropout.
        weight_B: 1 for samples that count, 0 for padding, which batch norm leaves out; None where all count.
        dtype: Type that the layers compute in.

    Returns:
        ``(logits_BC, batch_stats)``; the statistics are unchanged where ``train`` is False.
    """
    module = CNN(network, dtype, jax.tree.leaves(variables["params"])[0].dtype)
    logits_BC, updated = module.apply(
        variables, x_BHWC, train=train, sample_keys_B=sample_keys_B, weight_B=weight_B, mutable=["batch_stats"]
    )
    return logits_BC, updated.get("batch_stats", {})
