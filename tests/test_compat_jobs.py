"""Jobs: what the frameworks are given is what cnnjax itself would train on, and the runner of cnnjax does so."""

import itertools
import json

import jax
import numpy as np
import numpy_reference as reference
import optax
import pytest

from cnnjax import augment, networks, step
from cnnjax.compat import frameworks, jobs, orchestrate
from cnnjax.datasets.digits import load_digits
from cnnjax.networks import BatchNorm, Conv, Dense, Dropout, Flatten, MaxPool, Relu

TINY = (
    *(Conv(4, (3, 3), (2, 1), "SAME"), BatchNorm(0.9), Relu(), MaxPool((3, 3), (2, 2), "SAME"), Flatten()),
    *(Dropout(0.5), Dense(10), BatchNorm(0.8, use_scale=False)),
)


def plan(network=TINY, images=50, steps=4, **changes):
    digits = load_digits((8, 8, 2))
    values = dict(
        name="tiny", network=network, train=digits.train.subset(np.arange(images)),
        test=digits.test.subset(np.arange(30)), scaling="unit", batch_size=20, learning_rates=[0.1] * steps,
        optimizer=jobs.Optimizer("nesterov"), dtype="float64",
    )  # fmt: skip
    return jobs.Plan(**values | changes)


@pytest.mark.parametrize("name", networks.REGISTRY)
def test_networks_survive_the_translation(name):
    network, shape = networks.build_cnn(name, 10), networks.default_input_shape(name)
    layers = json.loads(json.dumps(jobs.describe(network, shape)))
    again = jobs.records(layers)
    assert networks.summary(again, shape) == networks.summary(network, shape)
    assert [type(layer) for layer in again] == [type(layer) for layer in network]
    if name == "cifar10_slim":
        weights, expected = (jobs.initial_weights(one, shape, 3) for one in (again, network))
        assert all(np.array_equal(weights[key], expected[key]) for key in weights.keys() | expected.keys())
    assert [layer["output_shape"] for layer in layers][-1] == [10]
    assert all(a["output_shape"] == b["input_shape"] for a, b in itertools.pairwise(layers))


def test_the_weights_are_those_that_training_starts_from():
    schedule = optax.constant_schedule(0.1)
    state = step.create_state(step.Recipe(TINY, optax.sgd(schedule), schedule, seed=5), (8, 8, 2))
    weights = jobs.initial_weights(TINY, (8, 8, 2), 5)
    expected = jobs.flat(state.params) | jobs.flat(state.batch_stats)
    assert weights.keys() == expected.keys()
    assert all(np.array_equal(weights[key], expected[key]) for key in expected)


def test_every_epoch_has_every_image_once():
    order_TB, ends = jobs.sample_order(50, 20, 7, seed=1)
    assert order_TB.shape == (7, 20) and ends == [3, 6, 7]
    for start in (0, 3):
        epoch = order_TB[start : start + 3].ravel()
        assert sorted(epoch[epoch >= 0]) == list(range(50)) and (epoch == -1).sum() == 10
    assert not np.array_equal(order_TB[0], order_TB[3])


@pytest.mark.parametrize("scaling", jobs.SCALINGS)
def test_images_are_scaled_as_in_training(tmp_path, scaling, monkeypatch):
    monkeypatch.syspath_prepend(frameworks.RUNNERS)
    import protocol

    one = plan(scaling=scaling)
    jobs.write(one, tmp_path / "job")
    x_BHWC, labels_B, index_B = protocol.Job(tmp_path / "job").batch(2)
    assert len(x_BHWC) == 10 and np.array_equal(labels_B, one.train.labels_N[index_B])
    with jax.enable_x64(True):
        images = one.train.images_NHWC[index_B].astype(np.float64)
        expected = augment.scale(jax.numpy.asarray(images), scaling, *one.train.channel_moments())
    np.testing.assert_allclose(x_BHWC, expected, rtol=1e-12, atol=1e-12)


def test_an_unknown_scaling_is_refused(tmp_path):
    with pytest.raises(ValueError, match="--scaling is 'log'; allowed: none, unit"):
        jobs.write(plan(scaling="log"), tmp_path / "job")
    assert not (tmp_path / "job").exists()


