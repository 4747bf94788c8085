"""The training toolbox: on every layout the same numbers, and whole runs that do what their flags say."""

import dataclasses
import functools
import json

import commands
import dataset_files as files
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from commands import SMALL, call

from cnnjax import optim, partition
from cnnjax.augment import Augmentation
from cnnjax.datasets.digits import load_digits
from cnnjax.losses import Objective
from cnnjax.networks import BatchNorm, Conv, Dense, Dropout, Flatten, Relu
from cnnjax.partition import Layout
from cnnjax.step import Recipe, create_state, train_step
from experiments import equivalence
from experiments.equivalence import Case

# -- layouts ----------------------------------------------------------------------------------------------------------

SMALL_NETWORK = (
    *(Conv(4, (3, 3), (2, 2), "SAME", use_bias=False), BatchNorm(0.9), Relu()),
    *(Conv(4, padding="SAME"), Relu(), Flatten(), Dropout(0.2), Dense(6), Relu()),
)
CASES = [
    *(Case(mesh) for mesh in ("data=4", "fsdp=2", "model=2", "space=2")),
    *(Case("data=2,fsdp=2", "shard_map"), Case("data=4", "pmap"), Case("data=2", microbatches=3)),
    *(Case("pipe=2", microbatches=3), Case("data=2,pipe=2", microbatches=2)),
]
TOOLS = {
    "classes": Objective(0.1, (1.0, 2.0, *[0.5] * 8), mixup=0.4, flip_test=True),
    "numbers": Objective(label_moments=(4.5, 2.9), mixup=0.4, flip_test=True),
}


@functools.cache
def trained(task: str, case: Case):
    with jax.enable_x64(True):
        digits = load_digits((8, 8, 1)).train
        if task == "numbers":
            digits = digits.as_regression()
        network = (*SMALL_NETWORK, Dense(10 if task == "classes" else 1))
        problem = equivalence.make_problem(network, digits.subset(np.arange(50)), digits.subset(np.arange(30)), 19, 5)
        augmentation = Augmentation(True, translate=1, cutout=3, cutout_fill=(80.0,))
        config = optim.OptimizerConfig("nesterov", 0.1, weight_decay=1e-3, schedule="onecycle", adjustable=True)
        recipe = dataclasses.replace(
            problem.recipe, objective=TOOLS[task], clip_norm=0.5, augmentation=augmentation,
            l2=1e-2, optimizer=optim.make_optimizer(config, 6), schedule=optim.make_schedule(config, 6),
        )  # fmt: skip
        return equivalence.train(dataclasses.replace(problem, recipe=recipe), case)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("task", TOOLS)
def test_layout_equals_one_device(task, case):
    outcome, expected = trained(task, case), trained(task, case.one_device)
    assert len(set(expected.losses_T)) == 5 and expected.norms_T.max() > 0.5, "clipping must act"
    assert equivalence.agrees(equivalence.differences(outcome, expected), True)


# -- parts of the step ------------------------------------------------------------------------------------------------

ONE = Layout(partition.make_mesh("data=1")[0])


def batch(size=8, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "image": rng.integers(0, 256, (size, 8, 8, 1), np.uint8), "label": rng.integers(0, 4, size).astype(np.int32),
        "weight": np.ones(size, np.float32), "index": np.arange(size, dtype=np.int32),
    }  # fmt: skip


def recipe(**options):
    schedule = optax.constant_schedule(0.1)
    network = (Conv(3), Relu(), Flatten(), Dense(4))
    defaults = {"network": network, "optimizer": optax.sgd(schedule), "schedule": schedule, "scaling": "unit"}
    return Recipe(**defaults | options)


@pytest.mark.parametrize("limit", [0.01, 1e6])
def test_clipping_shortens_the_update_and_keeps_its_direction(x64, limit):
    double = {"dtype": jnp.float64, "param_dtype": jnp.float64}
    start = create_state(recipe(**double), (8, 8, 1))
    plain, clipped = (train_step(recipe(clip_norm=norm, **double), ONE, start, batch()) for norm in (0.0, limit))
    assert clipped[1]["grad_norm"] == plain[1]["grad_norm"]  # that before clipping
    factor = min(1, limit / float(plain[1]["grad_norm"]))
    moves = [jax.tree.map(lambda a, b: a - b, state.params, start.params) for state, _ in (plain, clipped)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(b, factor * a, rtol=1e-9, atol=1e-15), *moves)


