"""What needs another framework skips without it, or fails where ``CNNJAX_STRICT=1``."""

import importlib.util
import os

import pytest

from cnnjax.compat import legacy


def needs(*modules: str) -> None:
    """To be called by a test."""
    lacking = [module for module in modules if importlib.util.find_spec(module) is None]
    if lacking:
        _refuse(f"{', '.join(lacking)} is not installed")


def needs_legacy() -> None:
    """The same for the Python 3.7 environment."""
    if legacy.interpreter() is None:
        _refuse("there is no Python 3.7 environment: python -m cnnjax.compat.legacy")


def _refuse(why: str) -> None:
    if os.environ.get("CNNJAX_STRICT") == "1":
        pytest.fail(why)
    pytest.skip(why)
