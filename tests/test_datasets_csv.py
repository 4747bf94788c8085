"""CSV files as people have them: each is read rightly, or refused with the place or the flag that is missing."""

import csv as python_csv
import gzip
import os
import shlex
import time
import tracemalloc
from pathlib import Path

import dataset_files as files
import hypothesis
import numpy as np
import pandas as pd
import pytest
from hypothesis import strategies as st

from cnnjax.datasets import ReadOptions, load
from cnnjax.datasets.csv import detect, read
from cnnjax.datasets.csv_columns import choose_label
from cnnjax.datasets.csv_form import look
from cnnjax.datasets.pixels import Extent, guess_order, possible_shapes, square_shape

# Twelve images of 3x3 pixels. The first and the last pixel change, as they do not in digits with a margin.
COUNT = 12
IMAGES = files.random_images(COUNT, 0, (9,)).astype(int)
IMAGES[0, :2] = 0, 255
LABELS = [0, 1, 2, 1] * 3
PIXELS = [f"pixel{i}" for i in range(9)]
COLOURS = files.random_images(COUNT, 1, (2, 2, 3))


def text(
    images=IMAGES, labels=LABELS, *, header=True, place="first", name="label", sep=",", end="\n", final=True, form=str
):
    """A file; ``place`` is where the label goes: first, last, none or a position."""
    rows = [[form(value) for value in image] for image in np.asarray(images).reshape(len(images), -1).tolist()]
    names = [f"pixel{i}" for i in range(len(rows[0]))]
    at = {"first": 0, "last": len(rows[0])}.get(place, place)
    if place != "none":
        for row, label in zip(rows, labels, strict=True):
            row.insert(at, str(label))
        names.insert(at, name)
    lines = [sep.join(row) for row in ([names, *rows] if header else rows)]
    return end.join(lines) + (end if final else "")


def lines_with(line: int, old: str, new: str, source: str | None = None) -> str:
    """The usual file with something else in one line, counted from 1."""
    lines = (source or text()).split("\n")
    assert old in lines[line - 1], lines[line - 1]
    lines[line - 1] = lines[line - 1].replace(old, new, 1)
    return "\n".join(lines)


def smooth(planes: bool) -> np.ndarray:
    """Images 8x8 in three colours that change slowly; a row of numbers each."""
    y, x = np.mgrid[0:8, 0:8]
    shifts = np.arange(COUNT)[:, None, None]
    colours = [
        np.uint8(128 + 60 * np.sin((x + y) / 4 + shifts)),
        np.uint8(20 + 8 * x + 0 * shifts),
        np.uint8(9 * y + shifts),
    ]
    images_NHWC = np.stack([np.broadcast_to(c, (COUNT, 8, 8)) for c in colours], -1)
    return (images_NHWC.transpose(0, 3, 1, 2) if planes else images_NHWC).reshape(COUNT, -1)


def quoted(source: str) -> str:
    return "\n".join(",".join(f'"{cell}"' for cell in line.split(",")) for line in source.splitlines())


TEN = np.vstack([IMAGES % 17] * 2)
TEN[0, :3] = 16, 0, 1
UNIT = np.round(IMAGES / 255, 6)
SORTED = sorted(LABELS)
MARGIN = np.where(np.arange(9) % 8 == 0, 0, IMAGES)
NAMES = [("cat", "a dog", "NA")[label] for label in LABELS]
VALUES = [label + 0.25 for label in LABELS]
COMMAS = text(UNIT, VALUES, header=False, sep=";").replace(".", ",")
EXACT = {"images": IMAGES, "labels": LABELS, "names": ("0", "1", "2")}
SMOOTH = smooth(False).reshape(COUNT, 8, 8, 3)

