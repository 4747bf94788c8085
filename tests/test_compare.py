"""`experiments.compare`: rows, files and exit codes, with runners that need no other framework."""

import dataclasses
import json
import signal
import subprocess
import sys

import numpy as np
import pandas as pd
import psutil
import pytest
from commands import ROOT, environment, wait_until

from cnnjax import report
from cnnjax.compat import frameworks, parity
from cnnjax.compat.orchestrate import Result
from experiments import compare

SMALL = ("--network", "cnn2d_1layer_fullconnected_1layer", "--data", "digits", "--images", "100", "--batch-size", "40")


@pytest.fixture
def stand_ins(tmp_path, monkeypatch):
    """Frameworks that are cnnjax under another name, or break in some way."""
    jax = frameworks.FRAMEWORKS["jax"]
    folder = tmp_path / "runners"
    folder.mkdir()
    for file in frameworks.RUNNERS.glob("*.py"):
        (folder / file.name).write_text(file.read_text())
    (folder / "run_crash.py").write_text("import sys; sys.exit('error: no backend')")
    (folder / "run_hang.py").write_text("import time; time.sleep(600)")
    wrong = (folder / "run_jax.py").read_text().replace("batch_stats=jobs.filled(", "batch_stats=(lambda a, b: a)(")
    wrong = wrong.replace("lr=1.0", "lr=1.01")
    (folder / "run_wrong.py").write_text(wrong)
    table = {"jax": dataclasses.replace(jax, runner=str(folder / "run_jax.py"))}
    for name in ("crash", "hang", "wrong"):
        table[name] = frameworks.Framework(name, name, str(folder / f"run_{name}.py"))
    table["twin"] = dataclasses.replace(jax, name="twin")
    table["absent"] = frameworks.Framework("absent", "not there", "run_jax.py", modules=("no_such_module",))
    table["twice"] = dataclasses.replace(
        jax, name="twice", options={"mesh": "data=2", "strategy": "shard_map", "bn_scope": "local"},
        reference={"mesh": "data=2", "strategy": "pmap", "bn_scope": "local"},
    )  # fmt: skip
    monkeypatch.setattr(frameworks, "FRAMEWORKS", table)
    return tmp_path / "out"


def call(out, *flags):
    return compare.main([*SMALL, "--run-dir", str(out), *flags])


@pytest.mark.slow
def test_rows_files_and_exit_code_when_some_fail(stand_ins, capfd):
    code = call(stand_ins, "--frameworks", "crash,twin,hang", "--timeout", "15", "--epochs", "2")
    printed = capfd.readouterr().out
    assert code == 1
    assert "crash: failed: no backend" in printed and "hang: failed: ended after 15 s, its time limit" in printed
    table = report.pd.read_csv(stand_ins / "comparison.csv", index_col="framework")
    assert table["status"].to_dict() == {"jax": "ok", "crash": "failed", "twin": "ok", "hang": "failed"}
    assert table.loc["jax", "loss"] == table.loc["twin", "loss"]
    names = {path.name for path in (stand_ins / "results").iterdir()}
    network = "cnn2d_1layer_fullconnected_1layer"
    assert names == {f"{network}_{name}{kind}.csv" for name in ("jax", "twin") for kind in ("", "_predictions")}
    curves = report.read_results(stand_ins / "results" / f"{network}_twin.csv")
    assert isinstance(curves, report.Curves) and len(curves.table) == 2
    assert isinstance(
        report.read_results(stand_ins / "results" / f"{network}_twin_predictions.csv"), report.Predictions
    )
    text = (stand_ins / "result.txt").read_text()
    assert "crash" in text and "Agreement" in text and text.strip() in printed
    assert "no backend" in (stand_ins / "results.log").read_text()
    page = (stand_ins / "report.html").read_text()
    assert all(f"<h2>{title}</h2>" in page for title in ("Results", "Loss by step", "Divergence", "Speed", "Agreement"))
    plots = {path.name for path in (stand_ins / "plots").iterdir()}
    assert plots == {"loss_by_step.png", "divergence.png", "speed.png"}
    assert json.loads((stand_ins / "config.json").read_text())["epochs"] == 2


@pytest.mark.slow
def test_parity_tells_the_same_from_the_wrong(stand_ins, capfd):
    assert call(stand_ins, "--parity", "--steps", "3", "--x64", "--frameworks", "twin,wrong,twice") == 1
    table = report.pd.read_csv(stand_ins / "parity.csv", index_col="framework")
    assert (table.loc["twin", "verdict"], table.loc["twice", "verdict"]) == ("same", "same")
    assert table.loc["wrong", "verdict"].startswith("beyond: first_update, losses")
    assert table.loc["wrong", "first_update"] == pytest.approx(0.01, rel=1e-6)
    assert table["against"].dropna().to_dict() == {"twin": "jax", "wrong": "jax", "twice": "jax-data2-pmap-local"}
    assert table.loc["limit", "first_loss"] == 1e-9
    assert "Largest relative differences from cnnjax." in capfd.readouterr().out


@pytest.mark.slow
def test_parity_in_float32_allows_for_the_rounding_of_cnnjax_itself(stand_ins):
    assert call(stand_ins, "--parity", "--steps", "3", "--frameworks", "twin,wrong") == 1
    table = report.pd.read_csv(stand_ins / "parity.csv", index_col="framework")
    own = table.loc[["jax", "jax-nudged1", "jax-nudged2", "jax-nudged3"]]
    assert set(own["verdict"]) == {"rounding"} and own["first_update"].between(1e-8, 1e-3).all()
    assert own["first_update"].nunique() == 4
    assert table.loc["limit", "first_update"] == max(1e-4, 3 * own["first_update"].max())
    assert table.loc["twin", "verdict"] == "same" and table.loc["wrong", "verdict"].startswith("beyond: first_update")


