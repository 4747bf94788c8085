"""What needs another framework skips without it, or fails where ``CNNJAX_STRICT=1``."""

import os

import pytest

from cnnjax.compat.frameworks import FRAMEWORKS, Framework


def needs(framework: str | Framework) -> None:
    """To be called by a test, with a name of ``--frameworks`` or a framework that has none."""
    framework = FRAMEWORKS[framework] if isinstance(framework, str) else framework
    if (missing := framework.missing) is None:
        return
    if os.environ.get("CNNJAX_STRICT") == "1":
        pytest.fail(f"{framework.name} is not installed: {missing}")
    pytest.skip(f"{framework.name} is not installed: {missing}")
