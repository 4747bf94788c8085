"""The frameworks by name: which runner, which interpreter, what must be installed."""

import dataclasses
import difflib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path

from cnnjax.compat import legacy

RUNNERS = Path(__file__).parent / "runners"
_TWO_REPLICAS = {"mesh": "data=2", "strategy": "shard_map", "bn_scope": "local"}


@dataclasses.dataclass(frozen=True)
class Framework:
    """One way to train the network.

    Attributes:
        name: As ``--frameworks`` takes it and results show it.
        about: One line.
        runner: File in ``runners/``.
        options: What the runner is told.
        counts: Options that ``--frameworks NAME:OPTION=COUNT`` may set.
        modules: What must be importable.
        install: Command that installs them.
        old: Whether it needs the old interpreter of `cnnjax.compat.legacy`.
        reference: Options of the runner of cnnjax that give the same numbers.
        exact: Whether it computes the same steps as cnnjax; asynchronous updates do not.
    """

    name: str
    about: str
    runner: str
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    modules: tuple[str, ...] = ()
    install: str = "pip install -e '.[compat]'"
    old: bool = False
    reference: Mapping[str, str] = dataclasses.field(default_factory=dict)
    exact: bool = True
    counts: tuple[str, ...] = ()

    def with_options(self, given: Mapping[str, str]) -> "Framework":
        """The same with some of `counts` set, under a name that says so, held against as many replicas.

        Raises:
            ValueError: If an option is unknown or no count.
        """
        if not given:
            return self
        for option, value in given.items():
            if option not in self.counts:
                allowed = f"allowed: {', '.join(self.counts)}" if self.counts else f"{self.name} takes none"
                raise ValueError(f"--frameworks: {self.name}:{option} is unknown; {allowed}")
            if not (value.isdecimal() and int(value)):
                raise ValueError(f"--frameworks: {self.name}:{option} is {value!r}; allowed: a whole number, 1 or more")
        replicas = int(given.get("workers", given.get("replicas", 2)))
        taken = int(given.get("replicas_to_aggregate", replicas))
        if taken > replicas:
            raise ValueError(f"--frameworks: {self.name}:replicas_to_aggregate is {taken}; allowed: 1 to {replicas}")
        return dataclasses.replace(
            self, name="-".join([self.name, *(f"{option}{value}" for option, value in given.items())]),
            about=f"{self.about}; {', '.join(f'{option}={value}' for option, value in given.items())}",
            options=dict(self.options) | dict(given), reference=dict(self.reference) | {"mesh": f"data={replicas}"},
            exact=self.exact and taken == replicas,
        )  # fmt: skip

    @property
    def interpreter(self) -> Path | None:
        """The Python that runs it; None where there is none."""
        return legacy.interpreter() if self.old else Path(sys.executable)

    @property
    def missing(self) -> str | None:
        """What is not installed, with the command that installs it; None where nothing is missing."""
        if self.old:
            return None if self.interpreter else f"its Python 3.7 environment; {legacy.install_command()}"
        lacking = [module for module in self.modules if importlib.util.find_spec(module) is None]
        return f"{', '.join(lacking)}; {self.install}" if lacking else None


def _keras(backend: str, module: str, install: str = "pip install -e '.[compat]'") -> Framework:
    name = {"tensorflow": "TensorFlow", "jax": "JAX", "torch": "PyTorch"}[backend]
    return Framework(
        f"keras_{backend}", f"Keras 3 on {name}", "run_keras.py", {"backend": backend}, ("keras", module), install
    )


def _old(name: str, about: str, runner: str, options: Mapping[str, str]) -> Framework:
    return Framework(name, f"{about}, on Python 3.7", runner, options, old=True)


_TORCH = "pip install torch"

FRAMEWORKS: dict[str, Framework] = {
    framework.name: framework
    for framework in (
        Framework("jax", "cnnjax itself, under --mesh and --strategy", "run_jax.py"),
        _keras("tensorflow", "tensorflow"),
        _keras("jax", "jax"),
        _keras("torch", "torch", "pip install keras torch"),
        Framework("tensorflow", "TensorFlow 2, tf.function", "run_tensorflow.py", {}, ("tensorflow",)),
        Framework(
            "tensorflow_mirrored", "TensorFlow 2, MirroredStrategy over virtual CPU devices, 2 unless counted",
            "run_tensorflow.py", {"replicas": "2"}, ("tensorflow",), reference=_TWO_REPLICAS, counts=("replicas",),
        ),
        Framework(
            "tensorflow_ps", "TensorFlow 1 cluster on TensorFlow 2: a parameter server and workers, 2 unless counted",
            "run_tensorflow_ps.py", {"mode": "sync"}, ("tensorflow",), reference=_TWO_REPLICAS,
            counts=("workers", "replicas_to_aggregate"),
        ),
        Framework(
            "tensorflow_ps_async", "the same cluster, each worker updating when it is ready", "run_tensorflow_ps.py",
            {"mode": "async"}, ("tensorflow",), reference=_TWO_REPLICAS, exact=False, counts=("workers",),
        ),
        Framework("torch", "PyTorch, channels last", "run_torch.py", {}, ("torch",), _TORCH),
        Framework("torch_compiled", "the same through torch.compile", "run_torch.py", {"compile": "1"}, ("torch",),
                  _TORCH),
        Framework("torch_ddp", "PyTorch DistributedDataParallel over gloo, 2 processes unless counted", "run_torch.py",
                  {"replicas": "2"}, ("torch",), _TORCH, reference=_TWO_REPLICAS, counts=("replicas",)),
        Framework("caffe", "trained by cnnjax, written for Caffe, read back by OpenCV", "run_caffe.py", {}, ("cv2",),
                  "pip install 'opencv-python-headless<5'"),
        _old("keras_theano", "Keras 2.3 on Theano 1.0", "run_keras2.py", {"backend": "theano"}),
        _old("keras_tensorflow1", "Keras 2.3 on TensorFlow 1.15", "run_keras2.py", {"backend": "tensorflow"}),
        _old("tensorflow1", "TensorFlow 1.15, graph and session", "run_tensorflow1.py", {}),
        _old("lasagne", "Lasagne 0.1 on Theano 1.0", "run_lasagne.py", {}),
    )
}  # fmt: skip


def parse(text: str) -> list[Framework]:
    """Reads ``--frameworks``: ``all``, or names with commas between, some with counts, as ``torch_ddp:replicas=4``.

    Raises:
        ValueError: Names the part that is no framework or option, and the nearest that is.
    """
    if text == "all":
        return list(FRAMEWORKS.values())
    chosen: dict[str, Framework] = {}
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if "all" in parts:
        raise ValueError(f"--frameworks is {text!r}; allowed: all by itself, or names of {', '.join(FRAMEWORKS)}")
    for part in parts:
        name, *given = part.split(":")
        if name not in FRAMEWORKS:
            near = difflib.get_close_matches(name, FRAMEWORKS, 1)
            hint = f"nearest: {near[0]}; " if near else ""
            raise ValueError(f"--frameworks: {name!r} is unknown; {hint}allowed: all, {', '.join(FRAMEWORKS)}")
        options: dict[str, str] = {}
        for pair in given:
            option, _, value = pair.partition("=")
            if option in options:
                raise ValueError(f"--frameworks: {part} has {option} twice")
            options[option] = value
        framework = FRAMEWORKS[name].with_options(options)
        chosen[framework.name] = framework
    if not chosen:
        raise ValueError(f"--frameworks is {text!r}; allowed: all, or names of {', '.join(FRAMEWORKS)}")
    return list(chosen.values())
