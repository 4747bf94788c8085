"""PyTorch on cnnjax's job: in float64 the same numbers, whatever its conventions; and ranks that die take all along.

And Caffe's files: what OpenCV computes from them is what cnnjax computes.
"""

import os
import re
import signal
import subprocess
import sys
import time
import types

import frameworks as needed
import numpy as np
import numpy_reference as reference
import psutil
import pytest
from test_compat_frameworks import MIXED, differences
from test_compat_jobs import plan

from cnnjax.compat import frameworks, jobs, orchestrate, parity
from cnnjax.networks import AvgPool, Conv, Flatten, MaxPool, Relu, Residual

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
    runners = needed.wrong_runners(tmp_path, *WRONG[mistake])
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


# ---------------------------------------------------------------------------------------------------------------------
# Caffe
# ---------------------------------------------------------------------------------------------------------------------

CAFFE = frameworks.FRAMEWORKS["caffe"]


@pytest.fixture
def run_caffe(monkeypatch):
    needed.needs("caffe")
    monkeypatch.syspath_prepend(frameworks.RUNNERS)
    import run_caffe

    return run_caffe


def opencv_logits(run_caffe, folder, network, weights, x_BHWC):
    """Of a network written as Caffe's files."""
    layers = jobs.describe(network, x_BHWC.shape[1:])
    net = run_caffe.Net(layers, weights)
    job = types.SimpleNamespace(name="tiny", input_shape=x_BHWC.shape[1:], images=x_BHWC, scaled=lambda x: x)
    (folder / "deploy.prototxt").write_text(run_caffe.deploy(job, net))
    (folder / "weights.caffemodel").write_bytes(run_caffe.caffemodel(job, net))
    net_text = (folder / "deploy.prototxt").read_text()
    height, width, channels = x_BHWC.shape[1:]
    assert list(map(int, re.findall(r"\bdim: (\d+)", net_text))) == [1, channels, height, width]
    return run_caffe.read_back(str(folder), net.layers[-1]["name"], x_BHWC)


@pytest.mark.parametrize("pads", [((0, 1), (1, 0)), ((1, 2), (0, 2)), ((2, 0), (1, 1)), ((0, 2), (2, 2)), "VALID"])
@pytest.mark.parametrize("strides", [(1, 1), (2, 1), (3, 2)])
@pytest.mark.parametrize("kind", [Conv, MaxPool, AvgPool])
def test_caffe_windows_anywhere(run_caffe, tmp_path, kind, strides, pads):
    rng = np.random.default_rng(0)
    x_BHWC = rng.normal(size=(2, 8, 7, 2)).astype(np.float32) - 3  # so that a zero in the padding would win
    if kind is Conv:
        network = (Conv(3, (3, 4), strides, pads), Flatten())
        weights = {"conv_1/kernel": rng.normal(size=(3, 4, 2, 3)), "conv_1/bias": rng.normal(size=3)}
        params = {"conv_1": {"kernel": weights["conv_1/kernel"], "bias": weights["conv_1/bias"]}}
    else:
        network = (kind((3, 4), strides, *([pads] if kind is MaxPool else [])), Flatten())
        weights = params = {}
    found = opencv_logits(run_caffe, tmp_path, network, weights, x_BHWC)
    expected, _ = reference.forward((network[0],), params, {}, x_BHWC, train=False)
    np.testing.assert_allclose(found, expected.transpose(0, 3, 1, 2).reshape(2, -1), rtol=1e-5, atol=1e-5)


def test_caffe_keeps_what_a_shortcut_still_reads(run_caffe, tmp_path):
    network = (Residual((Relu(), AvgPool((1, 1)))), Residual((), (Relu(),)), Flatten())
    x_BHWC = np.random.default_rng(0).normal(size=(2, 4, 4, 1)).astype(np.float32)
    expected = x_BHWC + np.maximum(x_BHWC, 0)
    expected = expected + np.maximum(expected, 0)
    found = opencv_logits(run_caffe, tmp_path, network, {}, x_BHWC)
    np.testing.assert_allclose(found, expected.reshape(2, -1), rtol=1e-6)


