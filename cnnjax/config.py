"""Every option of a training run, as one frozen dataclass that is also the command line and ``config.json``.

Imports only the standard library, so that ``--help`` starts nothing.
"""

import dataclasses
import json
import re
from typing import Any, Literal


class UsageError(ValueError):
    """A mistake in what the user asked for, found after the run has started: one line, no traceback."""


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Options of one training run. Some defaults depend on the data set found; ``config.json`` has the result."""

    preset: str = "default"
    """Named set of defaults, which the other flags override; see above."""
    network: str = "cifar10_slim"
    """Name of the network; `python -m cnnjax.networks` lists them."""
    data: str | None = None
    """Data set: a file, folder or .tar.gz; READER:PATH (cifar10:, cifar100:, idx:, csv:, npz:, folder:, tfds:); or
    cifar10, cifar100, mnist, digits. Default: $CNNJAX_DATA, then data/downloads/, then a download, then the shipped
    digits."""
    image_shape: str | None = None
    """Height, width and channels of the images, such as 28,28,1: of those in a CSV or .npz file, where the number of
    columns does not say it; or to which images in folders and the shipped digits are resized."""
    pixel_order: Literal["channels_last", "channels_first"] | None = None
    """Whether the colours of a pixel lie together in a CSV or .npz file, or each colour is a plane. Default: as makes
    the smoother images."""
    label_column: str | None = None
    """Column of a CSV file with the labels: a name, first, last, or none. Default: by its name, else by its values."""
    task: Literal["classification", "regression"] | None = None
    """Whether labels are classes or numbers to approach. Default: numbers where some have fractions, else classes."""
    mesh: str = "data=1"
    """Device layout, AXIS=SIZE[,AXIS=SIZE...]: data splits each batch; fsdp splits the batch, the parameters and the
    optimiser's state; model splits channels and features; space splits image rows; pipe puts stages of layers on
    different devices, which work at the same time where there are --microbatches. A size of -1 takes the devices that
    are left. On a host with only CPUs, enough fake devices are made."""
    strategy: Literal["jit", "shard_map", "pmap"] = "jit"
    """How the step is spread over the mesh: jit lets the compiler partition it; shard_map writes the collectives out
    (axes data and fsdp); pmap is the older interface (data)."""
    microbatches: int = 1
    """Parts of each batch that are computed one after another, their gradients added up; batch norm takes the
    statistics of each part."""
    stages: str | None = None
    """Layers at which the stages of pipe after the first start, such as 3,7, counted from 0 as
    `python -m cnnjax.networks NAME` lists them (a residual block is one). Default: stages of about equal work."""
    bn_scope: Literal["global", "local"] = "global"
    """Batch norm over the whole batch, or on each device over its own part as other frameworks do (shard_map, pmap)."""
    aggregate: str | None = None
    """K/N, such as 3/4: the batch counts as the shares of N replicas, and each step leaves out all but the K fastest,
    drawn from the seed; the metrics are of the samples kept. K equal to N leaves out none."""
    stale: int = 0
    """Applies each gradient this many steps late, as workers do that do not wait for each other; 0 is off."""
    strict_sharding: bool = False
    """Refuse a mesh whose sizes do not divide the channels that model would split, instead of leaving those whole."""

    coordinator: str | None = None
    """HOST:PORT at which process 0 listens, where several processes train together; the mesh then spans the devices of
    all. Under SLURM and Open MPI 4, leave this and the next two out."""
    num_processes: int | None = None
    """Processes that train together."""
    process_id: int | None = None
    """Which of them this is, from 0; process 0 writes and prints."""

    batch_size: int = 128
    """Images a step, over all devices together."""
    epochs: int | None = None
    """Passes over the training images."""
    steps: int | None = None
    """Ends the run after this many steps, epochs or not; the learning rate schedule still spans the epochs."""
    seed: int = 0
    """Decides initial weights, the order of images, augmentation and dropout."""
    validation_split: float = 0.0
    """Share of the training images held out for val_loss and val_accuracy; 0 uses the test set for them."""
    classes: int | None = None
    """Outputs of the network. Default: the classes of the data set."""

    optimizer: Literal["sgd", "momentum", "nesterov", "adam", "adamw"] = "nesterov"
    """Update rule."""
    lr: float = 0.05
    """Peak learning rate."""
    momentum: float = 0.9
    """Momentum of momentum and nesterov."""
    b1: float = 0.9
    """Adam's decay a step of the mean of gradients."""
    b2: float = 0.999
    """Adam's decay a step of the mean of squared gradients."""
    eps: float = 1e-8
    """Adam's epsilon."""
    schedule: Literal["constant", "cosine", "exponential", "time", "onecycle"] = "cosine"
    """Learning rate over the run: cosine to 0; exponential: times --decay-rate every --decay-epochs; time:
    lr / (1 + time-decay * step); onecycle: up from lr / 25 in the first 30% of the steps, then down to nearly 0."""
    warmup_epochs: float = 0.0
    """Epochs in which the learning rate rises linearly from 0."""
    decay_epochs: float = 350.0
    """Epochs between two decays of the exponential schedule."""
    decay_rate: float = 0.1
    """Factor of the exponential schedule."""
    time_decay: float = 1e-6
    """Decay a step of the time schedule."""
    staircase: bool = True
    """Whether the exponential schedule decays in jumps."""
    plateau: int = 0
    """Lower the learning rate after this many evaluations in a row without a lower val_loss (by 0.0001), beside the
    schedule; 0 is off."""
    plateau_factor: float = 0.5
    """Factor of the learning rate then."""
    early_stopping: int = 0
    """End the run after this many evaluations in a row without a lower val_loss, and go back to the weights with the
    lowest one, also where the run ends by itself; 0 is off."""
    clip_norm: float = 0.0
    """Scale gradients down to this norm over all parameters, where it is larger; 0 is off."""
    weight_decay: float = 0.0
    """Weight decay of kernels."""
    weight_decay_kind: Literal["decoupled", "loss"] = "decoupled"
    """decoupled shrinks kernels by lr * weight_decay a step; loss adds weight_decay / 2 * sum of squares to the
    loss."""
    label_smoothing: float = 0.0
    """Share of each label that is spread evenly over all classes."""
    class_weights: str | None = None
    """Factor of the training loss of each class: balanced, for all classes to count alike however many images they
    have, or one number a class, such as 1,1,2.5."""
    ema: float = 0.0
    """Decay a step of the moving average of the parameters that evaluation then uses; 0 is off."""

    scaling: Literal["none", "unit", "standardize", "per_image", "minmax"] = "standardize"
    """Input scaling: none (0-255), unit (0-1), standardize (mean and deviation of the training images, per channel),
    per_image (each image by its own mean and deviation), minmax (each image to 0-1)."""
    flip: Literal["auto", "on", "off"] = "auto"
    """Mirror training images left-right, each with probability 1/2; auto is on for CIFAR and off elsewhere."""
    crop_padding: int | None = None
    """Random crop after padding training images with this many pixels of 0 on each side. Default: chosen for the
    data set; 0 is off."""
    crop_to: int | None = None
    """Random crop of training images to this side length, in pixels; evaluation takes the centre."""
    brightness: float = 0.0
    """Random brightness: adds up to +- this much, in pixel units (0-255)."""
    contrast: tuple[float, float] | None = None
    """Random contrast: factor between these two bounds, around each channel's mean."""
    translate: int = 0
    """Random shift of training images by up to this many pixels each way, with edges repeated; 0 is off."""
    cutout: int = 0
    """Paint a square of this side length, in pixels, over a random place of each training image, in the mean colour of
    all; 0 is off."""
    mixup: float = 0.0
    """Mix each training image, and its label, with another of its batch, in shares drawn from Beta(X, X); 0 is off."""
    flip_test: bool = False
    """Evaluate each image together with its mirror image, and average their probabilities."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type that convolutions and dense layers compute in; parameters stay float32. float16 scales the loss, and leaves
    out steps that overflow."""
    x64: bool = False
    """Compute everything in float64, to tell rounding from mistakes."""

    eval_every: int = 1
    """Epochs between evaluations; the last epoch is always evaluated."""
    checkpoint_every: str = "1epoch"
    """Steps (a number) or epochs (such as 2epochs) between checkpoints; 0 for none but the last."""
    keep: int = 3
    """Newest checkpoints kept, beside the one with the best val_accuracy."""
    run_dir: str | None = None
    """Folder of everything that the run writes. Default: runs/EXPERIMENT-TIME."""
    resume: bool = False
    """Continue the run in --run-dir from its newest complete checkpoint, or from its start where there is none;
    options not given again are those of that run."""
    overwrite: bool = False
    """Delete the run in --run-dir first."""
    log_every: int = 10
    """Steps between lines of steps.jsonl."""
    tensorboard: bool = False
    """Also write TensorBoard event files into the run directory; needs `pip install -e '.[tensorboard]'`."""
    report: bool = False
    """Make report.html in the run directory at the end, as `python -m experiments.report RUN` does at any time."""
    log_style: Literal["cnnjax", "tensorflow"] = "cnnjax"
    """tensorflow also prints 'step N, loss = x, Train accuracy = y' for each logged step."""
    quiet: bool = False
    """Print only warnings and errors; run.log has the rest."""
    explain: bool = False
    """Print what the mesh costs and exit: memory, work and traffic of each device, read from the compiled training
    step. Nothing is trained or written."""
    devices: int | None = None
    """With --explain: this many fake CPU devices, for a mesh that this machine does not have."""

    def __post_init__(self) -> None:
        def need(ok: bool, field: str, allowed: str) -> None:
            if not ok:
                raise ValueError(f"{flag(field)} is {getattr(self, field)}; allowed: {allowed}")

        at_least_one = (
            "batch_size",
            "microbatches",
            "epochs",
            "steps",
            "classes",
            "crop_to",
            "eval_every",
            "keep",
            "log_every",
            "devices",
        )
        for field in at_least_one:
            need(getattr(self, field) is None or getattr(self, field) >= 1, field, "1 or more")
        for field in ("warmup_epochs", "time_decay", "weight_decay", "brightness", "clip_norm", "mixup"):
            need(0 <= getattr(self, field) < float("inf"), field, "0 or more")
        for field in ("stale", "plateau", "early_stopping", "translate", "cutout"):
            need(getattr(self, field) >= 0, field, "0 or more")
        need(0 < self.plateau_factor < 1, "plateau_factor", "above 0 and below 1")
        need(not (self.schedule == "onecycle" and self.warmup_epochs), "warmup_epochs", "0 with --schedule onecycle")
        for field in ("momentum", "b1", "b2", "label_smoothing", "ema", "validation_split"):
            need(0 <= getattr(self, field) < 1, field, "from 0 to below 1")
        for field in ("lr", "eps", "decay_epochs"):
            need(0 < getattr(self, field) < float("inf"), field, "above 0")
        need(0 <= self.seed < 2**32, "seed", "0 to 4294967295")
        need(0 < self.decay_rate <= 1, "decay_rate", "above 0 to 1")
        need(self.crop_padding is None or self.crop_padding >= 0, "crop_padding", "0 or more")
        need(not (self.crop_padding and self.crop_to), "crop_padding", "0 together with --crop-to")
        need(self.contrast is None or 0 <= self.contrast[0] <= self.contrast[1], "contrast", "0 <= LOW <= HIGH")
        need(not (self.x64 and self.dtype != "float32"), "dtype", "float32 together with --x64")
        need(not (self.resume and self.overwrite), "overwrite", "not together with --resume")
        need(self.devices is None or self.explain, "devices", "only together with --explain")
        parse_image_shape(self.image_shape)
        parse_aggregate(self.aggregate)
        parse_class_weights(self.class_weights)
        parse_interval(self.checkpoint_every)
        together = ("coordinator", "num_processes", "process_id")
        if (missing := [flag(field) for field in together if getattr(self, field) is None]) and len(missing) < 3:
            raise ValueError(f"{' and '.join(missing)} missing; {', '.join(map(flag, together))} belong together")
        if self.num_processes is not None and self.process_id is not None:
            need(re.fullmatch(r".+:\d{1,5}", self.coordinator or "") is not None, "coordinator", "HOST:PORT")
            need(self.num_processes >= 1, "num_processes", "1 or more")
            need(0 <= self.process_id < self.num_processes, "process_id", f"0 to {self.num_processes - 1}")

    def to_json(self) -> str:
        """The options as a JSON object."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str) -> "TrainConfig":
        """Reads what `to_json` wrote.

        Raises:
            ValueError: If the text is not such an object; names ``source``.
        """
        try:
            values: dict[str, Any] = json.loads(text)
            if not isinstance(values, dict):
                raise ValueError("it is no JSON object")
            known = {field.name for field in dataclasses.fields(cls)}
            if unknown := sorted(set(values) - known):
                raise ValueError(f"unknown options {', '.join(unknown)}")
            if values.get("contrast") is not None:
                values["contrast"] = tuple(values["contrast"])
            return cls(**values)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{source}: not the options of a run: {error}") from None


# Options that decide the numbers of a run: a resumed run must keep them.
FIXED_ON_RESUME = (
    *("preset", "network", "batch_size", "seed", "validation_split", "classes", "optimizer", "lr", "momentum"),
    *("b1", "b2", "eps", "schedule", "warmup_epochs", "decay_epochs", "decay_rate", "time_decay", "staircase"),
    *("weight_decay", "weight_decay_kind", "microbatches", "bn_scope"),
    *("plateau", "plateau_factor", "early_stopping", "clip_norm", "class_weights", "translate", "cutout", "mixup"),
    "flip_test",
    *("aggregate", "stale"),
    *("image_shape", "pixel_order", "label_column", "task"),
    *("label_smoothing", "ema", "scaling", "flip", "crop_padding", "crop_to", "brightness", "contrast", "dtype", "x64"),
)


def flag(field: str) -> str:
    """The command line flag of a field."""
    return "--" + field.replace("_", "-")


def parse_image_shape(text: str | None) -> tuple[int, int, int] | None:
    """Reads ``28,28,1`` into ``(28, 28, 1)``; None stays None.

    Raises:
        ValueError: If the text is no such shape.
    """
    if text is None:
        return None
    match = re.fullmatch(r"0*([1-9]\d{0,4}),0*([1-9]\d{0,4}),0*([1-9]\d?)", text.replace(" ", ""), re.ASCII)
    if match is None:
        raise ValueError(f"--image-shape is {text!r}; allowed: HEIGHT,WIDTH,CHANNELS, such as 28,28,1")
    return int(match[1]), int(match[2]), int(match[3])


def parse_aggregate(text: str | None) -> tuple[int, int] | None:
    """Reads ``3/4`` into ``(3, 4)``; None where all count.

    Raises:
        ValueError: If the text is no such fraction.
    """
    if text is None:
        return None
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError(f"--aggregate is {text!r}; allowed: K/N with 1 <= K <= N, such as 3/4")
    return None if match[1] == match[2] else (int(match[1]), int(match[2]))


def parse_class_weights(text: str | None) -> tuple[float, ...] | str | None:
    """Reads ``1,2.5`` into ``(1.0, 2.5)``; ``balanced`` and None stay.

    Raises:
        ValueError: If the text is neither, or a number is below 0 or all are 0.
    """
    if text in (None, "balanced"):
        return text
    try:
        weights = tuple(float(part) for part in text.split(","))
    except ValueError:
        weights = ()
    if not weights or not all(0 <= weight < float("inf") for weight in weights) or not any(weights):
        raise ValueError(f"--class-weights is {text!r}; allowed: balanced, or a number of 0 or more for each class")
    return weights


def parse_interval(text: str) -> tuple[int, str]:
    """Reads ``10`` into ``(10, "steps")`` and ``2epochs`` into ``(2, "epochs")``.

    Raises:
        ValueError: If the text is neither.
    """
    match = re.fullmatch(r"(\d+)(steps?|epochs?)?", text)
    if match is None:
        raise ValueError(f"--checkpoint-every is {text!r}; allowed: a number of steps, or of epochs as in 2epochs")
    return int(match[1]), "epochs" if (match[2] or "").startswith("epoch") else "steps"