@pytest.mark.slow
def test_what_was_asked_for_by_name_must_be_there(stand_ins, monkeypatch, capfd):
    for name in ("crash", "hang", "wrong", "twin", "twice"):
        del frameworks.FRAMEWORKS[name]
    named, everything = (call(stand_ins.with_name(name), "--frameworks", name) for name in ("absent", "all"))
    assert (named, everything) == (1, 0)
    assert capfd.readouterr().out.count("absent: missing: not installed: no_such_module") == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--frameworks lasange", "--frameworks: 'lasange' is unknown; nearest: lasagne; allowed: all, jax"),
        ("--network nothing", "--network: "),
        ("--data digits --images 9999", "--images is 9999; allowed: 1 to 1438"),
        ("--epochs 0", "--epochs is 0; allowed: 1 or more"),
        ("--timeout 0", "--timeout is 0.0; allowed: above 0"),
        ("--truth x.csv", "--truth goes together with --csv"),
        ("--csv nothing.csv", "--csv nothing.csv: No such file or directory"),
        ("--csv", "--csv is empty; allowed: one file or more"),
        ("--csv a.csv a.csv", "--csv has a.csv twice"),
        ("--csv a.csv --parity", "--csv compares files that are there"),
        ("--mesh data=x", "--mesh data=x: "),
        ("--data digits --images 64", "--batch-size is 128; allowed: 1 to 64, the training images"),
        ("--frameworks all,jax", "allowed: all by itself, or names of jax"),
        ("--frameworks torch_ddp:replicas=2:replicas=4", "torch_ddp:replicas=2:replicas=4 has replicas twice"),
        ("--optimizer lion", "--optimizer is 'lion'; allowed: sgd, momentum, nesterov, adam"),
        ("--data digits --run-dir .", "--run-dir . exists; a comparison never overwrites one"),
    ],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, capfd, flags, message):
    monkeypatch.chdir(tmp_path)
    assert compare.main(flags.split()) == 2
    shown = capfd.readouterr()
    assert shown.err.startswith("error: ") and shown.err.count("\n") == 1 and message in shown.err
    assert list(tmp_path.iterdir()) == []


def test_sigterm_ends_the_process_of_the_framework_too(tmp_path):
    flags = ["--data", "digits", "--epochs", "1000", "--frameworks", "jax", "--run-dir", str(tmp_path / "out")]
    flags += ["--network", "cnn2d_1layer_fullconnected_1layer"]
    command = [sys.executable, "-m", "experiments.compare", *flags]
    with subprocess.Popen(command, cwd=ROOT, env=environment(), start_new_session=True) as child:
        log = tmp_path / "out" / "jax" / "runner.log"
        wait_until(log.exists, child, "process of the framework")
        wait_until(lambda: psutil.Process(child.pid).children(), child, "process of the framework")
        (runner,) = psutil.Process(child.pid).children()
        child.terminate()
        assert child.wait(60) == 128 + signal.SIGTERM
    runner.wait(10)
    assert not runner.is_running()


def test_without_test_images_parity_says_nothing_of_predictions(tmp_path):
    steps = pd.DataFrame({"step": [1, 2], "loss": [2.0, 1.5], "ms": [1.0, 1.0]})
    results = []
    for name in ("jax", "twin"):
        folder = tmp_path / name
        folder.mkdir()
        steps.to_csv(folder / "steps.csv", index=False)
        for file in ("first_weights", "final_weights"):
            np.savez(folder / f"{file}.npz", **{"dense/kernel": np.full((2, 2), 0.5)})
        results.append(Result(name, "ok", "", folder))
    found = parity.compare(results[1], results[0], {"dense/kernel": np.ones((2, 2))}, "sgd", 0.1)
    assert dataclasses.astuple(found) == (0, 0, 0, 0, 0)


def test_a_truth_of_other_images_is_said(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text("ImageId,Label\n0,3\n1,4\n")
    (tmp_path / "truth.csv").write_text("label\n4\n5\n")
    (tmp_path / "curve.csv").write_text("epoch,loss\n0,1\n")
    assert compare.main(["--csv", "a.csv", "--truth", "truth.csv", "--run-dir", "out"]) == 0
    assert "Of the 2 images of a and the 2 of the truth, 1 are the same." in capfd.readouterr().out
    assert compare.main(["--csv", "curve.csv", "--truth", "truth.csv"]) == 2
    assert "--csv has curves alone" in capfd.readouterr().err


def test_files_of_others_are_compared(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keras.csv").write_text("epoch,acc,loss\n0,0.5,1.5\n1,0.75,0.5\n")
    (tmp_path / "a.csv").write_text("ImageId,Label\n1,3\n2,4\n")
    (tmp_path / "b.csv").write_text("ImageId,Label\n1,3\n2,5\n")
    (tmp_path / "truth.csv").write_text("label\n3\n5\n")
    code = compare.main(["--csv", "keras.csv", "a.csv", "b.csv", "--truth", "truth.csv", "--run-dir", "out"])
    assert code == 0
    lines = [line.split() for line in capfd.readouterr().out.splitlines()]
    assert ["a", "1", "0.5", "0.5"] in lines and ["b", "0.5", "1", "1"] in lines
    assert ["keras", "2", "0.5", "0.75", "0.75"] in lines
    assert {"report.html", "result.txt", "results.log", "plots"} == {path.name for path in (tmp_path / "out").iterdir()}
