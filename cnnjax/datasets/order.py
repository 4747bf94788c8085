"""Which samples are seen, and when.

The order is a function of (seed, epoch) alone: it needs no state, no copy of the data set, and is the same on every
process, layout and machine. Only sample numbers are handled here, never images.

Shape suffixes: N samples, B samples of one batch.
"""

import dataclasses
import operator
from collections.abc import Iterator

import numpy as np

# Epochs stop short of this number, so that the split never shares a random stream with an epoch.
_SPLIT_STREAM = 2**64 - 1


@dataclasses.dataclass(frozen=True, eq=False)
class BatchIndices:
    """The samples of one batch.

    Attributes:
        index: Int32 [B], global sample numbers. Padding rows repeat the last valid number.
        weight: Float32 [B], 1 for a sample and 0 for padding.
    """

    index: np.ndarray
    weight: np.ndarray


def epoch_order(seed: int, epoch: int, num_samples: int) -> np.ndarray:
    """Returns the order in which one epoch visits the samples.

    The permutation is the stable argsort of the first ``num_samples`` raw words of the Philox4x64-10 stream with the
    128-bit key ``(seed, epoch)``. NumPy fixes raw bit-generator streams for good (NEP 19), whereas
    ``Generator.permutation`` may change between versions.

    Args:
        seed: 0 to 2**64 - 1.
        epoch: 0 to 2**64 - 2.
        num_samples: N, 1 to 2**31 - 1.

    Returns:
        int32 [N], a permutation of 0..N-1.

    Raises:
        ValueError: An argument is outside its range.

    Example:
        >>> epoch_order(seed=0, epoch=0, num_samples=5)
        array([0, 2, 1, 4, 3], dtype=int32)
    """
    epoch = _in_range("epoch", epoch, 0, _SPLIT_STREAM - 1)
    return _permutation(seed, epoch, num_samples)


def split_validation(num_samples: int, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Splits the samples at random into a training and a validation side.

    Args:
        num_samples: N, at least 2.
        fraction: Share of the samples on the validation side, strictly between 0 and 1. The count is
            ``round(N * fraction)``.
        seed: 0 to 2**64 - 1. The split is independent of every `epoch_order` of the same seed.

    Returns:
        ``(train_indices, validation_indices)``, int32, each sorted; together they hold 0..N-1 once.

    Raises:
        ValueError: ``fraction`` is outside (0, 1), or it leaves one side empty.
    """
    if not 0.0 < fraction < 1.0:
        raise ValueError(f"fraction is {fraction}; it must be strictly between 0 and 1")
    permutation_N = _permutation(seed, _SPLIT_STREAM, num_samples)
    num_validation = round(num_samples * fraction)
    if not 0 < num_validation < num_samples:
        side = "validation" if num_validation == 0 else "training"
        raise ValueError(
            f"fraction {fraction} of {num_samples} samples rounds to {num_validation} for validation, which leaves the "
            f"{side} side empty; each side needs at least one sample"
        )
    return np.sort(permutation_N[num_validation:]), np.sort(permutation_N[:num_validation])


def num_batches(num_samples: int, batch_size: int) -> int:
    """Returns how many batches hold ``num_samples`` samples, the padded last one included.

    Raises:
        ValueError: ``num_samples`` is negative or ``batch_size`` is below 1.
    """
    num_samples = _in_range("num_samples", num_samples, 0, 2**31 - 1)
    batch_size = _in_range("batch_size", batch_size, 1, 2**31 - 1)
    return -(-num_samples // batch_size)


def batches(order_N: np.ndarray, batch_size: int, start: int = 0) -> Iterator[BatchIndices]:
    """Cuts an order into batches of one fixed size.

    The last batch is padded, never dropped: a fixed size means that nothing is compiled twice, and the zero weight
    means that padding counts for nothing.

    Args:
        order_N: Sample numbers in the order of use, such as `epoch_order` or ``train_indices[epoch_order(...)]``.
        batch_size: B, at least 1.
        start: Whole batches to skip, for a run that resumes in the middle of an epoch.

    Returns:
        An iterator over ``num_batches(N, B) - start`` batches.

    Raises:
        ValueError: At the call, not at the first batch: ``order_N`` is not a vector of integers, ``batch_size`` is
            below 1, or ``start`` is negative or beyond the number of batches.
    """
    order_N = np.asarray(order_N)
    if order_N.ndim != 1 or not np.issubdtype(order_N.dtype, np.integer):
        raise ValueError(
            f"order_N has shape {order_N.shape} and dtype {order_N.dtype}; it must be a vector of integers"
        )
    count = num_batches(len(order_N), batch_size)
    start = _in_range("start", start, 0, count)
    return (_batch(order_N, batch_size, i) for i in range(start, count))


def _batch(order_N: np.ndarray, batch_size: int, i: int) -> BatchIndices:
    valid = order_N[i * batch_size : (i + 1) * batch_size]
    index_B = np.full(batch_size, valid[-1], np.int32)
    index_B[: len(valid)] = valid
    weight_B = np.zeros(batch_size, np.float32)
    weight_B[: len(valid)] = 1
    return BatchIndices(index_B, weight_B)


def _permutation(seed: int, stream: int, num_samples: int) -> np.ndarray:
    seed = _in_range("seed", seed, 0, 2**64 - 1)
    num_samples = _in_range("num_samples", num_samples, 1, 2**31 - 1)
    # `key=` sets the cipher's key as it is; the `seed` argument would first be hashed.
    words_N = np.random.Philox(key=np.array([seed, stream], np.uint64)).random_raw(num_samples)
    return np.argsort(words_N, kind="stable").astype(np.int32)


def _in_range(name: str, value: int, lowest: int, highest: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} is {value!r}; it must be an integer from {lowest} to {highest}") from None
    if not lowest <= number <= highest:
        raise ValueError(f"{name} is {number}; it must be from {lowest} to {highest}")
    return number
