"""What every training experiment shares: command line, set-up, exit codes.

Exit codes: 0 done, or stopped by SIGTERM with a checkpoint; 2 a mistake in flags, files or folders; 3 the loss is no
number; 4 another process of the run is lost; 130 stopped by Ctrl-C.
"""

import contextlib
import dataclasses
import io
import itertools
import re
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tyro

from cnnjax import networks
from cnnjax.config import TrainConfig, UsageError, flag

Presets = Mapping[str, TrainConfig]
Options = TypeVar("Options")


def main(
    experiment: str,
    about: str,
    presets: Presets,
    fill: Callable[[str], dict[str, Any]],
    default_data: str = "cifar10",
    arguments: Sequence[str] | None = None,
) -> int:
    """Runs ``python -m experiments.<experiment>`` and returns its exit code.

    Args:
        experiment: Name of the module.
        about: What ``--help`` says first.
        presets: Options by preset name; ``default`` must be there.
        fill: Data set name to the options that are still open then (``epochs``, ``flip``, ``crop_padding``).
        default_data: Data set to look for where ``--data`` is not given.
        arguments: Command line; the process's own where None.
    """
    try:
        config = parse(experiment, about, presets, sys.argv[1:] if arguments is None else arguments)
        return train(experiment, config, fill, default_data)
    except _Mistake as error:
        text = " ".join(str(error).split())
        print(f"error: {text}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


class _Mistake(Exception):
    """Something that the user can mend; shown as one line."""

    exit_code = 2


@contextlib.contextmanager
def _mistakes(*kinds: type[Exception]):
    try:
        yield
    except kinds as error:
        raise _Mistake(error) from error


# ---------------------------------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------------------------------


def parse(experiment: str, about: str, presets: Presets, arguments: Sequence[str]) -> TrainConfig:
    """Reads the command line over the defaults of ``--preset``, or of the run that ``--resume`` continues."""
    text = "\n\n".join(
        [about, "Presets: " + "; ".join(f"{name}: {_difference(presets, name)}" for name in presets) + "."]
    )
    if {"-h", "--help"} & set(arguments):
        tyro.cli(TrainConfig, prog=f"python -m experiments.{experiment}", description=text, args=["--help"],
                 default=presets["default"])  # fmt: skip
    with _mistakes(ValueError, OSError):
        preset = _value_of("--preset", arguments) or "default"
        if preset not in presets:
            raise ValueError(f"--preset is {preset!r}; allowed: {', '.join(presets)}")
        defaults = dataclasses.replace(presets[preset], preset=preset)
        run_dir = _value_of("--run-dir", arguments)
        if "--resume" in arguments and run_dir is not None:
            from cnnjax.rundir import saved_config

            defaults = saved_config(Path(run_dir)) or defaults
        return command_line(TrainConfig, experiment, arguments, defaults)


def command_line(options: type[Options], experiment: str, arguments: Sequence[str], default: Any = None) -> Options:
    """Reads a command line into a dataclass of options; prints the help and exits where it is asked for.

    Raises:
        ValueError: In one line, what is wrong with it.
    """
    more = {"prog": f"python -m experiments.{experiment}"} | ({} if default is None else {"default": default})
    if {"-h", "--help"} & set(arguments):
        tyro.cli(options, args=["--help"], **more)
    shown = io.StringIO()
    try:
        with contextlib.redirect_stderr(shown), contextlib.redirect_stdout(shown):
            return tyro.cli(options, args=arguments, **more)
    except SystemExit:
        raise ValueError(_one_line(shown.getvalue(), arguments)) from None


def _value_of(name: str, arguments: Sequence[str]) -> str | None:
    """The last value given to a flag, also for those that decide the defaults of all others."""
    found = None
    for before, after in itertools.pairwise((*arguments, "")):
        given, equals, value = before.partition("=")
        if given.replace("_", "-") == name:
            found = value if equals else after
    return found


def _difference(presets: Presets, name: str) -> str:
    changed = [
        f"{field.name}={getattr(presets[name], field.name)}"
        for field in dataclasses.fields(TrainConfig)
        if field.name != "preset" and getattr(presets[name], field.name) != getattr(presets["default"], field.name)
    ]
    return ", ".join(changed) or "the defaults below"


_KINDS = {"INT": "a whole number", "FLOAT": "a number", "FLOAT FLOAT": "two numbers"}


def _one_line(box: str, arguments: Sequence[str]) -> str:
    """Tyro draws its errors as a box, or below a title, on several lines; scripts and logs are better served by one."""
    lines = [line.strip("│ ") for line in box.splitlines()]
    title, *parts = [
        " ".join(part)
        for is_rule, group in itertools.groupby(lines, lambda line: re.match(r"[╭╰]|[─-]{5}", line) is not None)
        if (part := [line for line in group if line and (not is_rule or line.startswith("╭"))])
    ] or ["the command line cannot be read"]
    message = parts[0] if parts else title
    if match := re.match(r"Error parsing (--[\w-]+): ", message):
        name = match[1]
        needed = re.search(rf"{name} (.*?)(?= [A-Z][a-z]|$)", next((p for p in parts if p.startswith("Argument")), ""))
        kind = needed[1].removeprefix("{None}|").strip("{}") if needed else ""
        return f"{name} is {_value_of(name, arguments)!r}; allowed: {_KINDS.get(kind, kind)}"
    if match := re.match(r"invalid choice (.*) for argument '(--[\w-]+)'\. Expected one of \((.*?),?\)\.", message):
        return f"{match[2]} is {match[1]}; allowed: {match[3].replace(chr(39), '')}"
    message = re.sub(r"^Error parsing \w+: ", "", message)
    hints = re.findall(r"--[\w-]+", next((part for part in parts if part.startswith("Perhaps you meant")), ""))
    return message + (f"; perhaps you meant {', '.join(dict.fromkeys(hints))}" if hints else "")


# ---------------------------------------------------------------------------------------------------------------------
# Set-up
# ---------------------------------------------------------------------------------------------------------------------


def shape_of_network(name: str) -> tuple[int, int, int]:
    """The images that a network is made for.

    Raises:
        ValueError: If there is no such network; names the flag.
    """
    try:
        networks.build_cnn(name, 10)
    except ValueError as error:
        raise ValueError(f"--network: {error}") from None
    return networks.default_input_shape(name)


def train(experiment: str, config: TrainConfig, fill: Callable[[str], dict[str, Any]], default_data: str) -> int:
    """Checks everything, then makes the run directory, then trains."""
    # What can be checked without JAX or data comes first: a typing error should cost no waiting.
    with _mistakes(ValueError):
        default_shape = shape_of_network(config.network)

    import jax

    from cnnjax import compile_cache, distributed, explain

    cache = compile_cache.start()
    jax.config.update("jax_enable_x64", config.x64)
    with _mistakes(ValueError):
        if config.devices is not None:
            config = dataclasses.replace(config, mesh=explain.pretend(config.mesh, config.devices))
        processes = distributed.start(config.coordinator, config.num_processes, config.process_id, config.mesh)
    with processes:
        return _train(experiment, config, fill, default_data, default_shape, processes, cache.publish)


def _train(
    experiment: str,
    config: TrainConfig,
    fill: Callable[[str], dict[str, Any]],
    default_data: str,
    default_shape: tuple[int, int, int],
    processes: Any,
    compiled: Callable[[], None],
) -> int:
    """The rest, which the `cnnjax.distributed.Processes` of a run do in step."""
    from cnnjax import distributed, explain, rundir
    from cnnjax.console import Console
    from cnnjax.metrics import replace_file
    from experiments.assembly import MODEL_FILE, Facts, choose, input_shape, make_layout, make_recipe, read_data

    def find_run() -> list[str | None]:
        path, saved = rundir.find_run(experiment, config)
        return [str(path), None if saved is None else saved.to_json()]

    with _mistakes(ValueError, OSError):
        place, options_then = ("", None) if config.explain else processes.from_first(find_run)
        path, saved = Path(place), options_then and TrainConfig.from_json(options_then, place)
        layout, mesh_line = make_layout(config)
        processes.check_mesh(layout.mesh)
        quiet = config.quiet or not processes.first
        found, config = processes.first_then_others(lambda: read_data(config, fill, default_data, default_shape, quiet))
        splits = found.splits
        if saved is not None:
            rundir.check_same_run(path, config, saved)
        own = ("coordinator", "process_id", "run_dir", "quiet")
        given = {flag(name): value for name, value in dataclasses.asdict(config).items() if name not in own}
        processes.same("options and data", given | {"images": len(splits.train), "data set": splits.train.name})
        training, validation = choose(config, splits)
        facts = Facts.of(config, training, splits)
        recipe = make_recipe(config, facts)
        if config.explain:
            shape = input_shape(config, training.image_shape)
            if "pipe" in layout.mesh.shape:
                costs = explain.explain_stages(recipe, layout, shape, config.batch_size, training.image_shape)
                text = explain.stages_report(costs)
            else:
                text = explain.report(
                    explain.explain(recipe, layout, shape, config.batch_size, config.strategy, training.image_shape)
                )
            print(*(f"note: {note}" for note in (*found.notes, mesh_line)), text, sep="\n")
            return 0

    from cnnjax.strategy import compile_steps

    with _mistakes(UsageError):  # other errors here come from the step itself, and whoever edits it needs the traceback
        steps = compile_steps(recipe, layout, input_shape(config, training.image_shape), config.strategy)
    with _mistakes(ValueError, OSError):
        run = processes.first_then_others(lambda: rundir.open_run(path, config.overwrite, writes=processes.first))
        if saved is None:  # at once, so that a run that is killed before its first checkpoint has its options
            rundir.write_config(run, config)

    from cnnjax.loop import Fit, NotFinite
    from experiments.doctor import Doctor

    console = Console(config.quiet, run.log) if processes.first else distributed.Silent(True, run.log)
    with contextlib.closing(run):
        for note in found.notes:
            console.warn(note)
        for line in splits.said:
            console.say(line)
        console.say(f"{config.network} on {splits.train.name}: {len(training):,} training images, "
                    f"{len(validation):,} for validation, from {splits.train.source}")  # fmt: skip
        console.say(mesh_line + (f", of {processes.count} processes" if processes.count > 1 else ""))
        for note in steps.notes:
            console.say(note)
        console.say(f"run directory {path}")
        if config.resume and saved is None:
            console.warn(f"--resume: there is no run in {path} yet, so it starts from its beginning")
        how = f"resume with: python -m experiments.{experiment} --run-dir {shlex.quote(str(path))} --resume"
        how += " in every process" if processes.count > 1 else ""
        processes.hint, processes.last_words = how, run.log
        doctor = Doctor(config, facts, run, console)

        def begun() -> None:
            if run.writes:
                replace_file(path / MODEL_FILE, facts.to_json())
            doctor.examine_data(training, [validation, *([] if splits.test is None else [splits.test])])

        try:
            with _mistakes(UsageError):
                try:
                    fit = Fit(steps, layout, training, validation, splits.test, config, run, console, processes)
                    result = fit.run(begun, compiled)
                except OSError as error:
                    raise UsageError(f"--run-dir {path} cannot be written: {error}") from error
        except NotFinite as error:
            console.warn(str(error))
            doctor.stopped(str(error))
            return 3
        except _Mistake as error:
            with contextlib.suppress(OSError):
                run.log(f"error: {error}")
            raise
        if result.stopped_by is not None:
            console.warn(f"stopped by {result.stopped_by.name} at step {result.step}, checkpoint saved; {how}")
            return 130 if result.stopped_by == signal.SIGINT else 0
        doctor.examine_curves()
        if config.report and run.writes:
            from experiments import report

            page = report.write(report.Options((str(path),)))
            console.say(f"page {page}")
    return 0
