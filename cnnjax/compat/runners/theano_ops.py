"""Operations of Theano 1.0 where its own mean something else than cnnjax's. Python 3.7.

Import it after `theano_settings.configure`. Images are [B, C, H, W].
"""

import numpy as np
import scipy
import theano
import theano.tensor as T
from theano.gradient import DisconnectedType
from theano.tensor.signal import pool


class _ReluGrad(theano.scalar.BinaryScalarOp):
    def impl(self, y, g):
        return g if y > 0 else 0 * g

    def c_code(self, node, name, inp, out, sub):
        return f"{out[0]} = {inp[0]} > 0 ? {inp[1]} : 0;"

    def c_code_cache_version(self):
        return (1,)


class _Relu(theano.scalar.UnaryScalarOp):
    def impl(self, x):
        return x if x > 0 else 0 * x

    def c_code(self, node, name, inp, out, sub):
        return f"{out[0]} = {inp[0]} > 0 ? {inp[0]} : 0;"

    def c_code_cache_version(self):
        return (1,)

    def L_op(self, inputs, outputs, grads):
        return [_relu_grad(outputs[0], grads[0])]


_relu_grad = _ReluGrad(theano.scalar.transfer_type(1), name="relu_grad")
# The gradient of ``T.nnet.relu`` at 0 is 0.5 instead of 0. Written with ``T.switch`` it is right but slower: the
# comparison then serves both passes, which keeps Theano from fusing it into either.
relu = T.Elemwise(_Relu(theano.scalar.same_out, name="relu"), name="relu")


class _FirstMaxPoolGrad(pool.MaxPoolGrad):
    """Theano's own code, but for one flag a window: whether its gradient has been given away."""

    def c_code(self, node, name, inp, out, sub):
        code = super().c_code(node, name, inp, out, sub)
        for old, new in (
            (f"dtype_{inp[2]} * gz;", f"dtype_{inp[2]} * gz; bool given = false;"),
            ("if (a == maximum){", "if (!given && a == maximum){ given = true;"),
        ):
            if code.count(old) != 1:
                raise NotImplementedError("the gradient of max pooling is not that of Theano 1.0.5")
            code = code.replace(old, new)
        return code

    def c_code_cache_version(self):
        return (1, *super().c_code_cache_version())


class _FirstMaxPool(pool.Pool):
    """Of equal values the first takes the gradient, where Theano gives it to each."""

    def L_op(self, inputs, outputs, grads):
        x, window, strides, pad = inputs
        gradient = _FirstMaxPoolGrad(ignore_border=True, ndim=2)
        unused = [DisconnectedType()() for _ in inputs[1:]]
        return [gradient(x, outputs[0], grads[0], window, strides, pad), *unused]


def max_pool(x, window, strides, pads):
    """Largest value of each window."""
    (top, bottom), (left, right) = pads
    pad = (top, left)
    if pad != (bottom, right):  # Theano's own padding is the same on both sides
        height, width = x.shape[2] + top + bottom, x.shape[3] + left + right
        lowest = T.alloc(np.asarray(-np.inf, x.dtype), x.shape[0], x.shape[1], height, width)
        x = T.set_subtensor(lowest[:, :, top : height - bottom, left : width - right], x)
        pad = (0, 0)
    return _FirstMaxPool(ignore_border=True, mode="max", ndim=2)(x, tuple(window), tuple(strides), pad)


def avg_pool(x, window, strides):
    """Mean of each window."""
    return pool.pool_2d(x, tuple(window), True, tuple(strides), mode="average_exc_pad")


def batch_norm(x, scale, bias, epsilon):
    """Normalises x [B, C, H, W] or [B, C] with the moments of the batch.

    Written out, since ``T.nnet.bn.batch_normalization_train`` moves the unbiased variance, and is slower.

    Returns:
        The normalised x, and the mean and the biased variance, each [C].
    """
    axes = (0, *range(2, x.ndim))
    mean = T.mean(x, axis=axes)
    centred = x - _wide(mean, x)
    var = T.mean(T.sqr(centred), axis=axes)
    return centred * _wide(scale / T.sqrt(var + epsilon), x) + _wide(bias, x), mean, var


def moved_norm(x, scale, bias, mean, var, epsilon):
    """Normalises x [B, C, H, W] or [B, C] with the moving statistics."""
    # Written out: ``T.nnet.bn`` refuses an epsilon below 1e-5, and takes 1e-5 in float32 for one.
    return (x - _wide(mean, x)) * _wide(scale / T.sqrt(var + epsilon), x) + _wide(bias, x)


def _wide(a, x):
    return a.dimshuffle([0 if axis == 1 else "x" for axis in range(x.ndim)])


def versions():
    """Of what computes."""
    return {"theano": theano.__version__, "scipy": scipy.__version__}
