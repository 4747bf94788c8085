"""TensorFlow 2: its own variables, tf.nn and a tf.function; MirroredStrategy over ``replicas=N`` virtual CPU devices.

Replica i takes the i-th ``ceil(batch_size / N)`` images of a batch, in order, as the devices of cnnjax do, and
normalises by their statistics alone. Losses are summed and divided by the size of the whole batch, gradients are
summed, and the moving statistics are means over the replicas weighted by their images.

`forward` and `update` serve the cluster of ``run_tensorflow_ps.py`` too.
"""

import contextlib
import os
import sys
import tempfile

import convert
import numpy as np
import protocol


@contextlib.contextmanager
def _quiet_import():
    """Holds back what TensorFlow's libraries print when they are loaded, unless loading fails."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            held.seek(0)
            os.write(kept, held.read())
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)


with _quiet_import():
    import tensorflow as tf

tf.get_logger().setLevel("ERROR")

# ---------------------------------------------------------------------------------------------------------------------
# The network
# ---------------------------------------------------------------------------------------------------------------------


def forward(network, weights, x, training, moved=None):
    """Runs the layers.

    Args:
        network: Layers of the job.
        weights: Variables or tensors by path.
        x: Images [B, H, W, C].
        training: Whether batch norm takes the batch's statistics and dropout drops.
        moved: Dict that gets the next moving statistics, by path, in training.

    Returns:
        Logits [B, classes].
    """
    for layer in network:
        x = _layer(layer, weights, x, training, {} if moved is None else moved)
    return x


def _layer(layer, weights, x, training, moved):
    kind, name = layer["kind"], layer["name"]
    if kind == "Conv":
        y = tf.nn.conv2d(x, weights[name + "/kernel"], layer["strides"], _padding(layer, layer["kernel"]))
        return tf.nn.bias_add(y, weights[name + "/bias"]) if layer["use_bias"] else y
    if kind == "Dense":
        y = tf.matmul(x, weights[name + "/kernel"])
        return tf.nn.bias_add(y, weights[name + "/bias"]) if layer["use_bias"] else y
    if kind == "BatchNorm":
        return _batch_norm(layer, weights, x, training, moved)
    if kind == "MaxPool":
        padding = _padding(layer, layer["window"])
        if not isinstance(padding, str):  # it has no explicit padding on CPUs
            x = tf.pad(x, padding, constant_values=x.dtype.as_numpy_dtype(-np.inf))
            padding = "VALID"
        return tf.nn.max_pool2d(x, layer["window"], layer["strides"], padding)
    if kind == "AvgPool":
        return tf.nn.avg_pool2d(x, layer["window"], layer["strides"], "VALID")
    if kind == "Relu":
        return tf.nn.relu(x)
    if kind == "Dropout":
        return tf.nn.dropout(x, layer["rate"]) if training and layer["rate"] else x
    if kind == "Flatten":
        return tf.reshape(x, (-1, int(np.prod(layer["input_shape"]))))
    if kind == "Residual":
        body = forward(layer["body"], weights, x, training, moved)
        return body + forward(layer["shortcut"], weights, x, training, moved)
    raise ValueError(f"{name}: TensorFlow's runner knows no layer {kind}")


def _padding(layer, window):
    """VALID or SAME where they mean the same, since explicit padding is slower."""
    totals = [max((-(-n // s) - 1) * s + k - n, 0) for n, k, s in zip(layer["input_shape"], window, layer["strides"])]
    if layer["pads"] == [[0, 0], [0, 0]]:
        return "VALID"
    if layer["pads"] == [[total // 2, total - total // 2] for total in totals]:
        return "SAME"
    return [[0, 0], *layer["pads"], [0, 0]]


def _batch_norm(layer, weights, x, training, moved):
    name, epsilon, kept = layer["name"], layer["epsilon"], layer["momentum"]
    number = x.dtype.as_numpy_dtype
    scale, bias = (
        weights[f"{name}/{leaf}"] if used else tf.fill((layer["input_shape"][-1],), number(value))
        for leaf, used, value in (("scale", layer["use_scale"], 1), ("bias", layer["use_bias"], 0))
    )
    old = [weights[f"{name}/{leaf}"] for leaf in ("mean", "var")]
    if not training:
        return tf.nn.batch_normalization(x, *old, bias, scale, epsilon)
    if x.dtype == tf.float32 and len(layer["input_shape"]) == 3:
        # Not tf.compat.v1.nn.fused_batch_norm, which raises epsilon to 1.001e-5 for the sake of cuDNN.
        none = tf.zeros((0,))
        y, mean, var, *_ = tf.raw_ops.FusedBatchNormV3(
            x=x, scale=scale, offset=bias, mean=none, variance=none, epsilon=epsilon
        )
        # It normalises by the biased variance, but returns the unbiased one.
        count = tf.cast(tf.size(x) // x.shape[-1], x.dtype)
        var = tf.where(count > 1, var * ((count - 1) / count), tf.zeros_like(var))
    else:
        mean, var = tf.nn.moments(x, list(range(len(layer["input_shape"]))))
        y = tf.nn.batch_normalization(x, mean, var, bias, scale, epsilon)
    for leaf, before, new in zip(("mean", "var"), old, (mean, var)):
        # As numbers of NumPy: TensorFlow would round a Python float to float32 first.
        moved[f"{name}/{leaf}"] = number(kept) * before + number(1 - kept) * tf.stop_gradient(new)
    return y


def sums(network, weights, x, y, moved):
    """Loss summed over the batch, and right predictions as the same type; fills ``moved`` as `forward` does."""
    logits = forward(network, weights, x, True, moved)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
    hits = tf.equal(tf.argmax(logits, 1, output_type=tf.int32), y)
    return tf.reduce_sum(losses), tf.reduce_sum(tf.cast(hits, logits.dtype))


# ---------------------------------------------------------------------------------------------------------------------
# The update
# ---------------------------------------------------------------------------------------------------------------------

SLOTS = {"sgd": (), "momentum": ("velocity",), "nesterov": ("velocity",), "adam": ("first", "second")}


def update(rule, variable, slots, gradient, rate, t):
    """Changes a variable by cnnjax's rule, with the kernels of TensorFlow's own optimisers.

    Args:
        rule: Of the job.
        variable: What to change.
        slots: Its variables of `SLOTS`.
        gradient: Of the same shape.
        rate: Learning rate, a scalar of the same type.
        t: Number of this update, counted from 1, a scalar of the same type.

    Returns:
        The operation.
    """
    name = rule["name"]
    own = [one.handle for one in (variable, *slots)]
    momentum, b1, b2, eps = (tf.constant(rule[key], gradient.dtype) for key in ("momentum", "b1", "b2", "eps"))
    if name == "sgd":
        return tf.raw_ops.ResourceApplyGradientDescent(var=own[0], alpha=rate, delta=gradient)
    if name in ("momentum", "nesterov"):
        # The rate multiplies the velocity as it leaves, as in cnnjax; tf.keras has it inside the velocity.
        return tf.raw_ops.ResourceApplyMomentum(
            var=own[0], accum=own[1], lr=rate, grad=gradient, momentum=momentum, use_nesterov=name == "nesterov"
        )
    if name == "adam":
        # Its epsilon is added before the bias correction of the second moment, so the correction is put into it.
        left = 1 - b2**t
        return tf.raw_ops.ResourceApplyAdam(
            var=own[0], m=own[1], v=own[2], beta1_power=b1**t, beta2_power=b2**t, lr=rate, beta1=b1, beta2=b2,
            epsilon=eps * tf.sqrt(left), grad=gradient,
        )  # fmt: skip
    raise ValueError(f"TensorFlow's runner knows no update rule {name}")


def is_trained(path):
    """Whether an array is trained; the moving statistics of batch norm are not."""
    return path.rsplit("/", 1)[-1] not in ("mean", "var")


# ---------------------------------------------------------------------------------------------------------------------
# One process
# ---------------------------------------------------------------------------------------------------------------------


class Trainer(protocol.Trainer):
    """One device, or replicas on virtual ones."""

    def __init__(self, job):
        """Makes variables of the job's weights."""
        super().__init__()
        self.versions = {"tensorflow": tf.__version__}
        self._network, self._rule, self._dtype = job.network, job.optimizer, tf.as_dtype(job.dtype)
        self._replicas = int(job.options.get("replicas", 1))
        self._share = -(-job.batch_size // self._replicas)
        tf.random.set_seed(job.seed)  # of dropout
        scope = contextlib.nullcontext()
        if self._replicas > 1:
            if job.options.get("bn_scope", "local") != "local":
                raise ValueError("bn_scope=global is not written for MirroredStrategy; each replica has its own")
            self.mesh, self.strategy, self.bn_scope = f"data={self._replicas}", "mirrored", "local"
            cpu = tf.config.list_physical_devices("CPU")[0]
            tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * self._replicas)
            devices = [f"CPU:{number}" for number in range(self._replicas)]
            self._mirrored = tf.distribute.MirroredStrategy(devices, tf.distribute.ReductionToOneDevice())
            scope = self._mirrored.scope()
        elif tf.config.list_physical_devices("GPU"):
            self.backend = "gpu"
        own = convert.to_framework(job.network, job.weights, convert.TENSORFLOW)
        with scope:
            self._weights = {path: tf.Variable(value, trainable=is_trained(path)) for path, value in own.items()}
            self._slots = {
                path: [tf.Variable(tf.zeros_like(value)) for _ in SLOTS[self._rule["name"]]]
                for path, value in own.items() if is_trained(path)
            }  # fmt: skip
        self._t = 0
        image = tf.TensorSpec((None, *job.input_shape), self._dtype)
        number = tf.TensorSpec((), self._dtype)
        # No batch size in the signature: its kernels gain nothing by it, and the smaller last batch is no new trace.
        signature = (image, tf.TensorSpec((None,), tf.int32), number, number)
        step = self._one if self._replicas == 1 else self._all
        # Without AutoGraph, which nothing here needs, and which would bury errors in its own frames.
        self._step = tf.function(step, signature, autograph=False)
        self._logits = tf.function(lambda x: forward(self._network, self._weights, x, False), [image], autograph=False)

    def _gradients(self, x, y, count):
        """Sums of loss and hits; gradients of the loss sum / count; next moving statistics; the last two by path."""
        moved: dict = {}
        trained = {path: self._weights[path] for path in self._slots}
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(list(trained.values()))
            loss, hits = sums(self._network, self._weights, x, y, moved)
            mean = loss / count
        return loss, hits, tape.gradient(mean, trained), moved

    def _one(self, x, y, rate, t):
        count = tf.cast(tf.size(y), self._dtype)
        loss, hits, gradients, moved = self._gradients(x, y, count)
        for path, gradient in gradients.items():
            update(self._rule, self._weights[path], self._slots[path], gradient, rate, t)
        for path, value in moved.items():
            self._weights[path].assign(value)
        return loss / count, hits

    def _all(self, x, y, rate, t):
        """The same over the replicas."""
        size = tf.size(y)
        count = tf.cast(size, self._dtype)

        def part():
            number = tf.distribute.get_replica_context().replica_id_in_sync_group
            start = tf.minimum(number * self._share, size - 1)
            # A replica without images takes the last one, for nothing.
            stop = tf.clip_by_value((number + 1) * self._share, start + 1, size)
            mine = tf.cast(tf.clip_by_value(size - number * self._share, 0, self._share), self._dtype)
            weight = tf.cast(mine > 0, self._dtype)
            loss, hits, gradients, moved = self._gradients(x[start:stop], y[start:stop], count)
            return (
                loss * weight, hits * weight, {path: g * weight for path, g in gradients.items()},
                {path: value * (mine / count) for path, value in moved.items()},
            )  # fmt: skip

        loss, hits, gradients, moved = self._mirrored.run(part)
        extended, total = self._mirrored.extended, tf.distribute.ReduceOp.SUM
        paths = [*gradients, *moved]
        values = [*gradients.values(), *moved.values()]
        reduced = extended.batch_reduce_to(total, [(value, self._weights[path]) for path, value in zip(paths, values)])
        for path, value in zip(paths, reduced):
            if path in self._slots:
                args = (self._slots[path], value, rate, t)
                extended.update(self._weights[path], lambda v, *args: update(self._rule, v, *args), args, group=True)
            else:
                extended.update(self._weights[path], lambda v, new: v.assign(new), (value,), group=True)
        return self._mirrored.reduce(total, loss, None) / count, self._mirrored.reduce(total, hits, None)

    def train(self, x, y, index, learning_rate):
        """See `protocol.Trainer`."""
        del index
        self._t += 1
        number = self._dtype.as_numpy_dtype
        loss, hits = self._step(x, y, number(learning_rate), number(self._t))
        return loss.numpy(), round(float(hits))

    def predict(self, x):
        """See `protocol.Trainer`."""
        return self._logits(x).numpy()

    def weights(self):
        """See `protocol.Trainer`."""
        own = {path: variable.numpy() for path, variable in self._weights.items()}
        return convert.from_framework(self._network, own, convert.TENSORFLOW)


if __name__ == "__main__":
    protocol.main("tensorflow", Trainer)
