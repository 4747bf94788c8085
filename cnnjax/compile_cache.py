"""JAX's compilation cache in the user's cache folder, so that the second start of a run has nothing to compile.

JAX writes an entry in place and never replaces it, so that a process killed meanwhile would leave a broken one for
ever. Here each process has a folder of its own with hard links to all entries; what it adds is linked into the shared
folder when it is whole. Folders are told apart by processor and release of jaxlib, since programs compiled for a
processor may use instructions that another lacks.
"""

import atexit
import contextlib
import hashlib
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import jax
import jaxlib

LARGEST_BYTES = 2**30  # of all entries of a folder; those not read for the longest time go first
_SHORTEST_S = 0.2  # of a compilation that is worth a file
_ABANDONED_S = 7 * 24 * 3600  # after which the folder of a process counts as left by a kill
_OWN = ".process-"


class CompileCache:
    """The entries that this process reads and adds.

    Attributes:
        shared: Folder of all processes; None where there is no cache.
    """

    def __init__(self, shared: Path | None, own: Path | None = None):
        self.shared, self._own = shared, own

    def publish(self) -> None:
        """Gives what this process has compiled so far to those that start later."""
        if self.shared is None or self._own is None:
            return
        with contextlib.suppress(OSError):  # a full disk costs nothing but time
            for entry in self._own.iterdir():
                with contextlib.suppress(FileExistsError):
                    os.link(entry, self.shared / entry.name)

    def close(self) -> None:
        """Publishes, and stops using the cache."""
        self.publish()
        if self._own is not None:
            jax.config.update("jax_compilation_cache_dir", None)
            shutil.rmtree(self._own, ignore_errors=True)
            self._own = None


def folder(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Where programs compiled for this machine are kept; None where the user wants no cache or keeps one of JAX's own.

    ``CNNJAX_COMPILE_CACHE`` names another folder than ``cnnjax`` in the user's cache folder, or is ``off``.
    """
    chosen = environment.get("CNNJAX_COMPILE_CACHE")
    own = environment.get("JAX_COMPILATION_CACHE_DIR") or environment.get("JAX_ENABLE_COMPILATION_CACHE")
    if chosen == "off" or (own and not chosen):
        return None
    if not chosen:
        try:
            home = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        except RuntimeError:  # nobody's home
            return None
        chosen = str(home / "cnnjax" / "compiled")
    return Path(chosen) / _machine()


def _machine() -> str:
    """What a compiled program depends on beside its source, as a name."""
    features = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    facts = (platform.system(), platform.machine(), platform.processor(), features, jaxlib.__version__)
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def start(environment: Mapping[str, str] = os.environ) -> CompileCache:
    """Makes JAX use the cache from here on; where the folder cannot be used, there is none, and nothing is said."""
    shared = folder(environment)
    in_use = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if shared is None or in_use:
        return CompileCache(None)
    try:
        shared.mkdir(parents=True, exist_ok=True)
        _clean(shared)
        own = Path(tempfile.mkdtemp(prefix=_OWN, dir=shared))
        for entry in shared.iterdir():
            if entry.is_file():
                with contextlib.suppress(FileNotFoundError):  # another process cleans too
                    os.link(entry, own / entry.name)
    except OSError:
        return CompileCache(None)
    jax.config.update("jax_compilation_cache_dir", str(own))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _SHORTEST_S)
    # Its folder would be part of each entry's key, and this one has another name each time.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    cache = CompileCache(shared, own)
    atexit.register(cache.close)
    return cache


def _clean(shared: Path) -> None:
    entries, now = [], time.time()
    for entry in shared.iterdir():
        with contextlib.suppress(FileNotFoundError):
            about = entry.stat()
            if not entry.name.startswith(_OWN):
                entries.append((max(about.st_atime, about.st_mtime), about.st_size, entry))
            elif now - about.st_mtime > _ABANDONED_S:
                shutil.rmtree(entry, ignore_errors=True)
    total = sum(size for _, size, _ in entries)
    for _, size, entry in sorted(entries):
        if total <= LARGEST_BYTES:
            break
        entry.unlink(missing_ok=True)
        total -= size
