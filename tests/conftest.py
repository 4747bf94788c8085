"""Eight fake CPU devices, small networks, and real data where the machine has it."""

import os
import shutil
import tempfile

# Before JAX starts a backend. Child processes choose for themselves.
import hypothesis
import jax
import pytest

from cnnjax import compile_cache

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
# A first example compiles, so times say nothing about an example.
hypothesis.settings.register_profile("cnnjax", deadline=None)
hypothesis.settings.load_profile("cnnjax")
# Many tests compile the same steps, here and in child processes. Nothing of the user's own is read or written.
_COMPILED = tempfile.mkdtemp(prefix="cnnjax-compiled-")
os.environ["CNNJAX_COMPILE_CACHE"] = _COMPILED
_cache = compile_cache.start()


@pytest.fixture(autouse=True)
def compiled_by_others() -> None:
    """What a test has compiled serves the child processes of the next."""
    _cache.publish()


def pytest_unconfigure() -> None:
    """Removes the programs compiled in these tests."""
    _cache.close()
    shutil.rmtree(_COMPILED, ignore_errors=True)


@pytest.fixture(autouse=True)
def no_data_of_the_user(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Tests see the user's data only where they ask for it, and never the network."""
    if request.node.get_closest_marker("realdata") is None:
        monkeypatch.delenv("CNNJAX_DATA", raising=False)
    monkeypatch.setenv("CNNJAX_OFFLINE", "1")
    os.environ.pop("JAX_NUM_CPU_DEVICES", None)


@pytest.fixture
def x64():
    """Float64 for one test."""
    with jax.enable_x64(True):
        yield
