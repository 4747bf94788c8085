"""A run that is stopped, killed or damaged at any moment, and then resumed, ends as if nothing had happened."""

import csv
import json
import os
import random
import shlex
import shutil
import signal
import subprocess

import commands
import numpy as np
import pytest
from commands import (
    NO_CACHE,
    ROOT,
    SMALL,
    assert_same_run,
    call,
    environment,
    run,
    start,
    steps_logged,
    wait_until,
)
from hypothesis import given
from hypothesis import strategies as st

from cnnjax import metrics
from cnnjax.config import TrainConfig, UsageError, parse_interval
from cnnjax.rundir import check_same_run, find_run, open_run

# All that a checkpoint must hold: batch norm, momentum, a moving average, random crops and flips; on two devices.
# 6 steps an epoch, with checkpoints within and at the end of epochs.
REFERENCE = (
    *("--data", "digits", "--network", "cifar10_slim", "--crop-to", 23, "--flip", "on", "--ema", 0.99),
    *("--validation-split", 0.5, "--batch-size", 128, "--epochs", 3, "--mesh", "data=2", "--seed", 7),
    *("--checkpoint-every", 4, "--keep", 2, "--log-every", 1),
)
STEPS = 18


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("reference") / "run"
    done = run(*REFERENCE, "--run-dir", folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert steps_logged(folder) == STEPS
    return folder


def resume(folder, *flags, **more):
    done = run("--run-dir", folder, "--resume", *flags, **more)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done


def kill(child):
    os.kill(child.pid, signal.SIGKILL)
    child.wait()


def signal_at(moment, number, folder, log):
    """Starts the reference, sends a signal as soon as ``moment`` is true, and returns exit code and output."""
    child = start(*REFERENCE, "--run-dir", folder, log=log)
    try:
        wait_until(moment, child, "the moment to stop it")
        os.kill(child.pid, number)
        child.wait(120)
    finally:
        if child.poll() is None:
            kill(child)
    return child.returncode, log.read_text()


# -- killed -----------------------------------------------------------------------------------------------------------


def killed_at_steps(folder, moments, tmp_path):
    """Runs to each of these steps in turn, is killed there, and resumes; then to the end."""
    flags = REFERENCE
    for step in moments:
        child = start(*flags, "--run-dir", folder, log=tmp_path / "log")
        try:
            wait_until(lambda step=step: steps_logged(folder) >= step, child, f"step {step}")
        finally:
            kill(child)
        flags = ("--resume",)
    resume(folder)


def test_killed_once(reference, tmp_path):
    step = random.randint(5, STEPS - 2)
    print(f"killed at step {step}")
    killed_at_steps(tmp_path / "run", [step], tmp_path)
    assert_same_run(reference, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [random.randrange(1000) for _ in range(3)], ids=lambda seed: "random")
def test_killed_again_and_again(reference, tmp_path, seed):
    moments = random.Random(seed).choices(range(1, STEPS), k=4)
    print(f"seed {seed}: killed at steps {moments}")
    killed_at_steps(tmp_path / "run", moments, tmp_path)
    assert_same_run(reference, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 3])
def test_killed_while_a_checkpoint_is_written(reference, tmp_path, number):
    folder = tmp_path / "run"
    child = start(*REFERENCE, "--run-dir", folder, log=tmp_path / "log")

    def half_written():
        names = os.listdir(folder / "checkpoints") if (folder / "checkpoints").exists() else []
        whole = [name for name in names if name.isdecimal()]
        return len(whole) >= min(number - 1, 2) and any("orbax-checkpoint-tmp" in name for name in names)

    try:
        for _ in range(50):
            wait_until(half_written, child, "half written checkpoint")
            os.kill(child.pid, signal.SIGSTOP)
            if half_written():
                break
            os.kill(child.pid, signal.SIGCONT)
        else:
            pytest.fail("no checkpoint could be caught half written")
    finally:
        kill(child)
    assert half_written()
    resume(folder)
    assert_same_run(reference, folder)
    assert not list((folder / "checkpoints").glob("*tmp*"))


