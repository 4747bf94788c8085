"""One page about one or several runs, from the files that they wrote; runs that are still going on are fine.

    python -m experiments.report runs/cifar10-20250101-120000
    python -m experiments.report runs/a runs/b --out comparison

Writes ``report.html``, which needs no other file and no network, and each of its plots as ``report_NAME.png``. Exit
codes: 0 done, 2 a mistake in the command line or a folder.
"""

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import tyro

from experiments.training import command_line


@dataclasses.dataclass(frozen=True)
class Options:
    """Makes one HTML page about one or several runs, side by side."""

    runs: tyro.conf.Positional[tuple[str, ...]]
    """Folders of runs, as --run-dir of training names them."""
    out: str | None = None
    """Folder to write. Default: that of the run; report/ where there are several."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise ValueError("RUN is missing; give the folder of at least one run")


def write(options: Options) -> Path:
    """Reads the runs and writes the page and its plots; returns the page.

    Raises:
        ValueError: If a folder is no run, or the page cannot be written.
    """
    from cnnjax.report.rundirs import read_runs
    from cnnjax.report.runs import runs_page

    runs = read_runs(options.runs)
    out = Path(options.out or (options.runs[0] if len(runs) == 1 else "report"))
    text, files = runs_page(runs)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, content in {**files, "report.html": text.encode("utf-8", "replace")}.items():
            new = out / f"{name}.new"
            new.write_bytes(content)
            os.replace(new, out / name)  # whoever watches a run sees the old page or the new one
    except OSError as error:
        raise ValueError(f"--out {out} cannot be written: {error.strerror}") from None
    return out / "report.html"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    try:
        print(f"page {write(command_line(Options, 'report', sys.argv[1:] if arguments is None else arguments))}")
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
