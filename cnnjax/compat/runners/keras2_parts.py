"""Layers, loss and update rules that Keras 2.3.1 has with another meaning than cnnjax. Python 3.7.

Import it after ``run_keras2.py`` has chosen the backend.
"""

import importlib

import keras
from keras import backend as K

ops = importlib.import_module({"theano": "theano_ops", "tensorflow": "tensorflow1_ops"}[K.backend()])


class BatchNorm(keras.layers.BatchNormalization):
    """Keras 2.3 scales the moving variance by n / (n - 1 - epsilon); this one does not."""

    def call(self, inputs, training=None):
        """See `keras.layers.Layer`."""
        scale = K.ones_like(self.moving_variance) if self.gamma is None else self.gamma
        bias = K.zeros_like(self.moving_mean) if self.beta is None else self.beta
        if not training:
            return ops.moved_norm(inputs, scale, bias, self.moving_mean, self.moving_variance, self.epsilon)
        y, *moments = ops.batch_norm(inputs, scale, bias, self.epsilon)
        kept, moving = self.momentum, (self.moving_mean, self.moving_variance)
        self.add_update([K.update(old, kept * old + (1 - kept) * new) for old, new in zip(moving, moments)], inputs)
        return y


def cross_entropy(labels, logits):
    """Of labels [B, 1], for each image."""
    if K.backend() == "tensorflow":
        return K.sparse_categorical_crossentropy(labels, logits, from_logits=True)
    import theano.tensor as T

    # Keras on Theano cuts probabilities at 1e-7, also those that it has from logits.
    return T.nnet.categorical_crossentropy(T.nnet.softmax(logits), T.cast(labels.flatten(), "int32"))


class Rule(keras.optimizers.Optimizer):
    """cnnjax's update rules.

    Keras keeps the learning rate inside the velocity, and adds Adam's epsilon before the bias correction.
    """

    def __init__(self, rule):
        super().__init__()
        self._rule = rule
        self.learning_rate = K.variable(0.0, name="learning_rate")

    def get_updates(self, loss, params):
        """See `keras.optimizers.Optimizer`."""
        name, momentum, b1, b2, eps = (self._rule[key] for key in ("name", "momentum", "b1", "b2", "eps"))
        if name not in ("sgd", "momentum", "nesterov", "adam"):
            raise NotImplementedError(f"the runner of Keras has no update rule {name}")
        self.updates, self.weights = [], []
        if name == "adam":
            t = self._follow(K.variable(0.0), lambda old: old + 1)
        for w, g in zip(params, self.get_gradients(loss, params)):
            step = g
            if name in ("momentum", "nesterov"):
                v = self._follow(self._zeros(w), lambda old, g=g: momentum * old + g)
                step = momentum * v + g if name == "nesterov" else v
            elif name == "adam":
                m = self._follow(self._zeros(w), lambda old, g=g: b1 * old + (1 - b1) * g)
                v = self._follow(self._zeros(w), lambda old, g=g: b2 * old + (1 - b2) * K.square(g))
                step = m / (1 - K.pow(b1 + 0 * t, t)) / (K.sqrt(v / (1 - K.pow(b2 + 0 * t, t))) + eps)
            self.updates.append(K.update(w, w - self.learning_rate * step))
        return self.updates

    def _follow(self, state, change):
        """Registers a state with its new value, which it returns."""
        new = change(state)
        self.weights.append(state)
        self.updates.append(K.update(state, new))
        return new

    def _zeros(self, w):
        return K.zeros(K.int_shape(w))