# id: (content, options, what is expected beside EXACT)
READ = {
    "header, label first": (text(), {}, {}),
    "header, label last": (text(place="last"), {}, {}),
    "header, label in the middle": (text(place=4, name="Target"), {}, {}),
    "header, label y": (text(place="last", name="y"), {}, {}),
    "header, one odd name": (text(name="number of the digit"), {}, {}),
    "header, name given": (text(place=3, name="kind"), {"label_column": "kind"}, {}),
    "header, name given in other letters": (text(place=3, name="Kind"), {"label_column": "kind"}, {}),
    "header of numbers": (",".join(map(str, range(10))) + "\n" + text(MARGIN, header=False), {}, {"images": MARGIN}),
    "header label,0,1,2": ("label," + ",".join(map(str, range(9))) + "\n" + text(header=False), {}, {}),
    "header with an index": (
        "\n".join(f"{i or ''},{line}" if not i else f"{i - 1},{line}" for i, line in enumerate(text().splitlines())),
        {},
        {},
    ),
    "header with ids": (
        "\n".join(f"{i if i else 'id'},{line}" for i, line in enumerate(text().splitlines())),
        {},
        {},
    ),
    "names with quotes and spaces": (lines_with(1, "label", '" label"'), {}, {}),
    "no header, label first": (text(MARGIN, header=False), {}, {"images": MARGIN}),
    "no header, label last": (text(MARGIN, header=False, place="last"), {}, {"images": MARGIN}),
    "no header, sorted by class": (
        text(MARGIN, SORTED, header=False, place="last"), {}, {"images": MARGIN, "labels": SORTED}),
    "no header, first given": (text(header=False), {"label_column": "first"}, {}),
    "no header, last given": (text(header=False, place="last"), {"label_column": "last"}, {}),
    "no header, labels count up": (text(header=False), {}, {}),
    "no header, label last counts up": (text(header=False, place="last"), {}, {}),
    "no header, floats": (text(UNIT, header=False, place="last"), {}, {}),
    "no header, texts": (text(labels=NAMES, header=False, place="last"), {}, {"names": ("NA", "a dog", "cat"),
                                                                          "labels": [2 - label for label in LABELS]}),
    "comment": ("# made by hand, 2016\n" + text(), {}, {}),
    "comments and empty lines": ("#\n\n# label, pixels\n" + text(MARGIN, header=False), {}, {"images": MARGIN}),
    "empty lines between and at the end": (text().replace("\n", "\n\n") + "\n \n\n", {}, {}),
    "CRLF": (text(end="\r\n"), {}, {}),
    "CRLF written twice": (text(end="\r\r\n"), {}, {}),
    "CR": (text(end="\r"), {}, {}),
    "no newline at the end": (text(final=False), {}, {}),
    "no newline at the end, CRLF": (text(end="\r\n", final=False), {}, {}),
    "byte order mark": ("\ufeff" + text(), {}, {}),
    "byte order mark, no header": ("\ufeff" + text(header=False), {}, {}),
    "quotes": (quoted(text()), {}, {}),
    "quotes, no header": (quoted(text(header=False)), {"label_column": "first"}, {}),
    "semicolons": (text(sep=";"), {}, {}),
    "tabs": (text(sep="\t"), {}, {}),
    "bars": (text(sep="|"), {}, {}),
    "spaces after commas": (text(sep=", "), {}, {}),
    "spaces": (text(sep="  ", header=False), {"label_column": "first"}, {}),
    "spaces, as NumPy saves": (
        text(header=False, sep=" ", form=lambda v: f"{v:.18e}"), {"label_column": "first"}, {}),
    "decimal commas": (COMMAS, {"label_column": "first"}, {"labels": VALUES, "names": ()}),
    "decimal commas, classes": (
        text(UNIT, NAMES, sep=";").replace(".", ","), {}, {"names": ("NA", "a dog", "cat"),
                                                           "labels": [2 - label for label in LABELS]}),
    "gzip": (gzip.compress(text().encode()), {}, {}),
    "gzip, no header": (gzip.compress(text(MARGIN, header=False).encode()), {}, {"images": MARGIN}),
    "labels from 1": (text(labels=[label + 1 for label in LABELS]), {}, {"names": ("1", "2", "3")}),
    "labels with gaps": (text(labels=[label * 5 for label in LABELS]), {}, {"names": ("0", "5", "10")}),
    "labels as floats": (text(labels=[f"{label}.0" for label in LABELS]), {}, {}),
    "labels below 0": (text(labels=[label - 1 for label in LABELS]), {}, {"names": ("-1", "0", "1")}),
    "letters and digits": (text(labels=["0A9"[label] for label in LABELS]), {},
                           {"names": ("0", "9", "A"), "labels": [[0, 2, 1][label] for label in LABELS]}),
    "text of one row, as asked": (
        lines_with(2, "0,", "zero,"), {"task": "classification"},
        {"names": ("0", "1", "2", "zero"), "labels": [3, *LABELS[1:]]}),
    "real labels": (text(labels=VALUES), {}, {"labels": VALUES, "names": ()}),
    "numbers as asked": (text(), {"task": "regression"}, {"names": ()}),
    "classes as asked": (text(labels=VALUES), {"task": "classification"}, {"names": ("0.25", "1.25", "2.25")}),
    "0 to 16": (text(TEN, LABELS * 2), {}, {"images": TEN * 15, "labels": LABELS * 2}),
    "0 to 16 as floats": (text(TEN, LABELS * 2, form=lambda v: f"{v:.1f}"), {},
                          {"images": TEN * 15, "labels": LABELS * 2}),
    "0 to 15": (text(IMAGES // 16), {}, {"images": IMAGES // 16 * 17}),
    "0 and 1": (text(IMAGES // 128), {}, {"images": IMAGES // 128 * 255}),
    "0 to 1": (text(UNIT), {}, {}),
    "-1 to 1": (text(np.round(IMAGES / 127.5 - 1, 6)), {}, {}),
    "0 to 255 as floats": (text(form=lambda v: f"{v}.0"), {}, {}),
    "0 to 255 with fractions": (text(np.minimum(IMAGES + 0.25, 255)), {}, {}),
    "true numbers in the first rows": (text(np.vstack([IMAGES[:6] * 0, UNIT[:6]])), {},
                                       {"images": np.vstack([IMAGES[:6] * 0, IMAGES[:6]])}),
    "not square": (text(IMAGES[:, :8]), {"image_shape": (2, 4, 1)}, {"images": IMAGES[:, :8].reshape(COUNT, 2, 4, 1)}),
    "label first, shape given": (text(MARGIN, header=False), {"image_shape": (3, 3, 1)}, {"images": MARGIN}),
    "colours together": (text(smooth(False)), {}, {"images": SMOOTH}),
    "colours apart": (text(smooth(True)), {}, {"images": SMOOTH}),
    "colours together, given": (text(COLOURS), {"pixel_order": "channels_last"}, {"images": COLOURS}),
    "colours apart, given": (
        text(COLOURS.transpose(0, 3, 1, 2)), {"pixel_order": "channels_first"}, {"images": COLOURS}),
}  # fmt: skip

# id: (content, options, message)
REFUSED = {
    "empty": ("", {}, r"has no rows and begins with nothing \(it is empty\); expected a row of numbers"),
    "a comment only": ("# nothing\n", {}, "has no rows and begins with '# nothing"),
    "header only": (text().split("\n")[0], {}, "has a header and no rows"),
    "web page": ("<!DOCTYPE html>\n<html>\n", {}, "expected a row of numbers for each image"),
    "no text": (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", {}, "is no UTF-8 text"),
    "null bytes": ("a,b\0,c\n", {}, "is no text"),
    "UTF-16": (text().encode("utf-16"), {}, "is no UTF-8 text"),
    "Latin-1 label in a late row": (text(labels=NAMES * 3, images=np.vstack([IMAGES] * 3)).replace("NA", "Ä").encode(
        "latin-1"), {}, "is no UTF-8 text"),
    "gzip cut short": (gzip.compress(text().encode())[:-9], {}, "damaged or cut short"),
    "one value a line": ("label\n1\n2\n", {}, "line 2 begins with '1'; expected a row of numbers"),
    "empty cell": (
        lines_with(3, f"{IMAGES[1, 4]},", ","), {}, "line 3, column pixel4 is an empty cell; expected a number"),
    "empty cell, no header": (
        lines_with(3, f"{IMAGES[2, 4]},", ",", text(MARGIN, header=False)), {}, "line 3, column 6 is an empty cell"),
    "empty cell after a comment and empty lines": (
        "# x\n\n" + lines_with(3, f"{IMAGES[1, 4]},", ","), {}, "line 5, column pixel4 is an empty cell"),
    "empty cell, CRLF": (
        lines_with(3, f"{IMAGES[1, 4]},", ",").replace("\n", "\r\n"), {}, "line 3, column pixel4 is an empty cell"),
    "empty label": (lines_with(5, "1,", ","), {}, "line 5, column label is empty; expected a label"),
    "word": (lines_with(13, f",{IMAGES[11, 8]}", ",none"), {}, "line 13, column pixel8 is 'none'; expected a number"),
    "true": (lines_with(13, f",{IMAGES[11, 8]}", ",True"), {}, "line 13, column pixel8 is 'True'; expected a number"),
    "nan": (lines_with(2, ",0,", ",nan,"), {}, "line 2, column pixel0 is 'nan'; expected a number"),
    "infinite": (lines_with(2, ",0,", ",inf,"), {}, "line 2, column pixel0 is 'inf'; expected a number"),
    "short row": (lines_with(4, f",{IMAGES[2, 8]}", ""), {}, "line 4 has 9 values; expected 10"),
    "long row": (lines_with(4, f",{IMAGES[2, 8]}", ",1,2"), {}, "line 4 has 11 values; expected 10"),
    "first row too long": (
        lines_with(2, ",0,", ",0,0,"), {}, "line 2 has 11 values; expected 10, as the header in line 1"),
    "first row too short": (lines_with(2, ",0,", ","), {}, "line 2 has 9 values; expected 10, as the header in line 1"),
    "separator at the end of each line": (
        text(end=",\n"), {}, "line 2 ends with an empty cell, behind a last ','; expected a value in each"),
    "column of texts": (
        "\n".join(f"file,{line}" if not i else f"{i}.png,{line}" for i, line in enumerate(text(place=3).splitlines())),
        {}, r"has 11 columns, of which column file begins with '1\.png'"),
    "quote that does not end": (lines_with(4, ",", ',"'), {}, "line 4"),
    "below 0": (lines_with(2, ",0,", ",-1,"), {}, "line 2, column pixel0 is -1; expected whole numbers 0 to 255"),
    "above 255": (
        lines_with(2, ",0,", ",256,"), {}, "line 2, column pixel0 is 256; .* but pixels here are whole numbers"),
    "very large": (lines_with(2, ",0,", f",{10**30},"), {}, "line 2, column pixel0 is 1000000"),
    "standardized": (
        text(np.round((IMAGES - 128) / 60, 3)), {}, "column pixel.* is -.*or -1 to 1, but pixels here are num"),
    "numbers to 3": (text(np.round(IMAGES / 90, 3)), {}, "column pixel.*; expected whole numbers 0 to 255"),
    "no labels": (text(place="none"), {}, "has no labels to train on .*--label-column first or last"),
    "no labels, no header": (
        text(place="none", header=False), {}, r"has no labels to train on \(9 columns are just an"),
    "label column none": (text(place="none"), {"label_column": "none"}, "has no labels to train on"),
    "first row too long, no header": (
        text(TEN, LABELS * 2, header=False).replace("\n", ",1\n", 1), {},
        "line 1 has 11 values; expected 10, as the next"),
    "either end counts up": (
        text(np.hstack([IMAGES[:, :8], np.array(LABELS)[:, None]]), header=False), {},
        r"could be column 1 \(3 values: 0, 1, 2\) or column 10 \(3 values: 0, 1, 2\); expected --label-column first"),
    "both sizes": (
        text(files.random_images(COUNT, 2, (48,)), header=False), {},
        "49 columns are 7,7,1 without a label, or 4,4,3 with"),
    "not square": (
        text(IMAGES[:, :8]), {}, "8 values an image make no square image: give --image-shape, such as 2,4,1"),
    "other shape": (text(), {"image_shape": (28, 28, 1)}, "--image-shape is 28,28,1, which is 784 values, but .*3,3,1"),
    "unknown name": (
        text(), {"label_column": "kind"}, "--label-column is 'kind', but .* has the columns label, pixel0"),
    "a name, no header": (text(header=False), {"label_column": "kind"}, "has no header; allowed: first, last, none"),
    "two label columns": (lines_with(1, "pixel3", "target"), {}, "the columns label, target could be the label"),
    "one class": (text(labels=[7] * COUNT), {}, "line 2, column label is 7, as all 12 labels for training are"),
    "one odd label": (
        lines_with(7, "1,", "x,"), {}, "line 7, column label is 'x'; expected a number, as the others are"),
    "text for regression": (
        lines_with(7, "1,", "x,"), {"task": "regression"}, "line 7, column label is 'x'; expected a num"),
    "file names": (
        text(np.vstack([IMAGES] * 10), [f"{i}.png" for i in range(120)]), {},
        "120 different labels .* names of images"),
    "many whole numbers": (
        text(np.vstack([IMAGES] * 10), range(1000, 1120)), {}, "120 different labels .* --task regression would"),
    "noise in colours": (text(COLOURS), {}, "expected --pixel-order channels_last or channels_first"),
}  # fmt: skip


def write(folder: Path, content: str | bytes, name: str = "x.csv") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder / name


def check(splits, images, labels, names) -> None:
    train = splits.train
    images_NHWC = np.asarray(images)
    images_NHWC = images_NHWC if images_NHWC.ndim == 4 else images_NHWC.reshape(len(images_NHWC), 3, 3, 1)
    assert train.images_NHWC.dtype == np.uint8
    np.testing.assert_array_equal(train.images_NHWC, images_NHWC)
    assert train.labels_N.tolist() == list(labels)
    assert train.class_names == names
    assert train.task == ("classification" if names else "regression")


@pytest.mark.parametrize("case", READ)
def test_read(case, tmp_path):
    content, options, expected = READ[case]
    path = write(tmp_path, content)
    found = load(str(path), options=ReadOptions(**options))
    assert found.notes == ()
    check(found.splits, **EXACT | expected)
    # What was found, given back as flags, finds the same without looking for evidence.
    flags = shlex.split(found.splits.said[-1].partition(" read as with ")[2])
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    shape = tuple(map(int, given.pop("--image-shape").split(",")))
    again = {name.removeprefix("--").replace("-", "_"): value for name, value in given.items()}
    check(read(path, ReadOptions(image_shape=shape, **again)), **EXACT | expected)


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case, tmp_path):
    content, options, message = REFUSED[case]
    path = write(tmp_path, content)
    with pytest.raises(ValueError, match=message) as error:
        load(str(path), options=ReadOptions(**options))
    assert "\n" not in str(error.value) and len(str(error.value)) < 600
    assert str(path) in str(error.value)


def test_there_are_many_shapes():
    assert len(READ) + len(REFUSED) >= 100


@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=60)
def test_round_trip(data, tmp_path_factory):
    """Whatever is written with the label named or pointed to comes back."""
    draw = data.draw
    side, channels = draw(st.integers(2, 4)), draw(st.sampled_from([1, 3]))
    count = draw(st.integers(2, 6))
    images_NHWC = draw(
        st.integers(0, 2**32 - 1).map(lambda seed: files.random_images(count, seed, (side, side, channels)))
    )
    images_NHWC[0, 0, 0, 0] = 255  # so that the range can be told
    labels = draw(
        st.lists(st.sampled_from([-3, 0, 1, 7]), min_size=count, max_size=count).filter(lambda x: len(set(x)) > 1)
    )
    header, end = draw(st.booleans()), draw(st.sampled_from(["\n", "\r\n"]))
    place = draw(st.sampled_from(["first", "last"]))
    sep = draw(st.sampled_from([",", ";", "\t", "|", " "]))
    order = draw(st.sampled_from(["channels_last", "channels_first"]))
    divisor, digits = draw(st.sampled_from([(1, 0), (255, 6), (255, 17)]))
    stored = images_NHWC if order == "channels_last" else images_NHWC.transpose(0, 3, 1, 2)
    content = text(stored, labels, header=header, place=place, sep=sep, end=end, final=draw(st.booleans()),
                   form=lambda v: f"{v / divisor:.{digits}f}")  # fmt: skip
    raw = gzip.compress(content.encode()) if draw(st.booleans()) else content.encode()
    path = write(tmp_path_factory.mktemp("x"), raw)
    splits = read(path, ReadOptions((side, side, channels), order, place))
    check(splits, images_NHWC, [sorted(set(labels)).index(label) for label in labels],
          tuple(str(label) for label in sorted(set(labels))))  # fmt: skip


@hypothesis.given(
    row=st.integers(0, COUNT - 1), column=st.integers(0, 8), cell=st.text(max_size=6), header=st.booleans()
)
def test_any_odd_cell_is_named_or_a_number(tmp_path_factory, row, column, cell, header):
    """A cell is replaced by any text: it is read as Python's number for it, or the message names its place."""
    hypothesis.assume(not set(cell) & set('\r\n",\0') and "_" not in cell and cell.isascii() and "\\" not in cell)
    rows = [[str(v) for v in image] for image in IMAGES.tolist()]
    rows[row][column] = cell
    lines = [",".join([str(label), *cells]) for label, cells in zip(LABELS, rows, strict=True)]
    path = write(tmp_path_factory.mktemp("x"), "\n".join([",".join(["label", *PIXELS])] * header + lines))
    try:
        value = float(cell)
    except ValueError:
        value = float("nan")
    if 0 <= value <= 255:
        images = IMAGES.copy()
        images[row, column] = np.rint(value)
        check(read(path, ReadOptions(label_column="first")), **EXACT | {"images": images})
    else:
        with pytest.raises(ValueError, match=rf"line {row + 1 + header}, column (pixel{column}|{column + 2}) is "):
            read(path, ReadOptions(label_column="first"))


# -- folders ----------------------------------------------------------------------------------------------------------


def test_folder(tmp_path):
    write(tmp_path, text(), "mnist_train.csv")
    write(tmp_path, text(IMAGES[:3], [2, 9, 0], place="last"), "mnist_test.csv")
    splits = load(str(tmp_path)).splits
    assert splits.train.class_names == splits.test.class_names == ("0", "1", "2", "9")
    np.testing.assert_array_equal(splits.test.images_NHWC.reshape(3, 9), IMAGES[:3])
    assert splits.test.labels_N.tolist() == [2, 3, 0]
    assert splits.test.source == str(tmp_path / "mnist_test.csv")
    assert splits.train.name == tmp_path.name.lower()


@pytest.mark.parametrize("header", [True, False])
@pytest.mark.parametrize("place", ["first", "last"])
def test_folder_with_a_test_file_without_labels(tmp_path, header, place):
    write(tmp_path, text(MARGIN, header=header, place=place), "train.csv")
    write(tmp_path, text(MARGIN[:3], place="none", header=header), "test.csv")
    found = load(str(tmp_path))
    assert found.splits.test is None
    np.testing.assert_array_equal(found.splits.unlabelled_NHWC.reshape(3, 9), MARGIN[:3])
    assert found.notes == (
        f"{tmp_path / 'test.csv'} has no labels: its images can only be predicted, so they are no test set",
    )
    write(tmp_path, text(MARGIN[:2], [0, 1], header=header, place=place), "val.csv.gz")
    found = load(str(tmp_path))
    assert found.splits.test.labels_N.tolist() == [0, 1]
    assert len(found.splits.unlabelled_NHWC) == 3


def test_folder_without_headers(tmp_path):
    write(tmp_path, text(MARGIN, header=False, place="last"), "train.tsv")
    write(tmp_path, text(MARGIN[:2], [0, 1], header=False, place="last"), "test.tsv")
    assert load(str(tmp_path)).splits.test.labels_N.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("test", "message"),
    [
        (text(UNIT), "test.csv: pixels are numbers 0.* to 1, but those of train.csv are whole numbers 0 to 255"),
        (text(place="none").replace("pixel0,pixel1", "pixel1,pixel0"), "has pixel1 where train.csv has pixel0"),
        (text(IMAGES[:, :4]), "has 5 columns; expected 10, or 9 without labels, as train.csv has images of 3,3,1"),
        (lines_with(2, ",0,", ",300,"), "test.csv: line 2, column pixel0 is 300; expected 0 to 255, as in train.csv"),
        (lines_with(1, "label", "kind"), "has 0 columns label; expected one, as in train.csv"),
        (lines_with(4, "2,", ","), "test.csv: line 4, column label is empty"),
    ],
)
def test_folder_whose_parts_differ(tmp_path, test, message):
    write(tmp_path, text(), "train.csv")
    write(tmp_path, test, "test.csv")
    with pytest.raises(ValueError, match=message):
        load(str(tmp_path))


def test_one_scale_for_all_parts(tmp_path):
    """A test set in which no pixel is white is not made brighter than the training set."""
    write(tmp_path, text(UNIT), "train.csv")
    dark = np.zeros((2, 9))
    dark[0, 0] = 0.2
    write(tmp_path, text(dark, [0, 1]), "test.csv")
    assert load(str(tmp_path)).splits.test.images_NHWC.max() == 51
    write(tmp_path, text(TEN[:COUNT]), "train.csv")
    write(tmp_path, text(TEN[:2] // 2, [0, 1]), "test.csv")
    assert load(str(tmp_path)).splits.test.images_NHWC.max() == 8 * 15


def test_folder_that_is_not_clear(tmp_path):
    write(tmp_path, text(), "train.csv")
    write(tmp_path, text(), "other_train.csv")
    with pytest.raises(ValueError, match=r"holds other_train\.csv and train\.csv; expected one train\.csv"):
        load(str(tmp_path))


# -- evidence, words, cost --------------------------------------------------------------------------------------------


def test_names_and_what_is_said(tmp_path):
    path = write(tmp_path, text(np.minimum(IMAGES + 0.25, 255)), "My Digits.csv.gz")
    assert detect(path) and detect(tmp_path / "x") is False
    splits = read(path)
    assert splits.train.name == "my digits"
    line, flags = splits.said
    for part in (
        "12 images of 3x3x1",
        "kept and rounded, by at most 0.25 of 255",
        "column label",
        "3 classes (0, 1, 2)",
    ):
        assert part in line
    assert flags == f"{path} read as with --image-shape 3,3,1 --label-column label --task classification"
    assert splits.read_as == {"image_shape": "3,3,1", "label_column": "label", "task": "classification"}


@pytest.mark.parametrize(
    ("first", "last", "inside", "chosen"),
    [
        (["1", "2"], ["0", "0"], Extent(0, 255, True), 0),
        (["0", "0"], ["a", "b"], Extent(0, 255, True), 1),
        (["0.5", "0.1"], ["3", "1"], Extent(0, 1, False), 1),
        (["0", "255"], ["300", "1"], Extent(0, 255, True), 1),
        (["0.5", "1.5"], ["9", "0"], Extent(0, 255, True), 0),
        (["0", "1"] * 3, ["0", "3"] * 3, Extent(0, 255, True), 0),
        (["0", "1"] * 3, ["0.3", "1"] * 3, Extent(0, 1, False), 0),
    ],
)
def test_evidence(tmp_path, first, last, inside, chosen):
    form = look(write(tmp_path, text(header=False)))
    assert choose_label(form, [np.array(first, object), np.array(last, object)], inside)[0] == chosen


def test_shapes():
    assert [square_shape(n) for n in (784, 1024, 3072, 64, 12, 785, 600, 1, 3)] == [
        (28, 28, 1), (32, 32, 1), (32, 32, 3), (8, 8, 1), (2, 2, 3), None, None, None, None]  # fmt: skip
    assert (20, 30, 1) in possible_shapes(600) and (24, 25, 1) in possible_shapes(600)
    assert all(h * w * c == 1800 for h, w, c in possible_shapes(1800))


def test_late_faults_are_found_across_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("cnnjax.datasets.csv._VALUES", 20)
    images = np.vstack([IMAGES] * 3)
    check(read(write(tmp_path, text(images, LABELS * 3))), images, LABELS * 3, ("0", "1", "2"))
    both = np.vstack([IMAGES * 0, UNIT])
    check(read(write(tmp_path, text(both, LABELS * 2))), np.vstack([IMAGES * 0, IMAGES]), LABELS * 2, ("0", "1", "2"))
    bad = lines_with(30, ",", ",x", text(images, LABELS * 3))
    with pytest.raises(ValueError, match=r"line 30, column pixel0 is 'x\d+'; expected a number"):
        read(write(tmp_path, bad))


def by_hand(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(python_csv.reader(file))


SHARED = Path(files._GIVEN).parent / "csv" if files._GIVEN else Path("absent")


@pytest.mark.realdata
@pytest.mark.parametrize("name", ["header_label_first.csv", "no_header_label_last_floats.csv"])
def test_files_as_people_have_them(name):
    """Runs where a folder ``csv`` with these two lies beside the folder in $CNNJAX_DATA, or in it."""
    path = next((p / name for p in (SHARED, Path(files._GIVEN) / "csv") if (p / name).is_file()), None)
    if path is None:
        stop = pytest.fail if os.environ.get("CNNJAX_STRICT") == "1" else pytest.skip
        stop(f"there is no {name} beside or in CNNJAX_DATA={files._GIVEN!r}")
    rows = by_hand(path)
    if name.startswith("header"):
        pixels = [[int(cell) for cell in row[1:]] for row in rows[1:]]
        labels = [row[0] for row in rows[1:]]
    else:
        pixels = [[round(float(cell) * 255) for cell in row[:-1]] for row in rows]
        labels = [row[-1] for row in rows]
    train = load(str(path)).splits.train
    assert [train.class_names[label] for label in train.labels_N] == labels
    np.testing.assert_array_equal(train.images_NHWC, np.array(pixels).reshape(-1, 28, 28, 1))


@pytest.mark.slow
def test_time_and_memory(tmp_path):
    """42,000 x 785: at most twice the time of pandas alone; beyond pandas' memory at most three times the pixels'."""
    images = files.random_images(4200, 0, (784,))
    images[images < 200] = 0
    block = text(images, [i % 10 for i in range(4200)])
    header, _, rest = block.partition("\n")
    path = write(tmp_path, header + "\n" + rest * 10)

    def measure(function):
        start = time.process_time()
        function(path)
        seconds = time.process_time() - start
        tracemalloc.start()
        function(path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return seconds, peak

    (pandas_s, pandas_bytes), (ours_s, ours_bytes) = measure(pd.read_csv), measure(read)
    assert ours_s <= 2 * pandas_s, (ours_s, pandas_s)
    assert ours_bytes - pandas_bytes <= 3 * 42_000 * 784, (ours_bytes, pandas_bytes)


@pytest.mark.realdata
@pytest.mark.parametrize("planes", [False, True])
def test_order_of_real_colours(planes):
    """On CIFAR-10 the evidence is right for any hundred images."""
    images = load(f"cifar10:{files.real_data('cifar10')}").splits.train.images_NHWC
    stored = images.transpose(0, 3, 1, 2) if planes else images
    for start in range(0, 50_000, 1000):
        rows = stored[start : start + 100].reshape(100, -1)
        assert guess_order(rows, (32, 32, 3)) == ("channels_first" if planes else "channels_last")