def test_time_of_compilation_is_taken_out(monkeypatch):
    monkeypatch.syspath_prepend(frameworks.RUNNERS)
    from protocol import without_compilation

    assert without_compilation([9.0, 1.0, 1.2, 1.1, 7.0], [20, 20, 20, 20, 10]) == [1.1, 1.0, 1.2, 1.1, 0.55]
    assert without_compilation([9.0], [20]) == [9.0]
    assert without_compilation([0.5, 1.0, 1.0], [20, 20, 20]) == [0.5, 1.0, 1.0]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Results of cnnjax on a job without dropout, in float64, and the job."""
    folder = tmp_path_factory.mktemp("jobs")
    one = plan(jobs.without_dropout(TINY))
    jobs.write(one, folder / "job")
    result = orchestrate.run(frameworks.FRAMEWORKS["jax"], folder / "job", folder / "out", 120)
    assert result.status == "ok", result.message
    return result, one, folder / "job"


def test_the_runner_of_cnnjax_trains_as_numpy_computes(done):
    result, one, job = done
    with np.load(job / "initial_weights.npz") as file:
        weights = {name: file[name].astype(np.float64) for name in file.files}
    index = np.load(job / "order.npy")[0]
    tree = lambda names: {  # noqa: E731
        layer: {key.split("/")[1]: weights[key] for key in weights if key.startswith(layer + "/")
                and key.split("/")[1] in names}
        for layer in {key.split("/")[0] for key in weights}
    }  # fmt: skip
    params, stats = tree(("kernel", "bias", "scale")), tree(("mean", "var"))
    x_BHWC, labels = one.train.images_NHWC[index] / 255, one.train.labels_N[index]
    logits, new_stats = reference.forward(one.network, params, stats, x_BHWC, train=True)[:2]
    losses = result.steps()["loss"]
    np.testing.assert_allclose(losses[0], reference.cross_entropy(logits, labels).mean(), rtol=1e-12)
    first = result.arrays("first_weights")
    np.testing.assert_allclose(first["batch_norm_1/var"], new_stats["batch_norm_1"]["var"], rtol=1e-12)
    # Nesterov's first step goes (1 + momentum) times along the gradient: checked along a random direction.
    direction = {key: np.random.default_rng(0).normal(size=weights[key].shape) for key in first if "kernel" in key}

    def loss(sign):
        for key, way in direction.items():
            weights[key] += sign * 1e-6 * way
        value = reference.cross_entropy(
            reference.forward(one.network, tree(("kernel", "bias", "scale")), stats, x_BHWC, train=True)[0], labels
        ).mean()
        for key, way in direction.items():
            weights[key] -= sign * 1e-6 * way
        return value

    slope = sum(((weights[key] - first[key]) / (0.1 * 1.9) * way).sum() for key, way in direction.items())
    np.testing.assert_allclose(slope, (loss(1) - loss(-1)) / 2e-6, rtol=1e-5)


def test_the_files_of_a_result(done):
    result, one, _ = done
    metrics, steps = result.metrics(), result.steps()
    assert list(metrics["step"]) == [3, 4] and list(metrics["epoch"]) == [1, 2]
    weighted = np.average(steps["loss"][:3], weights=[20, 20, 10])
    np.testing.assert_allclose(metrics["loss"][0], weighted, rtol=1e-12)
    assert metrics["framework"].unique() == ["jax"] and metrics["dtype"].unique() == ["float64"]
    correct = result.predictions() == one.test.labels_N
    assert metrics["val_accuracy"].iloc[-1] == correct.mean()
    assert result.environment()["versions"]["jax"] == jax.__version__
    assert result.peak_memory > 50e6
    # The time of a step is in one of the two columns, and compilation is by far the larger.
    built = result.environment()["build_s"]
    together = metrics["compile_s"].sum() + metrics["train_s"].sum()
    np.testing.assert_allclose(together, steps["ms"].sum() / 1000 + built, rtol=1e-3)
    assert metrics["compile_s"][0] > metrics["train_s"].sum()
