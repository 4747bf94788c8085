"""Several real processes on loopback: the numbers of one, and no hanging when one of them dies."""

import os
import resource
import shutil
import signal
import socket
import subprocess
import time

import numpy as np
import pytest
from commands import (
    ROOT,
    SMALL,
    arguments,
    assert_same_run,
    call,
    environment,
    run,
    start,
    steps,
    steps_logged,
    wait_until,
)

from cnnjax.distributed import detected

SHORT = (*SMALL, "--mesh", "data=4", "--batch-size", "100", "--log-every", "1", "--quiet")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_two(*flags, folder, logs):
    """Both processes of a run of two."""
    address = f"127.0.0.1:{free_port()}"
    together = ("--run-dir", folder, "--coordinator", address, "--num-processes", 2)
    logs.mkdir(exist_ok=True)
    return [start(*flags, *together, "--process-id", i, log=logs / f"{i}.log") for i in range(2)]


def finish(children, logs, seconds=240):
    try:
        codes = [child.wait(timeout=seconds) for child in children]
    finally:
        for child in children:
            child.kill()
    assert codes == [0, 0], "\n".join(path.read_text()[-2000:] for path in sorted(logs.iterdir()))


def assert_same_losses(one, other):
    losses, expected = ([line["loss"] for line in steps(folder)] for folder in (one, other))
    assert len(losses) == len(expected) > 0
    np.testing.assert_allclose(losses, expected, rtol=1e-9)


def test_two_processes_give_the_numbers_of_one(tmp_path):
    flags = (*SHORT, "--x64", "--steps", 5)
    finish(start_two(*flags, folder=tmp_path / "two", logs=tmp_path / "logs"), tmp_path / "logs")
    assert run(*flags, "--run-dir", tmp_path / "one").returncode == 0
    assert_same_losses(tmp_path / "two", tmp_path / "one")
    assert (tmp_path / "two" / "predictions.csv").read_text() == (tmp_path / "one" / "predictions.csv").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp=4", "data=2,model=2"])
