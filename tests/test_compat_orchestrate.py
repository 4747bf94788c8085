"""Whatever a runner does, the comparison goes on and says what happened."""

import os
import time

import psutil
import pytest
from test_compat_jobs import plan

from cnnjax.compat import frameworks, jobs, orchestrate

GOOD = """
import os, sys
sys.path.insert(0, {runners!r})
import numpy as np, protocol

class Trainer(protocol.Trainer):
    versions = {{"fake": "1"}}
    def __init__(self, job): self.kept = job.weights
    def train(self, x, y, index, learning_rate): return 2.0, 1
    def predict(self, x): return np.eye(10)[np.zeros(len(x), int)]
    def weights(self): return self.kept

{before}
protocol.main("fake", Trainer)
out = sys.argv[2]
{after}
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    path = tmp_path_factory.mktemp("job") / "job"
    jobs.write(plan(), path)
    return path


def run(job, tmp_path, before="", after="", timeout_s=60.0):
    (tmp_path / "run_fake.py").write_text(GOOD.format(runners=str(frameworks.RUNNERS), before=before, after=after))
    fake = frameworks.Framework("fake", "a runner that misbehaves", "run_fake.py")
    return orchestrate.run(fake, job, tmp_path / "out", timeout_s, runners=tmp_path)


def test_a_runner_that_behaves(job, tmp_path):
    result = run(job, tmp_path)
    assert (result.status, result.message) == ("ok", "")
    assert list(result.steps()["loss"]) == [2.0] * 4 and set(result.predictions()) == {0}


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("raise RuntimeError('no such backend')", "", "exit code 1: RuntimeError: no such backend"),
        ("Trainer.train = lambda *a: 1 / 0", "", "ZeroDivisionError: division by zero"),
        ("Trainer.train = lambda *a: (float('nan'), 1)", "", "FloatingPointError: the loss is nan at step 1"),
        ("os.kill(os.getpid(), 9)", "", "killed by SIGKILL"),
        ("os.abort()", "", "killed by SIGABRT"),
        ("sys.exit(0)", "", "its results cannot be read"),
        ("", "open(out + '/steps.csv', 'w').write('garbage')", "steps.csv has 0 rows of garbage; expected 4"),
        ("", "open(out + '/metrics.csv', 'wb').write(bytes(range(256)))", "its results cannot be read"),
        ("", "open(out + '/environment.json', 'w').write('{')", "its results cannot be read"),
        (
            "",
            "open(out + '/predictions.csv', 'w').write('ImageId,Label\\n1,3\\n')",
            "not one class from 0 to 9 for each",
        ),
        ("Trainer.predict = lambda s, x: np.eye(11)[np.full(len(x), 10)]", "", "not one class from 0 to 9 for each"),
        (
            "Trainer.weights = lambda s: {'a': np.array([np.inf])}",
            "",
            "final_weights.npz has values that are no numbers",
        ),
        ("", "os.remove(out + '/final_weights.npz')", "its results cannot be read"),
    ],
)
def test_a_runner_that_fails(job, tmp_path, before, after, message):
    result = run(job, tmp_path, before, after)
    assert result.status == "failed" and message in result.message and "\n" not in result.message


def test_a_runner_that_hangs_is_ended_with_its_children(job, tmp_path):
    before = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    start = time.monotonic()
    result = run(job, tmp_path, before, timeout_s=3.0)
    assert time.monotonic() - start < 20
    assert (result.status, result.message) == ("failed", "ended after 3 s, its time limit")
    child = int((result.folder / "runner.log").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_what_is_not_installed_is_named_with_its_command(job, tmp_path):
    fake = frameworks.Framework(
        "fake", "", "run_fake.py", modules=("numpy", "no_such_module"), install="pip install it"
    )
    result = orchestrate.run(fake, job, tmp_path / "out", 5)
    assert (result.status, result.message) == ("missing", "not installed: no_such_module; pip install it")


def test_memory_counts_the_children(job, tmp_path):
    small = run(job, tmp_path).peak_memory
    (tmp_path / "b").mkdir()
    code = "a = bytearray(300_000_000); import time; time.sleep(1)"
    before = f"import subprocess; subprocess.run([sys.executable, '-c', {code!r}])"
    assert run(job, tmp_path / "b", before).peak_memory > small + 250e6


def test_the_process_is_given_this_package_and_the_users_environment(job, tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "theano")
    after = "import cnnjax; print(cnnjax.__file__, os.environ['KERAS_BACKEND'])"
    log = (run(job, tmp_path, after=after).folder / "runner.log").read_text().split()
    assert log == [os.fspath(orchestrate.PACKAGE / "cnnjax" / "__init__.py"), "theano"]


def test_names_of_frameworks():
    assert [one.name for one in frameworks.parse("torch, jax,torch")] == ["torch", "jax"]
    assert len(frameworks.parse("all")) == len(frameworks.FRAMEWORKS)
    with pytest.raises(ValueError, match="'torhc' is unknown; nearest: torch; allowed: all, jax"):
        frameworks.parse("jax,torhc")
    with pytest.raises(ValueError, match="--frameworks is ','"):
        frameworks.parse(",")
    assert all((frameworks.RUNNERS / one.runner).is_file() for one in frameworks.FRAMEWORKS.values())


def test_counts_of_replicas():
    three, some = frameworks.parse("torch_ddp:replicas=3,tensorflow_ps:workers=3:replicas_to_aggregate=2")
    assert (three.name, three.exact) == ("torch_ddp-replicas3", True)
    assert three.options == {"replicas": "3"} and three.reference["mesh"] == "data=3"
    assert (some.name, some.exact) == ("tensorflow_ps-workers3-replicas_to_aggregate2", False)
    assert some.options == {"mode": "sync", "workers": "3", "replicas_to_aggregate": "2"}
    assert frameworks.FRAMEWORKS["torch_ddp"].options == {"replicas": "2"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("torch:replicas=2", "torch:replicas is unknown; torch takes none"),
        ("tensorflow_ps:wokers=3", "tensorflow_ps:wokers is unknown; allowed: workers, replicas_to_aggregate"),
        ("torch_ddp:replicas=two", "torch_ddp:replicas is 'two'; allowed: a whole number, 1 or more"),
        ("torch_ddp:replicas", "torch_ddp:replicas is ''; allowed: a whole number"),
        ("tensorflow_ps:replicas_to_aggregate=3", "replicas_to_aggregate is 3; allowed: 1 to 2"),
    ],
)
def test_impossible_counts_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        frameworks.parse(text)