@pytest.mark.slow
def test_killed_before_the_first_step(reference, tmp_path):
    folder = tmp_path / "run"
    child = start(*REFERENCE, "--run-dir", folder, log=tmp_path / "log")
    try:
        wait_until((folder / "config.json").exists, child, "config.json")
    finally:
        kill(child)
    assert steps_logged(folder) == 0
    resume(folder)
    assert_same_run(reference, folder)


def test_killed_between_row_and_checkpoint(reference, tmp_path):
    """The files of a run killed after the last row, of which the last checkpoint knows nothing."""
    folder = tmp_path / "run"
    shutil.copytree(reference, folder)
    shutil.rmtree(folder / "checkpoints" / str(STEPS))
    (folder / "predictions.csv").unlink()
    with (folder / "steps.jsonl").open("a") as file:
        file.write('{"step": 19, "lo')
    with (folder / "metrics.csv").open("a") as file:
        file.write("cifar10_slim,digits,jax,cp")
    resume(folder)
    assert_same_run(reference, folder)


# -- stopped ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_sigterm(reference, tmp_path):
    folder = tmp_path / "a run"
    code, output = signal_at(lambda: steps_logged(folder) >= 9, signal.SIGTERM, folder, tmp_path / "log")
    assert code == 0, output
    command = f"python -m experiments.cifar10 --run-dir {shlex.quote(str(folder))} --resume"
    *_, asked, last = output.splitlines()
    assert asked == "SIGTERM: saving a checkpoint, then stopping"
    newest = commands.checkpoints(folder)[-1]
    assert last == f"warning: stopped by SIGTERM at step {newest}, checkpoint saved; resume with: {command}"
    assert steps_logged(folder) == newest < STEPS
    assert not (folder / "predictions.csv").exists()
    words = shlex.split(command)
    assert words[0] == "python"
    resumed = subprocess.run(
        commands.arguments()[:1] + words[1:], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300
    )
    assert (resumed.returncode, resumed.stderr) == (0, "")
    assert f"resumed from step {newest} " in resumed.stdout
    assert_same_run(reference, folder)


@pytest.mark.slow
def test_sigint(reference, tmp_path):
    folder = tmp_path / "run"
    code, output = signal_at(lambda: steps_logged(folder) >= 3, signal.SIGINT, folder, tmp_path / "log")
    assert code == 130, output
    assert f"stopped by SIGINT at step {commands.checkpoints(folder)[-1]}, checkpoint saved; resume with: " in output
    assert "Traceback" not in output
    resume(folder, **NO_CACHE)
    assert_same_run(reference, folder)


@pytest.mark.slow
def test_sigterm_while_it_compiles(reference, tmp_path):
    folder = tmp_path / "run"
    # The step file is opened just before compilation starts.
    code, output = signal_at((folder / "steps.jsonl").exists, signal.SIGTERM, folder, tmp_path / "log")
    assert code == 0, output
    assert "stopped by SIGTERM at step 1, " in output
    resume(folder)
    assert_same_run(reference, folder)


@pytest.mark.slow
@pytest.mark.parametrize("epoch", [1, 3])
def test_sigterm_while_it_evaluates(reference, tmp_path, epoch):
    folder = tmp_path / "run"
    step = epoch * STEPS // 3
    code, output = signal_at(lambda: steps_logged(folder) >= step, signal.SIGTERM, folder, tmp_path / "log")
    assert code == 0, output
    assert f"stopped by SIGTERM at step {step}, " in output
    assert len(commands.rows(folder)) == epoch - 1
    resume(folder)
    assert_same_run(reference, folder)
    assert commands.checkpoints(folder) == commands.checkpoints(reference)


@pytest.mark.slow
def test_two_signals(reference, tmp_path):
    folder = tmp_path / "run"
    child = start(*REFERENCE, "--run-dir", folder, log=tmp_path / "log")
    wait_until(lambda: steps_logged(folder) >= 2, child, "step 2")
    child.terminate()
    child.terminate()
    assert child.wait(120) == 0
    resume(folder)
    assert_same_run(reference, folder)


