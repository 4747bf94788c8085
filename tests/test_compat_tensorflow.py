"""Keras 3 and TensorFlow 2: what `test_compat_frameworks` does not ask of every framework."""

import dataclasses
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
from cnnjax.networks import BatchNorm, Conv, Dense, Flatten, MaxPool, Relu

pytestmark = pytest.mark.compat

KERAS = ["keras_tensorflow", "keras_jax", "keras_torch"]
SINGLE = [*KERAS, "tensorflow"]
EXACT = [*SINGLE, "tensorflow_mirrored", "tensorflow_ps"]

# One value a channel and image: the unbiased variance of 20 is far from the biased one. Padding that is neither SAME
# nor VALID, and a batch norm whose values are images and has everything.
POINT = (
    *(Conv(6, (6, 6), padding=((0, 1), (2, 0)), use_bias=False), BatchNorm(0.5, 1e-3), Relu()),
    *(MaxPool((2, 2), (1, 1), ((1, 0), (0, 1))), Conv(6, (4, 5), use_bias=False), BatchNorm(0.5, 1e-3), Relu()),
    *(Flatten(), Dense(10)),
)


def ran(tmp_path, name, one, **options):
    jobs.write(one, tmp_path / "job")
    return orchestrate.run(frameworks.FRAMEWORKS[name], tmp_path / "job", tmp_path / "it", 300, options)


@pytest.mark.parametrize("optimizer", ["nesterov", "adam"])
@pytest.mark.parametrize("name", EXACT)
def test_the_same_steps_in_float32(tmp_path, name, optimizer):
    needed.needs(name)
    rates = [0.01, 0.005, 0.02, 0.01]
    one = plan(POINT, images=51, dtype="float32", learning_rates=rates, optimizer=jobs.Optimizer(optimizer))
    found = differences(tmp_path, frameworks.FRAMEWORKS[name], one)
    assert not found.beyond(parity.TOLERANCES["float32"]), found


@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
@pytest.mark.parametrize("name", SINGLE)
def test_plain_rules_too(tmp_path, name, optimizer):
    needed.needs(name)
    one = plan(POINT, images=51, learning_rates=[0.1, 0.05, 0.2, 0.01], optimizer=jobs.Optimizer(optimizer))
    found = differences(tmp_path, frameworks.FRAMEWORKS[name], one)
    assert not found.beyond(parity.TOLERANCES["float64"]), found


@pytest.mark.parametrize("name", ["tensorflow_mirrored", "tensorflow_ps"])
def test_replicas_without_images_count_for_nothing(tmp_path, name):
    needed.needs(name)
    one = frameworks.FRAMEWORKS[name]
    count = {"workers": "3"} if name == "tensorflow_ps" else {"replicas": "3"}
    changed = dataclasses.replace(
        one, options=dict(one.options) | count, reference=dict(one.reference) | {"mesh": "data=3"}
    )
    # Shares of 7 images, and a last batch of 5 that the first replica has alone.
    found = differences(tmp_path, changed, plan(MIXED, images=45, learning_rates=[0.1, 0.05, 0.2, 0.1]))
    assert not found.beyond(parity.TOLERANCES["float64"]), found


