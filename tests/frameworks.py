"""What needs another framework skips without it, or fails where ``CNNJAX_STRICT=1``."""

import os
from pathlib import Path

import pytest

from cnnjax.compat.frameworks import FRAMEWORKS, RUNNERS


def needs(name: str) -> None:
    """To be called by a test, with a name of ``--frameworks``."""
    if (missing := FRAMEWORKS[name].missing) is None:
        return
    if os.environ.get("CNNJAX_STRICT") == "1":
        pytest.fail(f"{name} is not installed: {missing}")
    pytest.skip(f"{name} is not installed: {missing}")


def wrong_runners(tmp_path: Path, file: str, before: str, after: str) -> Path:
    """A copy of the runners with a mistake in one of them."""
    folder = tmp_path / "runners"
    folder.mkdir()
    for path in RUNNERS.glob("*.py"):
        text = path.read_text()
        if path.name == file:
            assert text.count(before) == 1
            text = text.replace(before, after)
        (folder / path.name).write_text(text)
    return folder
