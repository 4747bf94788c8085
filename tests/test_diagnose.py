"""Each finding by data or a training that really has the fault; and silence where there is none."""

import dataclasses
import json

import commands
import numpy as np
import pytest
from commands import call

from cnnjax import diagnose, networks, partition
from cnnjax.config import TrainConfig
from cnnjax.datasets import Splits
from cnnjax.datasets.base import Dataset
from cnnjax.datasets.digits import load_digits
from cnnjax.networks import Conv, Dense, Flatten, Init, MaxPool, Relu
from cnnjax.partition import Layout
from experiments.assembly import assemble, input_shape
from experiments.diagnose import main

DIGITS = load_digits((16, 16, 1))
NETWORK = "cnn2d_2layer_fullconnected_1layer"
OPTIONS = TrainConfig(network=NETWORK, batch_size=64, epochs=12, flip="off", crop_padding=1, weight_decay=5e-4)


def checks(findings, severity=None):
    return {finding.check for finding in findings if severity in (None, finding.severity)}


def seen(findings, check):
    return next(finding.seen for finding in findings if finding.check == check)


def changed(dataset=DIGITS.train, **fields):
    return dataclasses.replace(dataset, **fields)


def joined(*parts: Dataset):
    return changed(
        parts[0],
        images_NHWC=np.concatenate([part.images_NHWC for part in parts]),
        labels_N=np.concatenate([part.labels_N for part in parts]),
    )


# -- data -------------------------------------------------------------------------------------------------------------


def test_the_shipped_digits_are_healthy():
    assert diagnose.examine_data(DIGITS.train, [DIGITS.test, DIGITS.test]) == []


def test_constant_images():
    images = DIGITS.train.images_NHWC.copy()
    images[[7, *range(100, 150)]] = 9
    found = diagnose.examine_data(changed(images_NHWC=images), [])
    assert "constant_images" in checks(found, "warning")
    assert "51 of 1,438 (3.5%)" in seen(found, "constant_images") and "number 7" in seen(found, "constant_images")
    everything = diagnose.examine_data(changed(images_NHWC=images * 0), [])
    assert "constant_images" in checks(everything, "error")


def test_copies_and_copies_with_other_labels():
    some = DIGITS.train.subset(np.arange(200))
    found = diagnose.examine_data(joined(DIGITS.train, some), [])
    assert checks(found) == {"duplicates"} and "200 of 1,638 (12.2%)" in seen(found, "duplicates")
    other = changed(some.subset(np.arange(5)), labels_N=((some.labels_N[:5] + 1) % 10).astype(np.int32))
    found = diagnose.examine_data(joined(DIGITS.train, other), [])
    assert checks(found) == {"contradicting_labels"}
    assert "10 of 1,443 (0.7%)" in seen(found, "contradicting_labels")
    pairs = zip(some.labels_N[:5], other.labels_N, strict=True)
    assert any(f"{one} and {two}" in seen(found, "contradicting_labels") for one, two in pairs)


def test_training_images_in_the_test_set():
    leaked = joined(DIGITS.test, DIGITS.train.subset(np.arange(90)))
    found = diagnose.examine_data(DIGITS.train, [leaked])
    assert checks(found, "error") == {"train_in_test"} and "90 of 449 (20.0%)" in seen(found, "train_in_test")
    few = joined(DIGITS.test, DIGITS.train.subset(np.arange(9)))
    assert checks(diagnose.examine_data(DIGITS.train, [few])) == {"train_in_test"}


def test_missing_and_rare_classes():
    labels = DIGITS.train.labels_N
    found = diagnose.examine_data(DIGITS.train.subset(np.flatnonzero(labels != 3)), [])
    assert checks(found) == {"missing_classes"} and "1 of 10 classes" in seen(found, "missing_classes")
    assert seen(found, "missing_classes").endswith(": 3")
    rare = np.concatenate([np.flatnonzero(labels != 3), np.flatnonzero(labels == 3)[:5]])
    found = diagnose.examine_data(DIGITS.train.subset(rare), [])
    assert checks(found) == {"imbalance"} and "class 3 has 5" in seen(found, "imbalance")


def test_one_column_of_one_hot_labels():
    one_hot = np.eye(10, dtype=np.int32)[DIGITS.train.labels_N]
    found = diagnose.examine_data(changed(labels_N=one_hot[:, 4].copy(), class_names=("0", "1")), [])
    assert "one_hot" in checks(found) and "one-hot labels of 10 classes" in seen(found, "one_hot")
    even = (DIGITS.train.labels_N % 2).astype(np.int32)
    assert diagnose.examine_data(changed(labels_N=even, class_names=("0", "1")), []) == []


def test_few_images():
    found = diagnose.examine_data(DIGITS.train.subset(np.arange(60)), [DIGITS.test.subset(np.arange(20))])
    assert checks(found, "warning") == {"few_images"} and checks(found, "note") == {"few_held_out"}


# -- training ---------------------------------------------------------------------------------------------------------


