"""Lasagne 0.1 on Theano 1.0.5. Python 3.7."""

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
        import lasagne_parts as parts
        import theano
        import theano.tensor as T

        lasagne = parts.lasagne
        self.versions = dict(parts.ops.versions(), lasagne=lasagne.__version__)
        lasagne.random.set_rng(np.random.RandomState(job.seed))  # of dropout
        self._network = job.network
        self._parameters: dict = {}
        weights = convert.to_framework(job.network, job.weights, convert.THEANO)
        height, width, channels = job.input_shape
        images = lasagne.layers.InputLayer((None, channels, height, width))
        top = _Builder(parts, weights, self._parameters).stack(job.network, images)

        x, y, rate = T.tensor4("x"), T.ivector("y"), T.scalar("rate")
        moved: list = []  # moving statistics with their new values, which batch norm adds
        logits = lasagne.layers.get_output(top, x, moved=moved)
        loss = T.nnet.categorical_crossentropy(T.nnet.softmax(logits), y).mean()
        hits = T.eq(T.argmax(logits, axis=1), y).sum()
        trained = lasagne.layers.get_all_params(top, trainable=True)
        updates = moved + parts.updates(job.optimizer, trained, T.grad(loss, trained), rate)
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

    def __init__(self, parts, weights, parameters):
        self._parts, self._weights, self._parameters = parts, weights, parameters

    def stack(self, network, below):
        for layer in network:
            below = self._layer(layer, below)
        return below

    def _layer(self, layer, below):
        kind, name, parts = layer["kind"], layer["name"], self._parts
        layers, ops = parts.lasagne.layers, parts.ops
        w = {key.rsplit("/", 1)[1]: self._weights[key] for key in self._weights if key.rsplit("/", 1)[0] == name}
        if kind == "Conv":
            made = parts.Conv(below, layer, w["kernel"], w.get("bias"))
        elif kind == "Dense":
            made = layers.DenseLayer(below, layer["features"], w["kernel"], w.get("bias"), nonlinearity=None)
        elif kind == "BatchNorm":
            made = parts.BatchNorm(below, layer, w)
        elif kind == "MaxPool":
            made = parts.Pool(below, layer, ops.max_pool, layer["window"], layer["strides"], layer["pads"])
        elif kind == "AvgPool":
            made = parts.Pool(below, layer, ops.avg_pool, layer["window"], layer["strides"])
        elif kind == "Relu":
            made = layers.NonlinearityLayer(below, ops.relu)
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


if __name__ == "__main__":
    protocol.main("lasagne", Trainer)
