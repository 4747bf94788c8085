"""`experiments.report`: one page about run directories in any state."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from run_files import FINDINGS, write_run

from cnnjax.report import plots, rundirs
from experiments import report

ROOT = Path(__file__).resolve().parents[1]
NASTY = """<script>alert(1)<> 'q' "ü" $x_1$ \\frac{ 猫 &amp;"""
PARTS = ("environment.json", "metrics.csv", "steps.jsonl", "evaluation.json", "mistakes.npz", "filters.npz",
         "diagnosis.json")  # fmt: skip
COLUMNS = ("label", "predicted", "loss", "index")


class Read(HTMLParser):
    """Titles, texts and tags of a page."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.ids, self.text, self.outside = [], [], "", []
        self.feed(path.read_text("utf-8"))
        self.titles = re.findall(r"<h2>(.*?)</h2>", path.read_text("utf-8"))

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        given = dict(attrs)
        self.ids += [given["id"]] if "id" in given else []
        links = [given.get(name) or "" for name in ("src", "href", "xlink:href", "srcset", "data")]
        self.outside += [link for link in links if link and not link.startswith(("data:", "#"))]

    def handle_data(self, data):
        self.text += data


def call(*arguments):
    return report.main([str(one) for one in arguments])


def with_parts(run, folder, *names):
    """A copy of a run with these of its parts."""
    folder.mkdir()
    for name in ("config.json", *names):
        shutil.copy(run / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = write_run(tmp_path_factory.mktemp("runs") / NASTY, names=[f"<b>{NASTY} {i}" for i in range(3)], mistakes=3)
    assert call(folder) == 0
    return folder


def test_every_part_of_a_run_is_on_its_page(whole):
    page = Read(whole / "report.html")
    assert page.titles == ["Summary", "Diagnosis", "Curves", "Evaluation", "Worst mistakes",
                           "Filters of the first layer", "Options", "Environment", "Reproduce"]  # fmt: skip
    curves = {f"{name}-{kind}-0" for name in ("loss", "accuracy", "top5_accuracy") for kind in ("train", "val")}
    curves |= {f"{name}-train-0" for name in ("loss_by_step", "accuracy_by_step", "learning_rate", "throughput")}
    assert curves <= set(page.ids) and len(page.ids) == len(set(page.ids))
    assert page.tags.count("img") == 3 + 1
    for text in ("12 of 12", *FINDINGS[1].values(), "cpu:0 cpu, cpu:1 cpu", "0.10.2", "0123abcd" * 5, "batch_size"):
        assert text in page.text
    command = json.loads((whole / "environment.json").read_text())["command"]
    assert shlex.join(command) in page.text
    severities = re.findall(r'class="finding (\w+)"', (whole / "report.html").read_text())
    assert severities == ["error", "warning", "note"]


def test_a_page_needs_no_other_file_and_shows_names_as_text(whole):
    page = Read(whole / "report.html")
    assert page.outside == [] and {"script", "b", "link"}.isdisjoint(page.tags)
    assert page.text.count(NASTY) > 3 and f"<b>{NASTY} 2" in page.text
    assert {path.name for path in whole.iterdir() if path.name.startswith("report")} == {
        "report.html", "report_loss.png", "report_accuracy.png", "report_top5_accuracy.png",
        "report_loss_by_step.png", "report_accuracy_by_step.png", "report_learning_rate.png", "report_throughput.png",
        "report_confusion.png", "report_mistakes.png", "report_filters.png",
    }  # fmt: skip
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in whole.glob("report_*.png"))


def test_numbers_of_the_evaluation_and_the_mistakes(whole):
    page = Read(whole / "report.html")
    found = json.loads((whole / "evaluation.json").read_text())
    assert f"On the test set: images {found['images']}, loss 0.7, accuracy {found['accuracy']:.4g}." in page.text
    confusion_CC = np.array(found["confusion"])
    for count in confusion_CC[confusion_CC > 0]:
        assert re.search(rf">{count}</text>", (whole / "report.html").read_text())
    worst = min(found["per_class"], key=lambda one: one["accuracy"])
    table = page.text[page.text.index("Classes, the worst first") :]
    assert re.search(r"(\d)\s", table[table.index("<b>") :].replace(NASTY, ""))[1] == worst["class"][-1]
    with np.load(whole / "mistakes.npz") as file:
        for label, predicted, loss, index in zip(*(file[n] for n in COLUMNS), strict=True):
            names = found["classes"]
            said = f"true {names[label]}predicted {names[predicted]}loss {loss:.4g}, index {index}"
            assert said in page.text


def test_no_label_is_mathematical_source(tmp_path):
    """Losses over several decades are on a logarithmic axis."""
    values = np.geomspace(3, 0.002, 30)
    figure = plots.curves("loss", [plots.Curve(0, "train", np.arange(30), values)], "step", "loss", 1, log=True)
    text = plots.svg(figure, "loss", "losses")
    assert "mathdefault" not in text and ">0.01<" in text and ">1<" in text


def test_several_runs_side_by_side(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").mkdir()
    first = write_run(tmp_path / "x" / "a", classes=4, mistakes=20, lr=0.5)
    write_run(tmp_path / "_b", regression=True, channels=1, mistakes=2)
    before = set(first.iterdir())
    assert call(first, "_b") == 0
    assert set(first.iterdir()) == before
    page = Read(tmp_path / "report" / "report.html")
    assert {"loss-train-0", "loss-val-1", "accuracy-val-0", "mae-train-1", "r2-val-1"} <= set(page.ids)
    assert {"accuracy-val-1", "mae-train-0", "accuracy_by_step-train-1"}.isdisjoint(page.ids)
    assert page.tags.count("img") == 12 + 2 + 2
    options = page.text[page.text.index("These differ between the runs.") : page.text.index("All options")]
    assert re.findall(r"\w+\.?\d*", options)[5:] == ["a", "_b", "lr", "0.5", "0.05"]
    files = {path.name for path in (tmp_path / "report").iterdir()}
    assert {"report_confusion_1.png", "report_mistakes_2.png", "report_filters_2.png", "report_mae.png"} <= files
    assert "report_confusion_2.png" not in files
    source = (tmp_path / "report" / "report.html").read_text()
    colour = [re.search(rf'id="loss-train-{n}">\s*<path [^>]*stroke: (#\w+)', source)[1] for n in (0, 1)]
    assert colour[0] != colour[1]
    dashes = {kind: "stroke-dasharray" in re.search(rf'id="loss-{kind}-0">\s*<path [^>]*>', source)[0]
              for kind in ("train", "val")}  # fmt: skip
    assert dashes == {"train": False, "val": True}


def test_runs_of_the_same_name_are_told_apart(tmp_path):
    folders = [write_run(tmp_path / name / "run", epochs=1, steps=2, mistakes=1) for name in ("x", "y")]
    assert [run.name for run in rundirs.read_runs(folders)] == [str(folder) for folder in folders]


@pytest.mark.parametrize(
    ("kept", "titles"),
    [
        ((), []),
        (("environment.json",), ["Environment", "Reproduce"]),
        (("evaluation.json", "diagnosis.json"), ["Diagnosis", "Evaluation"]),
        (("mistakes.npz", "filters.npz"), ["Worst mistakes", "Filters of the first layer"]),
        (("metrics.csv",), ["Curves"]),
        (("steps.jsonl",), ["Curves"]),
    ],
)
def test_parts_that_are_missing_are_left_out_and_named(tmp_path, kept, titles, whole):
    folder = with_parts(whole, tmp_path / "run", *kept)
    assert call(folder) == 0
    page = Read(folder / "report.html")
    assert sorted(page.titles) == sorted(["Summary", "Options", "Not shown", *titles])
    assert re.findall(r"(\S+) is not there", page.text) == [name for name in PARTS if name not in kept]


@pytest.mark.parametrize("name", ["config.json", *PARTS])
def test_a_part_that_is_damaged_never_stops_the_page(tmp_path, name, whole):
    folder = with_parts(whole, tmp_path / "run", name)
    content = (folder / name).read_bytes()
    rng = np.random.default_rng(0)
    flipped = bytearray(content)
    for place in rng.integers(0, len(content), 5):
        flipped[place] ^= 0x15
    for damaged in (b"", content[: len(content) // 2], content[:-2], bytes(flipped), b"[1, 2]", b"{}", b"\xff\xfe\x00"):
        (folder / name).write_bytes(damaged)
        (run,) = rundirs.read_runs([folder])
        if damaged in (b"", content[: len(content) // 2]) and name not in ("metrics.csv", "steps.jsonl"):
            assert f"{name} cannot be read: " in " ".join(run.notes)
    assert call(folder) == 0
    assert (name in ("metrics.csv", "steps.jsonl")) or f"{name} cannot be read: " in Read(folder / "report.html").text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("evaluation.json", {"task": "classification", "classes": ["a", "b"], "confusion": [[1, 2], [3]]}),
        ("evaluation.json", {"task": "classification", "classes": ["a", "b"], "confusion": [[1]], "per_class": [3]}),
        ("evaluation.json", {"loss": "high", "classes": 3, "confusion": None}),
        ("diagnosis.json", [{"severity": "odd"}, {"severity": None, "check": 3}]),
        ("diagnosis.json", [1]),
        ("config.json", {"epochs": [1], "network": {"a": 1}}),
        ("environment.json", {"command": "python x", "packages": None, "devices": {"a": [1]}, "git_commit": 5}),
        ("environment.json", {"command": [1, None]}),
    ],
)
def test_json_of_another_shape_never_stops_the_page(tmp_path, whole, name, value):
    folder = with_parts(whole, tmp_path / "run", name)
    (folder / name).write_text(json.dumps(value))
    assert call(folder) == 0


def test_a_run_that_goes_on_and_one_that_broke(tmp_path):
    folder = write_run(tmp_path / "run", epochs=3, steps=60, classes=3, mistakes=1)
    metrics = (folder / "metrics.csv").read_text()
    rows = metrics.splitlines()
    (folder / "metrics.csv").write_text("\n".join(rows[:3]) + "\n" + rows[3][:70])
    steps = (folder / "steps.jsonl").read_text().splitlines()
    steps[10:12] = [
        '{"step": 11, "loss": NaN, "accuracy": 0.1, "learning_rate": 0.1}',
        '{"step": 12, "loss": Infinity}',
    ]
    (folder / "steps.jsonl").write_text("\n".join(steps[:40]) + '\n{"step": 41, "lo')
    (run,) = rundirs.read_runs([folder])
    assert (len(run.metrics), len(run.steps), run.notes) == (2, 40, ())
    assert call(folder) == 0
    text = Read(folder / "report.html").text
    assert "2 of 3" in text and "2 values are missing or no finite number" in text
    (folder / "metrics.csv").write_text(rows[0] + "\n")
    assert call(folder) == 0 and "loss-train-0" not in Read(folder / "report.html").ids


@pytest.mark.slow
def test_long_runs_are_thinned_and_small(tmp_path):
    folder = write_run(tmp_path / "run", epochs=400, steps=100_000, classes=100, side=224)
    assert call(folder) == 0
    page = Read(folder / "report.html")
    assert "Thinned from up to 100,000 points" in page.text and "loss_by_step-train-0" in page.ids
    assert (folder / "report.html").stat().st_size < 3_000_000


def test_thinning_keeps_means_and_extremes():
    x_T, y_T = np.arange(10_000.0), np.sin(np.arange(10_000) / 1000)
    y_T[1234], y_T[77] = 50, np.nan
    mean_x, mean, low, high = plots.thinned(x_T, y_T, 100)
    assert len(mean_x) == len(mean) == 100 and high.max() == 50 and high.argmax() == 12 and (low <= mean).all()
    assert mean_x[50] == pytest.approx(5050, abs=2) and mean[50] == pytest.approx(np.sin(5.05), abs=0.01)


def test_filters_have_zero_at_mid_grey():
    kernel_HWIO = np.zeros((2, 2, 3, 2))
    kernel_HWIO[0, 0, 0, 0], kernel_HWIO[1, 1, 2, 1] = 0.5, -0.25
    tiles = plots.filter_tiles(kernel_HWIO)
    assert tiles.shape == (2, 5, 4) and tiles[:, 2].max() == 0  # a transparent column between the two
    assert tiles[0, 0].tolist() == [255, 128, 128, 255] and tiles[1, 4].tolist() == [128, 128, 64, 255]
    assert plots.filter_tiles(np.full((3, 3, 1, 5), np.nan)).shape == (3, 19, 4)
    assert plots.filter_tiles(np.zeros((3, 3, 20, 100))).shape == (8 * 4 - 1, 64 * 4 - 1, 4)
    assert plots.filter_tiles(np.zeros((3, 3, 1, 40))).shape == (3 * 4 - 1, 16 * 4 - 1, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "RUN"),
        ("nothing", "RUN nothing: there is no such folder"),
        ("empty", "RUN empty: it has no config.json"),
        ("run run/", "RUN run is given twice"),
        ("run --out run/config.json", "--out run/config.json cannot be written: File exists"),
        ("run --ouf x", "--ouf"),
    ],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, capfd, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    write_run(tmp_path / "run", epochs=1, steps=2, mistakes=1)
    assert call(*arguments.split()) == 2
    shown = capfd.readouterr()
    assert shown.err.startswith("error: ") and shown.err.count("\n") == 1 and message in shown.err


def test_the_command_needs_no_jax_and_takes_names_that_are_no_text(tmp_path):
    folder = tmp_path / os.fsdecode(b"run \xff")
    write_run(folder, epochs=1, steps=2, mistakes=1, classes=2)
    code = "import sys; sys.modules['jax'] = None\nfrom experiments.report import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code, folder, "--out", tmp_path / "out"],
                          capture_output=True, text=True, cwd=ROOT, timeout=120)  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"page {tmp_path / 'out' / 'report.html'}\n"
    assert "Run run ?" in Read(tmp_path / "out" / "report.html").text
