"""What every framework's runner inherits: in float64 it gives cnnjax's numbers, whatever its own conventions."""

import frameworks as needed
import numpy as np
import pytest
from test_compat_jobs import plan

from cnnjax.compat import frameworks, jobs, orchestrate, parity
from cnnjax.networks import AvgPool, BatchNorm, Conv, Dense, Dropout, Flatten, MaxPool, Relu, Residual

pytestmark = pytest.mark.compat

OTHERS = [name for name in frameworks.FRAMEWORKS if name != "jax"]

# Uneven padding, strides, average pooling, a residual block, and batch norm behind the flatten. No bias right before
# batch norm, which takes it out again: its gradient is rounding alone, and Adam makes whole steps of that.
MIXED = (
    *(Conv(4, (3, 2), (2, 1), "SAME", use_bias=False), BatchNorm(0.9, 1e-3, use_scale=False), Relu()),
    MaxPool((3, 3), (2, 2), "SAME"),
    *(Residual((Conv(4, padding="SAME", use_bias=False), BatchNorm())), Relu(), AvgPool((1, 2))),
    *(Flatten(), BatchNorm(0.8), Dense(12), Relu(), Dense(10, use_bias=False), BatchNorm(use_bias=False)),
)


def differences(tmp_path, framework, one, runners=frameworks.RUNNERS):
    """Of a framework from cnnjax with the same replicas, on a job that is written here."""
    jobs.write(one, tmp_path / "job")
    options = dict(framework.reference)
    held = orchestrate.run(frameworks.FRAMEWORKS["jax"], tmp_path / "job", tmp_path / "jax", 300, options)
    result = orchestrate.run(framework, tmp_path / "job", tmp_path / "it", 300, runners=runners)
    assert (held.status, held.message) == ("ok", "")
    assert (result.status, result.message) == ("ok", ""), (tmp_path / "it" / "runner.log").read_text()[-3000:]
    with np.load(tmp_path / "job" / "initial_weights.npz") as file:
        initial = {name: file[name] for name in file.files}
    return parity.compare(result, held, initial, one.optimizer.name, one.learning_rates[0])


@pytest.mark.parametrize("optimizer", ["nesterov", "adam"])
@pytest.mark.parametrize(
    "name", [one.name for one in frameworks.FRAMEWORKS.values() if one.exact and one.name != "jax"]
)
def test_the_same_steps_in_float64(tmp_path, name, optimizer):
    needed.needs(name)
    # A rate that changes from step to step, and a batch of 11 images, which two replicas share as 10 and 1.
    one = plan(MIXED, images=51, learning_rates=[0.1, 0.05, 0.2, 0.01, 0.1], optimizer=jobs.Optimizer(optimizer))
    found = differences(tmp_path, frameworks.FRAMEWORKS[name], one)
    assert not found.beyond(parity.TOLERANCES["float64"]), found


@pytest.mark.parametrize("name", OTHERS)
def test_a_network_with_dropout_trains_in_float32(tmp_path, name):
    """Every framework draws differently, so that the curves differ; but it learns."""
    needed.needs(name)
    network = (Conv(8), Relu(), MaxPool(), Flatten(), Dropout(0.3), Dense(10))
    one = plan(network, dtype="float32", images=200, learning_rates=[0.05] * 40)
    jobs.write(one, tmp_path / "job")
    result = orchestrate.run(frameworks.FRAMEWORKS[name], tmp_path / "job", tmp_path / "it", 300)
    assert (result.status, result.message) == ("ok", ""), (tmp_path / "it" / "runner.log").read_text()[-3000:]
    losses = result.steps()["loss"]
    assert 2 < losses[0] < 3 and losses[-5:].mean() < 0.7 * losses[:5].mean()
    assert set(result.metrics()["framework"]) == {name}
    assert result.environment()["versions"]
