"""The folder of one run: made, found again, protected, and described."""

import dataclasses
import fcntl
import io
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from cnnjax import partition
from cnnjax.config import FIXED_ON_RESUME, TrainConfig, flag
from cnnjax.metrics import replace_file


class RunDirectory:
    """A run's folder, locked while this process lives.

    Attributes:
        path: The folder.
        checkpoints: Its folder of checkpoints.
        writes: Whether this process writes the run's files, as the first of several does for all.
    """

    def __init__(self, path: Path, writes: bool = True):
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.writes = writes
        self._lock: io.FileIO | None = None
        if not writes:
            return
        # Unbuffered: what a full disk refuses would otherwise be refused again on closing.
        self._lock = io.FileIO(path / "run.log", "a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise ValueError(f"--run-dir {path}: another process is writing this run") from None

    def log(self, text: str) -> None:
        """Appends a line with the time to ``run.log``."""
        if self._lock is not None:
            self._lock.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n".encode())

    def close(self) -> None:
        """Unlocks the folder."""
        if self._lock is not None:
            self._lock.close()


class Nowhere:
    """In place of a file that another process writes."""

    def write(self, *row: Any, **values: Any) -> None:
        """Does nothing."""

    def scalars(self, step: int, values: Any) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


def saved_config(path: Path) -> TrainConfig | None:
    """Options of the run in ``path``, or None where there is none.

    Raises:
        ValueError: If its ``config.json`` is damaged.
    """
    file = path / "config.json"
    return TrainConfig.from_json(file.read_text(), str(file)) if file.exists() else None


def is_run(path: Path) -> bool:
    """Whether a run began in ``path``: its two files are there, or nothing else, where it was killed between them."""
    names = {entry.name for entry in path.iterdir()} if path.is_dir() else set()
    return "run.log" in names and ("config.json" in names or names <= {"run.log", "config.json.new"})


def find_run(experiment: str, config: TrainConfig) -> tuple[Path, TrainConfig | None]:
    """Decides where a run goes, and whether it may; changes nothing on disk.

    Args:
        experiment: Name for the default folder, ``runs/<experiment>-<time>``.
        config: Its ``run_dir``, ``resume`` and ``overwrite`` decide.

    Returns:
        The folder, and the options of the run in it that is to be continued, or None for a new run.

    Raises:
        ValueError: If the folder holds something already that was not asked to be resumed or overwritten.
    """
    if config.run_dir is None:
        if config.resume:
            raise ValueError("--resume needs --run-dir, the folder of the run to continue")
        base = Path("runs") / f"{experiment}-{time.strftime('%Y%m%d-%H%M%S')}"
        candidates = (base, *(base.with_name(f"{base.name}-{number}") for number in range(2, 1000)))
        return next(path for path in candidates if not path.exists()), None
    path = Path(config.run_dir)
    try:
        occupied = path.exists() and (not path.is_dir() or any(path.iterdir()))
    except OSError as error:
        raise ValueError(f"--run-dir {path} cannot be read: {error.strerror or error}") from None
    if not occupied:
        return path, None
    if not is_run(path):
        raise ValueError(
            f"--run-dir {path} exists and is not the folder of a run (it has no run.log and config.json); name another"
        )
    if config.resume:
        return path, saved_config(path)
    if not config.overwrite:
        raise ValueError(f"--run-dir {path} holds a run already; --resume continues it, --overwrite deletes it first")
    return path, None


def check_same_run(path: Path, config: TrainConfig, saved: TrainConfig) -> None:
    """Refuses to resume a run with other options than it was started with, where they decide its numbers.

    Raises:
        ValueError: Lists the flags with both values.
    """
    changes = [
        f"{flag(field)} is {getattr(config, field)} but was {getattr(saved, field)}"
        for field in FIXED_ON_RESUME
        if getattr(config, field) != getattr(saved, field)
    ]
    if changes:
        raise ValueError(f"--resume {path}: {'; '.join(changes)}; a resumed run must keep these")


def open_run(path: Path, overwrite: bool, writes: bool = True) -> RunDirectory:
    """Makes the folder, or takes it over; ``overwrite`` empties it first. Without ``writes`` it must be there.

    Raises:
        ValueError: If it cannot be written, or another process is writing there.
    """
    if not writes:
        if not (path / "run.log").exists():
            raise ValueError(f"--run-dir {path}: not here, where another process made it; all need one file system")
        return RunDirectory(path, writes=False)
    try:
        path.mkdir(parents=True, exist_ok=True)
        run = RunDirectory(path)
        if overwrite:
            # run.log holds the lock; config.json goes last, so that what is left of a killed deletion is still a run.
            for entry in sorted(path.iterdir(), key=lambda entry: entry.name == "config.json"):
                if entry.name != "run.log":
                    shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
            os.truncate(path / "run.log", 0)
    except OSError as error:
        raise ValueError(f"--run-dir {path} cannot be written: {error.strerror or error}") from None
    return run


def write_config(run: RunDirectory, config: TrainConfig) -> None:
    """Writes ``config.json``, in which flags about this start only are left out."""
    plain = dataclasses.replace(
        config, run_dir=None, resume=False, overwrite=False, quiet=False,
        coordinator=None, num_processes=None, process_id=None,
    )  # fmt: skip
    if run.writes:
        replace_file(run.path / "config.json", plain.to_json())


def write_environment(run: RunDirectory, mesh: Mesh, dataset_source: str) -> None:
    """Writes ``environment.json``: what, where and on which versions this process runs."""
    if not run.writes:
        return
    devices = mesh.devices.flatten().tolist()
    environment: dict[str, Any] = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": [sys.executable, *sys.orig_argv[1:]],
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "packages": _versions("cnnjax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy"),
        "backend": jax.default_backend(),
        "devices": [f"{device.platform}:{device.id} {device.device_kind}" for device in devices],
        "mesh": partition.describe(mesh),
        "processes": jax.process_count(),
        "data": dataset_source,
        "git_commit": _git_commit(),
    }
    replace_file(run.path / "environment.json", json.dumps(environment, indent=2) + "\n")


def _versions(*packages: str) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def _git_commit() -> str | None:
    """Commit of the code, with ``-dirty`` where files differ from it; None outside a repository."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None