def test_what_caffe_cannot_express_is_refused_by_name(run_caffe):
    wide = jobs.describe((MaxPool((2, 2), (1, 1), ((0, 3), (0, 0))),), (6, 6, 1))
    with pytest.raises(ValueError, match=r"max_pool_1: Caffe cannot pad"):
        run_caffe.Net(wide, {})
    unknown = [{"kind": "Attention", "name": "attention_1"}]
    with pytest.raises(ValueError, match=r"attention_1: Caffe's runner knows no layer Attention"):
        run_caffe.Net(unknown, {})


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ([0.1] * 4, {"lr_policy": "fixed"}),
        ([0.1, 0.1, 0.01, 0.01, 0.001], {"lr_policy": "multistep", "gamma": 0.1, "stepvalue": [2, 4]}),
        ([0.1, 0.09, 0.081, 0.0729], {"lr_policy": "exp", "gamma": 0.9}),
        ([0.1, 0.1 / 1.5, 0.05, 0.04], {"lr_policy": "inv", "gamma": 0.5, "power": 1}),
        ([0.1, 0.05, 0.2, 0.01], None),
    ],
)
def test_caffe_policies_of_the_learning_rate(run_caffe, rates, expected):
    found = run_caffe._policy(np.array(rates))
    assert found == (expected and {key: pytest.approx(value) for key, value in expected.items() if key != "lr_policy"}
                     | {"lr_policy": expected["lr_policy"]})  # fmt: skip


@pytest.mark.parametrize("scaling", ["none", "unit", "standardize", "per_image"])
def test_caffe_scales_as_the_job_does(run_caffe, tmp_path, scaling):
    import protocol

    jobs.write(plan(MIXED, scaling=scaling), tmp_path / "job")
    job = protocol.Job(tmp_path / "job")
    fields, words = run_caffe._scaling(job)
    if scaling == "standardize":  # digits have two channels alike here, and so the same factor
        assert len(fields["transform_param"]["mean_value"]) == 2
    if scaling in ("unit", "standardize"):
        transform = fields["transform_param"]
        image = np.full((1, 1, 2), 100.0)
        found = (image - transform.get("mean_value", 0)) * transform["scale"]
        np.testing.assert_allclose(found, job.scaled(image), rtol=1e-6)
    else:
        assert fields == {}
    assert words.startswith({"none": "0 to 255", "per_image": "what is stored"}.get(scaling, "image * ["))
    job._factor = np.array([1.0, 2.0])
    assert run_caffe._scaling(job)[0] == {} and "store images that are scaled already" in run_caffe._scaling(job)[1]


def test_caffe_is_given_what_cnnjax_trained(tmp_path):
    needed.needs("caffe")
    import cv2

    one = plan(MIXED, images=51, learning_rates=[0.1] * 5)
    found = differences(tmp_path, CAFFE, one)
    assert not found.beyond(parity.TOLERANCES["float64"]), found
    out = tmp_path / "it"
    net = cv2.dnn.readNetFromCaffe(str(out / "deploy.prototxt"), str(out / "weights.caffemodel"))
    with np.load(tmp_path / "job" / "scaling.npz") as file:
        x_BHWC = np.load(tmp_path / "job" / "test_images.npy") * file["factor"] + file["offset"]
    net.setInput(x_BHWC.transpose(0, 3, 1, 2).astype(np.float32))
    with np.load(out / "logits.npz") as file:
        odds = np.exp(file["logits"])
    np.testing.assert_allclose(net.forward(), odds / odds.sum(1, keepdims=True), rtol=1e-4)
    solver = (out / "solver.prototxt").read_text()
    for line in ('type: "Nesterov"', "base_lr: 0.1", 'lr_policy: "fixed"', "momentum: 0.9", "max_iter: 5",
                 "test_iter: 1"):  # fmt: skip
        assert f"{line}\n" in solver
    training = (out / "train_val.prototxt").read_text()
    for line in ('top: "label"', 'type: "SoftmaxWithLoss"', 'type: "Accuracy"', "batch_size: 20", 'type: "xavier"'):
        assert f"{line}\n" in training
    assert any(
        "trained by cnnjax" in note for note in orchestrate.Result("caffe", "ok", "", out).environment()["notes"]
    )


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("convert.py", 'CAFFE = Convention("OIHW", "OI", "CHW")', 'CAFFE = Convention("OIHW", "OI", "HWC")'),
        ("run_caffe.py", '"eps": layer["epsilon"]', '"eps": 1e-1'),
    ],
)
def test_caffe_files_that_are_wrong_fail_the_run(tmp_path, file, before, after):
    needed.needs("caffe")
    runners = needed.wrong_runners(tmp_path, file, before, after)
    jobs.write(plan(MIXED), tmp_path / "job")
    result = orchestrate.run(CAFFE, tmp_path / "job", tmp_path / "it", 300, runners=runners)
    assert result.status == "failed" and "OpenCV's logits" in result.message