WRONG = {
    "rate inside the velocity": (
        *("keras_tensorflow", "nesterov", "float64", "run_keras.py"),
        *("    if rule[\"name\"] in (\"momentum\", \"nesterov\"):\n        return Momentum(1.0)",
          "    if rule[\"name\"] in (\"momentum\", \"nesterov\"):\n"
          "        return keras.optimizers.SGD(1.0, rule[\"momentum\"], nesterov=True)"),
    ),
    "epsilon before the correction, Keras": (
        *("keras_tensorflow", "adam", "float64", "run_keras.py"),
        *("return Adam(1.0)", 'return keras.optimizers.Adam(1.0, rule["b1"], rule["b2"], rule["eps"])'),
    ),
    "float32 inside": (
        *("keras_jax", "nesterov", "float64", "run_keras.py"),
        *('dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64"', "pass"),
    ),
    "padding that wins": (
        *("keras_tensorflow", "nesterov", "float64", "run_keras.py"),
        *("constant_values=-np.inf", "constant_values=3.0"),
    ),
    "epsilon before the correction": (
        "tensorflow", "adam", "float64", "run_tensorflow.py", "epsilon=eps * tf.sqrt(left)", "epsilon=eps",
    ),
    "unbiased variance": (
        "tensorflow", "nesterov", "float32", "run_tensorflow.py", "var * ((count - 1) / count)", "var",
    ),
    "mean of means over replicas": (
        *("tensorflow_mirrored", "nesterov", "float64", "run_tensorflow.py"),
        *("y[start:stop], count)", "y[start:stop], 2 * tf.maximum(mine, 1))"),
    ),
    "statistics not weighted": (
        "tensorflow_mirrored", "nesterov", "float64", "run_tensorflow.py", "value * (mine / count)", "value / 2",
    ),
    "gradients of two workers summed": (
        *("tensorflow_ps", "nesterov", "float64", "run_tensorflow_ps.py"),
        *("{path: taken[path] / images for path in gradients}", "{path: taken[path] / 5 for path in gradients}"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_convention_is_caught(tmp_path, mistake):
    name, optimizer, dtype, file, before, after = WRONG[mistake]
    needed.needs(name)
    runners = needed.wrong_runners(tmp_path, file, before, after)
    one = plan(
        POINT, images=51, dtype=dtype, optimizer=jobs.Optimizer(optimizer), learning_rates=[0.01, 0.02, 0.005, 0.01]
    )
    found = differences(tmp_path, frameworks.FRAMEWORKS[name], one, runners)
    assert found.beyond(parity.TOLERANCES[dtype])


# ---------------------------------------------------------------------------------------------------------------------
# Keras
# ---------------------------------------------------------------------------------------------------------------------


def test_other_wishes_for_a_backend_are_overruled_and_told(tmp_path, monkeypatch):
    needed.needs("keras_jax")
    (tmp_path / "keras").mkdir()
    file = tmp_path / "keras" / "keras.json"
    file.write_text('{"backend": "tensorflow", "floatx": "float16", "image_data_format": "channels_first"}')
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "keras"))
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    found = differences(tmp_path, frameworks.FRAMEWORKS["keras_jax"], plan(MIXED))
    assert not found.beyond(parity.TOLERANCES["float64"]), found
    result = orchestrate.Result("", "", "", tmp_path / "it")
    assert result.environment()["backend"] == "jax" and set(result.metrics()["backend"]) == {"jax"}
    notes = result.environment()["notes"]
    assert notes == [
        "the environment's KERAS_BACKEND asks for torch; jax runs, from the option backend",
        f"{file} asks for tensorflow; jax runs, from the option backend",
    ]


@pytest.mark.parametrize(("variable", "expected"), [("jax", "jax"), (None, "torch")])
def test_without_the_option_the_variable_beats_the_file(tmp_path, monkeypatch, variable, expected):
    monkeypatch.syspath_prepend(frameworks.RUNNERS)
    from run_keras import choose_backend

    (tmp_path / "keras.json").write_text('{"backend": "torch"}')
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    if variable is None:
        monkeypatch.delenv("KERAS_BACKEND", raising=False)
    else:
        monkeypatch.setenv("KERAS_BACKEND", variable)
    backend, notes = choose_backend(None)
    assert backend == os.environ["KERAS_BACKEND"] == expected and len(notes) == (variable is not None)
    monkeypatch.setenv("KERAS_BACKEND", "theano")
    with pytest.raises(ValueError, match="backend is 'theano'; allowed: tensorflow, jax, torch"):
        choose_backend(None)


@pytest.mark.parametrize("name", ["keras_tensorflow", "tensorflow", "tensorflow_ps"])
def test_an_unknown_layer_is_refused_by_name(tmp_path, name):
    needed.needs(name)
    jobs.write(plan(POINT), tmp_path / "job")
    path = tmp_path / "job" / "job.json"
    path.write_text(path.read_text().replace('"kind": "Relu"', '"kind": "Gelu"'))
    result = orchestrate.run(frameworks.FRAMEWORKS[name], tmp_path / "job", tmp_path / "it", 120)
    assert result.status == "failed" and "relu_1" in result.message and "knows no layer Gelu" in result.message


# ---------------------------------------------------------------------------------------------------------------------
# The cluster
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("victim", ["ps:0", "worker:1", "the chief"])
def test_one_that_dies_takes_the_others_along(tmp_path, mode, victim):
    needed.needs("tensorflow_ps")
    jobs.write(plan(POINT, steps=200_000), tmp_path / "job")
    (tmp_path / "out").mkdir()
    runner = frameworks.RUNNERS / "run_tensorflow_ps.py"
    with (tmp_path / "log").open("w") as log:
        command = [sys.executable, runner, tmp_path / "job", tmp_path / "out", f"mode={mode}"]
        chief = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        end = time.monotonic() + 120
        while not (tmp_path / "out" / "first_weights.npz").exists():
            assert chief.poll() is None and time.monotonic() < end, (tmp_path / "log").read_text()
            time.sleep(0.1)
        others = {child.environ()["CNNJAX_PS_TASK"]: child for child in psutil.Process(chief.pid).children()}
        assert set(others) == {"ps:0", "worker:1"}
        os.kill(others[victim].pid if victim in others else chief.pid, signal.SIGKILL)
        code = chief.wait(60)
        gone, alive = psutil.wait_procs(others.values(), timeout=30)
        assert not alive and len(gone) == 2
    finally:
        chief.kill()
    if victim in others:
        named = {"ps:0": "the parameter server", "worker:1": "worker 1"}[victim]
        last = (tmp_path / "log").read_text().splitlines()[-1]
        assert code == 1 and last.startswith("error: ") and f"{named} was killed by signal 9" in last


def test_updates_of_some_of_the_workers(tmp_path):
    needed.needs("tensorflow_ps")
    result = ran(tmp_path, "tensorflow_ps", plan(MIXED, images=51, steps=12), replicas_to_aggregate="1")
    assert (result.status, result.message) == ("ok", "")
    assert "updates of 1 of 2 workers" in result.environment()["notes"][0]
    losses = result.steps()["loss"]
    assert losses[-3:].mean() < losses[:3].mean()


def test_without_waiting_every_worker_goes_through_every_step(tmp_path):
    """Plain SGD with a tiny rate adds up the gradients of all parts, whatever their order."""
    needed.needs("tensorflow_ps_async")
    network = (Flatten(), Dense(12), Relu(), Dense(10))
    rate = 1e-7
    # 3 epochs of 3 batches, shared as 10 and 10; twice the synchronous step, which has their mean.
    one = plan(network, images=60, learning_rates=[rate] * 9, optimizer=jobs.Optimizer("sgd"))
    result = ran(tmp_path, "tensorflow_ps_async", one)
    assert (result.status, result.message) == ("ok", "")
    held = orchestrate.run(frameworks.FRAMEWORKS["jax"], tmp_path / "job", tmp_path / "jax", 300)
    ours, theirs = result.arrays("final_weights"), held.arrays("final_weights")
    initial = jobs.initial_weights(network, (8, 8, 2), one.seed)
    for name, start in initial.items():
        expected = 2 * (theirs[name] - start)
        assert abs(ours[name] - start - expected).max() <= 1e-4 * abs(expected).max()
    assert set(result.metrics()["strategy"]) == {"ps_async"} and set(result.metrics()["bn_scope"]) == {"local"}


@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        ("tensorflow_ps", {"mode": "later"}, "mode is 'later'; allowed: sync, async"),
        ("tensorflow_ps", {"replicas_to_aggregate": "3"}, "replicas_to_aggregate is 3 and workers is 2"),
        ("tensorflow_mirrored", {"bn_scope": "global"}, "bn_scope=global"),
    ],
)
def test_impossible_options_are_refused(tmp_path, name, options, named):
    needed.needs(name)
    result = ran(tmp_path, name, plan(POINT), **options)
    assert result.status == "failed" and named in result.message
