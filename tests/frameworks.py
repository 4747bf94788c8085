"""What needs another framework skips without it, or fails where ``CNNJAX_STRICT=1``."""

import os

import pytest

from cnnjax.compat.frameworks import FRAMEWORKS


def needs(name: str) -> None:
    """To be called by a test, with a name of ``--frameworks``."""
    if (missing := FRAMEWORKS[name].missing) is None:
        return
    if os.environ.get("CNNJAX_STRICT") == "1":
        pytest.fail(f"{name} is not installed: {missing}")
    pytest.skip(f"{name} is not installed: {missing}")
