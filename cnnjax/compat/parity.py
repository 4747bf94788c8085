"""How far a framework's first steps are from those of cnnjax on the same job."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from cnnjax.compat.orchestrate import Result

# Rounding turns the choice of a max pooling or a relu over wherever two values are nearly alike, and every such choice
# moves a gradient. In float32 cnnjax itself may therefore be further from its own float64 than the tolerance; a
# framework may then be this many times as far.
ROUNDINGS = 3

# Runs of cnnjax from `nudged` weights that tell how far that is, beside the one from the weights as they are: whether a
# choice turns over in any one run is chance.
NUDGES = 3


@dataclasses.dataclass(frozen=True)
class Differences:
    """Largest relative differences; NaN where something is no number or is lacking.

    Attributes:
        first_loss: Of the first step's loss.
        first_update: Of what the first step added to each array, relative to that array's update, both as Euclidean
            norms: the gradient as the update rule passes it on. Adam's first step is ``rate * sign(gradient)`` wherever
            the gradient is not tiny, so that rounding turns single values over; there it is the share of all values
            whose step differs by more than a hundredth of the rate.
        losses: Of any step's loss.
        statistics: Of batch norm's moving statistics after the last step, relative to the largest of each array.
        predictions: Share of test images whose predicted class differs.
    """

    first_loss: float
    first_update: float
    losses: float
    statistics: float
    predictions: float

    def beyond(self, limits: "Differences") -> list[str]:
        """Names of the differences that are larger than their limits."""
        largest = dataclasses.asdict(limits)
        # Written so that NaN is too large.
        return [name for name, value in dataclasses.asdict(self).items() if not value <= largest[name]]


# An image between two classes may fall to either side in float32.
TOLERANCES = {
    "float32": Differences(1e-5, 1e-4, 1e-3, 1e-3, 0.02),
    "float64": Differences(1e-9, 1e-9, 1e-9, 1e-9, 0.0),
}


def limits(dtype: str, roundings: Sequence[Differences]) -> Differences:
    """What still counts as the same.

    Args:
        dtype: Of the job.
        roundings: How far runs of cnnjax in float32 are from cnnjax in float64 on the same job; none in float64.
    """
    allowed = dataclasses.asdict(TOLERANCES[dtype])
    for rounding in roundings:
        allowed = {name: max(limit, ROUNDINGS * getattr(rounding, name)) for name, limit in allowed.items()}
    return Differences(**allowed)


def nudged(weights: Mapping[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """Weights that make float32 results differ as another order of summation would.

    A sum of n products of float32, taken in sequence, is off by about ``n / 2`` roundings of one product, since the
    partial sums grow as the square root of their length does. Kernels whose values are each off by ``sqrt(n) / 2``
    roundings, at random, put their sums off by as much; four times that allows for the fast convolutions, which trade
    precision for speed.

    Args:
        weights: By name; kernels ``[..., O]``, of which all other dimensions are summed over. Others stay as they are.
        seed: Of the draw.
    """
    rng = np.random.default_rng(seed)
    changed = dict(weights)
    for name, kernel in weights.items():
        if name.rsplit("/", 1)[-1] == "kernel":
            scale = 2.0**-24 * 2 * math.sqrt(math.prod(kernel.shape[:-1]))
            changed[name] = (kernel * (1 + scale * rng.standard_normal(kernel.shape))).astype(kernel.dtype)
    return changed


def compare(
    result: Result, reference: Result, initial: Mapping[str, np.ndarray], optimizer: str, rate: float,
    own_initial: Mapping[str, np.ndarray] | None = None,
) -> Differences:  # fmt: skip
    """Compares two results of one job.

    Args:
        result: Of the framework.
        reference: Of cnnjax.
        initial: Weights before the first step.
        optimizer: Name of the update rule.
        rate: Learning rate of the first step.
        own_initial: Weights before the first step of the framework, where they are others.
    """
    own_initial = initial if own_initial is None else own_initial
    losses_T, expected_T = (one.steps()["loss"].to_numpy(float) for one in (result, reference))
    relative_T = np.abs(losses_T - expected_T) / np.abs(expected_T)
    first, expected_first = (one.arrays("first_weights") for one in (result, reference))
    final, expected_final = (one.arrays("final_weights") for one in (result, reference))
    for ours, theirs in ((first, expected_first), (final, expected_final)):
        shapes, expected_shapes = ({name: a.shape for name, a in arrays.items()} for arrays in (ours, theirs))
        if wrong := {name for name, _ in shapes.items() ^ expected_shapes.items()}:
            raise ValueError(f"{result.name}: arrays {', '.join(sorted(wrong))} are missing or of another shape")
    trained = [name for name in first if not is_statistic(name)]
    updates = [(first[name] - own_initial[name], expected_first[name] - initial[name]) for name in trained]
    if optimizer == "adam":
        beyond = sum(int((np.abs(update - expected) > 0.01 * rate).sum()) for update, expected in updates)
        first_update = beyond / sum(expected.size for _, expected in updates)
    else:
        first_update = _largest(updates, _root_mean_square)
    statistics = [(final[name], expected_final[name]) for name in final if is_statistic(name)]
    # Without test images there is nothing to predict, for either.
    tested = (reference.folder / "predictions.csv").exists()
    differ = float(np.mean(result.predictions() != reference.predictions())) if tested else 0.0
    return Differences(
        float(relative_T[0]),
        first_update,
        float(np.max(relative_T)),
        _largest(statistics, _largest_value) if statistics else 0.0,
        differ,
    )


def is_statistic(name: str) -> bool:
    """Whether an array is a moving statistic of batch norm."""
    return name.rsplit("/", 1)[-1] in ("mean", "var")


def _largest(pairs: list[tuple[np.ndarray, np.ndarray]], size: Callable[[np.ndarray], float]) -> float:
    """Largest difference of any array, relative to that array, both measured by ``size``."""
    # An array whose exact value is zero, such as the update of a bias that batch norm takes out again, is all rounding.
    floor = max(1e-6 * max(size(expected) for _, expected in pairs), 1e-30)
    return float(np.max([size(x - y) / max(size(y), floor) for x, y in pairs]))


def _root_mean_square(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=float))))


def _largest_value(values: np.ndarray) -> float:
    return float(np.max(np.abs(values)))
