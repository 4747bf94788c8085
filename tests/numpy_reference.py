"""The layers once more, in plain float64 NumPy with loops: slow, obvious, and sharing no code with the package's."""

import math

import numpy as np

from cnnjax import networks


def pads(size, window, stride, padding):
    if padding == "VALID":
        return 0, 0
    if padding == "SAME":
        total = max((math.ceil(size / stride) - 1) * stride + window - size, 0)
        return total // 2, total - total // 2
    raise AssertionError(padding)


def padded(x, window, strides, padding, value):
    if isinstance(padding, str):
        padding = [pads(n, k, s, padding) for n, k, s in zip(x.shape[1:3], window, strides, strict=True)]
    return np.pad(x, ((0, 0), *padding, (0, 0)), constant_values=value)


def windows(x, window, strides):
    """Yields (row, column, patch [B, kh, kw, C]) of every output position."""
    rows = (x.shape[1] - window[0]) // strides[0] + 1
    columns = (x.shape[2] - window[1]) // strides[1] + 1
    for i in range(rows):
        for j in range(columns):
            top, left = i * strides[0], j * strides[1]
            yield i, j, x[:, top : top + window[0], left : left + window[1]]


def convolution(x, w, strides, padding):
    x = padded(x, w.shape[:2], strides, padding, 0.0)
    outputs = {(i, j): np.tensordot(patch, w, 3) for i, j, patch in windows(x, w.shape[:2], strides)}
    return assemble(outputs)


def max_pool(x, window, strides, padding):
    x = padded(x, window, strides, padding, -np.inf)
    return assemble({(i, j): patch.max((1, 2)) for i, j, patch in windows(x, window, strides)})


def max_pool_gradient(x, g, window, strides, padding):
    """The whole gradient of a window goes to the first of its largest values in row-major order."""
    inside = padded(np.ones_like(x), window, strides, padding, 0.0)
    big = padded(x, window, strides, padding, -np.inf)
    gradient = np.zeros_like(big)
    for i, j, patch in windows(big, window, strides):
        for b in range(x.shape[0]):
            for c in range(x.shape[3]):
                r, s = np.unravel_index(np.argmax(patch[b, :, :, c]), window)
                gradient[b, i * strides[0] + r, j * strides[1] + s, c] += g[b, i, j, c]
    return gradient[inside > 0].reshape(x.shape)


def average_pool(x, window, strides):
    return assemble({(i, j): patch.mean((1, 2)) for i, j, patch in windows(x, window, strides)})


def assemble(outputs):
    rows, columns = (1 + max(place[k] for place in outputs) for k in (0, 1))
    return np.stack([np.stack([outputs[i, j] for j in range(columns)], 1) for i in range(rows)], 1)


def forward(network, params, stats, x, *, train, weight=None):
    """Logits and new batch statistics; dropout must be off."""
    weight = np.ones(len(x)) if weight is None else weight
    new_stats = {}
    for name, layer in networks.named_layers(network):
        own = params.get(name, {})
        match layer:
            case networks.Conv():
                x = convolution(x, own["kernel"], layer.strides, layer.padding) + own.get("bias", 0)
            case networks.Dense():
                x = x @ own["kernel"] + own.get("bias", 0)
            case networks.Relu():
                x = np.maximum(x, 0)
            case networks.MaxPool():
                x = max_pool(x, layer.window, layer.strides, layer.padding)
            case networks.AvgPool():
                x = average_pool(x, layer.window or x.shape[1:3], layer.strides)
            case networks.Flatten():
                x = x.reshape(len(x), -1)
            case networks.Dropout():
                assert not train or layer.rate == 0, "dropout must be off"
            case networks.BatchNorm():
                mean, var = stats[name]["mean"], stats[name]["var"]
                if train:
                    valid = x[weight > 0].reshape(-1, x.shape[-1])
                    batch_mean, batch_var = valid.mean(0), valid.var(0)
                    m = layer.momentum
                    new_stats[name] = {
                        "mean": m * mean + (1 - m) * batch_mean,
                        "var": m * var + (1 - m) * batch_var,
                    }
                    mean, var = batch_mean, batch_var
                x = (x - mean) / np.sqrt(var + layer.epsilon) * own.get("scale", 1) + own.get("bias", 0)
            case networks.Residual():
                ends, inner = [], {}
                for part, layers in (("body", layer.body), ("shortcut", layer.shortcut)):
                    end, changed = forward(layers, own.get(part, {}), stats.get(name, {}).get(part, {}), x,
                                           train=train, weight=weight)  # fmt: skip
                    ends.append(end)
                    if changed:
                        inner[part] = changed
                x = ends[0] + ends[1]
                if inner:
                    new_stats[name] = inner
    return x, new_stats


def cross_entropy(logits, labels, smoothing=0.0):
    """Per-sample loss."""
    shifted = logits - logits.max(1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    target = np.full(logits.shape, smoothing / logits.shape[1])
    target[np.arange(len(labels)), labels] += 1 - smoothing
    return -(target * log_p).sum(1)
