"""The same network, weights and batches in every framework, one after another; or results that are there already.

    python -m experiments.compare --network cifar10_slim --frameworks jax,torch,tensorflow --epochs 3
    python -m experiments.compare --parity --frameworks all
    python -m experiments.compare --csv old/results/a.csv old/results/b.csv

Every framework gets the same job: initial weights, order of images, constants. Its process runs alone. A step's clock
runs from a batch in host memory to the updated weights; compilation counts apart. Exit codes: 0 all is well, 1 a
framework failed, was asked for by name and is not installed, or with --parity differs beyond the tolerance, 2 a mistake
in flags or data.
"""

import contextlib
import dataclasses
import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from cnnjax import datasets, networks, partition, report
from cnnjax.compat import frameworks, jobs, orchestrate, parity
from cnnjax.compat.frameworks import Framework
from cnnjax.compat.orchestrate import Result
from cnnjax.datasets.base import Dataset
from cnnjax.datasets.resize import resized
from experiments.training import command_line


@dataclasses.dataclass(frozen=True)
class Options:
    """Trains the same network from the same weights on the same batches in several frameworks, and compares."""

    network: str = "cifar10_slim"
    """Name of the network; `python -m cnnjax.networks` lists them."""
    frameworks: str = "all"
    """Names with commas between, or all: jax, keras_tensorflow, keras_jax, keras_torch, tensorflow,
    tensorflow_mirrored, tensorflow_ps, tensorflow_ps_async, torch, torch_compiled, torch_ddp, caffe,
    keras_theano, keras_tensorflow1, tensorflow1, lasagne. jax always runs, as the reference. Counts may follow, as in
    torch_ddp:replicas=4, tensorflow_mirrored:replicas=4, tensorflow_ps:workers=3:replicas_to_aggregate=2."""
    data: str | None = None
    """Data set, as for training. Images of another size are resized to what the network was made for."""
    epochs: int = 1
    """Passes over the training images."""
    images: int | None = None
    """Train on this many images only, the first ones."""
    batch_size: int = 128
    """Images a step."""
    optimizer: Literal["sgd", "momentum", "nesterov", "adam"] = "nesterov"
    """Update rule, with the same constants everywhere."""
    lr: float | None = None
    """Learning rate, constant. Default: 0.01, or 0.001 for adam and with --parity."""
    momentum: float = 0.9
    """Momentum of momentum and nesterov."""
    b1: float = 0.9
    """Adam's decay a step of the mean of gradients."""
    b2: float = 0.999
    """Adam's decay a step of the mean of squared gradients."""
    eps: float = 1e-8
    """Adam's epsilon, outside the square root and after the bias correction."""
    scaling: Literal["none", "unit", "standardize", "per_image", "minmax"] = "unit"
    """Input scaling, as for training."""
    seed: int = 0
    """Decides initial weights, the order of images, and cnnjax's own dropout."""
    x64: bool = False
    """Compute in float64."""
    parity: bool = False
    """Switch dropout off, run --steps steps, and judge how far each framework is from cnnjax: exit code 1 beyond the
    tolerance."""
    steps: int = 20
    """Steps of --parity."""
    mesh: str = "data=1"
    """Layout of jax, as for training."""
    strategy: Literal["jit", "shard_map", "pmap"] = "jit"
    """Strategy of jax."""
    bn_scope: Literal["global", "local"] = "global"
    """Batch norm of jax."""
    timeout: float = 3600.0
    """Seconds after which a framework's process is ended."""
    run_dir: str | None = None
    """Folder of everything that is written; it must not exist. Default: runs/compare-TIME."""
    csv: tuple[str, ...] | None = None
    """Compare these files instead of training: curves (metrics.csv, or Keras's CSVLogger), or predictions
    (ImageId,Label)."""
    truth: str | None = None
    """With --csv: the true labels, for the accuracy of predictions."""

    def __post_init__(self) -> None:
        for name in ("epochs", "images", "batch_size", "steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {value}; allowed: 1 or more")
        for name in ("lr", "eps", "timeout"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"--{name} is {value}; allowed: above 0")
        for name in ("momentum", "b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"--{name} is {getattr(self, name)}; allowed: from 0 to below 1")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"--seed is {self.seed}; allowed: 0 to 4294967295")
        if self.truth is not None and self.csv is None:
            raise ValueError("--truth goes together with --csv")
        if self.csv is not None:
            if not self.csv:
                raise ValueError("--csv is empty; allowed: one file or more")
            if twice := [name for name in self.csv if self.csv.count(name) > 1]:
                raise ValueError(f"--csv has {twice[0]} twice")
            if self.parity or self.frameworks != "all":
                raise ValueError("--csv compares files that are there; --parity and --frameworks train")
        partition.parse_mesh(self.mesh)


class Log:
    """Prints lines and keeps them in ``results.log``."""

    def __init__(self, path: Path):
        self._path = path

    def __call__(self, text: str) -> None:
        """Says it."""
        print(text, flush=True)
        with self._path.open("a") as file:
            for line in text.splitlines():
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")


# ---------------------------------------------------------------------------------------------------------------------
# Running
# ---------------------------------------------------------------------------------------------------------------------


def make_plan(options: Options) -> tuple[jobs.Plan, tuple[str, ...]]:
    """What to train, and notes on the data.

    Raises:
        ValueError: If network and data do not fit, or a flag is wrong.
    """
    try:
        networks.build_cnn(options.network, 10)
        shape = networks.default_input_shape(options.network)
    except ValueError as error:
        raise ValueError(f"--network: {error}") from None
    default = "mnist" if shape[2] == 1 else "cifar10"
    found = datasets.load(options.data, default=default, image_shape=shape)
    notes = list(found.notes)
    train, test = found.splits.train, found.splits.test
    if train.image_shape[2] != shape[2]:
        raise ValueError(
            f"--network {options.network} is for images of {shape[2]} channels, but {train.name} has "
            f"{train.image_shape[2]}"
        )
    if train.image_shape != shape:
        height, width, _ = train.image_shape
        notes.append(f"{train.name}: images of {height}x{width} are resized to {shape[0]}x{shape[1]}")
    if options.images is not None:
        if options.images > len(train):
            raise ValueError(f"--images is {options.images}; allowed: 1 to {len(train)}, what {train.name} has")
        train = train.subset(np.arange(options.images))
    if options.batch_size > len(train):
        raise ValueError(f"--batch-size is {options.batch_size}; allowed: 1 to {len(train)}, the training images")
    network = networks.build_cnn(options.network, len(train.class_names))
    rate = options.lr or (0.001 if options.optimizer == "adam" or options.parity else 0.01)
    steps = options.steps if options.parity else options.epochs * -(-len(train) // options.batch_size)
    if options.parity:
        network = jobs.without_dropout(network)
        train = train.subset(np.arange(min(len(train), steps * options.batch_size)))
        test = None if test is None else test.subset(np.arange(min(len(test), 1000)))

    def sized(images: Dataset | None) -> Dataset | None:
        return None if images is None else resized(images, *shape[:2])

    plan = jobs.Plan(
        options.network, network, resized(train, *shape[:2]), sized(test), options.scaling, options.batch_size,
        [rate] * steps, jobs.Optimizer(options.optimizer, options.momentum, options.b1, options.b2, options.eps),
        options.seed, "float64" if options.x64 else "float32",
    )  # fmt: skip
    return plan, tuple(notes)


def run_all(options: Options, chosen: Sequence[Framework], folder: Path, log: Log) -> dict[str, Result]:
    """One framework after another; the first is cnnjax."""
    mine = {"mesh": options.mesh, "strategy": options.strategy, "bn_scope": options.bn_scope}
    results: dict[str, Result] = {}
    for framework in chosen:
        log(f"{framework.name}: {framework.about}")
        more = mine if framework.name == "jax" else {}
        result = orchestrate.run(framework, folder / "job", folder / framework.name, options.timeout, more)
        results[framework.name] = result
        if result.status == "ok":
            log(f"  {result.seconds:.1f} s in all, {result.images_per_second():.0f} images/s, "
                f"{result.peak_memory / 1e6:.0f} MB")  # fmt: skip
            for note in result.environment()["notes"]:
                log(f"  note: {note}")
        else:
            log(f"  {result.status}: {result.message}")
    return results


def reference_name(framework: Framework) -> str:
    """Folder of the run of cnnjax that a framework is held against under ``--parity``."""
    return "jax" if not framework.reference else "jax-" + "-".join(framework.reference.values()).replace("=", "")


_EXACT = "jax-float64"
_NUDGED = tuple(f"jax-nudged{i + 1}" for i in range(parity.NUDGES))


def references(
    options: Options, plan: jobs.Plan, chosen: Sequence[Framework], results: dict[str, Result], folder: Path, log: Log,
    initial: dict[str, np.ndarray],
) -> dict[str, Result]:  # fmt: skip
    """The runs of cnnjax with the replicas of other frameworks, one for each kind, and those that show rounding."""
    found = {"jax": results["jax"]}
    if not options.x64:
        log(f"{_EXACT}, {', '.join(_NUDGED)}: cnnjax in float64 and from nudged weights, to see how much is rounding")
        jobs.write(dataclasses.replace(plan, dtype="float64"), folder / "job-float64")
        for seed, name in enumerate(_NUDGED, start=1):
            jobs.write(plan, folder / name.replace("jax", "job"), parity.nudged(initial, seed))
        for name in (_EXACT, *_NUDGED):
            job = folder / name.replace("jax", "job")
            found[name] = orchestrate.run(
                frameworks.FRAMEWORKS["jax"], job, folder / name, options.timeout, label=name
            )  # fmt: skip
    for framework in chosen:
        name = reference_name(framework)
        if name not in found and results[framework.name].status == "ok":
            log(f"{name}: cnnjax with {', '.join(f'{k}={v}' for k, v in framework.reference.items())}, for reference")
            found[name] = orchestrate.run(
                frameworks.FRAMEWORKS["jax"], folder / "job", folder / name, options.timeout, framework.reference,
                label=name,
            )  # fmt: skip
            if found[name].status != "ok":
                log(f"  failed: {found[name].message}")
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Tables
# ---------------------------------------------------------------------------------------------------------------------


def comparison_table(results: dict[str, Result]) -> pd.DataFrame:
    """One row a framework."""
    rows = {}
    for name, result in results.items():
        row: dict[str, Any] = {"status": result.status}
        if result.status == "ok":
            metrics, environment = result.metrics(), result.environment()
            last = metrics.iloc[-1]
            own = {"keras_": "keras", "tensorflow": "tensorflow", "torch": "torch", "lasagne": "lasagne"}
            package = next((p for prefix, p in own.items() if name.startswith(prefix)), "jax")
            row |= {
                "version": environment["versions"].get(package, ""), "backend": last["backend"], "mesh": last["mesh"],
                "bn scope": last["bn_scope"], "loss": last["loss"], "val accuracy": last["val_accuracy"],
                "images/s": round(result.images_per_second()), "compile s": round(float(metrics["compile_s"].sum()), 1),
                "train s": round(float(metrics["train_s"].sum()), 1), "all s": round(result.seconds, 1),
                "peak MB": round(result.peak_memory / 1e6),
            }  # fmt: skip
        row["message"] = result.message
        rows[name] = row
    return pd.DataFrame.from_dict(rows, orient="index")


def parity_table(
    options: Options, plan: jobs.Plan, chosen: Sequence[Framework], results: dict[str, Result], held: dict[str, Result],
    initial: dict[str, np.ndarray],
) -> tuple[pd.DataFrame, list[str]]:  # fmt: skip
    """Differences of every framework from its reference, and the names of those that are beyond the tolerance."""
    rows: dict[str, dict[str, Any]] = {}
    failed: list[str] = []

    def differences(result: Result, reference: Result, own: dict[str, np.ndarray] | None = None) -> parity.Differences:
        return parity.compare(result, reference, initial, options.optimizer, plan.learning_rates[0], own)

    roundings = []
    if not options.x64 and held[_EXACT].status == "ok":
        for seed, name in enumerate(("jax", *_NUDGED)):
            if held[name].status == "ok":
                own = parity.nudged(initial, seed) if seed else initial
                roundings.append(differences(held[name], held[_EXACT], own))
                rows[name] = {"against": _EXACT, **dataclasses.asdict(roundings[-1]), "verdict": "rounding"}
    limits = parity.limits(plan.dtype, roundings)
    rows["limit"] = dataclasses.asdict(limits)
    for framework in chosen:
        result, reference = results[framework.name], held.get(reference_name(framework))
        row: dict[str, Any] = {"against": reference_name(framework)}
        if result.status == "ok" and reference is not None and reference.status == "ok":
            try:
                found = differences(result, reference)
            except (ValueError, KeyError, OSError) as error:
                row["verdict"] = f"cannot be compared: {error}"
                failed.append(framework.name)
            else:
                row |= dataclasses.asdict(found)
                wrong = found.beyond(limits) if framework.exact else []
                row["verdict"] = f"beyond: {', '.join(wrong)}" if wrong else "same"
                if not framework.exact:
                    row["verdict"] = "not judged: which gradients count is a matter of time"
                failed += [framework.name] * bool(wrong)
        else:
            row["verdict"] = result.status
        rows[framework.name] = row
    table = pd.DataFrame.from_dict(rows, orient="index")
    return table[[name for name in table.columns if name != "verdict"] + ["verdict"]], failed


def summary_sections(results: dict[str, Result], table: pd.DataFrame) -> list[report.Section]:
    """Sections of the page that training and parity share."""
    ok = {name: result for name, result in results.items() if result.status == "ok"}
    sections = [report.Section("Results", table=table)]
    losses = {name: result.steps()["loss"].to_numpy(float) for name, result in ok.items()}
    steps = {name: (np.arange(1, len(loss_T) + 1), loss_T) for name, loss_T in losses.items()}
    sections.append(report.Section("Loss by step", figure=report.lines_plot(steps, "step", "loss")))
    if "jax" in ok:
        base = losses["jax"]
        apart = {n: (s, np.abs(loss - base) / np.abs(base)) for n, (s, loss) in steps.items() if n != "jax"}
        text = (
            "Relative difference of the loss from cnnjax on the same batches. Dropout is drawn differently everywhere."
        )
        sections.append(
            report.Section("Divergence", text, figure=report.lines_plot(apart, "step", "difference", log=True))
        )
    rates = {name: result.images_per_second() for name, result in ok.items()}
    sections.append(report.Section("Speed", figure=report.bars_plot(rates, "images/s, compilation apart")))
    predictions = {n: pd.Series(r.predictions()) for n, r in ok.items() if (r.folder / "predictions.csv").exists()}
    if len(predictions) > 1:
        truth = pd.Series(np.load(next(iter(ok.values())).folder.parent / "job" / "test_labels.npy"))
        text = "Share of the test images on which two agree, and accuracy."
        sections.append(report.Section("Agreement", text, report.agreement(predictions, truth)))
    return sections


# ---------------------------------------------------------------------------------------------------------------------
# Commands
# ---------------------------------------------------------------------------------------------------------------------


def compare(options: Options) -> bool:
    """Trains, prints the table and writes the run directory; returns whether all is well."""
    asked = frameworks.parse(options.frameworks)
    jax = frameworks.FRAMEWORKS["jax"]
    chosen = [jax, *(framework for framework in asked if framework is not jax)]
    plan, notes = make_plan(options)
    folder = make_folder(options, "compare")
    log = Log(folder / "results.log")
    for note in notes:
        log(f"note: {note}")
    jobs.write(plan, folder / "job")
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(options), indent=2) + "\n")
    log(f"{plan.name} on {len(plan.train):,} images of {plan.train.name}, {len(plan.learning_rates)} steps of "
        f"{plan.batch_size}, {plan.optimizer.name}, {plan.dtype}; run directory {folder}")  # fmt: skip

    results = run_all(options, chosen, folder, log)
    table = comparison_table(results)
    well = all(result.status != "failed" for result in results.values())
    if options.frameworks != "all":
        well = well and all(result.status == "ok" for result in results.values())
    sections = summary_sections(results, table)
    shown = table.drop(columns="message")
    text = [report.text_table(shown)]
    if options.parity and results["jax"].status == "ok":
        with np.load(folder / "job" / "initial_weights.npz") as file:
            initial = {name: file[name] for name in file.files}
        held = references(options, plan, chosen, results, folder, log, initial)
        differences, failed = parity_table(options, plan, chosen[1:], results, held, initial)
        note = "Largest relative differences from cnnjax."
        if not options.x64:
            note += f" Limits: the tolerance, or {parity.ROUNDINGS} times the rounding of cnnjax itself."
        sections.insert(1, report.Section("Parity", note, differences))
        text += [note, report.text_table(differences)]
        differences.to_csv(folder / "parity.csv", index_label="framework")
        well = well and not failed
    text += [f"{s.title}: {s.text}\n{report.text_table(s.table)}" for s in sections if s.title == "Agreement"]  # type: ignore[arg-type]
    text += [f"{name}: {result.status}: {result.message}" for name, result in results.items() if result.message]
    write_results(folder, plan.name, results, table, sections, "\n\n".join(text) + "\n")
    log("\n\n".join(text))
    log(f"page {folder / 'report.html'}")
    return well


