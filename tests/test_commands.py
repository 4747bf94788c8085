"""What a user sees of a command: its mistakes in one line, its help, and every file of a run."""

import csv
import dataclasses
import json
import os
import pty
import re
import shutil
import subprocess

import commands
import jax
import numpy as np
import pytest
from commands import ROOT, SMALL, call, run

from cnnjax.checkpoint import Checkpoints
from cnnjax.config import TrainConfig, flag
from cnnjax.metrics import COLUMNS

# -- mistakes ---------------------------------------------------------------------------------------------------------

MISTAKES = [
    ("--network cifar10_slimm", "--network", "'cifar10_slimm'", "nearest: cifar10_slim"),
    ("--batch-size 0", "--batch-size is 0", "allowed: 1 or more"),
    ("--batch-size abc", "--batch-size is 'abc'", "allowed: a whole number"),
    ("--batch-size=abc", "--batch-size is 'abc'", "allowed: a whole number"),
    ("--steps 1.5", "--steps is '1.5'", "allowed: a whole number"),
    ("--lr fast", "--lr is 'fast'", "allowed: a number"),
    ("--lr nan", "--lr is nan", "allowed: above 0"),
    ("--contrast 1", "--contrast is '1'", "allowed: two numbers"),
    ("--batch-size", "--batch-size", "Missing value"),
    ("--batch-sise 5", "--batch-sise", "perhaps you meant --batch-size"),
    ("stray", "stray", "Unrecognized"),
    ("--optimizer lion", "--optimizer is 'lion'", "allowed: sgd, momentum, nesterov, adam, adamw"),
    ("--strategy hope", "--strategy is 'hope'", "allowed: jit"),
    ("--preset fast", "--preset is 'fast'", "allowed: default, ancestor"),
    ("--checkpoint-every 2fortnights", "--checkpoint-every is '2fortnights'", "a number of steps, or of epochs"),
    ("--checkpoint-every -1", "--checkpoint-every is '-1'", "a number of steps, or of epochs"),
    ("--decay-rate 0", "--decay-rate is 0.0", "allowed: above 0"),
    ("--seed -1", "--seed is -1", "allowed: 0 to 4294967295"),
    ("--mesh data", "--mesh data", "such as data=4"),
    ("--mesh rows=2", "--mesh rows=2", "unknown axis 'rows'; allowed: data"),
    ("--mesh data=0", "--mesh data=0", "allowed: 1 or more, or -1"),
    ("--mesh data=99 --data digits", "--mesh data=99 needs 99 devices", "there are 8", "data=-1 takes all"),
    ("--data digits --crop-to 4", "--crop-to 4", "4x4x3", "at least 3 x 3 is needed"),
    ("--data digits --crop-to 99", "--crop-to is 99", "allowed: 1 to 32"),
    ("--data digits --classes 3", "--classes is 3", "allowed: 10 or more"),
    ("--data digits --validation-split 0.00001", "--validation-split is 1e-05", "at least one sample"),
    ("--data digits --epochs 2 --warmup-epochs 2", "--warmup-epochs is 2.0", "allowed: below --epochs, 2"),
    ("--data digits --optimizer adam", "--weight-decay is 0.0005", "--weight-decay-kind", "'adam' with 'loss'"),
    ("--data /nowhere", "--data /nowhere", "no such file or folder", "digits"),
    ("--data idx:", "--data idx:", "idx:PATH"),
    ("--resume", "--resume needs --run-dir"),
    ("--run-dir x --resume --overwrite", "--overwrite", "not together with --resume"),
    ("--x64 --dtype bfloat16", "--dtype is bfloat16", "float32 together with --x64"),
    ("--crop-to 12 --crop-padding 2", "--crop-padding is 2", "0 together with --crop-to"),
]


def assert_one_line(output, *parts: str) -> None:
    out, err = output
    assert out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and err.endswith("\n"), err
    for part in parts:
        assert part in err, err


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """A current folder in which nothing may appear."""
    jax.devices()  # a backend that runs gets no more devices
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "parts"), [(flags, parts) for flags, *parts in MISTAKES], ids=[m[0] for m in MISTAKES]
)
def test_mistake(alone, capfd, flags, parts):
    assert call(*flags.split(" ")) == 2
    assert_one_line(capfd.readouterr(), *parts)
    assert list(alone.iterdir()) == []


