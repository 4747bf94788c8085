"""What a person sees while a run goes on: a progress bar on a terminal, plain lines elsewhere."""

import contextlib
import os
import sys
import time
from collections.abc import Callable

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

PLAIN_SECONDS = 30.0  # between progress lines where there is no terminal


class _Out(RichConsole):
    def on_broken_pipe(self) -> None:
        raise  # rich would exit


class Console:
    """Prints lines and progress, and hands every line to a log.

    A reader of standard output that goes away, as in ``| head``, ends the printing and not the run.
    """

    def __init__(self, quiet: bool, log: Callable[[str], None]):
        """``quiet`` leaves warnings only; ``log`` gets every line."""
        self._quiet, self._log = quiet, log
        self._out = _Out(highlight=False, soft_wrap=True)
        self._bar: Progress | None = None
        self._seen = 0.0

    def say(self, text: str) -> None:
        """Prints a line, above the bar where there is one."""
        self._log(text)
        self._print(text)

    def warn(self, text: str) -> None:
        """Prints a warning, quiet or not, to standard error."""
        self._log(f"warning: {text}")
        if self._bar is not None:
            self._bar.console.print(f"warning: {text}", markup=False)
        else:
            with contextlib.suppress(OSError):
                print(f"warning: {text}", file=sys.stderr, flush=True)

    def start(self, total_steps: int, done: int) -> None:
        """Starts the progress display."""
        self._seen = time.perf_counter()
        if self._out.is_terminal and not self._quiet:
            self._bar = Progress(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}"),
                TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=self._out,
            )  # fmt: skip
            self._task = self._bar.add_task("training", total=total_steps, completed=done, text="")
            self._bar.start()

    def progress(self, step: int, total_steps: int, epoch: int, epochs: int, text: Callable[[], str]) -> None:
        """Shows how far the run is; ``text`` is called only where it will be seen."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=f"epoch {epoch}/{epochs}", text=text())
        elif not self._quiet and (now := time.perf_counter()) - self._seen > PLAIN_SECONDS:
            self._seen = now
            self._print(f"epoch {epoch}/{epochs}  step {step}/{total_steps}  {text()}")

    def stop(self) -> None:
        """Ends the progress display."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _print(self, text: str) -> None:
        if self._quiet:
            return
        try:
            self._out.print(text, markup=False)
        except OSError:
            self._quiet = True
            # What is still buffered would raise again as Python exits.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
