"""Whole commands on people's own data: found, said, trained on, predicted, resumed."""

import csv
import json
import sys

import dataset_files as files
import numpy as np
import pytest
from commands import call, run

COUNT = 40
IMAGES = files.random_images(COUNT, 0, (8, 8))
LABELS = [3 + 4 * (i % 3) for i in range(COUNT)]  # 3, 7, 11
SMALL = ("--network", "cnn2d_1layer_fullconnected_1layer", "--batch-size", 16, "--epochs", 1, "--steps", 2)


def write(path, labels=LABELS, place=0, header=True):
    rows = [list(image.ravel()) for image in IMAGES]
    names = [f"pixel{i}" for i in range(64)]
    if labels is not None:
        names.insert(place, "label")
        for row, label in zip(rows, labels, strict=True):
            row.insert(place, label)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(",".join(map(str, row)) for row in [names, *rows][0 if header else 1 :]))
    return path


def predictions(folder):
    with (folder / "predictions.csv").open(newline="") as file:
        return [row["Label"] for row in csv.DictReader(file)]


def test_one_file_in_a_process_of_its_own(tmp_path):
    path, folder = write(tmp_path / "my digits.csv"), tmp_path / "run"
    done = run("--data", path, "--validation-split", 0.25, *SMALL, "--run-dir", folder)
    assert done.returncode == 0, done.stderr
    assert f"{path} read as with --image-shape 8,8,1 --label-column label --task classification" in done.stdout
    assert "3 classes (3, 7, 11)" in done.stdout and "on 10 images  [my digits]" in done.stdout
    # Classes are written as the file has them.
    assert len(predictions(folder)) == 10 and set(predictions(folder)) <= {"3", "7", "11"}
    config = json.loads((folder / "config.json").read_text())
    assert (config["image_shape"], config["label_column"], config["task"]) == ("8,8,1", "label", "classification")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_reader_by_name_and_resume(here, capfd):
    write(here / "data.txt", place=64, header=False)
    flags = ("--data", "csv:data.txt", "--validation-split", 0.25, *SMALL, "--run-dir", "run")
    assert call(*flags, "--label-column", "last") == 0
    assert "read as with --image-shape 8,8,1 --label-column last" in capfd.readouterr().out
    assert call("--run-dir", "run", "--resume") == 0
    capfd.readouterr()
    assert call("--run-dir", "run", "--resume", "--label-column", "first") == 2
    assert "--label-column is first but was last" in capfd.readouterr().err


def test_folder_with_a_test_set(here):
    write(here / "mine" / "train.csv")
    write(here / "mine" / "test.csv")
    assert call("--data", "mine", *SMALL, "--run-dir", "run") == 0
    assert len(predictions(here / "run")) == COUNT


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (("--data", "one.csv"), ("one.csv has no test images", "give --validation-split, such as 0.1")),
        (("--data", "two"), ("test.csv has no labels: its images can only be predicted", "--validation-split")),
        (("--data", "one.csv", "--image-shape", "28,28,1"), ("--image-shape is 28,28,1", "784 values", "as 8,8,1")),
        (("--data", "one.csv", "--image-shape", "28x28"), ("--image-shape is '28x28'", "HEIGHT,WIDTH")),
        (("--data", "one.csv", "--image-shape", "0,8,1"), ("--image-shape is '0,8,1'", "such as 28,28,1")),
        (("--data", "one.csv", "--label-column", "kind"), ("--label-column is 'kind'", "allowed: first, last, none")),
        (("--data", "one.csv", "--pixel-order", "rgb"), ("--pixel-order is 'rgb'", "channels_first")),
        (("--data", "one.csv", "--task", "ranking"), ("--task is 'ranking'", "regression")),
        (("--data", "digits", "--label-column", "first"), ("--label-column is first", "allowed with: csv")),
        (("--data", "bad.csv"), ("bad.csv: line 4, column pixel2 is 'x'; expected a number",)),
        (("--data", "tfds:/nowhere"), ("/nowhere: no such folder", "TensorFlow Datasets")),
    ],
)  # fmt: skip
def test_mistakes(here, capfd, flags, parts):
    write(here / "one.csv")
    write(here / "two" / "train.csv")
    write(here / "two" / "test.csv", labels=None)
    lines = (here / "one.csv").read_text().split("\n")
    lines[3] = ",".join([*lines[3].split(",")[:3], "x", *lines[3].split(",")[4:]])
    (here / "bad.csv").write_text("\n".join(lines))
    assert call(*flags) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    for part in parts:
        assert part in err, err
    assert not (here / "runs").exists()


def test_digits_experiment_is_what_it_says(here, capfd):
    from experiments import digits
    from experiments.training import main

    flags = ["--steps", "2", "--image-shape", "8,8,1", "--run-dir", "run"]
    assert main("digits", "", digits.PRESETS, digits.fill, default_data="digits", arguments=flags) == 0
    assert "on digits: 1,438 training images, 359 for validation" in capfd.readouterr().out
    assert len(predictions(here / "run")) == 359
    assert "tensorflow" not in sys.modules


@pytest.mark.slow
def test_digits_are_learnt(here):
    from experiments import digits
    from experiments.training import main

    assert main("digits", "", digits.PRESETS, digits.fill, default_data="digits", arguments=["--run-dir", "run"]) == 0
    test = np.loadtxt(files.ROOT / "data" / "test.csv", int, delimiter=",", skiprows=1)[:, 0]
    assert np.mean([int(label) for label in predictions(here / "run")] == test) > 0.98
