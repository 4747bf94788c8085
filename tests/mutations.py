"""Breaks the code on purpose, one mistake at a time in a copy, and lists which tests notice. Run by hand:

    python tests/mutations.py [--only WORDS] [PYTEST ARGUMENTS...]

Each mistake is one that makes a parallel training wrong without making it fail. A mistake that no test notices is a
hole in the suite, and the exit code is then 1.
"""

import argparse
import dataclasses
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("step", "model", "ops", "layouts_agree", "spatial", "pipeline", "replicas")


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A piece of a file of the package, which must occur once, and what to put in its place."""

    about: str
    file: str
    before: str
    after: str


MUTATIONS = [
    Mutation(
        "gradients summed over devices, not averaged (shard_map, pmap)", "step.py",
        'count = jnp.maximum(layout.total(jnp.sum(batch["weight"])), 1)',
        'count = jnp.maximum(jnp.sum(batch["weight"]), 1)',
    ),
    Mutation(
        "gradients summed over micro-batches, not averaged (jit)", "step.py",
        'loss = sums["loss"] / count\n',
        'loss = sums["loss"] / jnp.maximum(jnp.sum(batch["weight"]), 1)\n',
    ),
    Mutation(
        "gradients summed over micro-batches, not averaged (pipe)", "pipeline.py",
        'sums["loss"] / jnp.maximum(jnp.sum(batch["weight"]), 1)',
        'sums["loss"] / jnp.maximum(jnp.sum(part["weight"]), 1)',
    ),
    Mutation(
        "loss summed over samples, not averaged", "step.py",
        'loss = sums["loss"] / count\n',
        'loss = sums["loss"]\n',
    ),
    Mutation(
        "batch-norm means of devices averaged without counts", "ops.py",
        "    mean = psum(jnp.sum(weight * x, dims), sum_axes) / count\n",
        "    mine = jnp.maximum(jnp.sum(weight_B.astype(x.dtype)), 1) * positions\n"
        "    mean = psum(jnp.sum(weight * x, dims), sum_axes) / psum(1.0, sum_axes) / mine\n",
    ),
    Mutation(
        "moving statistics of devices averaged without counts (--bn-scope local)", "partition.py",
        'if self.bn_scope == "global":  # all are the same',
        "if True:",
    ),
    Mutation(
        "padding counted in batch norm", "model.py",
        "mean, var = ops.batch_moments(x, call.weight_B,",
        "mean, var = ops.batch_moments(x, None,",
    ),
    Mutation(
        "padding counted in the loss", "step.py",
        "return {name: jnp.sum(weight_B * values_B) for",
        "return {name: jnp.sum(weight_B * 0 + values_B) for",
    ),
    Mutation(
        "dropout keyed by the place on the device, not by the sample", "step.py",
        "return sample_keys(augment_key, index_B), sample_keys(dropout_key, index_B)",
        "return sample_keys(augment_key, index_B), sample_keys(dropout_key, jnp.arange(len(index_B)))",
    ),
    Mutation(
        "last micro-batch dropped (jit, shard_map)", "step.py",
        "return lax.scan(add, (batch_stats, zeros), parts)[0]",
        "return lax.scan(add, (batch_stats, zeros), jax.tree.map(lambda x: x[:-1], parts))[0]",
    ),
    Mutation(
        "last micro-batch dropped (pipe)", "pipeline.py",
        "        for _ in numbers:\n",
        "        saved = [one[:-1] for one in saved]\n        losses.pop()\n        for _ in numbers[:-1]:\n",
    ),
    Mutation(
        "one halo row missing", "spatial.py",
        "    x_BHWC = _with_neighbours(x_BHWC, rows, above, below)\n",
        "    x_BHWC = _with_neighbours(x_BHWC, rows, above, below)\n"
        "    x_BHWC = x_BHWC.at[:, 0].set(jnp.where(lax.axis_index(rows.axis) > 0, 0, x_BHWC[:, 0]) if above else"
        " x_BHWC[:, 0])\n",
    ),
]  # fmt: skip


def try_out(mutation: Mutation, arguments: list[str]) -> list[str]:
    """Names of the tests that fail in a copy with the mistake."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("cnnjax", "experiments", "tests", "data"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "downloads"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        path = copy / "cnnjax" / mutation.file
        text = path.read_text()
        assert text.count(mutation.before) == 1, f"{mutation.file} has this {text.count(mutation.before)} times"
        path.write_text(text.replace(mutation.before, mutation.after))
        command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=no", "-rfE", *arguments]
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)


def main() -> int:
    """Runs the command and returns its exit code."""
    parser = argparse.ArgumentParser(description="Breaks the code on purpose and lists which tests notice.")
    parser.add_argument("--only", default="", help="part of the name of the mistakes to make")
    options, arguments = parser.parse_known_args()
    arguments = arguments or [f"tests/test_{name}.py" for name in TESTS]
    missed = 0
    for mutation in MUTATIONS:
        if options.only not in mutation.about:
            continue
        start = time.monotonic()
        failed = try_out(mutation, arguments)
        missed += not failed
        print(f"{mutation.about} [{time.monotonic() - start:.0f} s]: {len(failed) or 'NOTHING'} noticed", flush=True)
        for name in failed:
            print(f"    {name}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