@pytest.mark.slow
def test_second_process_is_refused(reference, tmp_path):
    folder = tmp_path / "run"
    child = start(*REFERENCE, "--run-dir", folder, log=tmp_path / "log")
    try:
        wait_until(lambda: steps_logged(folder) >= 1, child, "step 1")
        os.kill(child.pid, signal.SIGSTOP)
        before = commands.snapshot(folder)
        for how in ("--resume", "--overwrite"):
            done = run(*REFERENCE, "--run-dir", folder, how)
            assert (done.returncode, done.stdout) == (2, "")
            assert done.stderr == f"error: --run-dir {folder}: another process is writing this run\n"
            assert commands.snapshot(folder) == before
        os.kill(child.pid, signal.SIGCONT)
        assert child.wait(120) == 0
    finally:
        if child.poll() is None:
            kill(child)
    assert_same_run(reference, folder)


# -- resumed without need, or differently -----------------------------------------------------------------------------


CONSTANT = (*SMALL, "--schedule", "constant", "--log-every", 1)


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """A run of three epochs of three steps."""
    folder = tmp_path_factory.mktemp("long") / "run"
    assert call(*CONSTANT, "--epochs", 3, "--run-dir", folder) == 0
    return folder


def test_finished_run_stays_as_it_is(long, tmp_path, capfd):
    folder = tmp_path / "run"
    shutil.copytree(long, folder)
    before = commands.snapshot(folder)
    assert call("--run-dir", folder, "--resume") == 0
    assert "the run is complete already: 9 steps are done" in capfd.readouterr().out
    after = commands.snapshot(folder)
    assert before.keys() == after.keys()
    assert {name for name in before if before[name] != after[name]} <= {"run.log", "environment.json"}


def test_more_epochs(long, tmp_path):
    """With a constant rate a run may be continued at will, also from within an epoch."""
    short = tmp_path / "short"
    assert call(*CONSTANT, "--epochs", 2, "--steps", 4, "--run-dir", short) == 0
    assert [row["step"] for row in commands.rows(short)] == ["3", "4"]
    assert commands.checkpoints(short) == [3, 4]
    assert call("--run-dir", short, "--resume", "--epochs", 3, "--steps", 9) == 0
    assert commands.checkpoints(short) == [4, 6, 9]
    assert_same_run(long, short)


def test_fewer_steps_than_are_done(tmp_path, capfd):
    folder = tmp_path / "run"
    assert call(*SMALL, "--epochs", 2, "--steps", 5, "--run-dir", folder) == 0
    before = commands.rows(folder, times=False), commands.steps(folder), commands.checkpoints(folder)
    assert call("--run-dir", folder, "--resume", "--steps", 4) == 0
    assert "the run is complete already: 5 steps are done" in capfd.readouterr().out
    assert (commands.rows(folder, times=False), commands.steps(folder), commands.checkpoints(folder)) == before


@pytest.mark.slow
def test_other_mesh(tmp_path):
    """In float64, where rounding cannot pass for a mistake; in float32 a few steps carry it to the third digit."""
    flags = (*REFERENCE, "--x64", "--epochs", 1)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder, steps in ((whole, 6), (parts, 4)):
        done = run(*flags, "--steps", steps, "--run-dir", folder)
        assert (done.returncode, done.stderr) == (0, "")
    resume(parts, "--mesh", "data=1", "--steps", 6)
    assert [row["mesh"] for row in commands.rows(parts)] == ["data=1"]
    for one, other in zip(commands.steps(whole), commands.steps(parts), strict=True):
        assert one == pytest.approx(other, rel=1e-10)
    here, there = commands.state(parts), commands.state(whole)
    assert here.keys() == there.keys()
    for path in here:
        np.testing.assert_allclose(here[path], there[path], rtol=1e-7, atol=1e-10, err_msg=path)


def test_other_data_is_refused_and_the_options_stay(reference, tmp_path, capfd):
    folder = tmp_path / "run"
    shutil.copytree(reference, folder)
    write_idx(tmp_path / "idx", 40)
    before = commands.snapshot(folder)
    assert call("--run-dir", folder, "--resume", "--data", tmp_path / "idx") == 2
    err = capfd.readouterr().err
    assert err.startswith(f"error: --resume {folder}: the run trains on 719 images of digits, but --data gives 20 of ")
    after = commands.snapshot(folder)
    assert {name for name in before if before[name] != after[name]} == {"run.log"}


