"""The Python 3.7 environment of TensorFlow 1.15, Keras 2.3, Theano 1.0 and Lasagne 0.1.

    python -m cnnjax.compat.legacy [--where FOLDER] [--check]

makes it, from an interpreter that is `$CNNJAX_PYTHON37`, ``python3.7`` on the path, or a version of pyenv, in
`$CNNJAX_LEGACY`, or else in ``cnnjax/python37`` of the user's cache folder. If `$CNNJAX_PYTHON37` already has the
packages, nothing is made and it is used as it is. ``--check`` makes nothing: it imports everything once and says what
it found.
"""

import argparse
import contextlib
import fcntl
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

# Every package of an environment in which all runners were tested: what was resolved then cannot drift now.
TOOLS = ("pip==24.0", "setuptools==59.8.0", "wheel==0.42.0")
PACKAGES = (
    "absl-py==2.1.0", "astor==0.8.1", "gast==0.2.2", "google-pasta==0.2.0", "grpcio==1.62.3", "h5py==2.10.0",
    "importlib-metadata==6.7.0", "Keras==2.3.1", "Keras-Applications==1.0.8", "Keras-Preprocessing==1.1.2",
    "Markdown==3.4.4", "MarkupSafe==2.1.5", "numpy==1.17.5", "opt-einsum==3.3.0", "protobuf==3.20.3", "PyYAML==6.0.1",
    "scipy==1.7.3", "six==1.17.0", "tensorboard==1.15.0", "tensorflow==1.15.5", "tensorflow-estimator==1.15.1",
    "termcolor==2.3.0", "Theano==1.0.5", "typing-extensions==4.7.1", "Werkzeug==2.2.3", "wrapt==1.16.0", "zipp==3.15.0",
)  # fmt: skip
# It requires a Theano that is no longer published, by an exact version.
WITHOUT_DEPENDENCIES = ("Lasagne==0.1",)
FRAMEWORKS = ("tensorflow==1.15.5", "Keras==2.3.1", "Theano==1.0.5", "Lasagne==0.1")
# Written with "complete": false before anything else is and with true after everything else.
STATE = "cnnjax-environment.json"

_VERSION = "import sys; print('%d.%d' % sys.version_info[:2])"
_INSTALLED = """
import os, re, sys
for folder in filter(os.path.isdir, sys.path):
    for name in os.listdir(folder):
        match = re.match(r"([^-]+)-([^-]+)(-py[0-9.]+)?[.](dist|egg)-info$", name)
        if match:
            print("%s==%s" % match.groups()[:2])
"""
_IMPORTS = """
import os, sys
os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", KERAS_BACKEND="tensorflow")
import theano.tensor.signal.pool
sys.modules["theano.tensor.signal.downsample"] = theano.tensor.signal.pool
import h5py, keras, lasagne, numpy, scipy, tensorflow
modules = (tensorflow, keras, theano, lasagne, numpy, scipy, h5py)
print(", ".join(module.__name__ + " " + module.__version__ for module in modules))
"""


class Missing(Exception):
    """What is missing and what to do about it, in one line."""


def install_command() -> str:
    """What makes the environment."""
    return "python -m cnnjax.compat.legacy"


def default_folder() -> Path:
    """Where the environment is made unless ``--where`` says otherwise."""
    if named := os.environ.get("CNNJAX_LEGACY"):
        return Path(named).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "cnnjax" / "python37"


def interpreter() -> Path | None:
    """The Python that runs the old frameworks; None until the environment is there and whole."""
    if named := os.environ.get("CNNJAX_PYTHON37"):
        python = _executable(named)
        if python is not None and not _lacking(python):
            return python
    return _complete(default_folder())


def make(folder: Path) -> Path:
    """Makes the environment, or finds it whole.

    Args:
        folder: Where; it must not exist, or be empty, or be what an earlier call left.

    Returns:
        Its Python.

    Raises:
        Missing: There is no Python 3.7, or a package cannot be installed, or the folder has something else.
    """
    if named := os.environ.get("CNNJAX_PYTHON37"):
        python = _executable(named)
        if python is not None and not _lacking(python):
            return python
    if (python := _complete(folder)) is not None:
        return python
    old = find_python()
    with _alone(folder):
        if (python := _complete(folder)) is not None:  # made by another process while this one waited
            return python
        _clear(folder)
        _say(f"making {folder} with {old}")
        _run([str(old), "-m", "venv", str(folder)], f"{old} cannot make a virtual environment (on Debian and Ubuntu "
             "that takes the package python3.7-venv)")  # fmt: skip
        python = folder / "bin" / "python"
        log = folder / "pip.log"
        _pip(python, TOOLS, log)
        _pip(python, PACKAGES, log)
        _pip(python, (*WITHOUT_DEPENDENCIES, "--no-deps"), log)
        _say("importing everything once")
        _say(_import_all(python))
        _write_state(folder, True)
    return python


def find_python() -> Path:
    """An interpreter of Python 3.7 that starts.

    Raises:
        Missing: There is none.
    """
    if named := os.environ.get("CNNJAX_PYTHON37"):
        python = _executable(named)
        if python is None:
            raise Missing(f"CNNJAX_PYTHON37 is {named!r}, which is no program; let it name a python3.7, or unset it")
        if (version := _version(python)) != "3.7":
            raise Missing(f"CNNJAX_PYTHON37 is {named!r}, which is Python {version}; let it name a python3.7")
        return python
    for python in _candidates():
        if _version(python) == "3.7":  # pyenv puts a python3.7 on the path that may only say which version to choose
            return python
    raise Missing(
        "no Python 3.7: TensorFlow 1.15 and Theano 1.0 run on no later one; install it, as with 'pyenv install "
        "3.7', or set CNNJAX_PYTHON37 to one; the other frameworks do not need it"
    )


