"""Checkpoints: the whole state, the position in the data and the options, saved while training goes on.

A checkpoint appears under its final name only when it is complete, and loses that name before it is deleted, so a
killed process leaves none that is half there.
"""

import contextlib
import logging
import operator
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from cnnjax.config import UsageError

# Orbax reports every save in several lines, warns of each without metrics, and logs what it then raises as well.
logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)


_DISCARDED = "discarded"  # subfolder of checkpoints on their way out


@contextlib.contextmanager
def _failing(what: str, remedy: str) -> Iterator[None]:
    """Whatever goes wrong below Orbax, which may be any exception, is said in one line."""
    try:
        yield
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        raise UsageError(f"{what} ({reason}); {remedy}") from error


def _waiting_for_processes() -> ocp.AsyncOptions:
    """How the writing threads of several processes wait for each other."""
    wait = ocp.multihost.get_barrier_sync_fn()

    def barrier(*, key: str, timeout_ms: int) -> None:
        # Orbax also waits for the others where its own write has failed; they would wait too, for many minutes.
        if (error := sys.exception()) is not None:
            raise error
        wait(key=key, timeout_ms=timeout_ms)

    return ocp.AsyncOptions(timeout_secs=300, barrier_sync_fn=barrier)


class Checkpoints:
    """The checkpoints of one run, by step: the newest few and the best.

    Best is the highest ``rating`` given to `save`; checkpoints saved without one cannot be best.
    """

    def __init__(self, directory: Path, keep: int, read_only: bool = False):
        """Opens, or creates, the folder; what a killed process left half written or half deleted is removed.

        Args:
            directory: Folder of the checkpoints, one subfolder a step.
            keep: Newest checkpoints that stay.
            read_only: Changes nothing, as another process may be writing there.

        Raises:
            UsageError: If the folder cannot be read.
        """
        rating = operator.itemgetter("rating")
        best = BestN(get_metric_fn=rating, n=1, keep_checkpoints_without_metrics=False)
        self.directory, self._read_only = Path(directory).absolute(), read_only
        options = ocp.CheckpointManagerOptions(
            preservation_policy=AnyPreservationPolicy([LatestN(keep), best]),
            best_fn=rating,  # without it, metrics are not written
            cleanup_tmp_directories=not read_only,
            read_only=read_only,
            todelete_subdir=_DISCARDED,
            async_options=_waiting_for_processes() if jax.process_count() > 1 else None,
        )
        with _failing(f"{self.directory}: a checkpoint in it cannot be read", "delete its folder, likely the newest"):
            self._manager = ocp.CheckpointManager(
                self.directory, options=options, item_names=("state", "position", "config")
            )
        self._discard()

    def save(self, step: int, state: Any, position: dict, config: dict, rating: float | None = None) -> None:
        """Starts to save; training may go on, and donate ``state``, at once.

        A step that is there stays as it is, unless only now its ``rating`` is known.

        Raises:
            UsageError: If this checkpoint or the one before cannot be written.
        """
        self.wait()
        if step in self._manager.all_steps():
            if rating is None or self._manager.metrics(step) is not None:
                return
            self._manager.delete(step)
        # On a CPU, host and device memory are one: without a copy the next step would overwrite what is being written.
        state = jax.tree.map(jnp.copy, state)
        with self._writing():
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state),
                    position=ocp.args.JsonSave(position),
                    config=ocp.args.JsonSave(config),
                ),
                metrics=None if rating is None else {"rating": rating},
            )

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints."""
        return sorted(self._manager.all_steps())

    def newest(self) -> int | None:
        """Step of the newest complete checkpoint, or None."""
        return self._manager.latest_step()

    def best(self) -> int | None:
        """Step of the checkpoint with the highest rating, or None."""
        return self._manager.best_step()

    def restore(self, step: int, abstract_state: Any, shardings: Any) -> tuple[Any, dict]:
        """Reads a checkpoint onto the given shardings, which may differ from those that it was saved with.

        Args:
            step: As `newest` or `best` gives it.
            abstract_state: Tree of `jax.ShapeDtypeStruct`.
            shardings: Tree of shardings like it.

        Returns:
            State and position.

        Raises:
            UsageError: If the checkpoint is damaged, or of another network or optimiser.
        """
        target = jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), abstract_state, shardings
        )
        args = ocp.args.Composite(state=ocp.args.StandardRestore(target), position=ocp.args.JsonRestore())
        path = self.directory / str(step)
        with _failing(f"{path}: this checkpoint cannot be read", "delete its folder to continue from the one before"):
            restored = self._manager.restore(step, args=args)
        return restored["state"], restored["position"]

    def wait(self) -> None:
        """Returns when every started save is complete.

        Raises:
            UsageError: If one failed.
        """
        with self._writing():
            self._manager.wait_until_finished()
        self._discard()

    def close(self) -> None:
        """Waits and releases the folder."""
        with self._writing():
            self._manager.close()
        self._discard()

    def _writing(self) -> contextlib.AbstractContextManager[None]:
        return _failing(f"{self.directory}: a checkpoint cannot be written", "is the disk full?")

    def _discard(self) -> None:
        if jax.process_index() == 0 and not self._read_only:
            shutil.rmtree(self.directory / _DISCARDED, ignore_errors=True)
