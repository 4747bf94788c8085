"""PyTorch on cnnjax's job: in float64 the same numbers, whatever its conventions; and ranks that die take all along."""

import os
import signal
import subprocess
import sys
import time

import frameworks as needed
import psutil
import pytest
from test_compat_frameworks import MIXED, differences
from test_compat_jobs import plan

from cnnjax.compat import frameworks, jobs, orchestrate, parity

pytestmark = pytest.mark.compat


@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
def test_plain_rules_too(tmp_path, optimizer):
    needed.needs("torch")
    one = plan(MIXED, images=51, learning_rates=[0.1, 0.05, 0.2, 0.01], optimizer=jobs.Optimizer(optimizer))
    found = differences(tmp_path, frameworks.FRAMEWORKS["torch"], one)
    assert not found.beyond(parity.TOLERANCES["float64"]), found


WRONG = {
    "flatten order": (
        "convert.py",
        'TORCH = Convention("OIHW", "OI", "CHW")',
        'TORCH = Convention("OIHW", "OI", "HWC")',
    ),
    "momentum m and 1 - m": ("run_torch.py", "self.training, 1 - self.momentum,", "self.training, self.momentum,"),
    "epsilon": ("run_torch.py", 'eps=rule["eps"]', "eps=1e-7"),
    "sum over replicas": ("run_torch.py", "(loss * (self.replicas / count))", "(loss * (self.replicas**2 / count))"),
    "mean of means over replicas": ("run_torch.py", "(self.replicas / count)", "(1 / max(mine, 1))"),
    "unbiased variance": (
        "run_torch.py",
        "convert.biased_variance(moved, self.running_var, self.momentum, count)",
        "moved",
    ),
    "nesterov": ("run_torch.py", "nesterov=nesterov", "nesterov=False"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_convention_is_caught(tmp_path, mistake):
    needed.needs("torch")
    runners = tmp_path / "runners"
    runners.mkdir()
    file, before, after = WRONG[mistake]
    for path in frameworks.RUNNERS.glob("*.py"):
        text = path.read_text()
        if path.name == file:
            assert text.count(before) == 1
            text = text.replace(before, after)
        (runners / path.name).write_text(text)
    optimizer = jobs.Optimizer("adam" if mistake == "epsilon" else "nesterov")
    one = plan(MIXED, images=51, optimizer=optimizer, learning_rates=[0.01] * 6)
    framework = frameworks.FRAMEWORKS["torch_ddp" if "replicas" in mistake else "torch"]
    found = differences(tmp_path, framework, one, runners)
    assert found.beyond(parity.TOLERANCES["float64"])


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_takes_the_other_along(tmp_path, victim):
    needed.needs("torch")
    jobs.write(plan(MIXED, steps=200_000), tmp_path / "job")
    (tmp_path / "out").mkdir()
    command = [sys.executable, frameworks.RUNNERS / "run_torch.py", tmp_path / "job", tmp_path / "out", "replicas=2"]
    with (tmp_path / "log").open("w") as log:
        child = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        end = time.monotonic() + 120
        while not (tmp_path / "out" / "first_weights.npz").exists():
            assert child.poll() is None and time.monotonic() < end, (tmp_path / "log").read_text()
            time.sleep(0.1)
        ranks = [psutil.Process(child.pid), *psutil.Process(child.pid).children()]
        assert len(ranks) == 2
        os.kill(ranks[victim].pid, signal.SIGKILL)
        assert child.wait(60) != 0
        psutil.wait_procs(ranks, timeout=30)
        assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)
    finally:
        child.kill()
    if victim == 1:
        assert "error: " in (tmp_path / "log").read_text()


def test_batch_norm_over_all_replicas_is_refused(tmp_path):
    needed.needs("torch")
    jobs.write(plan(MIXED), tmp_path / "job")
    result = orchestrate.run(
        frameworks.FRAMEWORKS["torch_ddp"], tmp_path / "job", tmp_path / "it", 60, {"bn_scope": "global"}
    )
    assert result.status == "failed" and "SyncBatchNorm" in result.message