def test_the_rate_has_a_factor_in_the_state():
    config = optim.OptimizerConfig("nesterov", 0.1, adjustable=True)
    options = {"optimizer": optim.make_optimizer(config, 9), "schedule": optim.make_schedule(config, 9)}
    start = create_state(recipe(**options), (8, 8, 1))
    halved = start.replace(opt_state=optim.set_rate_factor(start.opt_state, 0.5))
    moves = []
    for state in (start, halved):
        after, metrics = train_step(recipe(**options), ONE, state, batch())
        moves.append((jax.tree.map(lambda a, b: a - b, after.params, start.params), metrics["learning_rate"]))
    assert moves[1][1] == pytest.approx(0.05)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a / 2, rtol=1e-4, atol=1e-7), moves[0][0], moves[1][0])


def test_float16_is_near_float32_and_leaves_out_steps_that_overflow():
    half = recipe(dtype=jnp.float16, ema=0.5)
    start, step = create_state(half, (8, 8, 1)), jax.jit(functools.partial(train_step, half, ONE))
    after, metrics = step(start, batch())
    exact, expected = train_step(recipe(), ONE, create_state(recipe(), (8, 8, 1)), batch())
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=2e-3)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), after.params, exact.params)

    high = start.replace(loss_scale=start.loss_scale.replace(factor=jnp.float32(2.0**40)))
    after, metrics = step(high, batch())
    assert (metrics["count"], metrics["loss"], metrics["grad_norm"]) == (0, 0, 0)
    assert (after.step, after.loss_scale.factor, after.loss_scale.skipped) == (1, 2.0**39, 1)
    same = {
        name: (getattr(after, name), getattr(start, name)) for name in ("params", "batch_stats", "opt_state", "ema")
    }
    for new, old in same.values():
        jax.tree.map(np.testing.assert_array_equal, new, old)


def test_the_loss_scale_doubles_after_many_good_steps():
    scale = optim.LossScale.first()
    for _ in range(1999):
        scale = scale.after(True)
    assert scale.factor == 2**15
    assert scale.after(True).factor == 2**16 and scale.after(True).good_steps == 0
    assert scale.after(False).factor == 2**14 and scale.after(False).good_steps == 0


# -- whole runs -------------------------------------------------------------------------------------------------------


def losses(folder):
    return [float(row["val_loss"]) for row in commands.rows(folder)]


