"""Run directories as training, evaluation and diagnosis write them, made up."""

import json
import sys
from pathlib import Path

import numpy as np

HEADER = (
    "network,dataset,framework,backend,mesh,strategy,bn_scope,dtype,seed,epoch,step,loss,accuracy,val_loss,"
    "val_accuracy,learning_rate,compile_s,train_s,eval_s,images_per_s"
)
FINDINGS = [
    {
        "severity": "note",
        "check": "throughput",
        "seen": "the loop waited for data 31% of the time",
        "why": "Reading is slower than training.",
        "change": "Read from local disk.",
    },
    {
        "severity": "error",
        "check": "loss",
        "seen": "the loss is NaN from step 320 on",
        "why": "The learning rate is too large for this network: the loss grew for 40 steps before.",
        "change": "--lr 0.01 or --warmup-epochs 2",
    },
    {
        "severity": "warning",
        "check": "overfitting",
        "seen": "loss 0.02, val_loss 1.31",
        "why": "The network knows the training images by heart.",
        "change": "--weight-decay 5e-4, --flip on, --crop-padding 4",
    },
]


def write_run(
    folder: Path, *, epochs: int = 12, steps: int = 240, classes: int = 10, channels: int = 3, seed: int = 0,
    regression: bool = False, names: list[str] | None = None, mistakes: int = 36, side: int = 32, **options: object,
) -> Path:  # fmt: skip
    """Writes a whole run directory; returns it."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    names = names or [f"class {number}" for number in range(classes)]
    config = {"network": "cifar10_slim", "mesh": "data=4", "strategy": "jit", "dtype": "float32", "seed": seed,
              "epochs": epochs, "lr": 0.05, "batch_size": 128, "contrast": None}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | options))
    (folder / "environment.json").write_text(json.dumps({
        "time": "2026-01-02T03:04:05+0000",
        "command": [sys.executable, "-m", "experiments.cifar10", "--run-dir", str(folder), "--data", "my data/a'b"],
        "python": "3.11.7", "packages": {"jax": "0.10.2", "flax": "0.12.8"}, "backend": "cpu",
        "devices": ["cpu:0 cpu", "cpu:1 cpu"], "mesh": "data=4", "data": "my data", "git_commit": "0123abcd" * 5,
    }))  # fmt: skip
    write_curves(folder, rng, epochs, steps, regression)
    (folder / "diagnosis.json").write_text(json.dumps(FINDINGS))
    loss_K = np.sort(rng.exponential(2, mistakes) + 1)[::-1].astype(np.float32)
    image_KHWC = rng.integers(0, 256, (mistakes, side, side, channels), dtype=np.uint8)
    image_KHWC[:, side // 4 : side // 2, :, 0] = 255
    label_K, predicted_K = rng.integers(0, len(names), mistakes), rng.integers(0, len(names), mistakes)
    if regression:
        label_K, predicted_K = label_K + 0.25, predicted_K + rng.random(mistakes)
    np.savez(folder / "mistakes.npz", image=image_KHWC, label=label_K, predicted=predicted_K, loss=loss_K,
             index=rng.integers(0, 10_000, mistakes))  # fmt: skip
    np.savez(folder / "filters.npz", kernel=rng.normal(0, 0.2, (5, 5, channels, 32)).astype(np.float32))
    write_evaluation(folder, rng, names, regression)
    return folder


def write_curves(folder: Path, rng: np.random.Generator, epochs: int, steps: int, regression: bool) -> None:
    """``metrics.csv`` and ``steps.jsonl``."""
    lines = [HEADER + (",mae,r2,val_mae,val_r2" if regression else ",top5_accuracy,val_top5_accuracy")]
    for epoch in range(1, epochs + 1):
        loss, accuracy = 2.3 * np.exp(-epoch / epochs) + rng.random() / 20, 1 - np.exp(-2.0 * epoch / epochs)
        hits = f"{accuracy},{loss + 0.1},{accuracy * 0.9}" if not regression else f",{loss + 0.1},"
        more = f"{loss / 2},{accuracy},{loss / 2 + 0.1},{accuracy - 0.1}" if regression else f"{accuracy},{accuracy}"
        lines.append(f"cifar10_slim,cifar10,jax,cpu,data=4,jit,global,float32,0,{epoch},{epoch * steps // epochs},"
                     f"{loss},{hits},{0.05 / epoch},{9.5 if epoch == 1 else 0.0},12.1,1.5,{rng.normal(4000, 90):.1f},"
                     f"{more}")  # fmt: skip
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    with (folder / "steps.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            row = {"step": step, "loss": 2.3 * np.exp(-2 * step / steps) + rng.random() / 5}
            row |= {} if regression else {"accuracy": min(1.0, step / steps + rng.random() / 10)}
            file.write(json.dumps(row | {"learning_rate": 0.05 * (1 - step / steps)}) + "\n")


def write_evaluation(folder: Path, rng: np.random.Generator, names: list[str], regression: bool) -> None:
    """``evaluation.json``."""
    if regression:
        found = {"task": "regression", "data": "test", "images": 900, "loss": 0.4, "mae": 0.5, "rmse": 0.63, "r2": 0.8}
    else:
        count = len(names)
        confusion_CC = rng.poisson(40 / count, (count, count)) + np.diag(rng.integers(40, 90, count))
        right_C, total_C, said_C = np.diag(confusion_CC), confusion_CC.sum(1), confusion_CC.sum(0)
        found = {
            "task": "classification", "data": "test", "images": int(total_C.sum()), "loss": 0.7,
            "accuracy": float(right_C.sum() / total_C.sum()), "top5_accuracy": None, "classes": names,
            "confusion": confusion_CC.tolist(),
            "per_class": [
                {"class": name, "images": int(total_C[number]), "accuracy": right_C[number] / total_C[number],
                 "precision": right_C[number] / said_C[number]}
                for number, name in enumerate(names)
            ],
        }  # fmt: skip
    (folder / "evaluation.json").write_text(json.dumps(found))
