"""Batches from host memory to the devices, one step ahead of the compute."""

import queue
import threading
import time
from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from cnnjax.datasets.base import Dataset
from cnnjax.datasets.order import BatchIndices
from cnnjax.losses import Objective
from cnnjax.networks import Shape
from cnnjax.partition import Layout


class Feed:
    """Iterates over device batches that a thread gathers and sends ahead.

    Iterating yields ``{"image", "label", "weight", "index"}`` with rows split over the mesh, and with ``mixup`` also
    ``other_image`` and ``other_label``; where the batch does not divide, rows of weight 0 fill it up. Use it as a
    context manager: leaving stops the thread.

    Attributes:
        waited_s: Seconds that the consumer has waited for a batch so far.
    """

    def __init__(
        self, dataset: Dataset, batches: Iterable[BatchIndices], layout: Layout, depth: int = 2, *, mixup: bool = False
    ):
        """Starts gathering.

        Args:
            dataset: Images and labels that the indices refer to.
            batches: What to send, in this order.
            layout: Where to send it.
            depth: Batches that may wait on the devices, beyond the one in use.
            mixup: Whether each sample comes with another of its batch.
        """
        self.waited_s = 0.0
        self._mixup = mixup
        self._dataset, self._batches, self._layout = dataset, batches, layout
        self._sharding = layout.batch_sharding
        self._ready: queue.Queue = queue.Queue(depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._send, name="feed", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Feed":
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def __iter__(self) -> Iterator[dict[str, jax.Array]]:
        while True:
            start = time.perf_counter()
            batch = self._ready.get()
            self.waited_s += time.perf_counter() - start
            if batch is None:
                return
            if isinstance(batch, BaseException):
                raise batch
            yield batch

    def _send(self) -> None:
        try:
            for indices in self._batches:
                if not self._put(place(self._dataset, indices, self._layout, self._sharding, self._mixup)):
                    return
            self._put(None)
        except BaseException as error:  # whatever it is, the consumer must hear of it instead of waiting for ever
            self._put(error)

    def _put(self, item: object) -> bool:
        while not self._stop.is_set():
            try:
                self._ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False


def place(
    dataset: Dataset, indices: BatchIndices, layout: Layout, sharding: NamedSharding, mixup: bool = False
) -> dict[str, jax.Array]:
    """One batch on the devices; of several processes, each gathers the rows of its own devices only."""
    if sharding.is_fully_addressable:
        return jax.device_put(gather(dataset, indices, layout, mixup=mixup), sharding)
    batch_size = len(layout.rows(len(indices.index)))
    slices = sharding.addressable_devices_indices_map((batch_size,)).values()
    spans = {at[0].indices(batch_size) for at in slices if at is not None}
    parts = {span: gather(dataset, indices, layout, slice(*span), mixup) for span in spans}

    def array(name: str) -> jax.Array:
        shape = (batch_size, *next(iter(parts.values()))[name].shape[1:])

        def mine(at: tuple[slice, ...] | None) -> np.ndarray:
            return parts[at[0].indices(batch_size)][name] if at is not None else np.empty(0)

        return jax.make_array_from_callback(shape, sharding, mine)

    return {name: array(name) for name in next(iter(parts.values()))}


def gather(
    dataset: Dataset, indices: BatchIndices, layout: Layout, rows: slice = slice(None), mixup: bool = False
) -> dict[str, np.ndarray]:
    """One batch in host memory, its rows as the layout places them; or of those, only the ``rows`` given.

    With ``mixup``, ``other_image`` and ``other_label`` are those of the next sample of the batch, and of the first for
    the last: the batch's order is random, and the same whatever the layout.
    """
    place = layout.rows(len(indices.index))[rows]
    index_B = indices.index[place]
    batch = {
        "image": dataset.images_NHWC[index_B],
        "label": dataset.labels_N[index_B],
        "weight": np.where(place >= 0, indices.weight[place], np.float32(0)),
        "index": index_B,
    }
    if not mixup:
        return batch
    valid = np.flatnonzero(indices.weight)
    following = np.arange(len(indices.index))
    following[valid] = np.roll(valid, -1)
    other_B = indices.index[following[place]]
    return batch | {"other_image": dataset.images_NHWC[other_B], "other_label": dataset.labels_N[other_B]}


def abstract_batch(
    objective: Objective, layout: Layout, batch_size: int, image_shape: Shape
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes, dtypes and shardings of what `place` gives.

    Args:
        objective: What the network is trained for.
        layout: Where the batch goes.
        batch_size: Samples over all devices.
        image_shape: ``(height, width, channels)`` of the data set's images.
    """
    rows, sharding = len(layout.rows(batch_size)), layout.batch_sharding
    label = jnp.int32 if objective.label_moments is None else jnp.float32
    arrays = {"image": (jnp.uint8, image_shape), "label": (label, ()), "weight": (jnp.float32, ()),
              "index": (jnp.int32, ())}  # fmt: skip
    if objective.mixup:
        arrays |= {"other_image": arrays["image"], "other_label": arrays["label"]}
    return {
        name: jax.ShapeDtypeStruct((rows, *shape), dtype, sharding=sharding) for name, (dtype, shape) in arrays.items()
    }
