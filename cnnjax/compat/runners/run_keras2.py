"""Keras 2.3.1; ``backend=theano`` or ``backend=tensorflow``. Python 3.7."""

import atexit
import importlib
import json
import os
import shutil
import tempfile
import warnings

import convert
import numpy as np
import protocol
import theano_settings

_BACKENDS = {
    # ops, data format, convention. Theano convolves, with kernels flipped; Keras stores them [H, W, in, out] all the
    # same, and flattens in H, W, C order in either format. Both formats are those that the backend computes in.
    "theano": ("theano_ops", "channels_first", convert.Convention(flipped=True)),
    "tensorflow": ("tensorflow1_ops", "channels_last", convert.TENSORFLOW),
}


class Trainer(protocol.Trainer):
    """A functional model, built twice over the same layers: so no step asks whether it trains or predicts."""

    def __init__(self, job):
        super().__init__()
        self.backend = job.options.get("backend", "tensorflow")
        if self.backend not in _BACKENDS:
            raise ValueError(f"backend is {self.backend!r}; allowed: {', '.join(_BACKENDS)}")
        operations, data_format, self._convention = _BACKENDS[self.backend]
        self.notes = _settings(self.backend, job.dtype, data_format)
        if self.backend == "theano":
            self.notes += theano_settings.configure(job.dtype)
        ops = importlib.import_module(operations)
        warnings.simplefilter("ignore")  # deprecations of what Keras itself calls
        keras = importlib.import_module("keras")
        self._K = keras.backend
        self._first = data_format == "channels_first"
        self.versions = dict(ops.versions(), keras=keras.__version__)
        if self.backend == "tensorflow":
            ops.tf.compat.v1.set_random_seed(job.seed)  # of dropout
        np.random.seed(job.seed)  # from which Keras draws the seeds of dropout on Theano

        self._network = job.network
        height, width, channels = job.input_shape
        images = keras.layers.Input((channels, height, width) if self._first else job.input_shape)
        builder = _Builder(keras, ops, self._first)
        self._model = keras.models.Model(images, builder.stack(job.network, images, training=True))
        self._tester = keras.models.Model(images, builder.stack(job.network, images, training=False))
        self._variables = builder.variables()
        weights = convert.to_framework(job.network, job.weights, self._convention)
        self._K.batch_set_value([(variable, weights[path]) for path, variable in self._variables.items()])
        self._model.compile(_optimizer(keras, job.optimizer), _loss(keras), metrics=["sparse_categorical_accuracy"])

    def train(self, x, y, index, learning_rate):
        """See `protocol.Trainer`."""
        del index
        self._K.set_value(self._model.optimizer.lr, learning_rate)
        loss, accuracy = self._model.train_on_batch(self._laid_out(x), y)
        return float(loss), round(float(accuracy) * len(y))

    def predict(self, x):
        """See `protocol.Trainer`."""
        return self._tester.predict_on_batch(self._laid_out(x))

    def weights(self):
        """See `protocol.Trainer`."""
        values = dict(zip(self._variables, self._K.batch_get_value(list(self._variables.values()))))
        return convert.from_framework(self._network, values, self._convention)

    def _laid_out(self, x):
        return np.ascontiguousarray(x.transpose(0, 3, 1, 2)) if self._first else x


def _settings(backend, dtype, data_format):
    """Makes sure of backend, type and format; returns lines about what asked for another backend."""
    notes = []
    named = os.environ.get("KERAS_BACKEND")
    if named and named != backend:
        notes.append(f"KERAS_BACKEND={named} is overruled: this run is on {backend}")
    home = os.environ.get("KERAS_HOME", os.path.join(os.path.expanduser("~"), ".keras"))
    path = os.path.join(home, "keras.json")
    try:
        with open(path) as file:
            configured = json.load(file).get("backend", backend)
        if configured != backend:
            notes.append(f"{path} says backend {configured}, which is overruled: this run is on {backend}")
    except (OSError, ValueError, AttributeError):
        pass
    os.environ["KERAS_BACKEND"] = backend
    # A file of its own: Keras sets Theano's type once, from it, and without one writes the user's, which newer versions
    # of Keras read too.
    os.environ["KERAS_HOME"] = folder = tempfile.mkdtemp(prefix="cnnjax-keras-")
    with open(os.path.join(folder, "keras.json"), "w") as file:
        json.dump({"backend": backend, "floatx": dtype, "image_data_format": data_format, "epsilon": 1e-7}, file)
    atexit.register(shutil.rmtree, folder, True)
    return notes


