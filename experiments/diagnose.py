"""Why does it not learn? Looks at data and options, takes some training steps, and says what is wrong.

    python -m experiments.diagnose --data images.csv --validation-split 0.1 --network cnn2d_2layer_fullconnected_1layer

Takes the flags of a training. Nothing is written but --json. Exit codes: 0 nothing wrong, or notes alone; 1 warnings or
errors; 2 a mistake in flags or files.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from cnnjax.config import TrainConfig, UsageError
from experiments import cifar10
from experiments.training import command_line, shape_of_network


@dataclasses.dataclass(frozen=True)
class Options(TrainConfig):
    """Looks for what is wrong with data, options and network."""

    probe_steps: int = 60
    """Training steps to take."""
    json: str | None = None
    """File to write the findings to."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.probe_steps < 4:
            raise ValueError(f"--probe-steps is {self.probe_steps}; allowed: 4 or more")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    defaults = Options(**dataclasses.asdict(cifar10.PRESETS["default"]))
    try:
        options = command_line(Options, "diagnose", sys.argv[1:] if arguments is None else arguments, defaults)
        return diagnose(options)
    except (UsageError, ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def diagnose(options: Options) -> int:
    """Looks, prints and returns the exit code."""
    default_shape = shape_of_network(options.network)
    fields = {field.name for field in dataclasses.fields(TrainConfig)}
    config = TrainConfig(**{name: value for name, value in vars(options).items() if name in fields})

    import jax

    from cnnjax import compile_cache, diagnose
    from experiments.assembly import Facts, choose, input_shape, make_layout, make_recipe, read_data

    compile_cache.start()
    jax.config.update("jax_enable_x64", config.x64)
    layout, line = make_layout(config)
    found, config = read_data(config, cifar10.fill, "cifar10", default_shape, config.quiet)
    splits = found.splits
    training, validation = choose(config, splits)
    for note in (*found.notes, *splits.said, line):
        print(note)
    counts = f"{len(training):,} training images, {len(validation):,} for validation"
    print(f"{config.network} on {training.name}: {counts}, {options.probe_steps} steps of {config.batch_size}\n")
    findings = diagnose.examine_data(training, [validation, *([] if splits.test is None else [splits.test])])
    recipe = make_recipe(config, Facts.of(config, training, splits))
    shape = input_shape(config, training.image_shape)
    findings += diagnose.examine_training(
        recipe, layout, shape, training, config.batch_size, options.probe_steps, config.strategy
    )
    print(diagnose.in_words(findings))
    if options.json:
        Path(options.json).write_text(json.dumps(diagnose.as_dicts(findings), indent=1) + "\n")
    return int(any(finding.severity != "note" for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
