"""Caffe: its files for the network, its solver and the trained weights.

No package of Caffe exists any more, so cnnjax's own runner trains, with the same options; then the result directory
gets

- ``train_val.prototxt`` and ``solver.prototxt``, to train the network with Caffe where there is one;
- ``deploy.prototxt`` and ``weights.caffemodel``, to predict with. OpenCV, which still reads them, must give the same
  logits of the first test images as cnnjax, or the run fails.

Caffe pads both sides alike and its pooling rounds sizes up. Where a layer needs something else, it computes more than
is wanted and a Slice behind it keeps the right part: every version of Caffe and OpenCV reads that, while the field
that rounds down has two names.
"""

import math
import os
from typing import Any

import convert
import cv2
import numpy as np
import protocol
import run_jax

TOLERANCE = 1e-4  # of the logits, relative to the largest

# ---------------------------------------------------------------------------------------------------------------------
# Layers, as dicts of the fields of Caffe's messages; a list is a repeated field
# ---------------------------------------------------------------------------------------------------------------------


class Word(str):
    """A value of an enumeration, which the text format writes without quotes."""


class Net:
    """A network of the job in Caffe's layers.

    Attributes:
        layers: ``LayerParameter`` messages.
        blobs: Arrays of each layer that has some, by its name.
        top: Name of the blob with the logits.
    """

    def __init__(self, network, weights):
        """Takes the layers of the job and arrays in the layout of cnnjax."""
        self.layers, self.blobs = [], {}
        self._weights = convert.to_framework(network, weights, convert.CAFFE)
        self._kept = {"data"}  # blobs that more than one layer reads, so that none may work in place
        self.top = self._chain(network, "data")

    def _chain(self, network, bottom):
        for layer in network:
            translate = self._translation(layer["kind"])
            if translate is None:
                raise ValueError(f"{layer['name']}: Caffe's runner knows no layer {layer['kind']}")
            bottom = translate(layer, bottom)
        return bottom

    def _add(self, name, kind, bottoms, tops=None, blobs=(), **fields):
        """Adds a layer, whose blob is called as itself unless ``tops`` are given; returns the first of its tops."""
        tops = tops or [name]
        self.layers.append({"name": name, "type": kind, "bottom": bottoms, "top": tops, **fields})
        if blobs:
            self.blobs[name] = list(blobs)
        return tops[0]

    def _in_place(self, name, kind, bottom, **fields):
        return self._add(name, kind, [bottom], [name if bottom in self._kept else bottom], **fields)

    def _own(self, layer, *leaves):
        paths = [f"{layer['name']}/{leaf}" for leaf in leaves]
        return [self._weights[path] for path in paths if path in self._weights]

    def _conv(self, layer, bottom):
        pads, starts, sizes = [], [], []
        for axis in (0, 1):
            before, after = layer["pads"][axis]
            stride = layer["strides"][axis]
            # Whole strides more on both sides, until the far side has enough.
            start = max(0, -(-(after - before) // stride))
            pads.append(before + start * stride)
            starts.append(start)
            sizes.append((layer["input_shape"][axis] + 2 * pads[-1] - layer["kernel"][axis]) // stride + 1)
        window = _pair("kernel", layer["kernel"]) | _pair("stride", layer["strides"]) | _pair("pad", pads)
        fields = {"num_output": layer["features"]} | window | _fillers(layer)
        top = self._add(
            layer["name"], "Convolution", [bottom], blobs=self._own(layer, "kernel", "bias"), convolution_param=fields
        )
        return self._cut(layer, top, starts, sizes)

    def _dense(self, layer, bottom):
        fields = {"num_output": layer["features"]} | _fillers(layer)
        blobs = self._own(layer, "kernel", "bias")
        return self._add(layer["name"], "InnerProduct", [bottom], blobs=blobs, inner_product_param=fields)

    def _pool(self, layer, bottom):
        pads, starts, sizes = [], [], []
        for axis in (0, 1):
            before = layer["pads"][axis][0] if layer["kind"] == "MaxPool" else 0
            size, wanted = layer["input_shape"][axis], layer["output_shape"][axis]
            window, stride = layer["window"][axis], layer["strides"][axis]
            # Windows end at the border whatever the padding behind it, so only their number matters. Caffe refuses
            # padding as wide as the window.
            for pad in range(before, window, stride):
                start, there = (pad - before) // stride, _pooled(size, window, stride, pad)
                if there - start >= wanted:
                    break
            else:
                raise ValueError(f"{layer['name']}: Caffe cannot pad a {window} wide window by {layer['pads'][axis]}")
            pads.append(pad)
            starts.append(start)
            sizes.append(there)
        window = _pair("kernel", layer["window"]) | _pair("stride", layer["strides"]) | _pair("pad", pads)
        kind = "MAX" if layer["kind"] == "MaxPool" else "AVE"
        top = self._add(layer["name"], "Pooling", [bottom], pooling_param={"pool": Word(kind)} | window)
        return self._cut(layer, top, starts, sizes)

    def _cut(self, layer, bottom, starts, sizes):
        """Keeps the wanted rows and columns of a blob that is ``sizes`` large, from ``starts`` on."""
        for axis, (start, size) in enumerate(zip(starts, sizes)):
            end = start + layer["output_shape"][axis]
            name = f"{layer['name']}/{('rows', 'columns')[axis]}"
            points = [point for point in (start, end) if 0 < point < size]
            if points:
                rest = [f"{name}_before"] * (start > 0), [f"{name}_after"] * (end < size)
                fields = {"axis": axis + 2, "slice_point": points}
                self._add(name, "Slice", [bottom], [*rest[0], name, *rest[1]], slice_param=fields)
                self.layers.append({"name": f"{name}_rest", "type": "Silence", "bottom": [*rest[0], *rest[1]]})
                bottom = name
        return bottom

    def _batch_norm(self, layer, bottom):
        name = layer["name"]
        mean, var = self._own(layer, "mean", "var")
        # Caffe keeps sums and, in a third blob, what to divide them by.
        fields = {"moving_average_fraction": layer["momentum"], "eps": layer["epsilon"]}
        top = self._add(
            name, "BatchNorm", [bottom], blobs=[mean, var, np.ones(1)], param=[{"lr_mult": 0}] * 3,
            batch_norm_param=fields,
        )  # fmt: skip
        if not layer["use_scale"] and not layer["use_bias"]:
            return top
        scale = self._own(layer, "scale") or [np.ones_like(mean)]
        fields = {"filler": _filler(layer["scale_init"]) if layer["use_scale"] else {"type": "constant", "value": 1}}
        if layer["use_bias"]:
            fields |= {"bias_term": True, "bias_filler": _filler(layer["bias_init"])}
        blobs = scale + self._own(layer, "bias")
        # A scale that the network lacks stays 1.
        rates = [{"lr_mult": int(layer["use_scale"])}, {"lr_mult": 1}][: len(blobs)]
        return self._add(f"{name}/scale", "Scale", [top], [top], blobs, param=rates, scale_param=fields)

    def _relu(self, layer, bottom):
        return self._in_place(layer["name"], "ReLU", bottom)

    def _dropout(self, layer, bottom):
        if not layer["rate"]:
            return bottom
        return self._in_place(layer["name"], "Dropout", bottom, dropout_param={"dropout_ratio": layer["rate"]})

    def _flatten(self, layer, bottom):
        return self._add(layer["name"], "Flatten", [bottom])

    def _residual(self, layer, bottom):
        self._kept.add(bottom)
        ends = [self._chain(layer[part], bottom) for part in ("body", "shortcut")]
        return self._add(layer["name"], "Eltwise", ends, eltwise_param={"operation": Word("SUM")})

    def _translation(self, kind):
        return {
            "Conv": self._conv, "Dense": self._dense, "MaxPool": self._pool, "AvgPool": self._pool,
            "BatchNorm": self._batch_norm, "Relu": self._relu, "Dropout": self._dropout, "Flatten": self._flatten,
            "Residual": self._residual,
        }.get(kind)  # fmt: skip


def _pair(name, values):
    """A height and a width as Caffe's fields; it wants one field where they are the same."""
    height, width = values
    if height == width:
        return {"kernel_size" if name == "kernel" else name: height} if height or name != "pad" else {}
    return {f"{name}_h": height, f"{name}_w": width}


def _pooled(size, window, stride, pad):
    """Outputs of Caffe's pooling along one axis."""
    count = math.ceil((size + 2 * pad - window) / stride) + 1
    return count - 1 if pad and (count - 1) * stride >= size + pad else count


def _fillers(layer):
    fields = {"bias_term": layer["use_bias"], "weight_filler": _filler(layer["kernel_init"])}
    return fields | ({"bias_filler": _filler(layer["bias_init"])} if layer["use_bias"] else {})


def _filler(init):
    """How a blob starts, in the distributions that Caffe has."""
    kind = init["kind"]
    if kind == "constant":
        return {"type": "constant", "value": init["scale"]}
    if kind == "truncated_normal":
        # Caffe does not cut. This is the standard deviation of a normal that is cut at two of its own.
        return {"type": "gaussian", "std": 0.87962566 * init["scale"]}
    if kind == "glorot_uniform":
        return {"type": "xavier", "variance_norm": Word("AVERAGE")}
    if kind == "lecun_uniform":
        return {"type": "xavier"}
    if kind == "he_normal":
        return {"type": "msra"}
    raise ValueError(f"Caffe has no filler for initial values {kind!r}")


# ---------------------------------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------------------------------


def text(message, indent=""):
    """A message in protobuf's text format."""
    lines = []
    for key, values in message.items():
        for value in values if isinstance(values, list) else [values]:
            if isinstance(value, dict):
                lines.append(f"{indent}{key} {{\n{text(value, indent + '  ')}{indent}}}\n")
            elif isinstance(value, bool):
                lines.append(f"{indent}{key}: {'true' if value else 'false'}\n")
            elif isinstance(value, str) and not isinstance(value, Word):
                lines.append(f'{indent}{key}: "{value}"\n')
            else:
                lines.append(f"{indent}{key}: {value}\n")
    return "".join(lines)


def deploy(job, net):
    """``deploy.prototxt``: from scaled images to probabilities."""
    height, width, channels = job.input_shape
    shape = {"dim": [1, channels, height, width]}
    data = {"name": "data", "type": "Input", "top": "data", "input_param": {"shape": shape}}
    prob = {"name": "prob", "type": "Softmax", "bottom": net.top, "top": "prob"}
    head = f"# Input: {'RGB ' if channels == 3 else ''}images scaled as {_scaling(job)[1]}\n"
    return head + text({"name": job.name, "layer": [data, *net.layers, prob]})


def train_val(job, net):
    """``train_val.prototxt``: with data layers, loss and accuracy."""
    transform, words = _scaling(job)
    train, test = ({"phase": Word(phase)} for phase in ("TRAIN", "TEST"))
    sizes = {"train": job.batch_size, "test": _test_batch(job)}
    data = []
    for part, phase in (("train", train), ("test", test)):
        if sizes[part]:
            source = {"source": f"{part}_lmdb", "batch_size": sizes[part], "backend": Word("LMDB")}
            layer = {"name": "data", "type": "Data", "top": ["data", "label"], "include": phase}
            data.append({**layer, **transform, "data_param": source})
    ends: list[dict[str, Any]] = [
        {"name": "loss", "type": "SoftmaxWithLoss", "bottom": [net.top, "label"], "top": "loss"}
    ]
    if sizes["test"]:
        ends.append({"name": "accuracy", "type": "Accuracy", "bottom": [net.top, "label"], "top": "accuracy",
                     "include": test})  # fmt: skip
    head = f"# train_lmdb, test_lmdb: the images of the job. The network takes {words}\n"
    return head + text({"name": job.name, "layer": [*data, *net.layers, *ends]})


def solver(job):
    """``solver.prototxt``, and whether its learning rates are those of the job."""
    rule, steps = job.optimizer, job.steps
    kind = {"adam": "Adam", "nesterov": "Nesterov"}.get(rule["name"], "SGD")
    fields: dict[str, Any] = {"net": "train_val.prototxt", "type": kind}
    policy = _policy(np.asarray(job.learning_rates, np.float64))
    fields |= {"base_lr": float(job.learning_rates[0])} | (policy or {"lr_policy": "fixed"})
    if rule["name"] == "adam":
        fields |= {"momentum": rule["b1"], "momentum2": rule["b2"], "delta": rule["eps"]}
    else:
        fields["momentum"] = 0 if rule["name"] == "sgd" else rule["momentum"]
    fields |= {"weight_decay": 0, "max_iter": steps, "display": max(1, steps // 100)}
    if _test_batch(job):
        fields |= {"test_iter": len(job.test_images) // _test_batch(job), "test_interval": job.epoch_ends[0]}
    fields |= {"snapshot": steps, "snapshot_prefix": job.name, "solver_mode": Word("CPU"), "random_seed": job.seed}
    head = "" if policy else "# The job's rates follow no policy of Caffe: base_lr is the first of them.\n"
    return head + text(fields), policy is not None


def _policy(rates_T):
    """Caffe's fields for the rates ``[T]``; None where it has no policy for them."""
    first, steps_T = rates_T[0], np.arange(len(rates_T))
    changes = steps_T[1:][rates_T[1:] != rates_T[:-1]]
    if not len(changes):
        return {"lr_policy": "fixed"}
    gamma = float(rates_T[changes[0]] / first)
    if np.allclose(rates_T, first * gamma ** np.searchsorted(changes, steps_T, "right"), 1e-6, 0):
        exponential = len(changes) == len(steps_T) - 1 > 1
        return {"gamma": gamma} | (
            {"lr_policy": "exp"} if exponential else {"lr_policy": "multistep", "stepvalue": changes.tolist()}
        )
    gamma = float(first / rates_T[1] - 1)
    if gamma > 0 and np.allclose(rates_T, first / (1 + gamma * steps_T), 1e-6, 0):
        return {"lr_policy": "inv", "gamma": gamma, "power": 1}
    return None


def _test_batch(job):
    """The largest batch that divides the test images, so that Caffe tests on each once; 0 without any."""
    count = len(job.test_images)
    return next((size for size in range(min(count, protocol.EVAL_BATCH), 0, -1) if count % size == 0), 0)


def _scaling(job):
    """Caffe's ``transform_param`` for the job's scaling, which is empty where it has none; and the scaling in words."""
    offset = job.scaled(np.zeros(1)).astype(np.float64)
    factor = job.scaled(np.ones(1)) - offset
    if (factor == 1).all() and not offset.any():
        return {}, "what is stored" if job.images.dtype.kind == "f" else "0 to 255"
    words = f"image * {_digits(factor)} + {_digits(offset)}, by channel"
    if np.ptp(factor) > 1e-6 * factor[0]:  # Caffe's factor is the same for all channels
        return {}, f"{words}: store images that are scaled already"
    means = {"mean_value": _digits(-offset / factor)} if offset.any() else {}
    return {"transform_param": {"scale": _digits(factor)[0], **means}}, words


def _digits(values):
    """Numbers with as many digits as float32 has."""
    return [float(f"{value:.9g}") for value in values]


def _field(number, content):
    """A field of protobuf's wire format: all that is written here is of a stated length."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value):
    coded = bytearray()
    while value > 127:
        coded.append(value & 127 | 128)
        value >>= 7
    return bytes([*coded, value])


def caffemodel(job, net):
    """``weights.caffemodel``: a binary ``NetParameter``. The numbers are those of the fields in caffe.proto."""
    parts = [_field(1, job.name.encode())]
    for layer in net.layers:
        content = _field(1, layer["name"].encode()) + _field(2, layer["type"].encode())
        for array in net.blobs.get(layer["name"], ()):
            shape = _field(7, _field(1, b"".join(map(_varint, array.shape))))
            content += _field(7, shape + _field(5, array.astype("<f4").tobytes()))
        parts.append(_field(100, content))
    return b"".join(parts)


# ---------------------------------------------------------------------------------------------------------------------
# The runner
# ---------------------------------------------------------------------------------------------------------------------


class Trainer(run_jax.Trainer):
    """Trains as cnnjax does, and writes Caffe's files at the end."""

    def __init__(self, job):
        """See `protocol.main`. A network that Caffe cannot express is refused before it is trained."""
        self._job = job
        Net(job.network, job.weights)
        super().__init__(job)
        self.versions["opencv"] = cv2.__version__
        self.notes = (
            *self.notes,
            "trained by cnnjax, since no package of Caffe exists; OpenCV computes the same logits from Caffe's files",
            "Caffe's own training differs: its moving variance is the unbiased one, Adam's epsilon comes before the "
            "correction of bias, the learning rate is part of the velocity, and batches run on over an epoch's end",
        )

    def finish(self, out):
        """See `protocol.Trainer`.

        Raises:
            ArithmeticError: If OpenCV computes other logits from the files.
        """
        job, net = self._job, Net(self._job.network, self.weights())
        plan, exact = solver(job)
        if not exact:
            self.notes = (*self.notes, "solver.prototxt: the job's learning rates follow no policy of Caffe")
        files = {
            "train_val.prototxt": train_val(job, net),
            "solver.prototxt": plan,
            "deploy.prototxt": deploy(job, net),
        }
        for name, content in files.items():
            with open(os.path.join(out, name), "w") as file:
                file.write(content)
        with open(os.path.join(out, "weights.caffemodel"), "wb") as file:
            file.write(caffemodel(job, net))
        images = job.test_images if len(job.test_images) else job.images
        x = job.scaled(images[: protocol.LOGITS])
        expected, found = self.predict(x), read_back(out, net.layers[-1]["name"], x)
        difference = np.max(np.abs(found - expected)) / np.max(np.abs(expected))
        if not difference <= TOLERANCE:
            raise ArithmeticError(
                "OpenCV's logits from deploy.prototxt and weights.caffemodel differ from cnnjax's by "
                f"{difference:.1e} of the largest; allowed: {TOLERANCE:g}"
            )


def read_back(out, layer, x):
    """Logits [B, classes] that OpenCV computes from ``deploy.prototxt`` and ``weights.caffemodel``.

    Args:
        out: Folder of the files.
        layer: Name of the layer that gives them; OpenCV knows no blobs.
        x: Scaled images [B, H, W, C].
    """
    net = cv2.dnn.readNetFromCaffe(*(os.path.join(out, name) for name in ("deploy.prototxt", "weights.caffemodel")))
    net.setInput(np.ascontiguousarray(x.transpose(0, 3, 1, 2), np.float32))
    return net.forward(layer)


if __name__ == "__main__":
    protocol.main("caffe", Trainer)