class _Builder:
    """Makes layers, once each, and connects them."""

    def __init__(self, keras, ops, first):
        self._keras, self._ops, self._first = keras, ops, first
        self._made = {}
        self._batch_norm = _batch_norm(keras, ops)

    def variables(self):
        """Variables by the path that they have in cnnjax."""
        leaves = {
            "kernel": "kernel", "bias": "bias", "gamma": "scale", "beta": "bias", "moving_mean": "mean",
            "moving_variance": "var",
        }  # fmt: skip
        return {
            f"{name}/{leaf}": getattr(layers[-1], attribute)
            for name, layers in self._made.items() for attribute, leaf in leaves.items()
            if getattr(layers[-1], attribute, None) is not None
        }  # fmt: skip

    def stack(self, network, x, training):
        for layer in network:
            name = layer["name"]
            if layer["kind"] == "Residual":
                x = self._keras.layers.add([self.stack(layer[part], x, training) for part in ("body", "shortcut")])
                continue
            if name not in self._made:
                self._made[name] = self._layers(layer)
            for made in self._made[name]:
                takes_phase = layer["kind"] in ("BatchNorm", "Dropout")
                x = made(x, training=training) if takes_phase else made(x)
        return x

    def _layers(self, layer):
        kind, layers = layer["kind"], self._keras.layers
        if kind == "Conv":
            padding, before = "valid", []
            if layer["pads"] == self._same(layer):
                padding = "same"
            elif layer["pads"] != [[0, 0], [0, 0]]:
                before = [layers.ZeroPadding2D(layer["pads"])]
            options = {"strides": layer["strides"], "padding": padding, "use_bias": layer["use_bias"]}
            return [*before, layers.Conv2D(layer["features"], layer["kernel"], **options)]
        if kind == "Dense":
            return [layers.Dense(layer["features"], use_bias=layer["use_bias"])]
        if kind == "BatchNorm":
            axis = 1 if self._first and len(layer["input_shape"]) == 3 else -1
            momentum, epsilon, bias, scale = (layer[key] for key in ("momentum", "epsilon", "use_bias", "use_scale"))
            return [self._batch_norm(axis=axis, momentum=momentum, epsilon=epsilon, center=bias, scale=scale)]
        if kind == "MaxPool":
            # Keras's own pads otherwise on each backend, and Theano's gives each of equal values the gradient.
            height, width, channels = layer["output_shape"]
            shape = (channels, height, width) if self._first else (height, width, channels)
            arguments = layer["window"], layer["strides"], layer["pads"]
            return [layers.Lambda(lambda x: self._ops.max_pool(x, *arguments), shape)]
        if kind == "AvgPool":
            return [layers.AveragePooling2D(layer["window"], strides=layer["strides"])]
        if kind == "Relu":
            return [layers.Lambda(self._ops.relu, lambda shape: shape)]
        if kind == "Dropout":
            return [layers.Dropout(layer["rate"])]
        if kind == "Flatten":
            return [layers.Flatten()]
        raise NotImplementedError(f"{layer['name']}: the runner of Keras has no layer {kind}")

    def _same(self, layer):
        """What Keras's "same" adds on this backend, where it can be told; else None."""
        if not self._first:
            sizes = zip(layer["input_shape"], layer["kernel"], layer["strides"])
            return [self._ops.same_pads(*one) for one in sizes]
        kernel = layer["kernel"]
        return [[size // 2, size // 2] for size in kernel] if all(size % 2 for size in kernel) else None


def _batch_norm(keras, ops):
    class BatchNorm(keras.layers.BatchNormalization):
        """Keras 2.3 scales the moving variance by n / (n - 1 - epsilon); this one does not."""

        def call(self, inputs, training=None):
            K = keras.backend
            scale = K.ones_like(self.moving_variance) if self.gamma is None else self.gamma
            bias = K.zeros_like(self.moving_mean) if self.beta is None else self.beta
            moving = self.moving_mean, self.moving_variance
            if not training:
                return ops.moved_norm(inputs, scale, bias, *moving, epsilon=self.epsilon)
            y, *moments = ops.batch_norm(inputs, scale, bias, self.epsilon)
            kept = self.momentum
            self.add_update([K.update(old, kept * old + (1 - kept) * new) for old, new in zip(moving, moments)], inputs)
            return y

    return BatchNorm


def _loss(keras):
    K = keras.backend

    def cross_entropy(labels, logits):
        if K.backend() == "tensorflow":
            return K.sparse_categorical_crossentropy(labels, logits, from_logits=True)
        import theano.tensor as T

        # Keras on Theano cuts probabilities at 1e-7, also those that it has from logits.
        return T.nnet.categorical_crossentropy(T.nnet.softmax(logits), T.cast(labels.flatten(), "int32"))

    return cross_entropy


def _optimizer(keras, rule):
    K = keras.backend

    class Rule(keras.optimizers.Optimizer):
        """cnnjax's update rules.

        Keras keeps the learning rate inside the velocity, and adds Adam's epsilon before the bias correction.
        """

        def __init__(self):
            super().__init__()
            self.learning_rate = K.variable(0.0, name="learning_rate")

        def get_updates(self, loss, params):
            name, momentum, b1, b2, eps = (rule[key] for key in ("name", "momentum", "b1", "b2", "eps"))
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

    return Rule()


if __name__ == "__main__":
    protocol.main("keras2", Trainer)