def test_mistake_in_the_variable(alone, capfd, monkeypatch):
    monkeypatch.setenv("CNNJAX_DATA", str(alone / "nowhere"))
    assert call() == 2
    assert_one_line(capfd.readouterr(), f"CNNJAX_DATA={alone / 'nowhere'}", "no such folder")
    assert list(alone.iterdir()) == []


def test_run_dir_where_nothing_can_be_written(alone, capfd):
    (alone / "file").write_text("mine")
    assert call(*SMALL, "--run-dir", alone / "file" / "run") == 2
    assert_one_line(capfd.readouterr(), f"--run-dir {alone / 'file' / 'run'} cannot be written", "Not a directory")
    assert commands.snapshot(alone) == {"file": b"mine"}


@pytest.mark.parametrize("flags", [(), ("--resume",), ("--overwrite",)])
@pytest.mark.parametrize("files", [("file",), ("dir/notes",), ("dir/run.log", "dir/notes"), ("dir/config.json",)])
def test_what_is_no_run_is_spared(alone, capfd, files, flags):
    for file in files:
        (alone / file).parent.mkdir(exist_ok=True)
        (alone / file).write_text("{}")
    path = alone / files[0].split("/")[0]
    before = commands.snapshot(alone)
    assert call(*SMALL, "--run-dir", path, *flags) == 2
    assert_one_line(capfd.readouterr(), f"--run-dir {path} exists and is not the folder of a run")
    assert commands.snapshot(alone) == before


