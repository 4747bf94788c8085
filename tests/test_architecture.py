"""The road of one batch: each module imports only from those above it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "cnnjax"

# From the top of the road down. Modules of one line do not import each other.
ROAD = [
    {"networks", "config"},
    {"datasets", "spatial"},
    {"augment", "compile_cache", "metrics", "console", "ops", "optim", "patience", "tensorboard"},
    {"model", "partition", "losses", "scores"},
    {"replicas"},
    {"step", "checkpoint", "rundir", "feed", "distributed"},
    {"pipeline", "evaluation", "signals"},
    {"strategy", "record"},
    {"loop", "explain", "diagnose"},
]
# Not on the road: they see files, or start processes. Nothing on the road imports them.
BESIDE = {
    "report": {"report"},
    "compat": set().union(*ROAD) | {"report", "compat"},
}
FOREIGN = ("tensorflow", "keras", "torch", "tensorflow_datasets")


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts != ("__init__",) and parts[:2] != ("compat", "runners"):
            yield parts[0], path


def imports(path: Path):
    """Package modules that a file imports anywhere, and top-level names of foreign ones."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ([f"cnnjax.{alias.name}" for alias in node.names] if node.module == "cnnjax" else [node.module])


def test_every_module_has_a_place_on_the_road():
    assert {name for name, _ in modules()} == set().union(*ROAD, BESIDE)


@pytest.mark.parametrize(("name", "path"), list(modules()), ids=lambda value: getattr(value, "stem", value))
def test_imports_point_up_the_road(name, path):
    place = next((i for i, line in enumerate(ROAD) if name in line), None)
    allowed = BESIDE[name] if place is None else set().union(*ROAD[:place], {name})
    used = {module.split(".")[1] for module in imports(path) if module.startswith("cnnjax.")}
    assert used <= allowed
    assert not [module for module in imports(path) if module.split(".")[0] in (*FOREIGN, "experiments", "tests")]


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_everything_loads_no_other_framework_and_starts_no_backend():
    names = sorted({f"cnnjax.{path.relative_to(PACKAGE).with_suffix('').as_posix().replace('/', '.')}"
                    for _, path in modules()})  # fmt: skip
    code = f"import sys, {', '.join(name.removesuffix('.__init__') for name in names)}\n"
    code += f"print([name for name in {FOREIGN} if name in sys.modules])\n"
    code += "from jax._src import xla_bridge; print(xla_bridge.backends_are_initialized())"
    assert run(code).split() == ["[]", "False"]


def test_importing_the_package_is_quick():
    code = """import time, jax, flax
start = time.perf_counter()
import cnnjax, cnnjax.loop
print(time.perf_counter() - start)"""
    assert min(float(run(code)) for _ in range(2)) < 3


def test_reading_data_needs_no_jax():
    code = "import sys; sys.modules['jax'] = None\n"
    code += "from cnnjax.datasets.digits import load_digits; print(len(load_digits().train))"
    assert run(code).strip() == "1438"


def test_the_step_stays_readable():
    """Two screens: whoever adds a feature here should ask whether it belongs elsewhere."""
    lines = (PACKAGE / "step.py").read_text().splitlines()
    assert len(lines) <= 200 and max(map(len, lines)) <= 120