def examine(train=DIGITS.train, layers=None, steps=60, layout=None, **options):
    config = dataclasses.replace(OPTIONS, **options)
    recipe, training, _ = assemble(config, Splits(train, DIGITS.test))
    if layers is not None:
        recipe = dataclasses.replace(recipe, network=layers)
    layout = layout or Layout(partition.make_mesh(config.mesh)[0])
    shape = input_shape(config, training.image_shape)
    return diagnose.examine_training(recipe, layout, shape, training, config.batch_size, steps, config.strategy)


def test_unscaled_pixels():
    found = examine(scaling="none")
    assert {"input_scale", "initial_loss"} <= checks(found)
    assert "scaling none" in seen(found, "input_scale")
    assert checks(found) & {"dead_relus", "learning_rate", "dead"}


def test_a_learning_rate_100_times_too_large():
    found = examine(lr=5.0)
    assert "learning_rate" in checks(found, "error") and "at a learning rate of 5;" in seen(found, "learning_rate")


@pytest.mark.slow
def test_a_learning_rate_that_is_far_too_small():
    found = examine(lr=1e-5, optimizer="sgd")
    assert checks(found, "warning") == {"learning_rate"} and "at a learning rate of 1e-05;" in seen(
        found, "learning_rate"
    )


@pytest.mark.slow
def test_shuffled_labels():
    labels = np.random.default_rng(0).permutation(DIGITS.train.labels_N)
    found = examine(changed(labels_N=labels))
    assert checks(found, "error") == {"labels"} and "32 images were learned by heart" in seen(found, "labels")


@pytest.mark.slow
@pytest.mark.parametrize("bias", [-30.0, -1000.0])
def test_relus_that_a_bad_bias_kills(bias):
    network = (Conv(8, bias_init=Init("constant", bias)), Relu(), MaxPool(), Flatten(), Dense(10))
    found = examine(layers=network)
    assert "dead_relus" in checks(found, "error") and "relu_1: 8 of 8" in seen(found, "dead_relus")
    assert "dead" in checks(found, "error")


@pytest.mark.slow
def test_gradients_that_vanish_and_explode():
    def deep(scale):
        layers = [Conv(8, padding="SAME", kernel_init=Init("truncated_normal", scale)), Relu()] * 8
        return (*layers, Flatten(), Dense(10))

    found = examine(layers=deep(0.01), steps=8)
    assert "vanishing_gradients" in checks(found) and "of 9 kernels" in seen(found, "vanishing_gradients")
    found = examine(layers=deep(1.0), steps=8)
    assert {"exploding_gradients", "initial_loss", "diverges"} <= checks(found)


@pytest.mark.slow
def test_a_batch_that_is_too_large_for_the_memory():
    found = examine(batch_size=2**23)
    assert checks(found) == {"memory"}
    assert "a step of 8388608 images takes " in seen(found, "memory")
    size = int(found[0].change.split()[1].rstrip(","))
    assert size < 2**23 and size & (size - 1) == 0


# -- curves -----------------------------------------------------------------------------------------------------------


def curve(**columns):
    names = ("loss", "accuracy", "val_loss", "val_accuracy", "learning_rate", "images_per_s")
    columns = dict.fromkeys(names, "") | columns
    count = max(len(column) for column in columns.values())
    return [{name: (values[i] if values else "") for name, values in columns.items()} for i in range(count)]


def test_curves():
    stuck = curve(loss=[2.31, 2.304, 2.303], accuracy=[0.1, 0.11, 0.1])
    assert checks(diagnose.examine_curves(stuck, 10), "error") == {"stuck"}
    assert diagnose.examine_curves([row | {"step": 4 * i} for i, row in enumerate(stuck)], 10) == []
    assert diagnose.examine_curves([row | {"step": 400 * i} for i, row in enumerate(stuck)], 10)
    rising = curve(loss=[2.0, 1.5, 1.2, 2.1], accuracy=[0.3, 0.4, 0.5, 0.3], learning_rate=[0.4] * 4)
    assert checks(diagnose.examine_curves(rising, 10)) == {"rising"}
    split = curve(loss=[2.0, 1.6, 1.5, 1.4], accuracy=[0.3, 0.4, 0.45, 0.5], val_loss=[1.5, 0.9, 0.7, 0.6],
                  val_accuracy=[0.5, 0.7, 0.8, 0.85])  # fmt: skip
    assert checks(diagnose.examine_curves(split, 10, harder=False)) == {"wrong_split"}
    assert diagnose.examine_curves(split, 10) == []
    learned = curve(loss=[2.0, 1.0, 0.5, 0.3, 0.1, 0.05], accuracy=[0.3, 0.6, 0.8, 0.9, 0.97, 0.99],
                    val_loss=[1.5, 1.0, 1.1, 1.3, 1.6, 1.9], val_accuracy=[0.5, 0.6, 0.6, 0.6, 0.6, 0.6])  # fmt: skip
    assert checks(diagnose.examine_curves(learned, 10)) == {"overfitting"}
    slower = curve(loss=[2.0, 1.5, 1.2, 1.0, 0.9, 0.8, 0.7], images_per_s=[500, 1000, 1000, 1000, 990, 300, 310])
    assert checks(diagnose.examine_curves(slower, 10)) == {"slower"}
    assert diagnose.examine_curves([], 10) == []


