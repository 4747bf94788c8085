"""What is wrong with a training, from its ``metrics.csv`` alone."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cnnjax.diagnose.findings import Finding

ENOUGH_STEPS = 100  # with fewer, a loss at chance says nothing


def examine_curves(rows: Sequence[Mapping[str, Any]], classes: int, harder: bool = True) -> list[Finding]:
    """Looks at losses and times by epoch.

    Args:
        rows: Of ``metrics.csv``, numbers or text; empty cells are values that were not measured.
        classes: Of the data; 0 for regression.
        harder: Whether training images are harder than those for validation: by dropout, augmentation, label smoothing,
            mixup or class weights. Then validation may rightly be better.

    Returns:
        What was found.
    """
    loss_E, accuracy_E, val_loss_E, val_accuracy_E, rate_E, speed_E, step_E = (
        np.array([_number(row.get(name)) for row in rows])
        for name in ("loss", "accuracy", "val_loss", "val_accuracy", "learning_rate", "images_per_s", "step")
    )
    if not len(loss_E):
        return []
    findings = _level(loss_E, accuracy_E, rate_E, classes, step_E[-1])
    findings += _split(loss_E, accuracy_E, val_loss_E, val_accuracy_E, harder)
    findings += _overfitting(loss_E, val_loss_E)
    # The first epoch of a process may warm up; what follows it must stay.
    if np.isfinite(speed_E).sum() >= 5 and np.nanmedian(speed_E[-2:]) < 0.4 * np.nanmedian(speed_E[1:-2]):
        findings.append(
            Finding(
                "note", "slower",
                f"training ran at {np.nanmedian(speed_E[1:-2]):,.0f} images/s, in the last epochs at "
                f"{np.nanmedian(speed_E[-2:]):,.0f}",
                "another process may share the machine, or its memory may be full",
                "see what else runs",
            )
        )  # fmt: skip
    return findings


def _number(value: Any) -> float:
    return float("nan") if value in (None, "") else float(value)


def _level(loss_E: np.ndarray, accuracy_E: np.ndarray, rate_E: np.ndarray, classes: int, steps: float) -> list[Finding]:
    findings, last = [], loss_E[-1]
    at_chance = classes > 1 and abs(last / math.log(classes) - 1) < 0.01
    unlearned = accuracy_E[-1] < 1 / classes + 0.1 * (1 - 1 / classes) if classes else False
    # A handful of steps rightly leaves the loss where it was.
    if at_chance and unlearned and len(loss_E) >= 2 and not steps < ENOUGH_STEPS:
        findings.append(
            Finding(
                "error", "stuck",
                f"after {len(loss_E)} epochs the training loss is {last:.4f}, as that of guessing among {classes} "
                f"classes, ln {classes} = {math.log(classes):.4f}; accuracy is {accuracy_E[-1]:.1%}",
                "nothing was learned: relus may be dead, pixels unscaled, the learning rate far too large or small, "
                "or labels may not belong to their images",
                "python -m experiments.diagnose with the same flags tells which",
            )
        )  # fmt: skip
    lowest = float(np.min(loss_E[:-1])) if len(loss_E) >= 3 else math.inf
    if last > 1.5 * lowest and last > lowest + 0.1:
        findings.append(
            Finding(
                "warning", "rising",
                f"the training loss rose from {lowest:.4f} to {last:.4f}, at a learning rate of {rate_E[-1]:.3g}",
                "updates that are too large undo what was learned",
                "--lr of a third or a tenth, or --clip-norm 1",
            )
        )  # fmt: skip
    return findings


def _split(
    loss_E: np.ndarray, accuracy_E: np.ndarray, val_loss_E: np.ndarray, val_accuracy_E: np.ndarray, harder: bool
) -> list[Finding]:
    """Training means are of the weights during an epoch, validation of those after it; early on that differs."""
    if harder or len(loss_E) < 4:
        return []
    late = slice(len(loss_E) // 2, None)
    ahead = val_accuracy_E[late] - accuracy_E[late]
    if not (np.all(val_loss_E[late] < 0.6 * loss_E[late]) and np.all(ahead > 0.03)):
        return []
    return [
        Finding(
            "warning", "wrong_split",
            f"validation is better than training in every later epoch (last: loss {val_loss_E[-1]:.4f} against "
            f"{loss_E[-1]:.4f}, accuracy {val_accuracy_E[-1]:.1%} against {accuracy_E[-1]:.1%}), though training is "
            "not made harder by dropout or augmentation",
            "the validation images are easier, or of other classes, or were trained on elsewhere",
            "split by chance: --validation-split 0.1",
        )
    ]  # fmt: skip


def _overfitting(loss_E: np.ndarray, val_loss_E: np.ndarray) -> list[Finding]:
    if np.isnan(val_loss_E).all():
        return []
    best = int(np.nanargmin(val_loss_E))
    last, lowest = val_loss_E[-1], val_loss_E[best]
    if not (best < len(val_loss_E) - 3 and last > 1.5 * lowest and loss_E[-1] < 0.7 * loss_E[best]):
        return []
    return [
        Finding(
            "note", "overfitting",
            f"val_loss was lowest in epoch {best + 1} with {lowest:.4f} and is now {last:.4f}, while the training loss "
            f"went on falling from {loss_E[best]:.4f} to {loss_E[-1]:.4f}",
            "from there on the network learned its training images by heart",
            "--early-stopping 5, or more augmentation, weight decay or dropout",
        )
    ]  # fmt: skip