def test_mistake_before_jax_in_a_process_of_its_own(tmp_path):
    (tmp_path / "jax.py").write_text("raise SystemExit('JAX was imported')")
    done = run("--batch-sise", "5", cwd=tmp_path, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert done.returncode == 2
    assert_one_line((done.stdout, done.stderr), "--batch-sise", "perhaps you meant --batch-size")


def test_help_names_every_flag_and_starts_no_backend(tmp_path):
    (tmp_path / "jax.py").write_text("raise SystemExit('JAX was imported')")
    done = run("--help", cwd=tmp_path, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert done.returncode == 0 and done.stderr == "", done
    given = set(re.findall(r"--[a-z0-9-]+", done.stdout))
    missing = {flag(field.name) for field in dataclasses.fields(TrainConfig)} - given
    assert not missing
    assert "python -m experiments.cifar10" in done.stdout and "ancestor: " in done.stdout


# -- a finished run ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Folder of a run on four fake devices, and what it printed."""
    folder = tmp_path_factory.mktemp("runs") / "a run é"
    flags = (*SMALL, "--epochs", 3, "--mesh", "data=4", "--log-every", 2, "--keep", 1, "--seed", 3)
    done = run(*flags, "--log-style", "tensorflow", "--run-dir", folder)
    assert done.returncode == 0, done.stderr
    return folder, done


def test_nothing_is_printed_that_is_not_meant(finished):
    folder, done = finished
    assert done.stderr == ""
    assert "\x1b" not in done.stdout and "\r" not in done.stdout  # not a terminal
    first, mesh, where, *rest = done.stdout.splitlines()
    assert "cnn2d_1layer_fullconnected_1layer on digits: 1,438 training images, 359 for validation" in first
    assert mesh == "mesh data=4: 4 fake CPU devices, since this host has no accelerator"
    assert where == f"run directory {folder}"
    epochs = [line for line in rest if line.startswith("epoch ")]
    assert [line.split()[1] for line in epochs] == ["1/3", "2/3", "3/3"]
    assert all(line.endswith("[digits]") and " images/s " in line for line in epochs)
    printed = [line for line in rest if line.startswith("step ")]
    for line, logged in zip(printed, commands.steps(folder), strict=True):
        expected = f"step {logged['step']}, loss = {logged['loss']:.6f}, Train accuracy = {logged['accuracy']:.4f}"
        assert line == expected
    assert len(rest) == len(epochs) + len(printed) + 2
    logged = [line.split(" ", 2)[2] for line in (folder / "run.log").read_text().splitlines()]
    assert logged == done.stdout.splitlines()


def test_metrics_of_a_run(finished):
    folder, _ = finished
    header = (folder / "metrics.csv").read_text().splitlines()[0]
    assert header == (
        "network,dataset,framework,backend,mesh,strategy,bn_scope,dtype,seed,epoch,step,loss,accuracy,val_loss,"
        "val_accuracy,learning_rate,compile_s,train_s,eval_s,images_per_s"
    )
    rows = commands.rows(folder)
    fixed = dict(
        network="cnn2d_1layer_fullconnected_1layer", dataset="digits", framework="jax", backend="cpu", mesh="data=4",
        strategy="jit", bn_scope="global", dtype="float32", seed="3",
    )  # fmt: skip
    assert all(row | fixed == row for row in rows)
    assert [(row["epoch"], row["step"]) for row in rows] == [("1", "3"), ("2", "6"), ("3", "9")]
    for row in rows:
        numbers = {name: float(row[name]) for name in COLUMNS[COLUMNS.index("loss") :]}
        assert all(np.isfinite(value) for value in numbers.values())
        assert 0 < numbers["accuracy"] < 1 and min(numbers["loss"], numbers["train_s"], numbers["eval_s"]) > 0
        assert numbers["images_per_s"] == pytest.approx(1438 / numbers["train_s"], rel=0.05)
    assert [float(row["compile_s"]) > 0 for row in rows] == [True, False, False]


def test_steps_of_a_run(finished):
    folder, _ = finished
    steps = commands.steps(folder)
    assert [line["step"] for line in steps] == [1, 2, 4, 6, 8]
    assert all(list(line) == ["step", "loss", "accuracy", "learning_rate"] for line in steps)
    cosine = [0.05 * (1 + np.cos(np.pi * (line["step"] - 1) / 9)) / 2 for line in steps]
    np.testing.assert_allclose([line["learning_rate"] for line in steps], cosine, rtol=1e-5)


def test_predictions_of_a_run(finished):
    folder, _ = finished
    with (folder / "predictions.csv").open(newline="") as file:
        header, *lines = csv.reader(file)
    assert header == ["ImageId", "Label"]
    assert [int(image) for image, _ in lines] == list(range(1, 360))
    with (ROOT / "data" / "test.csv").open(newline="") as file:
        labels = [row[0] for row in list(csv.reader(file))[1:]]
    hits = sum(predicted == label for (_, predicted), label in zip(lines, labels, strict=True))
    assert hits / len(labels) == float(commands.rows(folder)[-1]["val_accuracy"])


def test_config_and_environment_of_a_run(finished):
    folder, _ = finished
    text = (folder / "config.json").read_text()
    config = TrainConfig.from_json(text, "config.json")
    assert config.to_json() == text
    assert (config.seed, config.epochs, config.flip, config.crop_padding) == (3, 3, "off", 0)
    assert (config.run_dir, config.resume, config.overwrite) == (None, False, False)
    environment = json.loads((folder / "environment.json").read_text())
    assert list(environment) == [
        *("time", "command", "python", "platform", "cpu_count", "packages", "backend", "devices", "mesh"),
        *("processes", "data", "git_commit"),
    ]
    assert environment["backend"] == "cpu" and len(environment["devices"]) == 4 and environment["mesh"] == "data=4"
    assert environment["packages"]["jax"] == jax.__version__
    assert environment["data"].endswith("train.csv")
    assert environment["command"][1:3] == ["-m", "experiments.cifar10"]
    assert sorted(path.name for path in folder.iterdir()) == [
        *("checkpoints", "config.json", "diagnosis.json", "environment.json", "evaluation.json", "filters.npz"),
        *("metrics.csv", "mistakes.npz", "model.json", "predictions.csv", "run.log", "steps.jsonl"),
    ]


def test_newest_and_best_checkpoints_of_a_run(finished):
    folder, _ = finished
    best = max(commands.rows(folder), key=lambda row: (float(row["val_accuracy"]), int(row["step"])))
    assert commands.checkpoints(folder) == sorted({9, int(best["step"])})


@pytest.mark.parametrize("flags", [(), ("--seed", 4, "--resume"), ("--preset", "ancestor", "--resume")])
def test_a_run_is_not_changed_by_a_refusal(finished, capfd, flags):
    folder, _ = finished
    before = commands.snapshot(folder)
    assert call(*SMALL, "--run-dir", folder, *flags) == 2
    part = {"--seed": "--seed is 4 but was 3", "--preset": "--preset is ancestor but was default"}
    expected = part[flags[0]] if flags else "holds a run already; --resume continues it, --overwrite deletes it first"
    assert_one_line(capfd.readouterr(), str(folder), expected)
    assert commands.snapshot(folder) == before


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["--strategy pmap --mesh data=4", "--strategy shard_map --mesh fsdp=4"])
def test_whole_run_under_another_strategy(finished, tmp_path, flags):
    folder, _ = finished
    done = run(*SMALL, "--epochs", 3, "--log-every", 2, "--seed", 3, *flags.split(), "--run-dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    losses, expected = ([line["loss"] for line in commands.steps(path)] for path in (tmp_path / "run", folder))
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    predicted, expected = ((path / "predictions.csv").read_text().split() for path in (tmp_path / "run", folder))
    assert len(predicted) == len(expected)
    # Images between two classes may fall to either side by rounding.
    assert sum(one != other for one, other in zip(predicted, expected, strict=True)) <= 3


# -- the shape of output ----------------------------------------------------------------------------------------------


def test_fallback_is_announced_even_when_quiet(tmp_path):
    done = run(*SMALL[2:], "--steps", 1, "--quiet", "--run-dir", tmp_path / "run")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith("warning: CIFAR-10 was not found") and done.stderr.count("\n") == 1
    assert "training on the 1,797 digits shipped with cnnjax" in done.stderr and "--data PATH" in done.stderr
    assert [(row["dataset"], row["step"]) for row in commands.rows(tmp_path / "run")] == [("digits", "1")]
    assert "final test accuracy" in (tmp_path / "run" / "run.log").read_text()


@pytest.mark.slow
def test_progress_bar_on_a_terminal(tmp_path):
    master, slave = pty.openpty()
    environment = commands.environment(TERM="xterm-256color", COLUMNS="160", LINES="40")
    flags = (*SMALL, "--epochs", 20, "--run-dir", tmp_path / "run")
    with subprocess.Popen(
        commands.arguments(*flags), cwd=ROOT, env=environment, stdin=slave, stdout=slave, stderr=slave
    ) as child:
        os.close(slave)
        shown = b""
        while True:
            try:
                received = os.read(master, 65536)
            except OSError:  # the other end is closed
                break
            if not received:
                break
            shown += received
        os.close(master)
    assert child.returncode == 0, shown.decode()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode())
    bars = re.findall(r"epoch (\d+)/20 \S*━\S* +(\d+)/60 +loss \d+\.\d{4}  accuracy \d\.\d{4} \d:\d\d:\d\d left", text)
    assert bars and bars[-1] == ("20", "60"), text
    assert len(re.findall(r"epoch \d+/20  step \d+ .* images/s  \[digits\]", text)) == 20
    assert "Traceback" not in text and "\x1b[?25h" in shown.decode()  # the cursor is back


@pytest.mark.slow
def test_reader_of_the_output_goes_away(tmp_path):
    """As in ``python -m experiments.cifar10 | head -1``."""
    command = commands.arguments(*SMALL, "--epochs", 2, "--run-dir", tmp_path / "run")
    child = subprocess.Popen(
        command, cwd=ROOT, env=commands.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() != ""
    child.stdout.close()
    assert child.stderr.read() == ""
    assert child.wait(120) == 0
    child.stderr.close()
    assert len(commands.rows(tmp_path / "run")) == 2
    assert "final test accuracy" in (tmp_path / "run" / "run.log").read_text()


# -- numbers that are none --------------------------------------------------------------------------------------------

DIVERGES = ("--optimizer", "sgd", "--scaling", "none", "--weight-decay", "0", "--schedule", "constant")


def test_loss_is_no_number(tmp_path, capfd):
    folder = tmp_path / "run"
    assert call(*SMALL, *DIVERGES, "--lr", "1e30", "--run-dir", folder) == 3
    err = capfd.readouterr().err
    assert re.fullmatch(
        r"warning: stopped: the .* is (nan|inf) at step \d+ \(learning rate 1e\+30\); there is no .*\n", err
    )
    assert "there is no checkpoint yet" in err
    assert not (folder / "predictions.csv").exists()


def test_no_checkpoint_holds_what_is_no_number(tmp_path, capfd):
    """The update of step 1 overflows although its loss and gradients were finite; step 2 would be the first to tell."""
    folder = tmp_path / "run"
    assert call(*SMALL, *DIVERGES, "--lr", "3e38", "--checkpoint-every", 1, "--run-dir", folder) == 3
    assert "the largest parameter is inf at step 1 (learning rate 3e+38)" in capfd.readouterr().err
    assert commands.checkpoints(folder) == []
    assert commands.rows(folder) == []


def test_last_good_checkpoint_is_named(tmp_path, capfd):
    folder = tmp_path / "run"
    flags = (*SMALL, "--optimizer", "sgd", "--weight-decay", 0, "--checkpoint-every", 2)
    # The rate rises over the epochs, so that some steps are good.
    assert call(*flags, "--lr", "1e38", "--epochs", 3, "--warmup-epochs", 2.6, "--run-dir", folder) == 3
    err = capfd.readouterr().err
    newest = commands.checkpoints(folder)[-1]
    assert f"last good checkpoint: {folder / 'checkpoints' / str(newest)}\n" in err
    assert all(np.isfinite(leaf).all() for leaf in commands.state(folder).values())


# -- edges ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_batch_larger_than_the_data_set(tmp_path):
    folder = tmp_path / "run"
    flags = (*SMALL, "--batch-size", 2000, "--epochs", 2, "--eval-every", 5, "--checkpoint-every", 0)
    assert call(*flags, "--run-dir", folder) == 0
    first, last = commands.rows(folder)
    assert (first["step"], first["val_accuracy"], first["eval_s"]) == ("1", "", "")
    assert last["step"] == "2" and last["val_accuracy"] != ""
    assert commands.checkpoints(folder) == [2]


@pytest.mark.slow
def test_validation_images_are_not_the_test_images(tmp_path, capfd):
    folder = tmp_path / "run"
    assert call(*SMALL, "--epochs", 1, "--validation-split", 0.25, "--run-dir", folder) == 0
    output = capfd.readouterr().out
    assert "1,078 training images, 360 for validation" in output
    (row,) = commands.rows(folder)
    accuracy = re.search(r"final test accuracy (\S+), loss \S+ on 359 images", output)
    assert (float(row["val_accuracy"]) * 360) == pytest.approx(round(float(row["val_accuracy"]) * 360))
    assert len((folder / "predictions.csv").read_text().splitlines()) == 360
    assert accuracy is not None


def test_overwrite_starts_again(finished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished[0], folder)
    (folder / "report.html").write_text("old")
    assert call(*SMALL, "--epochs", 1, "--seed", 5, "--run-dir", folder, "--overwrite") == 0
    assert [(row["epoch"], row["seed"]) for row in commands.rows(folder)] == [("1", "5")]
    assert commands.checkpoints(folder) == [3]
    assert not (folder / "report.html").exists()
    assert (folder / "run.log").read_text().count("run directory") == 1


# -- checkpoints ------------------------------------------------------------------------------------------------------

STATE = {"w": np.arange(4.0, dtype=np.float32)}


def shards():
    return jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]), STATE)


