"""Predicting with the network of a run: files with and without labels, probabilities, other layouts, refusals."""

import commands
import numpy as np
import pandas as pd
import pytest
from commands import call

from cnnjax.config import TrainConfig
from cnnjax.datasets.base import Dataset


@pytest.fixture(scope="module")
def run_of_digits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("predict") / "run"
    data = ("--data", commands.ROOT / "data" / "train.csv", "--validation-split", 0.2)
    flags = ("--network", "cnn2d_1layer_fullconnected_1layer", "--epochs", 3, "--lr", 0.1, "--flip-test")
    assert call(*data, *flags, "--run-dir", folder) == 0
    return folder


def predict(*flags):
    from experiments.predict import main

    return main([str(flag) for flag in flags])


def test_predicting_with_and_without_labels(run_of_digits, tmp_path, capfd):
    given = commands.ROOT / "data" / "test.csv"
    bare, arrays = tmp_path / "bare.csv", tmp_path / "bare.npz"
    lines = [line.split(",", 1) for line in given.read_text().splitlines()]
    bare.write_text("\n".join(pixels for _, pixels in lines))
    np.savez(arrays, images=np.array([row.split(",") for _, row in lines[1:]], np.uint8))
    written = []
    for number, data in enumerate((given, bare, arrays)):
        out = tmp_path / f"{number}.csv"
        assert predict(run_of_digits, "--data", data, "--out", out, "--batch-size", 100 + number) == 0
        written.append(out.read_text())
    assert written[0] == written[1] == written[2]
    predicted = [line.split(",")[1] for line in written[0].splitlines()[1:]]
    right = np.mean([one == label for one, (label, _) in zip(predicted, lines[1:], strict=True)])
    said = capfd.readouterr().out
    assert f"accuracy {right:.4f}" in said and said.count("accuracy") == 2  # with top5_accuracy, of the first alone
    before = out.read_bytes()
    assert predict(run_of_digits, "--data", bare, "--out", out) == 2
    assert "--overwrite replaces it" in capfd.readouterr().err and out.read_bytes() == before


def test_predicting_on_another_mesh_gives_what_the_run_gave(run_of_digits, tmp_path):
    config = TrainConfig.from_json((run_of_digits / "config.json").read_text(), "")
    assert config.flip_test
    out = tmp_path / "out.csv"
    from cnnjax.datasets import csv
    from cnnjax.datasets.order import split_validation

    data = csv.read(commands.ROOT / "data" / "train.csv").train
    held_out: Dataset = data.subset(split_validation(len(data), 0.2, 0)[1])
    rows = [
        ",".join(map(str, [label, *(image.ravel() // 15)]))
        for image, label in zip(held_out.images_NHWC, held_out.labels_N, strict=True)
    ]
    (tmp_path / "held_out.csv").write_text("\n".join(["label," + ",".join(f"p{i}" for i in range(64)), *rows]))
    assert predict(run_of_digits, "--data", tmp_path / "held_out.csv", "--out", out, "--mesh", "data=2") == 0
    assert out.read_text() == (run_of_digits / "predictions.csv").read_text()


def test_probabilities_are_the_same_on_any_mesh_and_for_any_number_of_images(run_of_digits, tmp_path, capfd):
    rows = (commands.ROOT / "data" / "test.csv").read_text().splitlines()

    def table(name, count, *flags):
        data, out = tmp_path / f"{name}_images.csv", tmp_path / f"{name}.csv"
        data.write_text("\n".join(rows[: 1 + count]))
        assert predict(run_of_digits, "--data", data, "--out", out, "--probabilities", *flags) == 0
        return pd.read_csv(out)

    whole = table("whole", 359)
    classes = [str(digit) for digit in range(10)]
    assert list(whole) == ["ImageId", "Label", *classes]
    probabilities = whole[classes].to_numpy()
    np.testing.assert_allclose(probabilities.sum(1), 1, atol=1e-5)
    assert (probabilities.argmax(1) == whole["Label"]).all()
    truth = np.array([int(row.split(",")[0]) for row in rows[1:]])
    loss = -np.log(probabilities[np.arange(359), truth]).mean()
    assert f"\nloss {loss:.4f}  accuracy " in capfd.readouterr().out
    for count in (1, 19, 200):
        assert table(f"first{count}", count).equals(whole[:count])
    for name, flags in (("mesh", ("--mesh", "data=2,model=2")), ("batch", ("--batch-size", 37))):
        np.testing.assert_allclose(table(name, 359, *flags)[classes], probabilities, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda rows: [row + ",1,2" for row in rows], "has 67 columns; expected 64, or 65 with a label"),
        (lambda rows: [*rows[:-1], rows[-1].replace(",0,", ",200,", 1)], "expected 0 to 17, as in training"),
        (lambda rows: [*rows[:-1], "77," + rows[-1].split(",", 1)[1]], "'77'; expected a class of the network: 0, 1"),
    ],
)
def test_images_unlike_those_of_training_are_refused(run_of_digits, tmp_path, capfd, change, text):
    rows = (commands.ROOT / "data" / "test.csv").read_text().splitlines()
    (tmp_path / "odd.csv").write_text("\n".join(change(rows)))
    assert predict(run_of_digits, "--data", tmp_path / "odd.csv", "--out", tmp_path / "out.csv") == 2
    said = capfd.readouterr().err
    assert text in said and "odd.csv" in said and said.count("\n") == 1
    assert not (tmp_path / "out.csv").exists()


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("", "nowhere"), "RUN nowhere: no run is there"),
        (("--checkpoint", "7"), "--checkpoint is '7'; allowed: newest, best, "),
        (("--mesh", "data=99"), "--mesh data=99 needs 99 devices"),
        (("--data", "nowhere.csv"), "nowhere.csv: no such file"),
        (("--batch-size", "0"), "--batch-size is 0; allowed: 1 or more"),
    ],
)
def test_what_predicting_refuses(run_of_digits, tmp_path, capfd, flags, text):
    given = {"": run_of_digits, "--data": commands.ROOT / "data" / "test.csv", "--out": tmp_path / "o.csv"}
    given |= {flags[0]: flags[1]}
    assert predict(*(part for pair in given.items() for part in pair if part != "")) == 2
    said = capfd.readouterr().err
    assert text in said and said.count("\n") == 1


def test_probabilities_of_numbers_are_refused(tmp_path, capfd):
    images = np.random.default_rng(0).integers(0, 256, (24, 64))
    rows = [",".join(map(str, [image.mean() / 255, *image])) for image in images]
    (tmp_path / "numbers.csv").write_text("\n".join(rows))
    flags = ("--data", tmp_path / "numbers.csv", "--validation-split", 0.25, "--task", "regression")
    network = ("--network", "cnn2d_1layer_fullconnected_1layer", "--batch-size", 8, "--epochs", 1)
    assert call(*flags, *network, "--run-dir", tmp_path / "run") == 0
    capfd.readouterr()
    assert predict(tmp_path / "run", "--probabilities", "--out", tmp_path / "out.csv") == 2
    said = capfd.readouterr().err
    assert "--probabilities" in said and "predicts numbers, not classes" in said and said.count("\n") == 1
    assert not (tmp_path / "out.csv").exists()
