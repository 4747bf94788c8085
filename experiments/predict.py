"""Predicts images with the network of a run.

    python -m experiments.predict runs/digits-... --data my_images.csv

Writes ``ImageId,Label`` rows, and with ``--probabilities`` a column for each class; where the images have labels, it
also says how many are right. Exit codes: 0 done; 2 a mistake in flags or files.
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro

from cnnjax.config import UsageError, parse_image_shape
from experiments.training import command_line


@dataclasses.dataclass(frozen=True)
class Options:
    """Predicts images with the network of a run."""

    run: tyro.conf.Positional[str]
    """Folder of the run, as --run-dir of training names it."""
    data: str | None = None
    """Images: as --data in training; or a CSV or .npz file without labels, an image file, or a folder of them. Of a
    data set in parts, the test set. Default: the data of the run."""
    out: str | None = None
    """File to write. Default: predictions_NAME.csv in the run."""
    probabilities: bool = False
    """Add a column for each class, with its probability."""
    overwrite: bool = False
    """Replace that file."""
    checkpoint: str | None = None
    """newest, best, or a step. Default: that of the run's own final scores: best with early stopping, else newest."""
    flip_test: bool = False
    """Predict each image together with its mirror image, and average their probabilities; on if it was in the run."""
    batch_size: int = 500
    """Images at a time."""
    mesh: str = "data=1"
    """Device layout, as in training; it need not be that of the run."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"--batch-size is {self.batch_size}; allowed: 1 or more")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    try:
        options = command_line(Options, "predict", sys.argv[1:] if arguments is None else arguments)
        return predict(options)
    except (UsageError, ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def predict(options: Options) -> int:
    """Reads the run and the images, and writes the predictions."""
    from cnnjax import rundir

    run = Path(options.run)
    config = rundir.saved_config(run)
    if config is None:
        raise ValueError(f"RUN {run}: no run is there (no config.json)")

    import jax
    import numpy as np

    from cnnjax import compile_cache, datasets, partition
    from cnnjax.evaluation import evaluate
    from cnnjax.metrics import write_predictions
    from cnnjax.strategy import compile_steps
    from experiments.assembly import MODEL_FILE, Facts, input_shape, make_recipe

    file = run / MODEL_FILE
    if not file.exists():
        raise ValueError(f"RUN {run}: {MODEL_FILE} is missing; runs of this version have it")
    facts = Facts.from_json(file.read_text(), str(file))
    if options.probabilities and not facts.class_names:
        raise ValueError(f"--probabilities: {run} predicts numbers, not classes")
    compile_cache.start()
    jax.config.update("jax_enable_x64", config.x64)
    own = parse_image_shape(config.image_shape)
    read_options = datasets.ReadOptions(own, config.pixel_order, config.label_column, config.task)
    name = options.data or config.data or facts.dataset
    unseen = datasets.read_unseen(name, read_options, facts.class_names, facts.image_shape, facts.pixel_scale)
    out = Path(options.out) if options.out else run / f"predictions_{Path(unseen.source).stem or 'data'}.csv"
    if out.exists() and not options.overwrite:
        raise ValueError(f"--out {out} exists; --overwrite replaces it")

    config = dataclasses.replace(config, flip_test=config.flip_test or options.flip_test)
    mesh, _ = partition.make_mesh(options.mesh)
    layout = partition.Layout(mesh)
    partition.check_layout("jit", layout)
    steps = compile_steps(make_recipe(config, facts), layout, input_shape(config, facts.image_shape))
    state, step = _restore(run, config, options.checkpoint, steps)

    labels_N = unseen.labels_N
    if labels_N is None:  # any will do
        labels_N = np.zeros(len(unseen.images_NHWC), np.int32 if facts.class_names else np.float32)
    dataset = datasets.Dataset(facts.dataset, unseen.images_NHWC, labels_N, facts.class_names, unseen.source)
    found = evaluate(steps.evaluate, state, dataset, layout, options.batch_size, probabilities=options.probabilities)
    assert found is not None
    columns = {}
    if found.probabilities_NC is not None:
        columns = {
            name: [f"{probability:.6g}" for probability in column_N]
            for name, column_N in zip(facts.class_names, found.probabilities_NC.T, strict=True)
        }
    write_predictions(out, dataset.written_labels(found.predicted_N), unseen.names, columns)
    print(f"{len(dataset):,} images of {unseen.source} predicted by step {step} of {run}, written to {out}")
    if unseen.labels_N is not None:
        means = found.sums.means(dataset.task, len(facts.class_names))
        print("  ".join(f"{measure} {value:.4f}" for measure, value in means.items()))
    return 0


def _restore(run: Path, config: Any, wanted: str | None, steps: Any) -> tuple[Any, int]:
    """The state that is asked for, and its step."""
    import jax

    from cnnjax.checkpoint import Checkpoints

    folder = run / "checkpoints"
    if not folder.is_dir():
        raise ValueError(f"RUN {run}: there is no checkpoint yet")
    checkpoints = Checkpoints(folder, config.keep, read_only=True)
    there, best = checkpoints.steps(), checkpoints.best()
    if not there:
        raise ValueError(f"RUN {run}: there is no complete checkpoint yet")
    if wanted is None:
        wanted = "best" if config.early_stopping and best is not None else "newest"
    named = {"newest": there[-1], "best": best} | {str(step): step for step in there}
    step = named.get(wanted)
    if step is None:
        allowed = ", ".join(name for name, step in named.items() if step is not None)
        raise ValueError(f"--checkpoint is {wanted!r}; allowed: {allowed}")
    state, _ = checkpoints.restore(step, jax.eval_shape(steps.init), steps.state_shardings)
    checkpoints.close()
    return state, step


if __name__ == "__main__":
    sys.exit(main())