def _candidates() -> Iterator[Path]:
    if found := shutil.which("python3.7"):
        yield Path(found)
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    versions = root.glob("versions/3.7*/bin/python3.7")
    yield from sorted(versions, key=lambda path: [int(n) for n in re.findall(r"\d+", path.parts[-3])], reverse=True)


def _executable(name: str) -> Path | None:
    found = shutil.which(Path(name).expanduser())
    return Path(found).absolute() if found else None


def _version(python: Path) -> str | None:
    done = _output(python, _VERSION)
    return done.stdout.strip() if done is not None and done.returncode == 0 else None


@functools.lru_cache
def _lacking(python: Path) -> tuple[str, ...]:
    """Which of `FRAMEWORKS` an interpreter does not have."""
    done = _output(python, _INSTALLED)
    if done is None or done.returncode or _version(python) != "3.7":
        return FRAMEWORKS
    installed = {line.strip().lower() for line in done.stdout.splitlines()}
    return tuple(package for package in FRAMEWORKS if package.lower() not in installed)


def _output(python: Path, program: str) -> subprocess.CompletedProcess[str] | None:
    try:
        # Isolated: what a user's PYTHONPATH has is not of this environment.
        command = [str(python), "-I", "-c", program]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None


def _complete(folder: Path) -> Path | None:
    python = folder / "bin" / "python"
    whole = {"complete": True, "packages": _all_packages()}
    return python if _state(folder) == whole and os.access(python, os.X_OK) else None


def _all_packages() -> list[str]:
    return [*TOOLS, *PACKAGES, *WITHOUT_DEPENDENCIES]


def _state(folder: Path) -> Mapping | None:
    try:
        return json.loads((folder / STATE).read_text())
    except (OSError, ValueError):
        return None


def _write_state(folder: Path, complete: bool) -> None:
    new = folder / f"{STATE}.new"
    new.write_text(json.dumps({"complete": complete, "packages": _all_packages()}, indent=1) + "\n")
    os.replace(new, folder / STATE)


def _clear(folder: Path) -> None:
    """Empties what an earlier call left, and only that."""
    if folder.exists() and not folder.is_dir():
        raise Missing(f"{folder} is a file; name another folder with --where")
    folder.mkdir(parents=True, exist_ok=True)
    left = [path for path in folder.iterdir() if path.name not in (STATE, f"{STATE}.new")]
    if left and not (folder / STATE).exists():
        raise Missing(f"{folder} has files that {install_command()} did not make; name another folder with --where")
    _write_state(folder, False)
    if left:
        _say(f"{folder} is not whole or of another version: replacing it")
    for path in left:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Two processes that make the same folder take turns."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"another process is making {folder}; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _pip(python: Path, arguments: Iterable[str], log: Path) -> None:
    """Installs, with a line a package; what pip says goes to a file."""
    command = [str(python), "-m", "pip", "install", "--no-input", "--disable-pip-version-check", *arguments]
    # Settings that would send the packages somewhere else.
    environment = {
        name: value for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_USER", "PIP_REQUIRE_VIRTUALENV")
    }  # fmt: skip
    said: list[str] = []
    with log.open("a") as file, subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as child:  # fmt: skip
        assert child.stdout is not None
        for line in child.stdout:
            file.write(line)
            said = [*said[-50:], line.strip()]
            if line.startswith("Collecting "):
                _say(f"  {line.split()[1]}")
            elif line.startswith("Installing collected packages"):
                _say("  unpacking")
    if child.returncode:
        errors = [line for line in said if line.startswith("ERROR: ")] or said or [f"exit code {child.returncode}"]
        raise Missing(f"pip could not install the packages: {errors[-1].removeprefix('ERROR: ')} (all it said is in "
                      f"{log}); run the command again once that is mended")  # fmt: skip


def _run(command: list[str], otherwise: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        last = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()][-1:]
        raise Missing(": ".join([otherwise, *last]))


def _import_all(python: Path) -> str:
    done = _output(python, _IMPORTS)
    if done is not None and done.returncode == 0:
        return done.stdout.strip()
    last = [line.strip() for line in done.stderr.splitlines() if line.strip()][-1:] if done is not None else []
    why = ": ".join([f"{python} cannot import the frameworks", *last])
    raise Missing(f"{why}; delete its folder and run {install_command()}")


def _say(text: str) -> None:
    print(text, flush=True)


def main(arguments: list[str]) -> int:
    """Command line; 0, or 2 if something is missing."""
    parser = argparse.ArgumentParser(prog=install_command(), description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--where", type=Path, help=f"folder of the environment (default: {default_folder()})")
    parser.add_argument("--check", action="store_true", help="make nothing; say whether all is there and works")
    options = parser.parse_args(arguments)
    folder = options.where.expanduser().absolute() if options.where else default_folder()
    try:
        if options.check:
            python = _complete(folder) if options.where else interpreter()
            if python is None:
                raise Missing(f"{folder} has no whole environment; {install_command()} makes it")
            _say(_import_all(python))
        else:
            python = make(folder)
    except Missing as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"stopped; {install_command()} begins again", file=sys.stderr)
        return 130
    _say(f"{python} runs the old frameworks")
    if shutil.which("g++") is None:
        _say("Theano will need the C++ compiler g++, which is not on the path")
    if python == _complete(folder) and folder != default_folder():
        _say(f"set CNNJAX_LEGACY={folder} so that it is found")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
