"""Keras 3 on TensorFlow, JAX or PyTorch (option ``backend``): a compiled functional model and ``train_on_batch``.

Keras takes its backend from ``$KERAS_BACKEND``, else from ``keras.json`` in ``$KERAS_HOME`` or ``~/.keras``, and only
when it is imported. Here the option wins, and ``notes`` say who asked for another. Option ``jit_compile=0`` or ``1``
is that of ``model.compile``; without it see `_JIT_COMPILE`.

Images stay channels last on every backend, Keras's default; on PyTorch it hands on a transposed view, which is in
memory what PyTorch is fastest with on CPUs.
"""

import importlib
import json
import os

import convert
import numpy as np
import protocol

BACKENDS = ("tensorflow", "jax", "torch")
# What a user gets who says nothing ("auto" is True, True, False), but for TensorFlow: through XLA its steps took 1.2
# times (cifar10_slim) and 1.9 times (the 3+3 network) as long on two CPU cores, and its start three times.
_JIT_COMPILE = {"tensorflow": False, "jax": True, "torch": False}
_LEAVES = {"kernel": "kernel", "scale": "gamma", "bias": "beta", "mean": "moving_mean", "var": "moving_variance"}


def choose_backend(wanted):
    """Sets ``$KERAS_BACKEND`` for this process.

    Args:
        wanted: Name of a backend; None leaves it to Keras's own rules.

    Returns:
        The backend, and a note for every place that asks for another.
    """
    home = os.environ.get("KERAS_HOME") or os.path.join("~", ".keras")
    path = os.path.join(home, "keras.json")
    try:
        with open(os.path.expanduser(path)) as file:
            stored = json.load(file).get("backend")
    except (OSError, ValueError, AttributeError):
        stored = None
    asked = {"the environment's KERAS_BACKEND": os.environ.get("KERAS_BACKEND"), path: stored}
    backend = wanted or next(filter(None, asked.values()), "tensorflow")
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; allowed: {', '.join(BACKENDS)}")
    os.environ["KERAS_BACKEND"] = backend
    winner = "the option backend" if wanted else next((name for name, value in asked.items() if value), "the default")
    notes = [f"{name} asks for {value}; {backend} runs, from {winner}"
             for name, value in asked.items() if value and value != backend]  # fmt: skip
    return backend, notes


class Trainer(protocol.Trainer):
    """A functional model, trained batch by batch."""

    def __init__(self, job):
        """Builds and compiles the model, with the job's weights."""
        super().__init__()
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        self.backend, self.notes = choose_backend(job.options.get("backend"))
        module = self._module = importlib.import_module(self.backend)
        if self.backend == "jax":
            module.config.update("jax_enable_x64", job.dtype == "float64")
        elif self.backend == "tensorflow":
            module.get_logger().setLevel("ERROR")
        import keras

        if keras.config.backend() != self.backend:
            raise RuntimeError(f"Keras was imported before, with {keras.config.backend()}; {self.backend} was chosen")
        self.versions = {"keras": keras.__version__, self.backend: module.__version__}
        # Whatever keras.json says of them.
        keras.config.set_floatx(job.dtype)
        keras.config.set_image_data_format("channels_last")
        if job.dtype == "float64" and self.backend != "tensorflow":
            _allow_float64()
        keras.utils.set_random_seed(job.seed)  # of dropout
        self._network, self._named = job.network, {}
        image = keras.Input(job.input_shape)
        self._model = keras.Model(image, self._stack(keras, job.network, image))
        jit = job.options.get("jit_compile")
        self._optimizer, self._rate = _optimizer(keras, job.optimizer), 1.0
        self._model.compile(
            self._optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
            jit_compile=_JIT_COMPILE[self.backend] if jit is None else jit == "1",
        )  # fmt: skip
        own = convert.to_framework(job.network, job.weights, convert.TENSORFLOW)
        self._variables = {path: self._variable(path) for path in own}
        for path, value in own.items():
            self._variables[path].assign(value)

    def _stack(self, keras, network, x):
        for layer in network:
            x = self._layer(keras, layer, x)
        return x

    def _layer(self, keras, layer, x):
        kind, name, layers = layer["kind"], layer["name"], keras.layers
        if kind == "Conv":
            x, padding = _padded(layer, layer["kernel"], x, lambda pads: layers.ZeroPadding2D(pads))
            made = layers.Conv2D(
                layer["features"], layer["kernel"], layer["strides"], padding, use_bias=layer["use_bias"]
            )
        elif kind == "Dense":
            made = layers.Dense(layer["features"], use_bias=layer["use_bias"])
        elif kind == "BatchNorm":
            # Its moving variance follows the biased variance on all three backends, and its momentum is the share that
            # is kept: both as in cnnjax.
            made = layers.BatchNormalization(
                momentum=layer["momentum"], epsilon=layer["epsilon"], center=layer["use_bias"], scale=layer["use_scale"]
            )
        elif kind == "MaxPool":
            x, padding = _padded(layer, layer["window"], x, lambda pads: _lowest_padding(keras, pads))
            made = layers.MaxPooling2D(layer["window"], layer["strides"], padding)
        elif kind == "AvgPool":
            made = layers.AveragePooling2D(layer["window"], layer["strides"])
        elif kind == "Relu":
            made = layers.ReLU()
        elif kind == "Dropout":
            made = layers.Dropout(layer["rate"])
        elif kind == "Flatten":
            made = layers.Flatten()
        elif kind == "Residual":
            return layers.add([self._stack(keras, layer["body"], x), self._stack(keras, layer["shortcut"], x)])
        else:
            raise ValueError(f"{name}: Keras's runner knows no layer {kind}")
        self._named[name] = made
        return made(x)

    def _variable(self, path):
        name, leaf = path.rsplit("/", 1)
        layer = self._named[name]
        # A batch norm's own scale is whether it has one.
        return getattr(layer, _LEAVES[leaf] if hasattr(layer, "moving_mean") else leaf)

    def train(self, x, y, index, learning_rate):
        """See `protocol.Trainer`."""
        del index
        if learning_rate != self._rate:
            self._optimizer.learning_rate = self._rate = learning_rate
        # Its metrics begin anew with each call, and come from the forward pass of the update.
        logs = self._model.train_on_batch(x, y, return_dict=True)
        self._wait()
        return float(logs["loss"]), round(float(logs["accuracy"]) * len(y))

    def _wait(self):
        """Until the weights are written; TensorFlow on CPUs returns no earlier, nor PyTorch on CPUs."""
        if self.backend == "jax":
            self._module.block_until_ready([variable.value for variable in self._model.variables])
        elif self.backend == "torch" and self._module.cuda.is_available():
            self._module.cuda.synchronize()
        elif self.backend == "tensorflow" and self._module.config.list_physical_devices("GPU"):
            self._module.test.experimental.sync_devices()

    def predict(self, x):
        """See `protocol.Trainer`."""
        return self._model.predict_on_batch(x)

    def weights(self):
        """See `protocol.Trainer`."""
        own = {path: np.array(variable.numpy()) for path, variable in self._variables.items()}
        return convert.from_framework(self._network, own, convert.TENSORFLOW)


def _allow_float64():
    """Keeps values float64 on JAX and PyTorch, where Keras makes float32 of them though floatx is float64."""
    from keras.src.backend.common import dtypes  # there is no public switch

    if "float64" not in getattr(dtypes, "BIT64_TO_BIT32_DTYPE", {}):
        raise RuntimeError("this version of Keras computes in float64 on TensorFlow only")
    dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64"


def _padded(layer, window, x, pad):
    """Input and padding of a window: Keras knows valid and same, all else is a layer before it."""
    if layer["pads"] == [[0, 0], [0, 0]]:
        return x, "valid"
    if layer["pads"] == same_pads(layer["input_shape"], window, layer["strides"]):
        return x, "same"
    return pad(layer["pads"])(x), "valid"


def same_pads(size, window, strides):
    """What ``same`` pads in TensorFlow and Keras: the odd row or column last."""
    totals = [max((-(-n // s) - 1) * s + k - n, 0) for n, k, s in zip(size, window, strides)]
    return [[total // 2, total - total // 2] for total in totals]


def _lowest_padding(keras, pads):
    """A layer that pads with what never wins; ZeroPadding2D would win over negative values."""

    class LowestPadding(keras.layers.Layer):  # type: ignore[name-defined]
        def call(self, x):
            return keras.ops.pad(x, [[0, 0], *pads, [0, 0]], constant_values=-np.inf)

        def compute_output_shape(self, shape):
            return (shape[0], *(n + sum(p) for n, p in zip(shape[1:3], pads)), shape[3])

    return LowestPadding()


def _optimizer(keras, rule):
    """Cnnjax's update rule.

    Keras's SGD has the learning rate inside the velocity (``v = m v - r g``), which is another rule as soon as the rate
    changes, and its Adam adds epsilon before the bias correction of the second moment (``epsilon hat`` of the paper).
    """
    ops = keras.ops

    class Momentum(keras.optimizers.Optimizer):  # type: ignore[name-defined]
        def build(self, variables):
            if not self.built:
                super().build(variables)
                self._velocities = self.add_optimizer_variables(variables, "velocity")

        def update_step(self, gradient, variable, learning_rate):
            velocity = self._velocities[self._get_variable_index(variable)]
            moved = rule["momentum"] * velocity + gradient
            self.assign(velocity, moved)
            step = rule["momentum"] * moved + gradient if rule["name"] == "nesterov" else moved
            self.assign_sub(variable, learning_rate * step)

    class Adam(keras.optimizers.Optimizer):  # type: ignore[name-defined]
        def build(self, variables):
            if not self.built:
                super().build(variables)
                self._firsts, self._seconds = self.add_optimizer_variables(variables, ["first", "second"])

        def update_step(self, gradient, variable, learning_rate):
            number = self._get_variable_index(variable)
            t = ops.cast(self.iterations + 1, variable.dtype)
            corrected = []
            for moment, decay, value in (
                (self._firsts[number], rule["b1"], gradient),
                (self._seconds[number], rule["b2"], ops.square(gradient)),
            ):
                moved = decay * moment + (1 - decay) * value
                self.assign(moment, moved)
                corrected.append(moved / (1 - ops.power(ops.convert_to_tensor(decay, variable.dtype), t)))
            first, second = corrected
            self.assign_sub(variable, learning_rate * first / (ops.sqrt(second) + rule["eps"]))

    if rule["name"] == "sgd":
        return keras.optimizers.SGD(1.0)
    if rule["name"] in ("momentum", "nesterov"):
        return Momentum(1.0)
    if rule["name"] == "adam":
        return Adam(1.0)
    raise ValueError(f"Keras's runner knows no update rule {rule['name']}")


if __name__ == "__main__":
    protocol.main("keras", Trainer)
