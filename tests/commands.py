"""Whole commands: in a process of their own, or in this one where only the code, the text and the files matter."""

import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from experiments import cifar10
from experiments.training import main

ROOT = Path(__file__).resolve().parents[1]
TIMES = ("compile_s", "train_s", "eval_s", "images_per_s")

# A network that compiles and steps in moments, on the shipped digits.
SMALL = ("--data", "digits", "--network", "cnn2d_1layer_fullconnected_1layer", "--crop-to", "12", "--batch-size", "512")

NO_CACHE = {"CNNJAX_COMPILE_CACHE": "off"}


def environment(**more: str) -> dict[str, str]:
    """For a child: no data of the user, no network, one kind of device, and as many of it as it asks for."""
    dropped = ("CNNJAX_DATA", "XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "PYTHONWARNINGS")
    inherited = {name: value for name, value in os.environ.items() if name not in dropped}
    return inherited | {"CNNJAX_OFFLINE": "1", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)} | more


def arguments(*flags: Any) -> list[str]:
    return [sys.executable, "-m", "experiments.cifar10", *map(str, flags)]


def run(*flags: Any, cwd: Path = ROOT, **more: str) -> subprocess.CompletedProcess:
    """Runs ``python -m experiments.cifar10`` to its end."""
    return subprocess.run(
        arguments(*flags), cwd=cwd, env=environment(**more), capture_output=True, text=True, timeout=300
    )


def start(*flags: Any, log: Path) -> subprocess.Popen:
    """Starts ``python -m experiments.cifar10``; what it prints goes to a file."""
    with log.open("w") as output:
        return subprocess.Popen(
            arguments(*flags), cwd=ROOT, env=environment(), stdout=output, stderr=subprocess.STDOUT, text=True
        )


def call(*flags: Any) -> int:
    """The same in this process; returns the exit code."""
    return main(
        "cifar10", "Trains a CNN on CIFAR-10.", cifar10.PRESETS, cifar10.fill, arguments=[str(f) for f in flags]
    )


def wait_until(ready: Callable[[], Any], child: subprocess.Popen, what: str, seconds: float = 240) -> None:
    """Looks again and again, in millisecond steps; fails when the child ends first."""
    end = time.monotonic() + seconds
    while not ready():
        assert child.poll() is None, f"the run ended with {child.returncode} before {what}"
        assert time.monotonic() < end, f"after {seconds} s there was still no {what}"
        time.sleep(0.001)


def steps_logged(folder: Path) -> int:
    path = folder / "steps.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def rows(folder: Path, *, times: bool = True) -> list[dict[str, str]]:
    """The rows of ``metrics.csv``, if asked for without those columns that no two runs share."""
    with (folder / "metrics.csv").open(newline="") as file:
        return [{k: v for k, v in row.items() if times or k not in TIMES} for row in csv.DictReader(file)]


def steps(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]


def checkpoints(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir())


def state(folder: Path) -> dict[str, np.ndarray]:
    """Every array of the newest checkpoint, by path."""
    path = folder / "checkpoints" / str(checkpoints(folder)[-1]) / "state"
    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.metadata(path).item_metadata.tree
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        restored = checkpointer.restore(path, restore_args=as_numpy)
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(restored)}


def assert_same_run(one: Path, other: Path) -> None:
    """Two runs that ended alike, bit for bit: every number but times."""
    state_one, state_other = state(one), state(other)
    assert state_one.keys() == state_other.keys()
    different = [path for path in state_one if not np.array_equal(state_one[path], state_other[path])]
    assert not different, f"the last checkpoints differ in {', '.join(different)}"
    assert rows(one, times=False) == rows(other, times=False)
    assert (one / "steps.jsonl").read_text() == (other / "steps.jsonl").read_text()
    assert (one / "predictions.csv").read_text() == (other / "predictions.csv").read_text()


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
