"""`cnnjax.report`: old results are read as they are, and a page needs no other file."""

import re
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from cnnjax import report

# As Keras 1 and 2, Keras 3, and cnnjax write their curves.
OLD = "epoch,acc,loss,val_acc,val_loss\n0,0.61,1.2775,0.93,0.2207\n1,0.98,0.0501,0.99,0.0223\n"
NEW = "epoch,accuracy,loss,val_accuracy,val_loss\n0,0.61,1.2775,0.93,0.2207\n1,0.98,0.0501,0.99,0.0223\n"
OURS = "network,epoch,loss,accuracy,val_loss,val_accuracy\nx,1,1.2775,0.61,0.2207,0.93\nx,2,0.0501,0.98,0.0223,0.99\n"


@pytest.mark.parametrize("text", [OLD, NEW, OURS, OLD.replace("\n", "\r\n"), NEW.rstrip()])
def test_curves_of_any_age_are_the_same(tmp_path, text):
    (tmp_path / "net_keras.csv").write_text(text, newline="")
    found = report.read_results(tmp_path / "net_keras.csv")
    assert isinstance(found, report.Curves) and found.name == "net_keras"
    expected = {"epoch": [1, 2], "loss": [1.2775, 0.0501], "accuracy": [0.61, 0.98], "val_loss": [0.2207, 0.0223],
                "val_accuracy": [0.93, 0.99]}  # fmt: skip
    assert {name: found.table[name].tolist() for name in found.table} == expected
    row = report.curve_summary([found]).loc["net_keras"]
    assert (row["epochs"], row["val_loss"], row["best_val_accuracy"]) == (2, 0.0223, 0.99)


def test_an_epoch_that_broke_off_leaves_a_gap(tmp_path):
    (tmp_path / "a.csv").write_text(OLD + "2,0.99,,,\n")
    table = report.read_results(tmp_path / "a.csv").table
    assert len(table) == 3 and np.isnan(table["loss"].iloc[-1])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "1 rows of a, b; expected ImageId and Label, or some of loss, accuracy"),
        ("loss\n", "0 rows of loss"),
        ("", "cannot be read as CSV"),
        ("ImageId,Label\n1,3\n1,4\n", "must be there once for every image"),
        ("ImageId,Label\n1,\n", "must be there once for every image"),
        ("epoch,acc,loss\n0,0.9,1.5,7,8\n", "row 2 has 5 cells; the header has 3"),
        ("epoch,acc,loss\n0,0.9,1.5\n1,0.6\n", "row 3 has 2 cells; the header has 3"),
        ("epoch,acc\n0,0.9\nepoch,acc\n0,0.9\n", "row 3, column acc"),
        ("epoch,acc\n0,abc\n", "row 2, column acc"),
        ("epoch,acc\n0,0.5\n1,0.6\n0,0.5\n", "epoch 0 comes again in row 4"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path, text, message):
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(ValueError, match=re.escape(f"--csv {tmp_path / 'x.csv'}: ")) as caught:
        report.read_results(tmp_path / "x.csv")
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_agreement_by_hand(tmp_path):
    files = {"a": "ImageId,Label\n1,3\n2,5\n3,7\n4,1\n", "b": "ImageId,Label\n2,5\n1,3\n3,8\n4,0\n",
             "c": 'imageid,label\n"1","3"\n"2","5.0"\n'}  # fmt: skip
    predictions = {}
    for name, text in files.items():
        (tmp_path / f"{name}.csv").write_text(text)
        predictions[name] = report.read_results(tmp_path / f"{name}.csv").labels
    (tmp_path / "truth.csv").write_text("label,pixel0\n3,0\n5,0\n7,9\n0,1\n")
    matrix = report.agreement(predictions, report.read_truth(tmp_path / "truth.csv"))
    assert matrix.loc["a"].tolist() == [1, 0.5, 1, 0.75]
    assert matrix.loc["b"].tolist() == [0.5, 1, 1, 0.75]
    assert matrix.loc["c"].tolist() == [1, 1, 1, 1]
    with pytest.raises(ValueError, match="a and z have no image in common"):
        report.agreement({"a": predictions["a"], "z": pd.Series(["1"], index=[99])})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("label\n3\n\n", None),
        ("ImageId,label\n1,3\n1,4\n", "must be there once"),
        ("ImageId,label\n1,3\n2,\n", "must be there once"),
        ("", "cannot be read as CSV"),
    ],
)
def test_damaged_truth_is_refused_by_name(tmp_path, text, message):
    file = tmp_path / "truth.csv"
    file.write_text(text)
    if message is None:
        assert report.read_truth(file).to_dict() == {1: "3"}
        return
    with pytest.raises(ValueError, match=re.escape(f"--truth {file}: ") + ".*" + message):
        report.read_truth(file)


def test_names_that_mean_the_same_and_cells_without_a_number(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("epoch,acc,accuracy,val_sparse_categorical_accuracy,loss\n0,0.5,0.9,0.4,nan\n1,0.5,0.8,,1\n")
    table = report.read_results(file).table
    assert table["accuracy"].tolist() == [0.9, 0.8] and table["val_accuracy"].iloc[0] == 0.4
    assert table["loss"].isna().tolist() == [True, False]
    (tmp_path / "b.csv").write_text("ImageId,Label\na.png,03\nb.png,4.0\n")
    assert report.read_results(tmp_path / "b.csv").labels.to_dict() == {"a.png": "3", "b.png": "4"}


def test_truth_needs_a_label(tmp_path):
    (tmp_path / "truth.csv").write_text("pixel0,pixel1\n0,0\n")
    with pytest.raises(
        ValueError, match=r"--truth .*truth.csv: its columns are pixel0, pixel1; expected one named label"
    ):
        report.read_truth(tmp_path / "truth.csv")


def test_a_page_stands_alone_and_shows_text_as_text():
    lines = {"<b>": (np.arange(3), np.array([1.0, 0.0, 0.5]))}
    figure = report.lines_plot(lines, "step", "loss", log=True)
    page = report.page(
        "a & b", [report.Section("<script>", "1 < 2", pd.DataFrame({"x": [0.5]}, index=["<i>"]), figure)]
    )
    assert page.startswith("<!doctype html>") and page.rstrip().endswith("</html>")
    assert set(re.findall(r'(?:src|href)="([^"]{,20})', page)) == {"data:image/png;base6"}
    assert "&lt;script&gt;" in page and "<script" not in page and "&lt;i&gt;" in page and "1 &lt; 2" in page
    assert report.png(report.bars_plot({"a": 3.0}, "images/s")).startswith(b"\x89PNG")


def test_reading_results_imports_no_jax():
    code = "import sys; sys.modules['jax'] = None\nimport cnnjax.report"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
