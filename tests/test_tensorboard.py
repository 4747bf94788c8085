"""`cnnjax.tensorboard`: event files that TensorBoard's own reader reads, also after a resume."""

import importlib.util
import os
import re
import subprocess
import sys
import types

import numpy as np
import pytest

from cnnjax.config import UsageError
from cnnjax.tensorboard import TensorBoard

MISSING = importlib.util.find_spec("tensorboard") is None
needs_tensorboard = pytest.mark.skipif(
    MISSING and os.environ.get("CNNJAX_STRICT") != "1", reason="tensorboard is not installed"
)


def read(folder):
    """Steps and values by tag."""
    # As in a TensorBoard that was built without TensorFlow: otherwise the reader imports it, which takes long.
    sys.modules.setdefault("tensorboard.compat.notf", types.ModuleType("notf"))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return {tag: [(one.step, one.value) for one in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


@needs_tensorboard
def test_scalars_are_read_back(tmp_path):
    board = TensorBoard(tmp_path / "new" / "board")
    board.scalars(10, {"train/loss": 2.5, "train/accuracy": np.float32(0.25)})
    board.scalars(20, {"train/loss": float("inf")})
    assert read(tmp_path / "new" / "board")["train/loss"] == [(10, 2.5), (20, float("inf"))]  # before it is closed
    board.close()
    assert read(tmp_path / "new" / "board")["train/accuracy"] == [(10, 0.25)]


@needs_tensorboard
def test_a_resumed_run_continues_in_a_new_file_without_the_steps_that_were_lost(tmp_path):
    first = TensorBoard(tmp_path)
    for step in (1, 2, 3, 4):
        first.scalars(step, {"loss": step, "only_once": step})
    first.close()
    resumed = TensorBoard(tmp_path)
    resumed.scalars(3, {"loss": 30})
    resumed.scalars(5, {"loss": 50})
    resumed.close()
    assert len(list(tmp_path.iterdir())) == 2
    assert read(tmp_path) == {"loss": [(1, 1), (2, 2), (3, 30), (5, 50)], "only_once": [(1, 1), (2, 2)]}


@needs_tensorboard
def test_a_run_that_only_starts_again_loses_nothing(tmp_path):
    for step in (1, 2, 3):
        board = TensorBoard(tmp_path)
        board.scalars(step, {"loss": step})
        board.close()
    TensorBoard(tmp_path).close()  # stopped before its first step
    assert read(tmp_path) == {"loss": [(1, 1), (2, 2), (3, 3)]}


@needs_tensorboard
def test_a_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "board").write_text("")
    with pytest.raises(UsageError, match="board: event files cannot be written: File exists"):
        TensorBoard(tmp_path / "board")


def test_a_missing_package_is_named_with_its_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    for name in [name for name in sys.modules if name.startswith("tensorboard.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UsageError, match=re.escape("pip install -e '.[tensorboard]'")):
        TensorBoard(tmp_path)
    assert list(tmp_path.iterdir()) == []


@needs_tensorboard
def test_tensorflow_is_never_imported(tmp_path):
    code = f"""import sys; sys.modules["tensorflow"] = None
from pathlib import Path
from cnnjax.tensorboard import TensorBoard
assert "tensorboard" not in sys.modules
board = TensorBoard(Path({str(tmp_path)!r})); board.scalars(1, {{"loss": 1.0}}); board.close()"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
