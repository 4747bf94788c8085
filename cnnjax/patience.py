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


class Rules:
    """The rules that a run asked for, each of which may be None."""

    def __init__(self, plateau: int | None, factor: float, early_stopping: int | None, numbers: Numbers | None = None):
        """Starts, or goes on from the ``numbers`` of an earlier one; a rule that it lacks starts anew.

        Args:
            plateau: Patience of `Plateau`.
            factor: Its factor.
            early_stopping: Patience of `EarlyStopping`.
            numbers: What `numbers` was.
        """
        numbers = numbers or {}
        self.plateau = Plateau(factor, plateau, numbers=numbers.get("plateau")) if plateau else None
        self.stopping = EarlyStopping(early_stopping, numbers.get("early_stopping")) if early_stopping else None
        self._patience = plateau
        self._step = numbers.get("step")  # after which a loss was seen last

    @property
    def numbers(self) -> Numbers:
        """The state, for a checkpoint."""
        return {
            "plateau": self.plateau and self.plateau.numbers,
            "early_stopping": self.stopping and self.stopping.numbers,
            "step": self._step,
        }

    @property
    def over(self) -> bool:
        """Whether training should end."""
        return self.stopping is not None and self.stopping.over

    @property
    def best_step(self) -> int | None:
        """Step whose weights early stopping keeps."""
        return None if self.stopping is None else self.stopping.best_step

    def see(self, loss: float, step: int) -> list[str]:
        """Takes the validation loss after ``step`` steps; returns what to tell of it.

        A run that is resumed right where it ended evaluates the same weights again, and they do not count twice.
        """
        if step == self._step:
            return []
        self._step = step
        said = []
        if self.plateau is not None and self.plateau.see(loss):
            said.append(
                f"val_loss has not fallen for {self._patience} evaluations; the learning rate is now "
                f"{self.plateau.rate_factor:.3g} times that of the schedule"
            )
        if self.stopping is not None:
            self.stopping.see(loss, step)
            if self.stopping.over:
                said.append(f"val_loss has not fallen for {self.stopping.patience} evaluations; training ends")
        return said
