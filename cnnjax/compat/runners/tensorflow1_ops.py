"""Operations of TensorFlow 1.15 where its own mean something else than cnnjax's. Python 3.7.

The same functions as in ``theano_ops.py``, on images [B, H, W, C]: in that layout alone its CPU kernels convolve.
"""

import logging
import os
import warnings

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # of its NumPy types, a screenful
    import tensorflow as tf
logging.getLogger("tensorflow").setLevel(logging.ERROR)  # deprecations

relu = tf.nn.relu


def max_pool(x, window, strides, pads):
    """Largest value of each window."""
    sizes = x.shape.as_list()[1:3]
    if pads == [same_pads(*one) for one in zip(sizes, window, strides)]:
        return tf.nn.max_pool2d(x, window, strides, "SAME")
    if pads != [[0, 0], [0, 0]]:
        x = tf.pad(x, [[0, 0], *pads, [0, 0]], constant_values=x.dtype.as_numpy_dtype("-inf"))
    return tf.nn.max_pool2d(x, window, strides, "VALID")


def same_pads(size, window, stride):
    """What TensorFlow's SAME adds in one dimension: the odd row or column last."""
    total = max((-(-size // stride) - 1) * stride + window - size, 0)
    return [total // 2, total - total // 2]


def batch_norm(x, scale, bias, epsilon):
    """Normalises x [B, H, W, C] or [B, C] with the moments of the batch.

    Returns:
        The normalised x, and the mean and the biased variance, each [C].
    """
    if x.dtype == tf.float32 and x.shape.ndims == 4:
        # Not tf.nn.fused_batch_norm, which raises epsilon to 1.001e-5 for the sake of cuDNN.
        y, mean, var, *_ = tf.raw_ops.FusedBatchNormV3(
            x=x, scale=scale, offset=bias, mean=tf.zeros((0,)), variance=tf.zeros((0,)), epsilon=epsilon
        )
        # What it returns for the moving variance is the unbiased one.
        count = tf.cast(tf.size(x) // x.shape.as_list()[-1], x.dtype)
        return y, mean, var * ((count - 1) / count)
    mean, var = tf.nn.moments(x, list(range(x.shape.ndims - 1)))
    return tf.nn.batch_normalization(x, mean, var, bias, scale, epsilon), mean, var


def moved_norm(x, scale, bias, mean, var, epsilon):
    """Normalises x [B, H, W, C] or [B, C] with the moving statistics."""
    return tf.nn.batch_normalization(x, mean, var, bias, scale, epsilon)


def versions():
    """Of what computes."""
    return {"tensorflow": tf.__version__}
