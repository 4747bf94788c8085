"""The Python 3.7 environment, with interpreters that only pretend; and the old frameworks, where it is there."""

import ast
import subprocess
import threading

import frameworks as needed
import pytest
from test_compat_frameworks import MIXED, differences
from test_compat_jobs import plan

from cnnjax.compat import frameworks, jobs, legacy, orchestrate, parity
from cnnjax.networks import BatchNorm, Conv, Dense, Flatten, Init, MaxPool, Relu

OLD = [one.name for one in frameworks.FRAMEWORKS.values() if one.old]
OLD_FILES = sorted(
    {one.runner for one in frameworks.FRAMEWORKS.values() if one.old}
    | {"protocol.py", "convert.py", "theano_settings.py", "theano_ops.py"}
    | {"tensorflow1_ops.py", "keras2_parts.py", "lasagne_parts.py"}
)

# Answers as a Python would to what legacy.py asks; each copy reads `version`, `installed`, `broken` beside the first.
PRETENDER = """#!/bin/sh
here={folder}
echo "$*" | head -n 1 >> $here/asked
case "$*" in
  *version_info*) cat $here/version ;;
  *listdir*) cat $here/installed ;;
  *"import h5py"*) [ ! -e $here/unimportable ] && echo "tensorflow 1.15.5" || (echo "ImportError: no" >&2; exit 1) ;;
  "-m venv "*) [ -e $here/slow ] && sleep 0.5; mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pip install "*)
    if [ -e $here/broken ]; then echo "Looking in indexes"; echo "ERROR: No matching distribution"; exit 1; fi
    for word in "$@"; do case $word in *==*) echo "Collecting $word" ;; esac; done ;;
  *) exit 3 ;;
esac
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A user without any Python 3.7."""
    for name in ("CNNJAX_PYTHON37", "CNNJAX_LEGACY", "PYENV_ROOT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    legacy._lacking.cache_clear()
    return tmp_path


def pretend(path, version="3.7", installed=()):
    """A program that answers as a Python of this version; returns the folder that its answers are in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    answers = path.parent / f"{path.name}-answers"
    answers.mkdir()
    (answers / "version").write_text(f"{version}\n")
    (answers / "installed").write_text("\n".join(installed) + "\n")
    path.write_text(PRETENDER.format(folder=answers))
    path.chmod(0o755)
    return answers


def asked(answers):
    path = answers / "asked"
    return path.read_text().splitlines() if path.exists() else []


def test_the_environment_is_made_once_and_found(home, capsys):
    answers = pretend(home / "bin" / "python3.7")
    assert legacy.interpreter() is None
    assert legacy.main([]) == 0
    python = home / "cache" / "cnnjax" / "python37" / "bin" / "python"
    assert legacy.interpreter() == python and legacy.default_folder() == python.parents[1]
    said = capsys.readouterr().out
    assert "tensorflow==1.15.5" in said and f"{python} runs the old frameworks" in said
    installs = [line for line in asked(answers) if " pip install " in line]
    assert all(any(f" {one}" in line for line in installs) for one in legacy._all_packages())
    assert [line for line in installs if "Lasagne" in line] == [line for line in installs if "--no-deps" in line]
    before = asked(answers)
    assert legacy.main([]) == 0 and asked(answers) == before


def test_half_an_environment_is_none_and_the_next_call_replaces_it(home, capsys):
    answers = pretend(home / "bin" / "python3.7")
    (answers / "broken").touch()
    assert legacy.main([]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: pip could not install") and "No matching distribution" in error
    assert error.count("\n") == 1
    folder = legacy.default_folder()
    assert (folder / "bin" / "python").exists() and legacy.interpreter() is None
    (folder / "left").mkdir()
    (answers / "broken").unlink()
    assert legacy.main([]) == 0 and legacy.interpreter() is not None and not (folder / "left").exists()


def test_an_environment_that_cannot_import_is_not_whole(home, capsys):
    answers = pretend(home / "bin" / "python3.7")
    (answers / "unimportable").touch()
    assert legacy.main([]) == 2 and "cannot import the frameworks: ImportError: no" in capsys.readouterr().err
    assert legacy.interpreter() is None


@pytest.mark.parametrize("spoil", ["other packages", "no interpreter", "torn"])
def test_an_environment_that_has_become_useless_is_replaced(home, spoil):
    pretend(home / "bin" / "python3.7")
    assert legacy.main([]) == 0
    folder = legacy.default_folder()
    state = folder / legacy.STATE
    if spoil == "other packages":
        state.write_text(state.read_text().replace("tensorflow==1.15.5", "tensorflow==1.15.4"))
    elif spoil == "torn":
        state.write_text(state.read_text()[:40])
    else:
        (folder / "bin" / "python").unlink()
        (folder / "bin" / "python").symlink_to(home / "gone")
    assert legacy.interpreter() is None
    assert legacy.main([]) == 0 and legacy.interpreter() is not None


def test_files_of_others_are_left_alone(home, capsys):
    pretend(home / "bin" / "python3.7")
    folder = home / "precious"
    folder.mkdir()
    (folder / "thesis.tex").write_text("all of it")
    assert legacy.main(["--where", str(folder)]) == 2
    assert "name another folder with --where" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["thesis.tex"]


def test_elsewhere(home, capsys, monkeypatch):
    pretend(home / "bin" / "python3.7")
    folder = home / "a folder"
    assert legacy.main(["--where", str(folder)]) == 0
    assert f"set CNNJAX_LEGACY={folder}" in capsys.readouterr().out
    assert legacy.interpreter() is None
    monkeypatch.setenv("CNNJAX_LEGACY", str(folder))
    assert legacy.interpreter() == folder / "bin" / "python"


def test_two_processes_make_it_once(home):
    answers = pretend(home / "bin" / "python3.7")
    (answers / "slow").touch()
    threads = [threading.Thread(target=legacy.make, args=(legacy.default_folder(),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(line.startswith("-m venv") for line in asked(answers)) == 1 and legacy.interpreter() is not None


def test_no_python(home, capsys):
    assert legacy.main([]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "no Python 3.7" in error and "pyenv install 3.7" in error
    assert not legacy.default_folder().exists()


def test_the_newest_of_pyenv_where_its_shim_chooses_none(home):
    shim = home / "bin" / "python3.7"
    shim.write_text("#!/bin/sh\necho 'pyenv: python3.7: command not found' >&2\nexit 127\n")
    shim.chmod(0o755)
    for version in ("3.7.9", "3.7.16", "3.7.2"):
        pretend(home / "home" / ".pyenv" / "versions" / version / "bin" / "python3.7")
    assert legacy.find_python() == home / "home" / ".pyenv" / "versions" / "3.7.16" / "bin" / "python3.7"


@pytest.mark.parametrize("named", ["absent", "3.8"])
def test_a_wrong_choice_of_the_user_is_named(home, monkeypatch, capsys, named):
    pretend(home / "bin" / "python3.7")
    chosen = home / "chosen"
    if named != "absent":
        pretend(chosen, named)
    monkeypatch.setenv("CNNJAX_PYTHON37", str(chosen))
    assert legacy.main([]) == 2
    assert f"CNNJAX_PYTHON37 is '{chosen}', which is" in capsys.readouterr().err


def test_an_environment_of_the_user_is_used_as_it_is(home, monkeypatch):
    answers = pretend(home / "mine" / "python", installed=("Tensorflow==1.15.5", *legacy.FRAMEWORKS[1:], "h5py==2.9.0"))
    monkeypatch.setenv("CNNJAX_PYTHON37", str(home / "mine" / "python"))
    assert legacy.interpreter() == home / "mine" / "python"
    assert legacy.main([]) == 0 and not any("venv" in line or "pip" in line for line in asked(answers))
    assert not legacy.default_folder().exists()


def test_an_interpreter_of_the_user_gets_an_environment(home, monkeypatch):
    pretend(home / "bin" / "python3.7")
    answers = pretend(home / "mine" / "python", installed=legacy.FRAMEWORKS[:-1])
    monkeypatch.setenv("CNNJAX_PYTHON37", str(home / "mine" / "python"))
    assert legacy.interpreter() is None
    assert legacy.main([]) == 0 and any(line.startswith("-m venv") for line in asked(answers))
    assert legacy.interpreter() == legacy.default_folder() / "bin" / "python"


def test_check_makes_nothing(home, capsys):
    answers = pretend(home / "bin" / "python3.7")
    assert legacy.main(["--check"]) == 2
    assert f"has no whole environment; {legacy.install_command()} makes it" in capsys.readouterr().err
    assert asked(answers) == [] and not legacy.default_folder().exists()
    assert legacy.main([]) == 0 and legacy.main(["--check"]) == 0
    assert "tensorflow 1.15.5" in capsys.readouterr().out


@pytest.mark.parametrize("file", OLD_FILES)
def test_python_37_reads_the_runners(file):
    path = frameworks.RUNNERS / file
    text = path.read_text()
    ast.parse(text, feature_version=(3, 7))
    try:
        python = legacy.find_python()
    except legacy.Missing:
        return
    program = "import sys; compile(sys.stdin.read(), sys.argv[1], 'exec')"
    subprocess.run([python, "-c", program, path], input=text, text=True, check=True)


# ---------------------------------------------------------------------------------------------------------------------
# The frameworks
# ---------------------------------------------------------------------------------------------------------------------

# Digits have empty borders. There, without a bias, all values are where a relu bends; and with one above 0, all values
# of a window are alike.
ALIKE = (
    *(Conv(3, padding="SAME"), Relu(), Conv(3, padding="SAME", bias_init=Init("constant", 0.1)), Relu()),
    *(MaxPool((3, 3), (2, 2), ((0, 1), (1, 0))), Conv(3, padding="SAME"), Relu()),
    *(MaxPool((2, 2), (1, 1), ((1, 1), (1, 1))), Flatten(), Dense(10)),
)
# One value a channel and image: the unbiased variance of 20 is far from the biased one.
POINT = (Conv(6, (8, 8), use_bias=False), BatchNorm(0.5, 1e-3), Relu(), Flatten(), Dense(10))


@pytest.mark.compat
@pytest.mark.parametrize("name", OLD)
def test_equal_values_in_a_window(tmp_path, name):
    needed.needs(name)
    found = differences(tmp_path, frameworks.FRAMEWORKS[name], plan(ALIKE, images=51))
    assert not found.beyond(parity.TOLERANCES["float64"]), found


@pytest.mark.compat
@pytest.mark.parametrize("optimizer", ["nesterov", "adam"])
@pytest.mark.parametrize("name", OLD)
def test_the_same_steps_in_float32(tmp_path, name, optimizer):
    needed.needs(name)
    rates = [0.01, 0.005, 0.02, 0.01]
    one = plan(POINT, images=51, dtype="float32", learning_rates=rates, optimizer=jobs.Optimizer(optimizer))
    found = differences(tmp_path, frameworks.FRAMEWORKS[name], one)
    assert not found.beyond(parity.TOLERANCES["float32"]), found


@pytest.mark.compat
@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
@pytest.mark.parametrize("name", OLD)
def test_plain_rules_too(tmp_path, name, optimizer):
    needed.needs(name)
    one = plan(POINT, images=51, learning_rates=[0.1, 0.05, 0.2, 0.01], optimizer=jobs.Optimizer(optimizer))
    found = differences(tmp_path, frameworks.FRAMEWORKS[name], one)
    assert not found.beyond(parity.TOLERANCES["float64"]), found


WRONG = {
    "kernels not flipped": (
        *("keras_theano", MIXED, "nesterov", "float64"),
        *("run_keras2.py", "convert.Convention(flipped=True)", "convert.Convention()"),
    ),
    "flatten order": (
        *("lasagne", MIXED, "nesterov", "float64"),
        *("convert.py", 'THEANO = Convention("OIHW", "IO", "CHW"', 'THEANO = Convention("OIHW", "IO", "HWC"'),
    ),
    "gradient to each of equal values": (
        *("lasagne", ALIKE, "nesterov", "float64", "theano_ops.py"),
        *("_FirstMaxPool(ignore_border=True", "pool.Pool(ignore_border=True"),
    ),
    "gradient of relu at 0": (
        *("keras_theano", ALIKE, "nesterov", "float64", "theano_ops.py"),
        *("relu = T.Elemwise(_Relu(theano.scalar.same_out, name=\"relu\"), name=\"relu\")", "relu = T.nnet.relu"),
    ),
    "epsilon before the correction": (
        *("tensorflow1", MIXED, "adam", "float64"),
        *("run_tensorflow1.py", "eps * tf.sqrt(1 - b2 ** t.assign_add(1))", "eps"),
    ),
    "beta in float32": (
        *("tensorflow1", MIXED, "adam", "float64"),
        *("run_tensorflow1.py", "(rate, b1, b2, corrected)", '(rate, rule["b1"], rule["b2"], corrected)'),
    ),
    "unbiased variance": (
        *("keras_tensorflow1", POINT, "nesterov", "float32"),
        *("tensorflow1_ops.py", "var * ((count - 1) / count)", "var"),
    ),
    "type of the user's file": (
        *("keras_theano", MIXED, "nesterov", "float64"),
        *("run_keras2.py", '"floatx": dtype', '"floatx": "float32"'),
    ),
}  # fmt: skip


@pytest.mark.compat
@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_convention_is_caught(tmp_path, mistake):
    name, network, optimizer, dtype, file, before, after = WRONG[mistake]
    needed.needs(name)
    runners = needed.wrong_runners(tmp_path, file, before, after)
    one = plan(network, images=51, dtype=dtype, optimizer=jobs.Optimizer(optimizer), learning_rates=[0.01] * 6)
    found = differences(tmp_path, frameworks.FRAMEWORKS[name], one, runners)
    assert found.beyond(parity.TOLERANCES[dtype])


@pytest.mark.compat
def test_other_wishes_for_a_backend_are_overruled_and_told(tmp_path, monkeypatch):
    needed.needs("keras_tensorflow1")
    (tmp_path / "keras").mkdir()
    (tmp_path / "keras" / "keras.json").write_text('{"backend": "cntk", "floatx": "float16"}')
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "keras"))
    monkeypatch.setenv("KERAS_BACKEND", "theano")
    jobs.write(plan(POINT), tmp_path / "job")
    result = orchestrate.run(frameworks.FRAMEWORKS["keras_tensorflow1"], tmp_path / "job", tmp_path / "it", 300)
    assert (result.status, result.message) == ("ok", "")
    notes = " ".join(result.environment()["notes"])
    assert "KERAS_BACKEND=theano is overruled" in notes and "keras.json says backend cntk" in notes
    log = (tmp_path / "it" / "runner.log").read_text()
    assert len(log.splitlines()) < 5, log  # no wall of deprecations


@pytest.mark.compat
@pytest.mark.parametrize("name", OLD)
def test_an_unknown_layer_is_refused_by_name(tmp_path, name):
    needed.needs(name)
    jobs.write(plan(POINT), tmp_path / "job")
    path = tmp_path / "job" / "job.json"
    path.write_text(path.read_text().replace('"kind": "Relu"', '"kind": "Gelu"'))
    result = orchestrate.run(frameworks.FRAMEWORKS[name], tmp_path / "job", tmp_path / "it", 300)
    assert result.status == "failed" and "has no layer Gelu" in result.message and "relu_1" in result.message