def save(folder, rated, keep=2):
    checkpoints = Checkpoints(folder, keep)
    for step, accuracy in rated:
        checkpoints.save(
            step, jax.tree.map(lambda x, step=step: jax.numpy.asarray(x + step), STATE), {"s": step}, {}, accuracy
        )
    checkpoints.wait()
    return checkpoints


def test_newest_and_best_are_kept(tmp_path):
    checkpoints = save(tmp_path / "c", [(1, 0.1), (2, 0.9), (3, 0.5), (4, None), (5, 0.3), (6, None)])
    assert sorted(int(path.name) for path in (tmp_path / "c").iterdir()) == [2, 5, 6]
    assert (checkpoints.newest(), checkpoints.best()) == (6, 2)
    checkpoints.close()
    checkpoints = Checkpoints(tmp_path / "c", 2)
    assert (checkpoints.newest(), checkpoints.best()) == (6, 2)
    state, position = checkpoints.restore(2, jax.eval_shape(lambda: STATE), shards())
    np.testing.assert_array_equal(state["w"], STATE["w"] + 2)
    assert position == {"s": 2}
    checkpoints.close()


def test_rating_that_comes_later(tmp_path):
    checkpoints = save(tmp_path / "c", [(1, None), (1, 0.7), (1, 0.1), (2, None), (3, None), (4, None)])
    assert checkpoints.best() == 1
    assert sorted(int(path.name) for path in (tmp_path / "c").iterdir()) == [1, 3, 4]
    checkpoints.close()


def test_checkpoints_lose_their_name_before_their_files(tmp_path, monkeypatch):
    """A process that is killed while it deletes leaves nothing that looks like a checkpoint."""
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda *args, **kwargs: None)
        save(tmp_path / "c", [(1, None), (2, None), (3, None)], keep=1).close()
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["3", "discarded"]
    assert sorted(path.name for path in (tmp_path / "c" / "discarded").iterdir()) == ["1", "2"]
    Checkpoints(tmp_path / "c", 1).close()
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["3"]
