"""Keras 2.3.1; ``backend=theano`` or ``backend=tensorflow``. Python 3.7."""

import atexit
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
    # Data format, in which the backend computes, and convention. Theano convolves, with kernels flipped; Keras stores
    # them [H, W, in, out] all the same, and flattens in H, W, C order in either format.
    "theano": ("channels_first", convert.Convention(flipped=True)),
    "tensorflow": ("channels_last", convert.TENSORFLOW),
}


class Trainer(protocol.Trainer):
    """A functional model, built twice over the same layers: so no step asks whether it trains or predicts."""

    def __init__(self, job):
        super().__init__()
        self.backend = job.options.get("backend", "tensorflow")
        if self.backend not in _BACKENDS:
            raise ValueError(f"backend is {self.backend!r}; allowed: {', '.join(_BACKENDS)}")
        data_format, self._convention = _BACKENDS[self.backend]
        self.notes = _settings(self.backend, job.dtype, data_format)
        if self.backend == "theano":
            self.notes += theano_settings.configure(job.dtype)
        else:
            import tensorflow1_ops  # noqa: F401  imports TensorFlow before Keras does, without its noise
        warnings.simplefilter("ignore")  # deprecations of what Keras itself calls
        import keras2_parts as parts

        keras, self._K = parts.keras, parts.K
        self._first = data_format == "channels_first"
        self.versions = dict(parts.ops.versions(), keras=keras.__version__)
        np.random.seed(job.seed)  # from which Keras draws the seeds of dropout

        self._network = job.network
        height, width, channels = job.input_shape
        images = keras.layers.Input((channels, height, width) if self._first else job.input_shape)
        builder = _Builder(parts, self._first)
        self._model = keras.models.Model(images, builder.stack(job.network, images, training=True))
        self._tester = keras.models.Model(images, builder.stack(job.network, images, training=False))
        self._variables = builder.variables()
        weights = convert.to_framework(job.network, job.weights, self._convention)
        self._K.batch_set_value([(variable, weights[path]) for path, variable in self._variables.items()])
        self._model.compile(parts.Rule(job.optimizer), parts.cross_entropy, metrics=["sparse_categorical_accuracy"])

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

    def __init__(self, parts, first):
        self._parts, self._first = parts, first
        self._made: dict = {}

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
                branches = [self.stack(layer[part], x, training) for part in ("body", "shortcut")]
                x = self._parts.keras.layers.add(branches)
                continue
            if name not in self._made:
                self._made[name] = self._layers(layer)
            for made in self._made[name]:
                takes_phase = layer["kind"] in ("BatchNorm", "Dropout")
                x = made(x, training=training) if takes_phase else made(x)
        return x

    def _layers(self, layer):
        kind, layers = layer["kind"], self._parts.keras.layers
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
            return [self._parts.BatchNorm(axis=axis, momentum=momentum, epsilon=epsilon, center=bias, scale=scale)]
        if kind == "MaxPool":
            # Keras's own pads otherwise on each backend, and Theano's gives each of equal values the gradient.
            height, width, channels = layer["output_shape"]
            shape = (channels, height, width) if self._first else (height, width, channels)
            arguments = layer["window"], layer["strides"], layer["pads"]
            return [layers.Lambda(lambda x: self._parts.ops.max_pool(x, *arguments), shape)]
        if kind == "AvgPool":
            return [layers.AveragePooling2D(layer["window"], strides=layer["strides"])]
        if kind == "Relu":
            return [layers.Lambda(self._parts.ops.relu, lambda shape: shape)]
        if kind == "Dropout":
            return [layers.Dropout(layer["rate"])]
        if kind == "Flatten":
            return [layers.Flatten()]
        raise NotImplementedError(f"{layer['name']}: the runner of Keras has no layer {kind}")

    def _same(self, layer):
        """What Keras's "same" adds on this backend, where it can be told; else None."""
        if not self._first:
            sizes = zip(layer["input_shape"], layer["kernel"], layer["strides"])
            return [self._parts.ops.same_pads(*one) for one in sizes]
        kernel = layer["kernel"]
        return [[size // 2, size // 2] for size in kernel] if all(size % 2 for size in kernel) else None


if __name__ == "__main__":
    protocol.main("keras2", Trainer)
