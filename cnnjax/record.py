"""What a run writes while it trains: ``metrics.csv``, ``steps.jsonl`` and, if asked for, TensorBoard's files."""

from typing import Any

import jax

from cnnjax import metrics, partition
from cnnjax.config import TrainConfig
from cnnjax.datasets.base import Dataset
from cnnjax.evaluation import Evaluation
from cnnjax.metrics import Sums
from cnnjax.partition import Layout
from cnnjax.rundir import Nowhere, RunDirectory
from cnnjax.tensorboard import TensorBoard


class Record:
    """The open files of a run; nothing is written where another process writes."""

    def __init__(
        self, folder: RunDirectory, config: TrainConfig, train: Dataset, layout: Layout, epochs_done: int, step: int
    ):
        """Opens the files, and cuts off what they say of later epochs and steps.

        Args:
            folder: Of the run.
            config: Of the run.
            train: Images that it trains on.
            layout: Of its steps.
            epochs_done: Epochs whose rows stay.
            step: Step up to which lines stay.

        Raises:
            UsageError: If ``metrics.csv`` has other columns.
        """
        self._config = config
        self._task, self._classes = train.task, len(train.class_names)
        self._more = metrics.more_columns(self._task, self._classes)
        self._run = {
            "network": config.network,
            "dataset": train.name,
            "framework": "jax",
            "backend": jax.default_backend(),
            "mesh": partition.describe(layout.mesh),
            "strategy": config.strategy,
            "bn_scope": layout.bn_scope,
            "dtype": "float64" if config.x64 else config.dtype,
            "seed": config.seed,
        }
        self._epochs: metrics.MetricsFile | Nowhere = Nowhere()
        self._steps: metrics.StepsFile | Nowhere = Nowhere()
        self._board: TensorBoard | Nowhere = Nowhere()
        if folder.writes:
            self._epochs = metrics.MetricsFile(folder.path / "metrics.csv", epochs_done, self._more)
            self._steps = metrics.StepsFile(folder.path / "steps.jsonl", step)
            if config.tensorboard:
                self._board = TensorBoard(folder.path / "tensorboard")

    def step(self, step: int, means: dict[str, float], learning_rate: float, grad_norm: float) -> dict[str, float]:
        """Writes a step where it is its turn; returns the means then written, else none of them."""
        if step % self._config.log_every and step != 1:
            return {}
        kept = {name: value for name, value in means.items() if name in ("loss", "accuracy", "mae")}
        self._steps.write(step=step, **kept, learning_rate=learning_rate)
        shown = kept | {"learning_rate": learning_rate, "grad_norm": grad_norm}
        self._board.scalars(step, {f"step/{name}": value for name, value in shown.items()})
        return kept

    def epoch(
        self, epoch: int, step: int, sums: Sums, learning_rate: float, compile_s: float, validated: Evaluation | None
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """Writes the row of an epoch; returns it and its means, those of ``validated`` as ``val_...``."""
        means = sums.means(self._task, self._classes)
        if validated is not None:
            found = validated.sums.means(self._task, self._classes)
            means |= {f"val_{name}": value for name, value in found.items()}
        row = {
            **self._run,
            "epoch": epoch,
            "step": step,
            **dict.fromkeys(("accuracy", "val_loss", "val_accuracy", *self._more)),
            **{name: value for name, value in means.items() if name in (*metrics.COLUMNS, *self._more)},
            "learning_rate": learning_rate,
            "compile_s": round(compile_s, 4),
            "train_s": round(sums.train_s, 4),
            "eval_s": validated and round(validated.seconds, 4),
            "images_per_s": round(sums.count / sums.train_s, 1) if sums.train_s else None,
        }
        self._epochs.write(row)
        self._board.scalars(step, {f"epoch/{name}": value for name, value in means.items()})
        return row, means

    def close(self) -> None:
        """Closes the files."""
        for file in (self._epochs, self._steps, self._board):
            file.close()
