"""TensorFlow 1.15 as it was used: a graph, a session, feeds. Python 3.7."""

import convert
import numpy as np
import protocol
import tensorflow1_ops as ops

tf = ops.tf  # imported there, without its noise


class Trainer(protocol.Trainer):
    """One graph; channels last, the only layout in which its CPU kernels convolve."""

    def __init__(self, job):
        super().__init__()
        self.backend, self.versions = "tensorflow", ops.versions()
        self._network = job.network
        weights = convert.to_framework(job.network, job.weights, convert.TENSORFLOW)
        tf.compat.v1.set_random_seed(job.seed)  # of dropout
        self._x = tf.compat.v1.placeholder(job.dtype, (None, *job.input_shape))
        self._y = tf.compat.v1.placeholder(tf.int32, (None,))
        self._rate = tf.compat.v1.placeholder(job.dtype, ())
        build = _Builder(weights)
        logits = build.stack(job.network, self._x, training=True)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=self._y, logits=logits))
        hits = tf.reduce_sum(tf.cast(tf.equal(tf.argmax(logits, 1, output_type=tf.int32), self._y), tf.int32))
        train = _update(job.optimizer, loss, self._rate, job.dtype)
        with tf.control_dependencies([train]):  # moving statistics too: the step ends when all is written
            self._step = [loss, hits, tf.group(*build.moves)]
        self._logits = build.stack(job.network, self._x, training=False)
        self._variables = build.variables
        self._session = tf.compat.v1.Session()
        self._session.run(tf.compat.v1.global_variables_initializer())
        tf.compat.v1.get_default_graph().finalize()  # an error if a step adds to it

    def train(self, x, y, index, learning_rate):
        """See `protocol.Trainer`."""
        del index
        feeds = {self._x: x, self._y: y, self._rate: learning_rate}
        loss, hits, _ = self._session.run(self._step, feeds)
        return float(loss), int(hits)

    def predict(self, x):
        """See `protocol.Trainer`."""
        return self._session.run(self._logits, {self._x: x})

    def weights(self):
        """See `protocol.Trainer`."""
        return convert.from_framework(self._network, self._session.run(self._variables), convert.TENSORFLOW)

    def close(self):
        """See `protocol.Trainer`."""
        self._session.close()


class _Builder:
    """Adds layers to the graph; its variables are filed by the path that they have in cnnjax."""

    def __init__(self, weights):
        self._weights = weights
        self.variables, self.moves = {}, []

    def stack(self, network, x, training):
        for layer in network:
            x = self._layer(layer, x, training)
        return x

    def _layer(self, layer, x, training):
        kind, name = layer["kind"], layer["name"]
        if kind == "Conv":
            pads = [[0, 0], *layer["pads"], [0, 0]]
            y = tf.nn.conv2d(x, self._variable(name, "kernel"), layer["strides"], pads)
            return tf.nn.bias_add(y, self._variable(name, "bias")) if layer["use_bias"] else y
        if kind == "Dense":
            y = tf.matmul(x, self._variable(name, "kernel"))
            return tf.nn.bias_add(y, self._variable(name, "bias")) if layer["use_bias"] else y
        if kind == "BatchNorm":
            return self._batch_norm(layer, x, training)
        if kind == "MaxPool":
            return ops.max_pool(x, layer["window"], layer["strides"], layer["pads"])
        if kind == "AvgPool":
            return tf.nn.avg_pool2d(x, layer["window"], layer["strides"], "VALID")
        if kind == "Relu":
            return tf.nn.relu(x)
        if kind == "Dropout":
            return tf.nn.dropout(x, rate=layer["rate"]) if training and layer["rate"] else x
        if kind == "Flatten":
            return tf.reshape(x, (-1, int(np.prod(layer["input_shape"]))))
        if kind == "Residual":
            return self.stack(layer["body"], x, training) + self.stack(layer["shortcut"], x, training)
        raise NotImplementedError(f"{name}: the runner of TensorFlow 1 has no layer {kind}")

    def _variable(self, name, leaf):
        path = f"{name}/{leaf}"
        if path not in self.variables:
            trainable = leaf not in ("mean", "var")
            self.variables[path] = tf.compat.v1.Variable(
                self._weights[path], trainable=trainable, name=path, use_resource=True
            )
        return self.variables[path]

    def _batch_norm(self, layer, x, training):
        name, channels = layer["name"], layer["input_shape"][-1]
        scale, bias = (
            self._variable(name, leaf) if used else tf.fill((channels,), x.dtype.as_numpy_dtype(value))
            for leaf, used, value in (("scale", layer["use_scale"], 1), ("bias", layer["use_bias"], 0))
        )
        moving_mean, moving_var = (self._variable(name, leaf) for leaf in ("mean", "var"))
        if not training:
            return ops.moved_norm(x, scale, bias, moving_mean, moving_var, layer["epsilon"])
        y, *moments = ops.batch_norm(x, scale, bias, layer["epsilon"])
        kept = layer["momentum"]
        for old, new in zip((moving_mean, moving_var), moments):
            self.moves.append(old.assign(kept * old + (1 - kept) * new))
        return y


def _update(rule, loss, rate, dtype):
    """The operation that changes the weights."""
    name = rule["name"]
    # As tensors: a Python number would become a float32 whatever the weights are.
    momentum, b1, b2, eps = (tf.constant(rule[key], dtype) for key in ("momentum", "b1", "b2", "eps"))
    if name == "sgd":
        return tf.compat.v1.train.GradientDescentOptimizer(rate).minimize(loss)
    if name in ("momentum", "nesterov"):
        # The rate multiplies the velocity as it leaves, as in cnnjax.
        nesterov = name == "nesterov"
        return tf.compat.v1.train.MomentumOptimizer(rate, momentum, use_nesterov=nesterov).minimize(loss)
    if name == "adam":
        # Its epsilon is added before the bias correction of the second moment, so the correction is put into it.
        t = tf.compat.v1.Variable(tf.zeros((), dtype), trainable=False, use_resource=True)
        corrected = eps * tf.sqrt(1 - b2 ** t.assign_add(1))
        return tf.compat.v1.train.AdamOptimizer(rate, b1, b2, corrected).minimize(loss)
    raise NotImplementedError(f"the runner of TensorFlow 1 has no update rule {name}")


if __name__ == "__main__":
    protocol.main("tensorflow1", Trainer)
