"""Signals that ask a run to save and stop, heeded by all its processes at the same step."""

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import Mesh

from cnnjax.distributed import Votes


class Stop:
    """Whether a signal asks the run to stop.

    Attributes:
        signal: The signal at which all processes stop, or None.
    """

    def __init__(self, mesh: Mesh, processes: int, speaks: bool):
        """Hears nothing yet.

        Args:
            mesh: Of all processes; their votes are counted on it.
            processes: How many train together.
            speaks: Whether this one tells the terminal.
        """
        self.signal: signal.Signals | None = None
        self._asked: signal.Signals | None = None  # came to this process
        self._votes = Votes(mesh) if processes > 1 else None
        self._speaks = speaks

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Within it, the first SIGINT or SIGTERM asks to save and stop; a second Ctrl-C interrupts at once."""
        try:
            before = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not in the main thread, which alone receives signals
            before = {}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _ask(self, number: int, frame: object) -> None:
        if self._asked is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._asked = signal.Signals(number)
        if self._votes is None:
            self.signal = self._asked
        if self._speaks:
            with contextlib.suppress(OSError):  # nobody may be left to read it
                os.write(2, f"{self._asked.name}: saving a checkpoint, then stopping\n".encode())

    def vote(self) -> dict[str, jax.Array]:
        """With other processes, which must all call this, starts a count among them: ``{"signal": number or 0}``."""
        return {} if self._votes is None else {"signal": self._votes.cast(self._asked)}

    def heed(self, vote: Any) -> None:
        """Takes the number of a signal, the result of a vote; 0 is none."""
        if vote := int(vote):
            self.signal = signal.Signals(vote)

    def now(self) -> bool:
        """Whether a signal came to any process; all must ask."""
        self.heed(self.vote().get("signal", 0))
        return self.signal is not None
