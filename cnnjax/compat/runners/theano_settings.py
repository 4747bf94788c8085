"""Settings of Theano 1.0, which it reads once: `configure` comes before anything imports it. Python 3.7."""

import atexit
import glob
import hashlib
import logging
import os
import shutil
import tempfile
import warnings


def configure(dtype):
    """Settings: the type, compiled code in a cache folder, and the fastest BLAS that is installed.

    Args:
        dtype: ``float32`` or ``float64``.

    Returns:
        Lines for ``notes``.
    """
    warnings.simplefilter("ignore")  # of Theano's own code: deprecations of NumPy
    logging.getLogger("theano.configdefaults").setLevel(logging.ERROR)
    # Threads that wait for each other asleep: spinning doubles the time of a step as soon as anything else runs.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    folder = _cache()
    settings = ["base_compiledir=" + folder, "openmp=True", "device=cpu"]
    notes = [f"Theano keeps compiled code in {folder}"]
    library = _openblas()
    if library:
        # The directory is of Theano's naming (it looks for lib<name>.so), and has no character that its settings split.
        links = os.path.join(folder, f"blas-{hashlib.sha1(library.encode()).hexdigest()[:12]}")
        _link(library, links)
        settings.append(f"blas.ldflags=-L{links} -lopenblas")
        notes.append(f"BLAS: {os.path.basename(library)}")
    else:
        notes.append("no OpenBLAS beside SciPy or NumPy: Theano chooses its BLAS")
    given = os.environ.get("THEANO_FLAGS", "")
    if given:
        notes.append(f"THEANO_FLAGS of the environment is kept: {given}")
    os.environ["THEANO_FLAGS"] = ",".join(settings + ([given] if given else []) + ["floatX=" + dtype])
    import theano

    if not theano.config.cxx:
        raise RuntimeError("Theano needs a C++ compiler: install g++ or name one in THEANO_FLAGS=cxx=...")
    return notes


def _cache():
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = os.path.join(root, "cnnjax", "theano")
    try:
        os.makedirs(folder, exist_ok=True)
        usable = os.access(folder, os.W_OK)
    except OSError:
        usable = False
    # Theano splits its settings at blanks and commas, whatever the quotes.
    if usable and not set(folder) & set(" ,"):
        return folder
    folder = tempfile.mkdtemp(prefix="cnnjax-theano-")
    atexit.register(shutil.rmtree, folder, True)
    return folder


def _openblas():
    """The OpenBLAS that SciPy's or NumPy's wheel has; SciPy's is the newer and, with AVX-512, three times as fast."""
    for name, folder in (("scipy", "scipy.libs"), ("numpy", os.path.join("numpy", ".libs"))):
        try:
            module = __import__(name)
        except ImportError:
            continue
        packages = os.path.dirname(os.path.dirname(module.__file__ or ""))
        found = sorted(glob.glob(os.path.join(packages, folder, "libopenblas*.so*")))
        if found:
            return found[0]
    return ""


def _link(library, links):
    """Links all that lies beside a library, itself once more as ``libopenblas.so``, into a folder."""
    os.makedirs(links, exist_ok=True)
    beside = [(path, os.path.basename(path)) for path in glob.glob(os.path.join(os.path.dirname(library), "*.so*"))]
    for path, name in [*beside, (library, "libopenblas.so")]:
        new = tempfile.mktemp(dir=links)
        os.symlink(path, new)
        os.replace(new, os.path.join(links, name))
