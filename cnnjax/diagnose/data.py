"""What is wrong with images and labels, before anything is trained. NumPy only.

Thresholds are shares: CIFAR-10 and MNIST have single images twice, and are healthy.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from cnnjax.datasets.base import Dataset
from cnnjax.diagnose.findings import Finding


def examine_data(train: Dataset, held_out: Sequence[Dataset]) -> list[Finding]:
    """Looks at images and labels.

    Args:
        train: Training set.
        held_out: Validation and test sets; those that are the same object count once.

    Returns:
        What was found.
    """
    findings = _constant_images(train)
    hashes = image_hashes(train)
    findings += _duplicates(train, hashes)
    for other in {id(one): one for one in held_out}.values():
        findings += _overlap(hashes, other)
    if train.task == "classification":
        findings += _label_counts(train) + _one_hot(train)
    return findings + _few(train, held_out)


def image_hashes(dataset: Dataset) -> np.ndarray:
    """A hash of each image, ``S16 [N]``; equal images have equal ones."""
    rows = np.ascontiguousarray(dataset.images_NHWC).reshape(len(dataset), -1)
    # A NumPy string drops zero bytes at its end, which makes one hash in 256 a byte shorter, and none equal.
    return np.array([hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in rows], "S16")


def _share(count: int, of: int) -> str:
    return f"{count:,} of {of:,} ({count / of:.1%})"


def _constant_images(dataset: Dataset) -> list[Finding]:
    rows = dataset.images_NHWC.reshape(len(dataset), -1)
    constant = np.flatnonzero((rows == rows[:, :1]).all(1))
    if len(constant) < max(2, 0.001 * len(dataset)):
        return []
    all_of_them = len(constant) == len(dataset)
    return [
        Finding(
            "error" if all_of_them else "warning" if len(constant) > 0.01 * len(dataset) else "note",
            "constant_images",
            f"{_share(len(constant), len(dataset))} training images have one value in all their pixels, the first "
            f"number {constant[0]}",
            "there is nothing in them that could tell classes apart; often a column or a range was read wrongly",
            "look at the images, and leave these out or mend how they are read (--image-shape, --label-column)",
        )
    ]


def _duplicates(dataset: Dataset, hashes: np.ndarray) -> list[Finding]:
    _, first, group_N, counts = np.unique(hashes, return_index=True, return_inverse=True, return_counts=True)
    repeated = int(len(dataset) - len(counts))
    different = dataset.labels_N != dataset.labels_N[first][group_N]
    torn = np.unique(group_N[different])
    in_conflict = int(counts[torn].sum())
    findings = []
    if in_conflict > 0.002 * len(dataset):
        example = np.flatnonzero(group_N == torn[0])[:2]
        labels = " and ".join(_label(dataset, index) for index in example)
        findings.append(
            Finding(
                "warning", "contradicting_labels",
                f"{_share(in_conflict, len(dataset))} training images are there again with another label, such as "
                f"numbers {example[0]} and {example[1]}: {labels}",
                "no network can give both answers, so that the training loss cannot reach 0",
                "keep one label of each such image",
            )
        )  # fmt: skip
    if repeated > 0.02 * len(dataset):
        findings.append(
            Finding(
                "warning" if repeated > 0.1 * len(dataset) else "note", "duplicates",
                f"{_share(repeated, len(dataset))} training images are copies of another one",
                "copies count more than once in the loss, and a split by chance puts them on both sides",
                "leave the copies out",
            )
        )  # fmt: skip
    return findings


def _label(dataset: Dataset, index: int) -> str:
    value = dataset.labels_N[index]
    return dataset.class_names[value] if dataset.class_names else f"{value:g}"


def _overlap(train_hashes: np.ndarray, other: Dataset) -> list[Finding]:
    shared = int(np.isin(image_hashes(other), train_hashes).sum())
    if shared <= 0.005 * len(other):
        return []
    return [
        Finding(
            "error" if shared > 0.1 * len(other) else "warning", "train_in_test",
            f"{_share(shared, len(other))} images of {other.source} that should be new are in the training set as well",
            "accuracy on them says what was remembered, not what was understood",
            "leave them out of one of the two; split before making copies of images",
        )
    ]  # fmt: skip


def _label_counts(train: Dataset) -> list[Finding]:
    counts = np.bincount(train.labels_N, minlength=len(train.class_names))
    missing = [train.class_names[i] for i in np.flatnonzero(counts == 0)]
    findings = []
    if missing:
        findings.append(
            Finding(
                "warning", "missing_classes",
                f"{len(missing)} of {len(counts)} classes have no training image: {', '.join(missing[:8])}"
                f"{' ...' if len(missing) > 8 else ''}",
                "the network cannot learn them, and every image of them counts as a mistake",
                "check the labels, and that the training part has all classes",
            )
        )  # fmt: skip
    present = np.flatnonzero(counts)
    largest, smallest = present[counts[present].argmax()], present[counts[present].argmin()]
    if counts[largest] > 10 * counts[smallest]:
        findings.append(
            Finding(
                "warning", "imbalance",
                f"class {train.class_names[largest]} has {counts[largest]:,} training images, class "
                f"{train.class_names[smallest]} has {counts[smallest]:,}",
                f"always saying {train.class_names[largest]} is right for {counts[largest] / len(train):.0%} of them, "
                "so that accuracy says little",
                "--class-weights balanced, and look at the accuracy of each class in evaluation.json",
            )
        )  # fmt: skip
    return findings


def _one_hot(train: Dataset) -> list[Finding]:
    """One column of one-hot labels is 0 or 1, and 1 once in as many images as there are classes."""
    if train.class_names != ("0", "1"):
        return []
    share = float(train.labels_N.mean())
    if not 0.04 < share < 0.21:
        return []
    return [
        Finding(
            "warning", "one_hot",
            f"the labels are 0 and 1 only, and 1 for {share:.1%} of the images, as one column of one-hot labels of "
            f"{round(1 / share)} classes would be",
            "the network then learns to tell one class from all others",
            "if there are more classes, give one label an image: the number of the class",
        )
    ]  # fmt: skip


def _few(train: Dataset, held_out: Sequence[Dataset]) -> list[Finding]:
    findings = []
    classes = max(len(train.class_names), 1)
    if len(train) < 10 * classes:
        findings.append(
            Finding(
                "warning", "few_images", f"there are {len(train):,} training images for {classes} classes",
                "a network this small data can be learned by heart",
                "more images, or strong augmentation (--flip on, --crop-padding, --translate, --cutout, --mixup)",
            )
        )  # fmt: skip
    smallest = min((len(other) for other in held_out), default=None)
    if smallest is not None and smallest < 50:
        findings.append(
            Finding(
                "note", "few_held_out", f"accuracy is measured on {smallest} images",
                f"by chance alone it is off by {100 / np.sqrt(4 * max(smallest, 1)):.0f} points or so",
                "a larger --validation-split, or more test images",
            )
        )  # fmt: skip
    return findings
