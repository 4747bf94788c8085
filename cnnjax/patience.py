"""What a validation loss that no longer falls leads to: a lower learning rate, or the end of the run.

Both rules see one loss an evaluation and are those of Keras's ``ReduceLROnPlateau`` and ``EarlyStopping``, so that the
same series of losses gives the same epochs. They run on the host, in float64, and keep their state as plain numbers,
which checkpoints hold as JSON.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

Numbers = dict[str, Any]


class Plateau:
    """Multiplies the learning rate by ``factor`` after ``patience`` evaluations in a row without a lower loss."""

    def __init__(self, factor: float, patience: int, min_delta: float = 1e-4, numbers: Numbers | None = None):
        """Starts, or goes on from the ``numbers`` of an earlier one.

        Args:
            factor: Above 0 and below 1.
            patience: Evaluations, at least 1.
            min_delta: A loss must be below the lowest one by more than this; Keras's default.
            numbers: What `numbers` was.
        """
        # float64: a loss of float32 differs from its neighbour by less than min_delta where it is large.
        with jax.enable_x64(True):
            self._rule = optax.contrib.reduce_on_plateau(factor, patience, rtol=0.0, atol=min_delta)
            state = self._rule.init(jnp.zeros(()))
            if numbers is not None:
                state = type(state)(**{name: jnp.asarray(numbers[name], old.dtype) for name, old in _items(state)})
            self._state = state

    @property
    def numbers(self) -> Numbers:
        """The state, for a checkpoint."""
        return {name: value.item() for name, value in _items(self._state)}

    @property
    def rate_factor(self) -> float:
        """What the learning rate is multiplied by now."""
        return float(self._state.scale)

    def see(self, loss: float) -> bool:
        """Takes the loss of an evaluation; returns whether it lowered the learning rate."""
        before = self.rate_factor
        with jax.enable_x64(True):
            _, self._state = self._rule.update(jnp.zeros(()), self._state, value=jnp.asarray(loss, float))
        return self.rate_factor < before


def _items(state: Any) -> Any:
    return state._asdict().items()


class EarlyStopping:
    """Ends training after ``patience`` evaluations in a row without a lower loss, and knows the step of the lowest."""

    def __init__(self, patience: int, numbers: Numbers | None = None):
        """Starts, or goes on from the ``numbers`` of an earlier one.

        Args:
            patience: Evaluations, at least 1.
            numbers: What `numbers` was.
        """
        self.patience = patience
        self.numbers = numbers or {"loss": float("inf"), "step": None, "waited": 0}

    @property
    def best_step(self) -> int | None:
        """Step of the lowest loss so far; of equal ones, the first."""
        return self.numbers["step"]

    @property
    def lowest(self) -> float:
        """The lowest loss so far."""
        return self.numbers["loss"]

    @property
    def over(self) -> bool:
        """Whether training should end."""
        return self.numbers["waited"] >= self.patience

    def see(self, loss: float, step: int) -> bool:
        """Takes the loss of the evaluation after ``step`` steps; returns whether it is the lowest."""
        if loss < self.numbers["loss"]:
            self.numbers = {"loss": loss, "step": step, "waited": 0}
            return True
        self.numbers = self.numbers | {"waited": self.numbers["waited"] + 1}
        return False