def test_early_stopping_restores_the_weights_with_the_lowest_loss(tmp_path, capfd):
    """A rate that is far too high makes the loss go up and down."""
    flags = (*SMALL, "--lr", 0.4, "--schedule", "constant", "--keep", 1, "--run-dir", tmp_path / "run")
    assert call(*flags, "--epochs", 30, "--early-stopping", 3) == 0
    said, found = capfd.readouterr().out, losses(tmp_path / "run")
    best = int(np.argmin(found))
    assert len(found) < 30 and len(found) == best + 4
    assert f"the weights of step {3 * (best + 1)}, with the lowest val_loss {found[best]:.4f}, are restored" in said
    evaluation = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert evaluation["loss"] == found[best]  # bit for bit the same weights give the same loss
    assert commands.checkpoints(tmp_path / "run") == [3 * (best + 1), 3 * len(found)]
    # Another run that ends there has the same weights.
    again = [flag if flag != tmp_path / "run" else tmp_path / "again" for flag in flags]
    assert call(*again, "--epochs", 30, "--early-stopping", 3, "--steps", 3 * (best + 1)) == 0
    for name in ("predictions.csv", "mistakes.npz"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    before = commands.snapshot(tmp_path / "run")
    assert call("--run-dir", tmp_path / "run", "--resume") == 0
    assert "complete already" in capfd.readouterr().out
    after = commands.snapshot(tmp_path / "run")
    assert all(after[name] == before[name] for name in ("metrics.csv", "predictions.csv", "evaluation.json"))


def test_plateau_lowers_the_rate_and_survives_a_resume(tmp_path, capfd):
    flags = (*SMALL, "--lr", 0.4, "--schedule", "constant", "--epochs", 8, "--plateau", 1, "--early-stopping", 6)
    assert call(*flags, "--run-dir", tmp_path / "whole") == 0
    found = losses(tmp_path / "whole")
    rates, best, rate = [], float("inf"), 0.4
    for loss in found:
        rates.append(rate)
        if loss < best - 1e-4:
            best = loss
        else:
            rate /= 2
    assert rate < 0.4, "the rate must have fallen"
    np.testing.assert_allclose([float(row["learning_rate"]) for row in commands.rows(tmp_path / "whole")], rates)
    assert call(*flags, "--run-dir", tmp_path / "parts", "--steps", 3 * (rates.index(min(rates)) + 1)) == 0
    resumed = (*flags, "--run-dir", tmp_path / "parts", "--resume", "--steps", 24)
    assert call(*resumed) == 0
    commands.assert_same_run(tmp_path / "whole", tmp_path / "parts")


def write_numbers(path, count=60):
    """Images whose label is the mean of their pixels, on another scale."""
    images = files.random_images(count, 0, (8, 8)) // np.linspace(1, 4, count)[:, None, None]
    labels = 1000 + images.mean((1, 2)) / 7
    rows = [
        f"{label:.6f}," + ",".join(str(int(v)) for v in image.ravel())
        for label, image in zip(labels, images, strict=True)
    ]
    path.write_text("\n".join(["brightness," + ",".join(f"p{i}" for i in range(64)), *rows]))
    return labels


def test_regression_from_a_file_to_predictions(tmp_path, capfd):
    labels = write_numbers(tmp_path / "numbers.csv")
    network = ("--network", "cnn2d_1layer_fullconnected_1layer", "--batch-size", 16, "--scaling", "unit")
    flags = ("--data", tmp_path / "numbers.csv", "--label-column", "brightness", "--validation-split", 0.25, *network)
    assert call(*flags, "--optimizer", "adamw", "--lr", 0.003, "--epochs", 40, "--run-dir", tmp_path / "run") == 0
    rows = commands.rows(tmp_path / "run")
    assert rows[-1]["accuracy"] == "" and list(rows[0])[-4:] == ["mae", "r2", "val_mae", "val_r2"]
    assert float(rows[-1]["val_r2"]) > 0.8
    evaluation = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    lines = (tmp_path / "run" / "predictions.csv").read_text().splitlines()[1:]
    predicted = np.array([float(line.split(",")[1]) for line in lines])
    from cnnjax.datasets.order import split_validation

    truth = labels[split_validation(60, 0.25, 0)[1]]
    errors = predicted - truth
    np.testing.assert_allclose(evaluation["loss"], np.mean(errors**2), rtol=1e-3)
    np.testing.assert_allclose(float(rows[-1]["val_mae"]), np.abs(errors).mean(), rtol=1e-3)
    np.testing.assert_allclose(evaluation["r2"], 1 - (errors**2).sum() / ((truth - truth.mean()) ** 2).sum(), rtol=1e-3)
    np.testing.assert_allclose(float(rows[-1]["val_r2"]), evaluation["r2"], rtol=1e-3)
    assert "final validation loss" in capfd.readouterr().out
    assert call(*flags, "--class-weights", "balanced", "--run-dir", tmp_path / "no") == 2
    assert "the labels are numbers, not classes" in capfd.readouterr().err


def test_scores_of_a_run(tmp_path):
    assert call(*SMALL, "--epochs", 2, "--class-weights", "balanced", "--run-dir", tmp_path / "run") == 0
    evaluation = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    counts = np.array(evaluation["confusion"])
    test = load_digits((32, 32, 1)).test
    lines = (tmp_path / "run" / "predictions.csv").read_text().splitlines()[1:]
    predicted = np.array([int(line.split(",")[1]) for line in lines])
    by_hand = np.zeros((10, 10), int)
    for label, one in zip(test.labels_N, predicted, strict=True):
        by_hand[label, one] += 1
    assert np.array_equal(counts, by_hand) and evaluation["accuracy"] == counts.trace() / 359
    assert [row["images"] for row in evaluation["per_class"]] == by_hand.sum(1).tolist()
    worst = np.load(tmp_path / "run" / "mistakes.npz")
    assert (predicted[worst["index"]] == worst["predicted"]).all() and (worst["label"] != worst["predicted"]).all()
    assert (np.diff(worst["loss"]) <= 0).all() and np.array_equal(worst["image"], test.images_NHWC[worst["index"]])


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--class-weights", "1,2"), "--class-weights has 2 numbers, but there are 10 classes"),
        (("--class-weights", "some"), "--class-weights is 'some'; allowed: balanced, or a number"),
        (("--plateau-factor", 1), "--plateau-factor is 1.0; allowed: above 0 and below 1"),
        (
            ("--schedule", "onecycle", "--warmup-epochs", 1),
            "--warmup-epochs is 1.0; allowed: 0 with --schedule onecycle",
        ),
        (("--schedule", "onecycle", "--epochs", 1), "--schedule onecycle needs at least 4 steps, but --epochs 1 has 3"),
        (("--mixup", 0.2, "--batch-size", 1), "--batch-size is 1, but --mixup mixes images of a batch"),
        (("--dtype", "float16", "--mesh", "pipe=2"), "--dtype float16 and --mesh pipe do not go together"),
    ],
)
def test_refusals(tmp_path, capfd, flags, text):
    assert call(*SMALL, "--run-dir", tmp_path / "run", *flags) == 2
    said = capfd.readouterr().err
    assert text in said and said.count("\n") == 1
    assert not (tmp_path / "run").exists()
