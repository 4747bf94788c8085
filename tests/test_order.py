"""The order of samples: a permutation that is the same everywhere, and batches that lose nobody."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cnnjax.datasets.order import batches, epoch_order, num_batches, split_validation

MASK = 2**64 - 1


def philox4x64(key, counter):
    """One block of Philox4x64-10 (Salmon et al. 2011), in Python integers."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        low = 0xD2E7470EE14C6C93 * c0
        high = 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = (high >> 64) ^ c1 ^ k0, high & MASK, (low >> 64) ^ c3 ^ k1, low & MASK
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & MASK, (k1 + 0xBB67AE8584CAA73B) & MASK
    return [c0, c1, c2, c3]


@pytest.mark.parametrize(
    ("seed", "epoch", "expected"),
    [
        (0, 0, [0, 2, 1, 4, 3]),
        (7, 3, [2, 5, 9, 7, 3, 0, 6, 8, 4, 1, 11, 10]),
        (2**64 - 1, 2**64 - 2, [1, 7, 3, 2, 0, 4, 5, 6]),
    ],
)
def test_epoch_order_golden_numbers(seed, epoch, expected):
    order = epoch_order(seed, epoch, len(expected))
    assert order.tolist() == expected, "every run with a fixed seed would change: do not update these numbers lightly"
    assert order.dtype == np.int32


@given(seed=st.integers(0, MASK), epoch=st.integers(0, MASK - 1), n=st.integers(1, 30))
@settings(max_examples=50, deadline=None)
def test_epoch_order_sorts_the_philox_stream(seed, epoch, n):
    # NumPy raises the counter before each block, so that the first block has counter 1.
    words = [word for block in range(1, 9) for word in philox4x64((seed, epoch), (block, 0, 0, 0))][:n]
    assert epoch_order(seed, epoch, n).tolist() == sorted(range(n), key=words.__getitem__)


@given(seed=st.integers(0, MASK), epoch=st.integers(0, 1000), n=st.integers(1, 2000))
@settings(max_examples=50, deadline=None)
def test_epoch_order_is_a_permutation(seed, epoch, n):
    np.testing.assert_array_equal(np.sort(epoch_order(seed, epoch, n)), np.arange(n))


def test_epoch_order_differs_between_epochs_and_seeds():
    orders = [epoch_order(seed, epoch, 1000) for seed in range(3) for epoch in range(3)]
    for i, order in enumerate(orders):
        for other in orders[:i]:
            # Two independent permutations agree at one place on average; 12 has probability 1e-9.
            assert (order == other).sum() < 12


def test_epoch_order_first_sample_is_uniform():
    first = [epoch_order(1, epoch, 5)[0] for epoch in range(2000)]
    counts = np.bincount(first, minlength=5)
    assert np.sum((counts - 400) ** 2 / 400) < 23.5  # chi-square, 4 degrees of freedom, p = 1e-4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 0, 5), r"seed is -1; it must be from 0 to 18446744073709551615"),
        ((2**64, 0, 5), r"seed is 18446744073709551616"),
        ((0, -1, 5), r"epoch is -1; it must be from 0"),
        ((0, 2**64 - 1, 5), r"epoch is 18446744073709551615; it must be from 0 to 18446744073709551614"),
        ((0, 0, 0), r"num_samples is 0; it must be from 1 to 2147483647"),
        ((0.5, 0, 5), r"seed is 0.5; it must be an integer"),
    ],
)
def test_epoch_order_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        epoch_order(*arguments)


@given(n=st.integers(2, 500), fraction=st.floats(0.01, 0.99), seed=st.integers(0, 100))
@settings(max_examples=60, deadline=None)
def test_split_is_disjoint_sorted_and_complete(n, fraction, seed):
    count = round(n * fraction)
    if count in (0, n):
        with pytest.raises(ValueError, match="empty"):
            split_validation(n, fraction, seed)
        return
    train, validation = split_validation(n, fraction, seed)
    assert train.dtype == validation.dtype == np.int32
    assert len(validation) == count
    assert (np.diff(train) > 0).all() and (np.diff(validation) > 0).all()
    np.testing.assert_array_equal(np.sort(np.concatenate([train, validation])), np.arange(n))


def test_split_depends_on_the_seed_and_on_no_epoch():
    assert split_validation(10, 0.3, 7)[1].tolist() == [0, 1, 4]
    splits = {tuple(split_validation(100, 0.2, seed)[1]) for seed in range(20)}
    assert len(splits) == 20
    head_of_epoch_0 = np.sort(epoch_order(7, 0, 100)[:20])
    assert split_validation(100, 0.2, 7)[1].tolist() != head_of_epoch_0.tolist()


@pytest.mark.parametrize(
    ("n", "fraction", "message"),
    [
        (10, 0.0, r"fraction is 0.0; it must be strictly between 0 and 1"),
        (10, 1.0, r"fraction is 1.0"),
        (10, -0.2, r"fraction is -0.2"),
        (10, float("nan"), r"fraction is nan"),
        (10, 0.01, r"0.01 of 10 samples rounds to 0 for validation, which leaves the validation side empty"),
        (10, 0.99, r"0.99 of 10 samples rounds to 10 for validation, which leaves the training side empty"),
    ],
)
def test_split_errors(n, fraction, message):
    with pytest.raises(ValueError, match=message):
        split_validation(n, fraction, seed=0)


@given(n=st.integers(0, 200), batch_size=st.integers(1, 70), data=st.data())
@settings(max_examples=80, deadline=None)
def test_batches_hold_every_sample_once_and_have_one_shape(n, batch_size, data):
    order = epoch_order(3, 1, n) if n else np.zeros(0, np.int32)
    start = data.draw(st.integers(0, num_batches(n, batch_size)))
    cut = list(batches(order, batch_size, start))
    assert len(cut) == num_batches(n, batch_size) - start
    seen = []
    for batch in cut:
        assert batch.index.shape == batch.weight.shape == (batch_size,)
        assert batch.index.dtype == np.int32 and batch.weight.dtype == np.float32
        assert set(np.unique(batch.weight)) <= {0.0, 1.0}
        assert np.isin(batch.index, order).all()
        seen += batch.index[batch.weight == 1].tolist()
    assert seen == order[start * batch_size :].tolist()


def test_last_batch_is_padded():
    cut = list(batches(np.array([30, 10, 20, 50, 40]), batch_size=3))
    assert [batch.index.tolist() for batch in cut] == [[30, 10, 20], [50, 40, 40]]
    assert [batch.weight.tolist() for batch in cut] == [[1, 1, 1], [1, 1, 0]]


def test_batches_do_not_share_memory_with_the_order():
    order = np.arange(4, dtype=np.int32)
    next(batches(order, 2)).index[:] = 9
    assert order.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("order", "batch_size", "start", "message"),
    [
        (np.arange(5), 0, 0, r"batch_size is 0; it must be from 1"),
        (np.arange(5), 2, -1, r"start is -1; it must be from 0 to 3"),
        (np.arange(5), 2, 4, r"start is 4; it must be from 0 to 3"),
        (np.arange(6).reshape(2, 3), 2, 0, r"order_N has shape \(2, 3\)"),
        (np.arange(3.0), 2, 0, r"dtype float64; it must be a vector of integers"),
    ],
)
def test_batches_refuse_at_the_call(order, batch_size, start, message):
    with pytest.raises(ValueError, match=message):
        batches(order, batch_size, start)
