"""Runs a job on a framework in a process of its own, watches it, and checks what came back."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
import psutil

from cnnjax.compat.frameworks import RUNNERS, Framework
from cnnjax.metrics import COLUMNS

PACKAGE = Path(__file__).parents[2]
_POLL_S = 0.1


@dataclasses.dataclass(frozen=True)
class Result:
    """How a framework's run ended.

    Attributes:
        name: Of the framework.
        status: ``ok``, ``missing``, or ``failed``.
        message: Why it is not ok, in one line.
        folder: What it wrote.
        seconds: Of the whole process, its start included.
        peak_memory: Largest resident memory of its processes together, in bytes; what they share counts for each.
    """

    name: str
    status: str
    message: str
    folder: Path
    seconds: float = 0.0
    peak_memory: int = 0

    def metrics(self) -> pd.DataFrame:
        """``metrics.csv``."""
        return pd.read_csv(self.folder / "metrics.csv")

    def steps(self) -> pd.DataFrame:
        """``steps.csv``: step, loss, ms."""
        return pd.read_csv(self.folder / "steps.csv")

    def images_per_second(self) -> float:
        """Of the whole training, compilation apart."""
        rows = self.metrics()
        return float((rows["images_per_s"] * rows["train_s"]).sum() / rows["train_s"].sum())

    def predictions(self) -> np.ndarray:
        """Predicted class of each test image, int ``[N]``."""
        return pd.read_csv(self.folder / "predictions.csv")["Label"].to_numpy()

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        """One of the ``.npz`` files, such as ``final_weights``."""
        with np.load(self.folder / f"{name}.npz") as file:
            return {key: file[key] for key in file.files}

    def environment(self) -> dict:
        """``environment.json``."""
        return json.loads((self.folder / "environment.json").read_text())


def run(
    framework: Framework,
    job: Path,
    out: Path,
    timeout_s: float,
    options: Mapping[str, str] | None = None,
    runners: Path = RUNNERS,
    label: str | None = None,
) -> Result:
    """Runs a job; whatever happens to the process, this returns.

    Args:
        framework: Which.
        job: Job directory.
        out: Result directory, which must not exist yet; ``runner.log`` in it has what the process printed.
        timeout_s: Seconds after which it is ended.
        options: For the runner, over those of the framework.
        runners: Folder of the runner files.
        label: Name in the results; that of the framework where None.
    """
    name = label or framework.name
    out.mkdir(parents=True)
    if (missing := framework.missing) is not None:
        return Result(name, "missing", f"not installed: {missing}", out)
    python = framework.interpreter
    assert python is not None
    given = dict(framework.options) | dict(options or {}) | {"framework": name}
    command = [str(python), str(runners / framework.runner), str(job), str(out)]
    command += [f"{key}={value}" for key, value in given.items()]
    started = time.perf_counter()
    with (out / "runner.log").open("wb") as log:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=_environment(framework),
            start_new_session=True,
        )  # fmt: skip
        try:
            timed_out, peak = _watch(child, timeout_s)
        finally:
            _end(child)
    seconds = time.perf_counter() - started
    message = f"ended after {timeout_s:g} s, its time limit" if timed_out else _wrong(child.returncode, job, out)
    return Result(name, "failed" if message else "ok", message, out, seconds, peak)


def _environment(framework: Framework) -> dict[str, str]:
    dropped = ("PYTHONHOME", "PYTHONPATH", "PYTHONWARNINGS", "PYTHONSTARTUP") if framework.old else ()
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    if framework.old:
        return kept
    path = [str(PACKAGE), *filter(None, [kept.get("PYTHONPATH")])]  # this package, not another that is installed
    return kept | {"PYTHONPATH": os.pathsep.join(path)}


def _watch(child: subprocess.Popen, timeout_s: float) -> tuple[bool, int]:
    """Waits; whether it took too long, and the most memory that its processes held together."""
    peak, end = 0, time.monotonic() + timeout_s
    while True:
        peak = max(peak, _memory(child.pid))
        try:
            child.wait(_POLL_S)
            return False, peak
        except subprocess.TimeoutExpired:
            if time.monotonic() > end:
                return True, peak


def _memory(pid: int) -> int:
    total = 0
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(pid)
        for process in [parent, *parent.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                total += process.memory_info().rss
    return total


def _end(child: subprocess.Popen) -> None:
    """Ends the process and all that it started: they share its session."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _wrong(code: int, job: Path, out: Path) -> str:
    """What is wrong with a run that has ended, in one line; empty where nothing is."""
    last = _last_line(out / "runner.log")
    if code < 0:
        why = ", perhaps for want of memory" if code == -signal.SIGKILL else ""
        return f"killed by {signal.Signals(-code).name}{why}" + (f"; it last said: {last}" if last else "")
    if code:
        return last.removeprefix("error: ") if last.startswith("error: ") else f"exit code {code}: {last}"
    try:
        return _garbage(job, out)
    except (OSError, ValueError, KeyError) as error:
        return f"its results cannot be read: {' '.join(str(error).split())}"


def _garbage(job_folder: Path, out: Path) -> str:
    """What the files of a result lack."""
    job, order_TB = json.loads((job_folder / "job.json").read_text()), np.load(job_folder / "order.npy", mmap_mode="r")
    json.loads((out / "environment.json").read_text())
    steps, metrics = pd.read_csv(out / "steps.csv"), pd.read_csv(out / "metrics.csv")
    if list(steps.columns) != ["step", "loss", "ms"] or len(steps) != len(order_TB):
        return f"steps.csv has {len(steps)} rows of {', '.join(steps.columns)}; expected {len(order_TB)}"
    if tuple(metrics.columns) != COLUMNS or len(metrics) != len(job["epoch_ends"]):
        return f"metrics.csv has {len(metrics)} rows of {', '.join(metrics.columns)}; expected {len(job['epoch_ends'])}"
    if not np.isfinite(steps[["loss", "ms"]].to_numpy(float)).all():
        return "steps.csv has values that are no numbers"
    if job["evaluate"]:
        labels = pd.read_csv(out / "predictions.csv")["Label"].to_numpy()
        images = len(np.load(job_folder / "test_labels.npy", mmap_mode="r"))
        if len(labels) != images or not ((labels >= 0) & (labels < job["classes"])).all():
            return f"predictions.csv has not one class from 0 to {job['classes'] - 1} for each of {images} images"
    weights = np.load(out / "final_weights.npz")
    expected = np.load(out / "first_weights.npz").files
    if set(weights.files) != set(expected):
        return "final_weights.npz has other arrays than first_weights.npz"
    if not all(np.isfinite(weights[name]).all() for name in weights.files):
        return "final_weights.npz has values that are no numbers"
    return ""


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    said = next((line for line in reversed(lines) if line.startswith("error: ")), None)
    return " ".join((said or next((line for line in reversed(lines) if line.strip()), "")).split())[:400]
