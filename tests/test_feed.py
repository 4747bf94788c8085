import threading
import time

import numpy as np
import pytest

from cnnjax import partition
from cnnjax.datasets.base import Dataset
from cnnjax.datasets.order import BatchIndices, batches, epoch_order
from cnnjax.feed import Feed


@pytest.fixture(scope="module")
def mesh():
    return partition.Layout(partition.make_mesh("data=4")[0])


@pytest.fixture(scope="module")
def dataset():
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (50, 4, 5, 3), np.uint8)
    return Dataset("random", images, rng.integers(0, 7, 50).astype(np.int32), tuple("abcdefg"), "memory")


def test_every_sample_comes_once_in_order_with_its_own_image(dataset, mesh):
    order = epoch_order(3, 1, len(dataset))
    with Feed(dataset, batches(order, 7), mesh) as feed:
        got = list(feed)
    assert all(batch["image"].shape == (8, 4, 5, 3) for batch in got)  # 7 does not divide by 4 devices
    assert all(batch["image"].sharding.spec[0] == "data" for batch in got)
    valid = [np.asarray(batch["weight"]) > 0 for batch in got]
    index = np.concatenate([np.asarray(b["index"])[v] for b, v in zip(got, valid, strict=True)])
    assert np.array_equal(index, order)
    for batch in got:
        assert np.array_equal(batch["image"], dataset.images_NHWC[np.asarray(batch["index"])])
        assert np.array_equal(batch["label"], dataset.labels_N[np.asarray(batch["index"])])
    assert [int(v.sum()) for v in valid] == [7] * 7 + [1]


def test_leaving_early_stops_the_thread(dataset, mesh):
    with Feed(dataset, batches(np.arange(50), 5), mesh) as feed:
        next(iter(feed))
    assert not [thread for thread in threading.enumerate() if thread.name == "feed"]


def test_a_mistake_in_the_thread_reaches_the_consumer(dataset, mesh):
    wrong = BatchIndices(np.array([10**6], np.int32), np.ones(1, np.float32))
    with Feed(dataset, [wrong], mesh) as feed, pytest.raises(IndexError):
        list(feed)


def test_waiting_is_measured(dataset, mesh):
    def slow():
        for batch in batches(np.arange(10), 5):
            time.sleep(0.2)
            yield batch

    with Feed(dataset, slow(), mesh) as feed:
        list(feed)
    assert 0.35 < feed.waited_s < 2