def write_results(
    folder: Path, network: str, results: dict[str, Result], table: pd.DataFrame, sections: list[report.Section],
    text: str,
) -> None:  # fmt: skip
    """Everything that a person may want to open, under the names that the frameworks' users know."""
    (folder / "results").mkdir()
    for name, result in results.items():
        if result.status == "ok":
            target = folder / "results" / f"{network}_{name}.csv"
            target.write_bytes((result.folder / "metrics.csv").read_bytes())
            if (predictions := result.folder / "predictions.csv").exists():
                (folder / "results" / f"{network}_{name}_predictions.csv").write_bytes(predictions.read_bytes())
    table.to_csv(folder / "comparison.csv", index_label="framework")
    (folder / "result.txt").write_text(text)
    write_page(folder, f"{network} in {len(results)} frameworks", sections)


def write_page(folder: Path, title: str, sections: list[report.Section]) -> None:
    """``report.html`` and its plots."""
    (folder / "plots").mkdir(exist_ok=True)
    for section in sections:
        if section.figure is not None:
            (folder / "plots" / f"{section.title.lower().replace(' ', '_')}.png").write_bytes(
                report.png(section.figure)
            )
    (folder / "report.html").write_text(report.page(title, sections))


def make_folder(options: Options, name: str) -> Path:
    """The run directory, new.

    Raises:
        ValueError: If it is there already.
    """
    path = Path(options.run_dir or f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    if path.exists():
        raise ValueError(f"--run-dir {path} exists; a comparison never overwrites one")
    try:
        path.mkdir(parents=True)
    except OSError as error:
        raise ValueError(f"--run-dir {path} cannot be written: {error.strerror}") from None
    return path


def compare_files(options: Options) -> bool:
    """Reads results that are there already, prints what they say and writes a page."""
    files = options.csv or ()
    found = [report.read_results(Path(name)) for name in files]
    if len({one.name for one in found}) < len(found):
        found = [dataclasses.replace(one, name=name) for one, name in zip(found, files, strict=True)]
    curves = [one for one in found if isinstance(one, report.Curves)]
    predictions = {one.name: one.labels for one in found if isinstance(one, report.Predictions)}
    truth = None if options.truth is None else report.read_truth(Path(options.truth))
    sections = []
    if truth is not None and not predictions:
        raise ValueError("--truth is the truth of predictions, but --csv has curves alone")
    if predictions:
        matrix = report.agreement(predictions, truth)
        text = "Share of the images on which two files agree" + ("" if truth is None else ", and accuracy") + "."
        for name, labels in predictions.items():
            counted = len(labels) if truth is None else len(labels.index.intersection(truth.index))
            if truth is not None and not counted == len(labels) == len(truth):
                text += (
                    f" Of the {len(labels)} images of {name} and the {len(truth)} of the truth, {counted} are the same."
                )
        sections.append(report.Section("Predictions", text, matrix))
    if curves:
        sections.append(report.Section("Curves", table=report.curve_summary(curves)))
        for name in ("loss", "val_loss", "accuracy", "val_accuracy"):
            lines = {
                one.name: (one.table["epoch"].to_numpy(float), one.table[name].to_numpy(float))
                for one in curves if name in one.table
            }  # fmt: skip
            if lines:
                sections.append(report.Section(name, figure=report.lines_plot(lines, "epoch", name)))
    folder = make_folder(options, "compare")
    text = "\n\n".join(f"{s.title}: {s.text}\n{report.text_table(s.table)}" for s in sections if s.table is not None)
    Log(folder / "results.log")(text)
    (folder / "result.txt").write_text(text + "\n")
    write_page(folder, "Results side by side", sections)
    print(f"page {folder / 'report.html'}")
    return True


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Within it SIGTERM unwinds the stack, so that a framework's process ends with this one."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    try:
        before = signal.signal(signal.SIGTERM, end)
    except ValueError:  # not in the main thread, which alone receives signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    try:
        options = command_line(Options, "compare", sys.argv[1:] if arguments is None else arguments)
        with _ended_by_sigterm():
            return 0 if (compare_files if options.csv else compare)(options) else 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
