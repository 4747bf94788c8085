"""Weights between cnnjax's layout and those of other frameworks, both ways. Python 3.7 and NumPy alone.

cnnjax: convolution kernels [H, W, in, out] used as cross-correlation, dense kernels [in, out], images flattened in
height, width, channel order, batch norm with arrays scale, bias, mean and (biased) var. What others do differently:

- kernels [out, in, H, W] (torch, Theano, Caffe), flipped where the framework convolves (Theano);
- dense kernels [out, in] (torch, Caffe);
- images as [C, H, W], so that the rows of the first dense kernel behind a flatten, and batch norm between them, are in
  channel, height, width order;
- torch's running variance is the unbiased one: `biased_variance` takes its excess out.
"""

import numpy as np


class Convention:
    """How a framework lays weights out.

    Attributes:
        kernel: ``HWIO`` or ``OIHW``.
        dense: ``IO`` or ``OI``.
        flatten: ``HWC`` or ``CHW``: the order in which it flattens images.
        flipped: Whether it convolves, with kernels mirrored in both directions, instead of correlating.
    """

    def __init__(self, kernel="HWIO", dense="IO", flatten="HWC", flipped=False):
        self.kernel, self.dense, self.flatten, self.flipped = kernel, dense, flatten, flipped


TENSORFLOW = Convention()
TORCH = Convention("OIHW", "OI", "CHW")
CAFFE = Convention("OIHW", "OI", "CHW")
THEANO = Convention("OIHW", "IO", "CHW", flipped=True)


def to_framework(network, weights, convention):
    """Weights of cnnjax as a framework has them; the same names.

    Args:
        network: Layers of ``job.json``.
        weights: Dict of arrays by path.
        convention: Of the framework.
    """
    return _convert(network, weights, convention, _forward)


def from_framework(network, weights, convention):
    """Undoes `to_framework`."""
    return _convert(network, weights, convention, _backward)


def _convert(network, weights, convention, change):
    result = {}
    image = None  # [H, W, C] that was flattened, until a dense layer has mixed its values
    for layer in network:
        kind, name = layer["kind"], layer["name"]
        own = {key: weights[key] for key in weights if key.startswith(name + "/")}
        if kind == "Residual":
            result.update(_convert(layer["body"], own, convention, change))
            result.update(_convert(layer["shortcut"], own, convention, change))
            continue
        if kind == "Flatten" and len(layer["input_shape"]) == 3:
            image = layer["input_shape"]
        for key in own:
            result[key] = np.ascontiguousarray(change(own[key], key.split("/")[-1], kind, convention, image))
        if kind == "Dense":
            image = None
    return result


def _forward(w, leaf, kind, convention, image):
    if kind == "Conv" and leaf == "kernel":
        w = w[::-1, ::-1] if convention.flipped else w
        return w.transpose(3, 2, 0, 1) if convention.kernel == "OIHW" else w
    if image is not None and convention.flatten == "CHW" and (kind == "BatchNorm" or leaf == "kernel"):
        w = w.reshape(tuple(image) + w.shape[1:])
        w = w.transpose((2, 0, 1, *tuple(range(3, w.ndim)))).reshape((-1, *w.shape[3:]))
    return w.T if kind == "Dense" and leaf == "kernel" and convention.dense == "OI" else w


def _backward(w, leaf, kind, convention, image):
    if kind == "Conv" and leaf == "kernel":
        w = w.transpose(2, 3, 1, 0) if convention.kernel == "OIHW" else w
        return w[::-1, ::-1] if convention.flipped else w
    w = w.T if kind == "Dense" and leaf == "kernel" and convention.dense == "OI" else w
    if image is not None and convention.flatten == "CHW" and (kind == "BatchNorm" or leaf == "kernel"):
        height, width, channels = image
        w = w.reshape((channels, height, width, *w.shape[1:]))
        w = w.transpose((1, 2, 0, *tuple(range(3, w.ndim)))).reshape((-1, *w.shape[3:]))
    return w


def biased_variance(running, before, momentum, count):
    """A running variance that was moved by an unbiased variance, as if by the biased one.

    Args:
        running: After a step in which ``running = momentum * before + (1 - momentum) * unbiased``.
        before: Before it.
        momentum: Share of the old value that is kept.
        count: Values that each channel's variance was taken over.
    """
    kept = momentum * before
    return kept + (running - kept) * ((count - 1.0) / count)
