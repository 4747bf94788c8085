"""Scalars as TensorBoard's event files.

Uses the ``tensorboard`` package alone and never TensorFlow; nothing of it is imported before a `TensorBoard` is made.
"""

import re
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from cnnjax.config import UsageError

_EVENTS = re.compile(r"events\.out\.tfevents\.(\d+)\.")


class TensorBoard:
    """Writes scalars below a folder, for ``tensorboard --logdir FOLDER``.

    A run that resumes makes another one on the same folder, which writes a new file. With its first step it tells
    TensorBoard to forget what older files say of that step and of later ones.
    """

    def __init__(self, folder: Path):
        """Starts a new event file.

        Args:
            folder: Where to write; made where it is not there.

        Raises:
            UsageError: If the package ``tensorboard`` is not installed, or the folder cannot be written.
        """
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as error:
            raise UsageError(
                f"event files need the package tensorboard ({error}): pip install -e '.[tensorboard]'"
            ) from None
        self._event, self._summary, self._session = event_pb2.Event, summary_pb2.Summary, event_pb2.SessionLog
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # TensorBoard reads files in the order of their names: a new one must come last, also within one second.
            found = [int(match[1]) for path in folder.iterdir() if (match := _EVENTS.match(path.name))]
            number = max([int(time.time()), *(one + 1 for one in found)])
            file = (folder / f"events.out.tfevents.{number:010d}.{socket.gethostname()}").open("xb")
        except OSError as error:
            raise UsageError(f"{folder}: event files cannot be written: {error.strerror}") from None
        self._writer = RecordWriter(file)
        self._first = True
        self._write(file_version="brain.Event:2")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Writes the values of one step; they reach the operating system at once.

        Args:
            step: Number of the step, or of the epoch.
            values: By tag; tags with the same beginning, as in ``train/loss``, share a group.
        """
        if self._first:
            self._write(step=step, session_log=self._session(status=self._session.START))
            self._first = False
        summary = self._summary(
            value=[self._summary.Value(tag=tag, simple_value=float(value)) for tag, value in values.items()]
        )
        self._write(step=step, summary=summary)

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()

    def _write(self, **fields: object) -> None:
        event = self._event(wall_time=time.time(), **fields)
        self._writer.write(event.SerializeToString())
        self._writer.flush()
