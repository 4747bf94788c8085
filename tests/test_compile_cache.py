"""The cache of compiled programs: what starts again, what a kill leaves, and what the user may choose."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import ROOT, rows, run

from cnnjax import compile_cache
from cnnjax.compile_cache import CompileCache


def train(folder, cache):
    flags = ("--steps", 2, "--batch-size", 32, "--mesh", "data=2", "--run-dir", folder, "--quiet")
    done = run(*flags, CNNJAX_COMPILE_CACHE=str(cache))
    assert done.returncode == 0, done.stderr
    row = rows(folder)[-1]
    return done.stderr, float(row["compile_s"]), [row["loss"], row["val_loss"]]


def test_the_second_start_compiles_little_and_gives_the_same_numbers(tmp_path):
    said, first, losses = train(tmp_path / "a", tmp_path / "cache")
    said_again, second, losses_again = train(tmp_path / "b", tmp_path / "cache")
    assert second < first / 2
    assert losses_again == losses and said_again == said
    (machine,) = (tmp_path / "cache").iterdir()
    assert [entry for entry in machine.iterdir() if entry.is_file()]
    assert not [entry for entry in machine.iterdir() if entry.is_dir()]  # of the processes
    _, third, _ = train(tmp_path / "c", "off")
    assert third > 2 * second


def started(monkeypatch, folder):
    """A process's cache, without the settings of JAX."""
    settings: dict = {}
    config = SimpleNamespace(update=lambda name, value: settings.update({name: value}), jax_compilation_cache_dir=None)
    monkeypatch.setattr(compile_cache, "jax", SimpleNamespace(config=config))
    cache = compile_cache.start({"CNNJAX_COMPILE_CACHE": str(folder)})
    return cache, Path(settings.get("jax_compilation_cache_dir", "none"))


def test_a_folder_that_cannot_be_made_costs_nothing_but_time(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    cache, _ = started(monkeypatch, tmp_path / "file")
    assert cache.shared is None
    cache.publish()
    cache.close()


def test_only_whole_entries_reach_other_processes(tmp_path, monkeypatch):
    first, own = started(monkeypatch, tmp_path)
    (own / "a-cache").write_bytes(b"half")  # as a process that is killed while it writes leaves it
    _, other = started(monkeypatch, tmp_path)
    assert list(other.iterdir()) == []
    (own / "a-cache").write_bytes(b"whole")
    first.publish()
    _, third = started(monkeypatch, tmp_path)
    assert (third / "a-cache").read_bytes() == b"whole"
    (third / "a-cache").unlink()
    first.publish()
    first.close()
    assert not own.exists() and (first.shared / "a-cache").read_bytes() == b"whole"


def test_what_was_read_last_is_kept_and_abandoned_folders_go(tmp_path, monkeypatch):
    cache, own = started(monkeypatch, tmp_path)
    monkeypatch.setattr(compile_cache, "LARGEST_BYTES", 250)
    now = time.time()
    for age in (1, 2, 3):
        (cache.shared / f"{age}-cache").write_bytes(bytes(100))
        os.utime(cache.shared / f"{age}-cache", (now - 100 * age, now - 1000))
    os.utime(own, (now - 8 * 24 * 3600,) * 2)
    _, new = started(monkeypatch, tmp_path)
    assert sorted(entry.name for entry in new.iterdir()) == ["1-cache", "2-cache"]
    assert not own.exists()


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"CNNJAX_COMPILE_CACHE": "off"}, None),
        ({"JAX_COMPILATION_CACHE_DIR": "/x", "HOME": "/h"}, None),
        ({"JAX_ENABLE_COMPILATION_CACHE": "0", "HOME": "/h"}, None),
        ({"JAX_COMPILATION_CACHE_DIR": "/x", "CNNJAX_COMPILE_CACHE": "/c"}, Path("/c")),
        ({"XDG_CACHE_HOME": "/x"}, Path("/x/cnnjax/compiled")),
        ({}, Path.home() / ".cache/cnnjax/compiled"),
    ],
)
def test_where_it_is(variables, place):
    found = compile_cache.folder(variables)
    assert found == place or (found is not None and found.parent == place)


def test_no_cache_does_nothing():
    cache = CompileCache(None)
    cache.publish()
    cache.close()


def test_another_processor_has_another_folder(monkeypatch):
    here = compile_cache.folder({"XDG_CACHE_HOME": "/x"})
    monkeypatch.setattr(Path, "read_text", lambda self: "flags : sse2 avx512f")
    assert compile_cache.folder({"XDG_CACHE_HOME": "/x"}) != here


def test_the_help_needs_no_jax():
    code = "import sys; import experiments.cifar10, experiments.training; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr
