"""A whole data set through the evaluation step, once."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from cnnjax.datasets.base import Dataset
from cnnjax.datasets.order import batches
from cnnjax.feed import Feed
from cnnjax.metrics import Sums
from cnnjax.partition import Layout


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Sums, predictions and losses over one data set, and the seconds that it took.

    Attributes:
        sums: Over all images.
        predicted_N: Class, int32, or number, float32, of each image, in the order of the data set.
        losses_N: Loss of each image, likewise.
        seconds: Wall time.
        probabilities_NC: Of each class, where they were asked for; rows sum to 1.
    """

    sums: Sums
    predicted_N: np.ndarray
    losses_N: np.ndarray
    seconds: float
    probabilities_NC: np.ndarray | None = None


def evaluate(
    eval_step: Callable,
    state: Any,
    dataset: Dataset,
    layout: Layout,
    batch_size: int,
    stopping: Callable[[], bool] = lambda: False,
    probabilities: bool = False,
) -> Evaluation | None:
    """Evaluates every image once.

    Args:
        eval_step: `cnnjax.step.eval_step`, jitted for the layout.
        state: The train state.
        dataset: Images and labels.
        layout: Where.
        batch_size: Images at a time, over all devices.
        stopping: Asked before each batch.
        probabilities: Keep those of all classes, too.

    Returns:
        What came out; None if ``stopping`` said so.
    """
    start = time.perf_counter()
    sums = Sums()
    wanted = ("predicted", "sample_loss", *(["probabilities"] if probabilities else []))
    found: dict[str, list[np.ndarray]] = {name: [] for name in wanted}
    place = layout.rows(batch_size)
    with Feed(dataset, batches(np.arange(len(dataset)), batch_size), layout) as feed:
        for batch in feed:
            if stopping():
                return None
            results = eval_step(state, batch)
            if not probabilities:
                results.pop("probabilities", None)  # not worth the way to the host
            results = jax.device_get(results)
            sums.add(results)
            for name, parts in found.items():
                in_order_B = np.empty((batch_size, *results[name].shape[1:]), results[name].dtype)
                in_order_B[place[place >= 0]] = results[name][place >= 0]
                parts.append(in_order_B)
    predicted_N, losses_N, *more = (np.concatenate(parts)[: len(dataset)] for parts in found.values())
    return Evaluation(sums, predicted_N, losses_N, time.perf_counter() - start, *more)