def test_other_axes_span_processes(tmp_path, mesh):
    flags = (*SHORT, "--x64", "--steps", 5, "--mesh", mesh)
    finish(start_two(*flags, folder=tmp_path / "two", logs=tmp_path / "logs"), tmp_path / "logs")
    assert run(*flags, "--run-dir", tmp_path / "one").returncode == 0
    assert_same_losses(tmp_path / "two", tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_other_and_the_run_resumes_to_the_same_bits(tmp_path, victim):
    flags = (*SHORT, "--steps", 40, "--checkpoint-every", 5)
    finish(start_two(*flags, folder=tmp_path / "whole", logs=tmp_path / "a"), tmp_path / "a")
    folder, logs = tmp_path / "cut", tmp_path / "b"
    children = start_two(*flags, folder=folder, logs=logs)
    try:
        wait_until(lambda: steps_logged(folder) >= 12, children[0], "12 steps")
        children[victim].send_signal(signal.SIGKILL)
        killed = time.monotonic()
        assert children[1 - victim].wait(timeout=90) not in (0, None)
        assert time.monotonic() - killed < 60
    finally:
        for child in children:
            child.kill()
    said = (logs / f"{1 - victim}.log").read_text()
    if victim:
        assert "process 1" in said and "lost" in said and "resume" in said
    else:  # JAX's own client may see first that the coordinator is gone, and then ends the process with its words
        assert "coordinat" in said
    finish(start_two(*flags, "--resume", folder=folder, logs=tmp_path / "c"), tmp_path / "c")
    assert_same_run(folder, tmp_path / "whole")


@pytest.mark.slow
def test_a_process_whose_disk_is_full_ends_both_in_one_line(tmp_path):
    folder, logs = tmp_path / "run", tmp_path / "logs"
    children = start_two(*SHORT, "--steps", 4000, "--epochs", 400, "--checkpoint-every", 5, folder=folder, logs=logs)
    resource.prlimit(children[1].pid, resource.RLIMIT_FSIZE, (1024, 1024))  # no file of process 1 may be longer
    try:
        assert children[0].wait(timeout=120) == 2
        assert children[1].wait(timeout=60) != 0
    finally:
        for child in children:
            child.kill()
    said = (logs / "0.log").read_text()
    assert said.startswith("error: process 0 of 2: process 1 failed: ") and said.count("\n") == 1, said
    assert "a checkpoint cannot be written" in said and "disk full" in said


@pytest.mark.slow
def test_a_checkpoint_of_two_processes_continues_in_one(tmp_path):
    folder, flags = tmp_path / "run", (*SHORT, "--x64", "--schedule", "constant")
    finish(start_two(*flags, "--steps", 5, folder=folder, logs=tmp_path / "a"), tmp_path / "a")
    assert run(*flags, "--steps", 10, "--run-dir", folder, "--resume").returncode == 0
    assert run(*flags, "--steps", 10, "--run-dir", tmp_path / "one").returncode == 0
    assert_same_losses(folder, tmp_path / "one")


@pytest.mark.slow
def test_a_checkpoint_of_four_devices_continues_on_any_layout(tmp_path):
    """With batch norm, dropout, flips and momentum: the curve is that of a run that was never interrupted."""
    flags = ("--data", "digits", "--batch-size", 50, "--log-every", 1, "--quiet", "--x64", "--flip", "on")
    flags += ("--schedule", "constant", "--validation-split", 0.9)
    whole = tmp_path / "whole"
    assert run(*flags, "--mesh", "data=4", "--steps", 6, "--run-dir", whole).returncode == 0
    assert run(*flags, "--mesh", "data=4", "--steps", 3, "--run-dir", tmp_path / "half").returncode == 0
    for mesh in ("data=2,model=2", "data=1", "two processes"):
        folder = tmp_path / mesh
        shutil.copytree(tmp_path / "half", folder)
        if mesh == "two processes":
            finish(start_two("--steps", 6, "--resume", "--mesh", "data=4", folder=folder, logs=tmp_path / "logs"),
                   tmp_path / "logs")  # fmt: skip
        else:
            done = run("--run-dir", folder, "--resume", "--steps", 6, "--mesh", mesh)
            assert done.returncode == 0, done.stderr
        assert [line["step"] for line in steps(folder)] == [1, 2, 3, 4, 5, 6]
        assert_same_losses(folder, whole)


@pytest.mark.slow
def test_sigterm_to_one_process_stops_both_with_a_checkpoint(tmp_path):
    folder, logs = tmp_path / "run", tmp_path / "logs"
    children = start_two(*SHORT, "--steps", 4000, "--epochs", 400, folder=folder, logs=logs)
    wait_until(lambda: steps_logged(folder) >= 5, children[0], "5 steps")
    children[1].send_signal(signal.SIGTERM)
    finish(children, logs)
    assert "resume with" in (logs / "0.log").read_text()


@pytest.mark.slow
def test_open_mpi_starts_the_processes(tmp_path):
    if shutil.which("mpirun") is None:
        if os.environ.get("CNNJAX_STRICT") == "1":
            pytest.fail("mpirun is missing")
        pytest.skip("mpirun is missing")
    flags = (*SHORT, "--x64", "--steps", 5)
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    done = subprocess.run(
        [*mpirun, *arguments(*flags, "--run-dir", tmp_path / "two")],
        env=environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert run(*flags, "--run-dir", tmp_path / "one").returncode == 0
    assert_same_losses(tmp_path / "two", tmp_path / "one")


def test_the_sbatch_file_starts_and_resumes(tmp_path):
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text('#!/bin/sh\necho "$@"\n')
    srun.chmod(0o755)
    known = {"PATH": f"{srun.parent}:{os.environ['PATH']}", "SLURM_JOB_NAME": "mine"}
    command = ["bash", ROOT / "experiments" / "cluster.sbatch", "--epochs", "3"]
    expected = "python -m experiments.cifar10 --mesh data=-1 --run-dir runs/mine"
    for more in ("", " --resume"):
        done = subprocess.run(command, cwd=tmp_path, env=known, capture_output=True, text=True, timeout=60)
        assert (done.stdout, done.stderr) == (f"{expected}{more} --epochs 3\n", "")
        (tmp_path / "runs" / "mine").mkdir(parents=True, exist_ok=True)
        (tmp_path / "runs" / "mine" / "config.json").write_text("{}")


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--coordinator", "localhost:1234"], "--num-processes and --process-id missing"),
        (["--coordinator", "localhost", "--num-processes", "2", "--process-id", "0"], "allowed: HOST:PORT"),
        (["--coordinator", "localhost:1", "--num-processes", "2", "--process-id", "2"], "allowed: 0 to 1"),
        (["--coordinator", "127.0.0.1:1", "--num-processes", "3", "--process-id", "0"], "cannot share evenly"),
    ],
)
def test_mistakes_in_the_flags(flags, text, capfd):
    assert call(*SHORT, *flags) == 2
    err = capfd.readouterr().err
    assert text in err and err.startswith("error: ") and err.count("\n") == 1


def test_only_launchers_of_several_processes_are_heeded():
    slurm = {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "a", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    assert detected({}) is None
    assert detected(slurm | {"SLURM_NTASKS": "1"}) is None
    assert detected(slurm | {"SLURM_NTASKS": "2"}) == "SLURM"
    assert detected({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_MCA_orte_hnp_uri": "x"}) == "Open MPI"
    with pytest.raises(ValueError, match="--coordinator HOST:PORT"):
        detected({"OMPI_COMM_WORLD_SIZE": "2"})
