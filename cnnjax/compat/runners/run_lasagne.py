"""Lasagne 0.1 on Theano 1.0.5. Python 3.7."""

import sys

import convert
import numpy as np
import protocol
import theano_settings


class Trainer(protocol.Trainer):
    """Layers of Lasagne, channels first, and one compiled function a step."""

    def __init__(self, job):
        super().__init__()
        self.backend = "theano"
        self.notes = theano_settings.configure(job.dtype)
        import theano
        import theano.tensor as T
        import theano.tensor.signal.pool

        # The name under which Lasagne imports it, which Theano has dropped.
        sys.modules["theano.tensor.signal.downsample"] = theano.tensor.signal.pool
        import lasagne
        import theano_ops

        self.versions = dict(theano_ops.versions(), lasagne=lasagne.__version__)
        lasagne.random.set_rng(np.random.RandomState(job.seed))  # of dropout
        self._network, self._parameters = job.network, {}
        weights = convert.to_framework(job.network, job.weights, convert.THEANO)
        height, width, channels = job.input_shape
        images = lasagne.layers.InputLayer((None, channels, height, width))
        top = _Builder(lasagne, theano_ops, weights, self._parameters).stack(job.network, images)

        x, y, rate = T.tensor4("x"), T.ivector("y"), T.scalar("rate")
        moved = []  # pairs of a moving statistic and its new value, which batch norm adds while the graph is built
        logits = lasagne.layers.get_output(top, x, moved=moved)
        loss = T.nnet.categorical_crossentropy(T.nnet.softmax(logits), y).mean()
        hits = T.eq(T.argmax(logits, axis=1), y).sum()
        trained = lasagne.layers.get_all_params(top, trainable=True)
        updates = moved + _updates(job.optimizer, trained, T.grad(loss, trained), rate)
        self._train = theano.function([theano.In(x, borrow=True), y, rate], [loss, hits], updates=updates)
        self._predict = theano.function([x], lasagne.layers.get_output(top, x, deterministic=True))
        self._rate_type = np.dtype(job.dtype).type

    def train(self, x, y, index, learning_rate):
        """See `protocol.Trainer`."""
        del index
        loss, hits = self._train(_channels_first(x), y, self._rate_type(learning_rate))
        return float(loss), int(hits)

    def predict(self, x):
        """See `protocol.Trainer`."""
        return self._predict(_channels_first(x))

    def weights(self):
        """See `protocol.Trainer`."""
        values = {path: parameter.get_value() for path, parameter in self._parameters.items()}
        return convert.from_framework(self._network, values, convert.THEANO)


def _channels_first(x):
    return np.ascontiguousarray(x.transpose(0, 3, 1, 2))


class _Builder:
    """Makes layers of Lasagne and files their parameters by the path that they have in cnnjax."""

    def __init__(self, lasagne, ops, weights, parameters):
        self._layers, self._own, self._ops = lasagne.layers, _own_layers(lasagne, ops), ops
        self._weights, self._parameters = weights, parameters

    def stack(self, network, below):
        for layer in network:
            below = self._layer(layer, below)
        return below

    def _layer(self, layer, below):
        kind, name, layers, own = layer["kind"], layer["name"], self._layers, self._own
        w = {key.rsplit("/", 1)[1]: self._weights[key] for key in self._weights if key.rsplit("/", 1)[0] == name}
        if kind == "Conv":
            made = own.Conv(below, layer, w["kernel"], w.get("bias"))
        elif kind == "Dense":
            made = layers.DenseLayer(below, layer["features"], w["kernel"], w.get("bias"), nonlinearity=None)
        elif kind == "BatchNorm":
            made = own.BatchNorm(below, layer, w)
        elif kind == "MaxPool":
            made = own.Pool(below, layer, self._ops.max_pool, layer["window"], layer["strides"], layer["pads"])
        elif kind == "AvgPool":
            made = own.Pool(below, layer, self._ops.avg_pool, layer["window"], layer["strides"])
        elif kind == "Relu":
            made = layers.NonlinearityLayer(below, self._ops.relu)
        elif kind == "Dropout":
            made = layers.DropoutLayer(below, layer["rate"])
        elif kind == "Flatten":
            made = layers.FlattenLayer(below)
        elif kind == "Residual":
            made = layers.ElemwiseSumLayer([self.stack(layer[part], below) for part in ("body", "shortcut")])
        else:
            raise NotImplementedError(f"{name}: the runner of Lasagne has no layer {kind}")
        for leaf, attribute in (("kernel", "W"), ("bias", "b")):
            if kind in ("Conv", "Dense") and leaf in w:
                self._parameters[f"{name}/{leaf}"] = getattr(made, attribute)
        if kind == "BatchNorm":
            self._parameters.update((f"{name}/{leaf}", made.by_leaf[leaf]) for leaf in w)
        return made


def _own_layers(lasagne, ops):
    """Layers that Lasagne 0.1 lacks, or has with another meaning."""
    import theano.tensor as T

    class Conv(lasagne.layers.Layer):
        """Padding of any width inside the convolution; Lasagne's own would pad, or crop, in a step of its own."""

        def __init__(self, below, layer, kernel, bias):
            super().__init__(below)
            self._layer = layer
            self.W = self.add_param(kernel, kernel.shape, "W")
            self.b = None if bias is None else self.add_param(bias, bias.shape, "b")

        def get_output_shape_for(self, input_shape):
            return _shape(self._layer)

        def get_output_for(self, input, **_):
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
            return _shape(self._layer)

        def get_output_for(self, input, **_):
            return self._function(input, *self._arguments)

    class BatchNorm(lasagne.layers.Layer):
        """Lasagne 0.1 has none; later ones average 1 / sqrt(var + epsilon) instead of the variance."""

        def __init__(self, below, layer, weights):
            super().__init__(below)
            self._momentum, self._epsilon = layer["momentum"], layer["epsilon"]
            self.by_leaf = {}
            channels = weights["mean"].shape
            for leaf, start in (("scale", np.ones), ("bias", np.zeros), ("mean", None), ("var", None)):
                value = weights[leaf] if leaf in weights else start(channels, weights["mean"].dtype)
                trained = leaf in ("scale", "bias") and leaf in weights
                self.by_leaf[leaf] = self.add_param(value, channels, leaf, trainable=trained, regularizable=False)

        def get_output_for(self, input, deterministic=False, moved=None, **_):
            leaves = [self.by_leaf[leaf] for leaf in ("scale", "bias", "mean", "var")]
            if deterministic:
                return ops.moved_norm(input, *leaves, epsilon=self._epsilon)
            y, *moments = ops.batch_norm(input, *leaves[:2], epsilon=self._epsilon)
            kept = self._momentum
            moved.extend((old, kept * old + (1 - kept) * new) for old, new in zip(leaves[2:], moments))
            return y

    class Own:
        pass

    own = Own()
    own.Conv, own.Pool, own.BatchNorm = Conv, Pool, BatchNorm
    return own


def _shape(layer):
    height, width, channels = layer["output_shape"]
    return None, channels, height, width


def _updates(rule, trained, gradients, rate):
    """Pairs of a shared variable and its new value.

    Lasagne keeps the learning rate inside the velocity, and adds Adam's epsilon before the bias correction; cnnjax does
    neither, so its rules are written out.
    """
    import theano
    import theano.tensor as T

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


if __name__ == "__main__":
    protocol.main("lasagne", Trainer)
