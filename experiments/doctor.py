"""The diagnosis of a run while it trains: warnings on the console, ``diagnosis.json`` in its folder."""

import csv
import json
from collections.abc import Sequence

from cnnjax import diagnose, networks
from cnnjax.config import TrainConfig
from cnnjax.console import Console
from cnnjax.datasets.base import Dataset
from cnnjax.diagnose import Finding
from cnnjax.metrics import replace_file
from cnnjax.rundir import RunDirectory
from experiments.assembly import Facts


class Doctor:
    """Says each finding once, and keeps all in the run's folder."""

    def __init__(self, config: TrainConfig, facts: Facts, run: RunDirectory, console: Console):
        """Looks at nothing yet."""
        self._config, self._facts, self._run, self._console = config, facts, run, console
        self._findings: list[Finding] = []

    def examine_data(self, training: Dataset, held_out: Sequence[Dataset]) -> None:
        """Before training."""
        if self._run.writes:
            self._tell(diagnose.examine_data(training, held_out))

    def examine_curves(self) -> None:
        """After it."""
        if not self._run.writes:
            return
        with (self._run.path / "metrics.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        self._tell(diagnose.examine_curves(rows, len(self._facts.class_names), is_harder(self._config)))

    def stopped(self, why: str) -> None:
        """After a loss that is no number."""
        if self._run.writes:
            finding = Finding(
                "error", "learning_rate", why, "updates that are too large end in infinity",
                f"--lr {self._config.lr / 10:g}, or --clip-norm 1; python -m experiments.diagnose with the same flags "
                "looks further",
            )  # fmt: skip
            self._tell([finding], aloud=False)

    def _tell(self, findings: Sequence[Finding], aloud: bool = True) -> None:
        self._findings += findings
        for finding in diagnose.most_severe_first(findings) if aloud else ():
            text = f"{finding.seen}: {finding.why}. {finding.change}"
            (self._console.say if finding.severity == "note" else self._console.warn)(text)
        text = json.dumps(diagnose.as_dicts(self._findings), indent=1)
        replace_file(self._run.path / "diagnosis.json", text + "\n")


def is_harder(config: TrainConfig) -> bool:
    """Whether training images are harder than those for validation."""
    layers = networks.build_cnn(config.network, 10)
    dropout = any(isinstance(layer, networks.Dropout) and layer.rate for layer in layers)
    augmented = config.flip == "on" or config.crop_padding or config.crop_to or config.brightness or config.contrast
    more = config.translate or config.cutout or config.mixup or config.label_smoothing or config.class_weights
    return bool(dropout or augmented or more or config.ema)