# -- commands ---------------------------------------------------------------------------------------------------------


def test_a_run_says_what_is_wrong(tmp_path, capfd):
    data = tmp_path / "data"
    data.mkdir()
    rows = (commands.ROOT / "data" / "train.csv").read_text().splitlines()
    (data / "train.csv").write_text("\n".join(rows[:400]))
    (data / "test.csv").write_text("\n".join([rows[0], *rows[300:500]]))
    flags = ("--data", data, "--network", "cnn2d_1layer_fullconnected_1layer", "--batch-size", 100, "--epochs", 2)
    assert call(*flags, "--run-dir", tmp_path / "run") == 0
    assert "100 of 200 (50.0%) images of" in capfd.readouterr().err
    found = json.loads((tmp_path / "run" / "diagnosis.json").read_text())
    assert [finding["check"] for finding in found] == ["train_in_test"]
    assert call(*flags, "--lr", 1e6, "--run-dir", tmp_path / "infinite") == 3
    found = json.loads((tmp_path / "infinite" / "diagnosis.json").read_text())
    assert {finding["check"] for finding in found} == {"train_in_test", "learning_rate"}


@pytest.mark.slow
def test_the_command(tmp_path, capfd):
    flags = ["--data", "digits", "--network", NETWORK, "--batch-size", "64"]
    assert main([*flags, "--json", str(tmp_path / "good.json")]) == 0
    assert "nothing wrong was found" in capfd.readouterr().out
    assert json.loads((tmp_path / "good.json").read_text()) == []
    assert main([*flags, "--lr", "5", "--json", str(tmp_path / "bad.json")]) == 1
    said, found = capfd.readouterr().out, json.loads((tmp_path / "bad.json").read_text())
    assert found[0]["check"] == "learning_rate" and found[0]["seen"] in said and "what to change: --lr" in said
    assert list(found[0]) == ["severity", "check", "seen", "why", "change"]
    assert main([*flags, "--probe-steps", "1"]) == 2
    assert capfd.readouterr().err == "error: --probe-steps is 1; allowed: 4 or more\n"


# -- silence ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"optimizer": "adamw", "lr": 1e-3}, marks=pytest.mark.slow),
        pytest.param(
            {"optimizer": "adam", "lr": 1e-3, "weight_decay": 0.0, "mixup": 0.2, "cutout": 4}, marks=pytest.mark.slow
        ),
        pytest.param({"mesh": "data=2", "dtype": "bfloat16"}, marks=pytest.mark.slow),
        pytest.param({"microbatches": 2, "schedule": "onecycle", "label_smoothing": 0.1}, marks=pytest.mark.slow),
        pytest.param({"mesh": "pipe=2", "microbatches": 2}, marks=pytest.mark.slow),
        pytest.param({"strategy": "shard_map", "mesh": "data=2", "clip_norm": 1.0}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_silence_on_healthy_trainings(options):
    layout = Layout(partition.make_mesh(options.get("mesh", "data=1"))[0], options.get("microbatches", 1))
    assert examine(layout=layout, **options) == []


def test_silence_on_regression():
    assert examine(DIGITS.train.as_regression(), lr=0.005) == []


@pytest.mark.realdata
@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "network", "options"),
    [
        ("cifar10", "cifar10_slim", {}),
        ("cifar10", "cifar10_slim", {"scaling": "none", "optimizer": "sgd", "lr": 0.1}),  # preset ancestor
        ("mnist", "cnn2d_3layer_fullconnected_3layer_mnist", {"scaling": "unit", "batch_size": 1000}),
        ("mnist", "cnn2d_2layer_full_connected_2layer", {"scaling": "minmax", "batch_size": 50, "lr": 5e-4,
                                                         "optimizer": "adam", "weight_decay": 0.0}),
        ("cifar10", "resnet18_cifar", {"batch_size": 32}),
    ],
)  # fmt: skip
def test_silence_on_real_data(data, network, options):
    from cnnjax import datasets

    splits = datasets.load(data, image_shape=networks.default_input_shape(network)).splits
    assert diagnose.examine_data(splits.train, [splits.test]) == []
    config = dataclasses.replace(OPTIONS, **{"batch_size": 128, "network": network, "epochs": 8} | options)
    recipe, training, _ = assemble(config, splits)
    layout = Layout(partition.make_mesh("data=1")[0])
    steps = 60 if network == "cifar10_slim" else 20  # the others take seconds a step
    shape = training.image_shape
    assert diagnose.examine_training(recipe, layout, shape, training, config.batch_size, steps) == []
