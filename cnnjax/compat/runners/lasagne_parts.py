"""Layers and update rules that Lasagne 0.1 lacks, or has with another meaning. Python 3.7.

Import it after `theano_settings.configure`.
"""

import sys

import numpy as np
import theano
import theano.tensor as T
import theano.tensor.signal.pool
import theano_ops as ops

# The name under which Lasagne imports it, which Theano has dropped.
sys.modules["theano.tensor.signal.downsample"] = theano.tensor.signal.pool
import lasagne  # noqa: E402


class Conv(lasagne.layers.Layer):
    """Padding of any width inside the convolution; Lasagne's own would pad, or crop, in a step of its own."""

    def __init__(self, below, layer, kernel, bias):
        super().__init__(below)
        self._layer = layer
        self.W = self.add_param(kernel, kernel.shape, "W")
        self.b = None if bias is None else self.add_param(bias, bias.shape, "b")

    def get_output_shape_for(self, input_shape):
        """See `lasagne.layers.Layer`; as the job says it."""
        return _shape(self._layer)

    def get_output_for(self, input, **_):
        """See `lasagne.layers.Layer`."""
        # Theano flips the kernels, as it does by default for users of Lasagne; `convert.THEANO` has them flipped.
        y = T.nnet.conv2d(
            input, self.W, self.input_shape, self.W.get_value(borrow=True).shape,
            border_mode=tuple(map(tuple, self._layer["pads"])), subsample=tuple(self._layer["strides"]),
        )  # fmt: skip
        return y if self.b is None else y + self.b.dimshuffle("x", 0, "x", "x")


class Pool(lasagne.layers.Layer):
    """Lasagne's pooling calls functions that Theano 1.0 has dropped."""

    def __init__(self, below, layer, function, *arguments):
        super().__init__(below)
        self._layer, self._function, self._arguments = layer, function, arguments

    def get_output_shape_for(self, input_shape):
        """See `lasagne.layers.Layer`; as the job says it."""
        return _shape(self._layer)

    def get_output_for(self, input, **_):
        """See `lasagne.layers.Layer`."""
        return self._function(input, *self._arguments)


class BatchNorm(lasagne.layers.Layer):
    """Lasagne 0.1 has none; later ones average 1 / sqrt(var + epsilon) instead of the variance."""

    def __init__(self, below, layer, weights):
        super().__init__(below)
        self._momentum, self._epsilon = layer["momentum"], layer["epsilon"]
        self.by_leaf = {}
        channels = weights["mean"].shape
        for leaf, start in (("scale", 1), ("bias", 0), ("mean", 0), ("var", 1)):
            value = weights[leaf] if leaf in weights else np.full(channels, start, weights["mean"].dtype)
            trained = leaf in ("scale", "bias") and leaf in weights
            self.by_leaf[leaf] = self.add_param(value, channels, leaf, trainable=trained, regularizable=False)

    def get_output_for(self, input, deterministic=False, moved=None, **_):
        """See `lasagne.layers.Layer`; in training, appends pairs of a moving statistic and its new value to moved."""
        scale, bias, mean, var = (self.by_leaf[leaf] for leaf in ("scale", "bias", "mean", "var"))
        if deterministic:
            return ops.moved_norm(input, scale, bias, mean, var, self._epsilon)
        y, *moments = ops.batch_norm(input, scale, bias, self._epsilon)
        kept = self._momentum
        moved.extend((old, kept * old + (1 - kept) * new) for old, new in zip((mean, var), moments))
        return y


def _shape(layer):
    height, width, channels = layer["output_shape"]
    return None, channels, height, width


def updates(rule, trained, gradients, rate):
    """Pairs of a shared variable and its new value.

    Lasagne keeps the learning rate inside the velocity, and adds Adam's epsilon before the bias correction; cnnjax does
    neither, so its rules are written out.
    """

    def zeros(w):
        return theano.shared(np.zeros_like(w.get_value(borrow=True)), broadcastable=w.broadcastable)

    name, pairs = rule["name"], []
    momentum, b1, b2, eps = (rule[key] for key in ("momentum", "b1", "b2", "eps"))
    if name == "adam":
        t = theano.shared(np.zeros((), rate.dtype))
        pairs.append((t, t + 1))
    for w, g in zip(trained, gradients):
        if name == "sgd":
            step = g
        elif name in ("momentum", "nesterov"):
            v = zeros(w)
            velocity = momentum * v + g
            pairs.append((v, velocity))
            step = momentum * velocity + g if name == "nesterov" else velocity
        elif name == "adam":
            m, v = zeros(w), zeros(w)
            first, second = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * T.sqr(g)
            pairs.extend([(m, first), (v, second)])
            step = first / (1 - b1 ** (t + 1)) / (T.sqrt(second / (1 - b2 ** (t + 1))) + eps)
        else:
            raise NotImplementedError(f"the runner of Lasagne has no update rule {name}")
        pairs.append((w, w - rate * step))
    return pairs
