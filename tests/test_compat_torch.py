"""PyTorch on cnnjax's job: in float64 the same numbers, whatever its conventions; and ranks that die take all along."""

import os
import signal
import subprocess
import sys
import time

import frameworks as needed
import numpy as np
import psutil
import pytest
from test_compat_jobs import TINY, plan

from cnnjax.compat import frameworks, jobs, orchestrate, parity
from cnnjax.networks import AvgPool, BatchNorm, Conv, Dense, Flatten, MaxPool, Relu, Residual

pytestmark = pytest.mark.compat

# Uneven padding, strides, average pooling, a residual block, and batch norm behind the flatten. No bias right before
# batch norm, which takes it out again: its gradient is rounding alone, and Adam makes whole steps of that.
MIXED = (
    *(Conv(4, (3, 2), (2, 1), "SAME", use_bias=False), BatchNorm(0.9, 1e-3, use_scale=False), Relu()),
    *(
        MaxPool((3, 3), (2, 2), "SAME"),
        Residual((Conv(4, padding="SAME", use_bias=False), BatchNorm())),
        Relu(),
        AvgPool((1, 2)),
    ),
    *(Flatten(), BatchNorm(0.8), Dense(12), Relu(), Dense(10, use_bias=False), BatchNorm(use_bias=False)),
)


def differences(tmp_path, framework, one, reference=None, runners=frameworks.RUNNERS):
    jobs.write(one, tmp_path / "job")
    options = dict(frameworks.FRAMEWORKS[framework].reference if reference is None else reference)
    held = orchestrate.run(frameworks.FRAMEWORKS["jax"], tmp_path / "job", tmp_path / "jax", 300, options)
    result = orchestrate.run(frameworks.FRAMEWORKS[framework], tmp_path / "job", tmp_path / "it", 300, runners=runners)
    assert (held.status, held.message) == ("ok", "") and (result.status, result.message) == ("ok", "")
    initial = result_weights(tmp_path / "job")
    return parity.compare(result, held, initial, one.optimizer.name, one.learning_rates[0])


def result_weights(job):
    with np.load(job / "initial_weights.npz") as file:
        return {name: file[name] for name in file.files}


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "nesterov", "adam"])
@pytest.mark.parametrize("framework", ["torch", "torch_ddp"])
def test_the_same_steps_in_float64(tmp_path, framework, optimizer):
    needed.needs("torch")
    network = jobs.without_dropout(TINY) if optimizer == "sgd" else MIXED
    # A rate that changes from step to step, and a batch of 11 images, which two replicas share as 10 and 1.
    rates = [0.1, 0.05, 0.2, 0.01, 0.1]
    one = plan(network, images=51, learning_rates=rates, optimizer=jobs.Optimizer(optimizer))
    found = differences(tmp_path, framework, one)
    assert not found.beyond(parity.TOLERANCES["float64"]), found


def test_the_same_steps_compiled(tmp_path):
    needed.needs("torch")
    found = differences(tmp_path, "torch_compiled", plan(MIXED, steps=3))
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
    found = differences(tmp_path, "torch_ddp" if "replicas" in mistake else "torch", one, runners=runners)
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