def write_idx(folder, count):
    folder.mkdir()
    rng = np.random.default_rng(0)
    for split in ("train", "t10k"):
        images = rng.integers(0, 256, (count, 32, 32, 3), np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        header = b"\x00\x00\x08" + bytes([images.ndim]) + np.array(images.shape, ">i4").tobytes()
        (folder / f"{split}-images-idx4-ubyte").write_bytes(header + images.tobytes())
        header = b"\x00\x00\x08\x01" + np.array(labels.shape, ">i4").tobytes()
        (folder / f"{split}-labels-idx1-ubyte").write_bytes(header + labels.tobytes())


# -- damaged ----------------------------------------------------------------------------------------------------------


def damaged(reference, folder):
    shutil.copytree(reference, folder)
    return folder / "checkpoints" / str(STEPS)


def test_damaged_checkpoint_is_named(reference, tmp_path, capfd):
    newest = damaged(reference, tmp_path / "run")
    for path in (newest / "state").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    assert call("--run-dir", tmp_path / "run", "--resume") == 2
    err = capfd.readouterr().err
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: {newest}: this checkpoint cannot be read (")
    assert line.endswith("delete its folder to continue from the one before")
    shutil.rmtree(newest)
    resume(tmp_path / "run")
    assert_same_run(reference, tmp_path / "run")


def test_damaged_rating_is_named(reference, tmp_path, capfd):
    newest = damaged(reference, tmp_path / "run")
    (newest / "metrics" / "metrics").write_text("")
    assert call("--run-dir", tmp_path / "run", "--resume") == 2
    err = capfd.readouterr().err
    assert err.startswith(f"error: {newest.parent}: a checkpoint in it cannot be read (") and err.count("\n") == 1


@pytest.mark.slow
def test_full_disk(reference, tmp_path):
    """The first checkpoint does not fit; with room again, the run goes on."""
    folder = tmp_path / "run"
    limited = ("bash", "-c", 'ulimit -f 16; exec "$@"', "bash", *commands.arguments(*REFERENCE, "--run-dir", folder))
    full = subprocess.run(limited, cwd=ROOT, env=environment(**NO_CACHE), capture_output=True, text=True, timeout=300)
    assert full.returncode == 2
    (error,) = [line for line in full.stderr.splitlines() if line.startswith("error: ")]  # TensorStore may print, too
    assert error.startswith(f"error: {folder / 'checkpoints'}: a checkpoint cannot be written (")
    assert error.endswith("); is the disk full?")
    assert error in (folder / "run.log").read_text()
    resume(folder)
    assert_same_run(reference, folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"epochs": 3, "colour": "red"}', '{"epochs": "three"}'])
def test_damaged_config_is_named(reference, tmp_path, capfd, text):
    folder = tmp_path / "run"
    shutil.copytree(reference, folder)
    (folder / "config.json").write_text(text)
    before = commands.snapshot(folder)
    assert call("--run-dir", folder, "--resume") == 2
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith(f"error: {folder / 'config.json'}: not the options of a run: ")
    assert commands.snapshot(folder) == before


def test_damaged_metrics_file_is_named(reference, tmp_path, capfd):
    folder = tmp_path / "run"
    shutil.copytree(reference, folder)
    (folder / "metrics.csv").write_text("epoch;loss\n1;2\n")
    assert call("--run-dir", folder, "--resume") == 2
    assert f"error: {folder / 'metrics.csv'}: the columns are epoch;loss; expected network," in capfd.readouterr().err
    assert (folder / "metrics.csv").read_text() == "epoch;loss\n1;2\n"


# -- parts ------------------------------------------------------------------------------------------------------------

ROW = dict.fromkeys(metrics.COLUMNS, 1) | {"mesh": "data=2,model=2", "val_loss": None}


def write_rows(path, epochs):
    file = metrics.MetricsFile(path, 0)
    for epoch in range(1, epochs + 1):
        file.write(ROW | {"epoch": epoch})
    file.close()


@given(epochs=st.integers(0, 4), done=st.integers(0, 5), cut=st.integers(0, 60))
def test_metrics_file_keeps_the_epochs_done(tmp_path_factory, epochs, done, cut):
    path = tmp_path_factory.mktemp("metrics") / "metrics.csv"
    write_rows(path, epochs)
    header, *rows = path.read_text().splitlines(keepends=True)
    # A killed process can cut the last row anywhere; then its epoch is not done.
    rows.append(f"net,digits,jax,cpu,data=1,jit,global,float32,0,{done + 1},7,0.5,0.5,0.5,0.5,0.1,1,1,1,123456\n"[:cut])
    path.write_text(header + "".join(rows))
    metrics.MetricsFile(path, done).close()
    assert path.read_text() == header + "".join(rows[: min(epochs, done)])
    with path.open(newline="") as file:
        assert [row["mesh"] for row in csv.DictReader(file)] == ["data=2,model=2"] * min(epochs, done)


@given(steps=st.integers(0, 5), done=st.integers(0, 6), half=st.integers(0, 40))
def test_steps_file_keeps_the_steps_done(tmp_path_factory, steps, done, half):
    path = tmp_path_factory.mktemp("steps") / "steps.jsonl"
    file = metrics.StepsFile(path, 0)
    for step in range(1, steps + 1):
        file.write(step=step, loss=1 / 3)
    file.close()
    whole = path.read_text().splitlines(keepends=True)
    last = json.dumps({"step": max(steps, done) + 1, "loss": 0.125})
    path.write_text("".join(whole) + last[:half])
    file = metrics.StepsFile(path, done)
    file.write(step=done + 1)
    file.close()
    assert path.read_text() == "".join(whole[:done]) + f'{{"step": {done + 1}}}\n'


def test_metrics_file_refuses_other_columns(tmp_path):
    (tmp_path / "metrics.csv").write_text("a,b\n")
    with pytest.raises(UsageError, match=r"metrics\.csv: the columns are a,b; expected network,"):
        metrics.MetricsFile(tmp_path / "metrics.csv", 1)


@given(number=st.integers(0, 10**9), unit=st.sampled_from(["", "step", "steps", "epoch", "epochs"]))
def test_interval(number, unit):
    assert parse_interval(f"{number}{unit}") == (number, "epochs" if unit.startswith("epoch") else "steps")


@given(
    st.text(max_size=10).filter(
        lambda text: not text.removesuffix("s").removesuffix("epoch").removesuffix("step").isdecimal()
    )
)
def test_no_interval(text):
    with pytest.raises(ValueError, match=r"--checkpoint-every is .*; allowed: a number of steps"):
        parse_interval(text)


def test_find_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda *_: "20180101-000000")
    path, saved = find_run("cifar10", TrainConfig())
    assert (str(path), saved) == ("runs/cifar10-20180101-000000", None)
    path.mkdir(parents=True)
    assert str(find_run("cifar10", TrainConfig())[0]) == "runs/cifar10-20180101-000000-2"
    # An empty folder is as good as none, and a folder in which a run only just began is a run without options.
    empty = tmp_path / "empty"
    empty.mkdir()
    assert find_run("cifar10", TrainConfig(run_dir=str(empty))) == (empty, None)
    open_run(empty, overwrite=False).close()
    assert find_run("cifar10", TrainConfig(run_dir=str(empty), resume=True)) == (empty, None)
    with pytest.raises(ValueError, match="holds a run already"):
        find_run("cifar10", TrainConfig(run_dir=str(empty)))
    (empty / "config.json").write_text(TrainConfig(seed=5).to_json())
    path, saved = find_run("cifar10", TrainConfig(run_dir=str(empty), resume=True))
    assert (path, saved) == (empty, TrainConfig(seed=5))
    assert find_run("cifar10", TrainConfig(run_dir=str(empty), overwrite=True)) == (empty, None)
    assert sorted(p.name for p in empty.iterdir()) == ["config.json", "run.log"]


def test_same_run():
    check_same_run("x", TrainConfig(epochs=5, mesh="data=2", data="y"), TrainConfig(epochs=3))
    with pytest.raises(
        ValueError, match=r"--resume x: --lr is 0\.2 but was 0\.1; --flip is on but was auto; a resumed"
    ):
        check_same_run("x", TrainConfig(lr=0.2, flip="on"), TrainConfig(lr=0.1))
    with pytest.raises(ValueError, match="--microbatches is 2 but was 1; --bn-scope is local but was global"):
        check_same_run("x", TrainConfig(microbatches=2, bn_scope="local"), TrainConfig())
