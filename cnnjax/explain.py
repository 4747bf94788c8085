"""What a layout costs, read from the compiled training step: memory, work and traffic of each device. Nothing is run.

A sharding is a wish. What the compiler made of it is in the text of the compiled program, and the numbers here come
from there: sizes from its memory analysis, traffic from its collectives, each traced to the mesh axes that it crosses.

    python -m experiments.cifar10 --mesh data=4 --explain
"""

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cnnjax import networks, partition
from cnnjax.networks import Shape
from cnnjax.partition import Layout
from cnnjax.step import Recipe
from cnnjax.strategy import Steps, compile_steps


@dataclasses.dataclass(frozen=True)
class Machine:
    """The assumed device and interconnect, about an NVIDIA A100 behind a 400 Gbit/s network.

    Attributes:
        flops_per_s: Floating-point operations; the A100's data sheet gives 19.5e12 in float32.
        bytes_per_s: What each device sends, while it receives as much.
        latency_s: Of one message.
        memory: Bytes of each device.
    """

    flops_per_s: float = 20e12
    bytes_per_s: float = 50e9
    latency_s: float = 5e-6
    memory: float = 16e9


# ---------------------------------------------------------------------------------------------------------------------
# Collectives in the text of a compiled program
# ---------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of the compiled step.

    Attributes:
        kind: ``all-reduce``, ``all-gather``, ``reduce-scatter``, ``collective-permute``, ``all-to-all`` or
            ``collective-broadcast``.
        axes: Mesh axes that it crosses.
        group: Devices that take part in one exchange.
        payload: Bytes of the whole array or arrays that a device reduces, gathers, scatters or sends.
        shapes: Result arrays on one device.
        times: Runs in one step, more than 1 in a loop.
        source: JAX operation that it came from.
    """

    kind: str
    axes: tuple[str, ...]
    group: int
    payload: int
    shapes: tuple[Shape, ...]
    times: int = 1
    source: str = ""

    @property
    def sent(self) -> float:
        """Bytes that each device sends in one run, on a ring.

        Patarasuk & Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009): a ring
        all-reduce is a reduce-scatter and an all-gather, each of (n - 1) / n of the array.
        """
        share = (self.group - 1) / self.group
        return self.payload * {"all-reduce": 2 * share, "collective-permute": 1, "collective-broadcast": 1}.get(
            self.kind, share
        )

    def seconds(self, machine: Machine) -> float:
        """Time of one run, by the faster of a ring and of recursive doubling, which sends fewer messages.

        Thakur, Rabenseifner & Gropp, "Optimization of collective communication operations in MPICH" (2005).
        """
        rounds = math.ceil(math.log2(self.group))
        ways = {  # messages one after another, and bytes
            "all-reduce": [(2 * (self.group - 1), self.sent), (rounds, rounds * self.payload)],
            "all-to-all": [(self.group - 1, self.sent)],
            "collective-permute": [(1, self.sent)],
            "collective-broadcast": [(self.group - 1, self.sent), (rounds, rounds * self.payload)],
        }.get(self.kind, [(rounds, self.sent)])
        return min(messages * machine.latency_s + sent / machine.bytes_per_s for messages, sent in ways)


KINDS = (
    *("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all", "ragged-all-to-all"),
    "collective-broadcast",
)
_COLLECTIVE = re.compile(rf"= (?P<type>.+?) (?P<kind>{'|'.join(KINDS)})(?P<start>-start)?\(")
_GROUPS = re.compile(
    r"replica_groups=(\{(?:\{[\d,]*\},?)*\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?"
    r"|mesh\[[^\]]*\](?:, device_ids=\([^()]*(?:\([\d,]*\))?\))? \{[^}]*\})"
)
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_BITS = {"pred": 8, "token": 0, "opaque": 0}  # others have their bits in their name: f32, bf16, s8, f8e4m3fn


def collectives(text: str, axis_sizes: Mapping[str, int]) -> list[Collective]:
    """Finds the collectives of a compiled program.

    Args:
        text: HLO, as ``compiled.as_text()`` gives it. An asynchronous pair of ``-start`` and ``-done`` is one.
        axis_sizes: The mesh, in its order of axes.

    Raises:
        ValueError: If a collective's groups of devices cannot be read, which would be a new form of HLO.
    """
    found = []
    for line, times in _lines(text):
        match = _COLLECTIVE.search(line)
        if match is None:
            continue
        kind, parts = match["kind"].removeprefix("ragged-"), _arrays(match["type"])
        if match["start"] and kind != "all-reduce" and len(parts) > 1:
            parts = parts[1:2]  # (operands, results, and for a permute two counters)
        arrays = [array for part in parts for array in part]
        payload = sum(size for _, size in arrays)
        if kind == "collective-permute":
            pairs = [tuple(map(int, pair.split(","))) for pair in re.findall(r"\d+,\d+", _attribute(_PAIRS, line))]
            groups = [pair for pair in pairs if pair[0] != pair[1]]
        else:
            groups = device_groups(_attribute(_GROUPS, line), math.prod(axis_sizes.values()))
        size = max(map(len, groups), default=1)
        if kind == "reduce-scatter":
            payload *= size
        if size > 1:  # in groups of one device nothing moves
            name = re.search(r'op_name="([^"]*)"', line)
            found.append(
                Collective(kind, _axes_crossed(groups, axis_sizes), size, payload,
                           tuple(shape for shape, _ in arrays), times, name[1] if name else "")
            )  # fmt: skip
    return found


def _attribute(pattern: re.Pattern, line: str) -> str:
    match = pattern.search(line)
    if match is None:
        raise ValueError(f"--explain cannot read the devices of this collective: {line.strip()[:300]}")
    return match[1]


def _lines(text: str) -> list[tuple[str, int]]:
    """Instruction lines with the number of times that each runs: bodies of loops run as often as XLA says."""
    bodies: dict[str, list[str]] = {"": []}
    name = entry = ""
    for line in text.splitlines():
        header = re.match(r"(ENTRY )?%?([\w.\-]+) (\(.*\) -> .*)?\{$", line)
        if header:
            name = header[2]
            bodies[name] = []
            entry = name if header[1] else entry
        elif line.startswith("}"):
            name = ""
        else:
            bodies[name].append(line)
    found: list[tuple[str, int]] = []

    def visit(name: str, times: int) -> None:
        for line in bodies.get(name, ()):
            found.append((line, times))
            # to_apply of a reduction holds no collectives, but that of a call may.
            called = re.findall(r"(?:body|to_apply|calls|(?:true|false)_computation)=%?([\w.\-]+)", line)
            called += re.findall(r"[\w.\-]+", "".join(re.findall(r"branch_computations=\{(.*?)\}", line)))
            trips = re.search(r'known_trip_count":\{"n":"(\d+)"', line) if " while(" in line else None
            for other in called:
                visit(other, times * (int(trips[1]) if trips else 1))

    visit(entry, 1)
    return found if entry else [(line, 1) for line in text.splitlines()]


def _arrays(text: str) -> list[list[tuple[Shape, int]]]:
    """Shape and bytes of the arrays in a type such as ``(f32[8,4]{1,0}, (bf16[2], u32[]))``, by top-level element."""
    text = re.sub(r"/\*.*?\*/", "", text)
    elements, depth, start = [], 0, 1
    for place, letter in enumerate(text):
        depth += letter in "([{"
        depth -= letter in ")]}"
        if letter == "," and depth == 1 and text.startswith("("):
            elements.append(text[start:place])
            start = place + 1
    elements.append(text[start if text.startswith("(") else 0 :])
    return [
        [_array(dtype, dims) for dtype, dims in re.findall(r"\b([a-z]\w*)\[([\d,<=]*)\]", element)]
        for element in elements
    ]


def _array(dtype: str, dims: str) -> tuple[Shape, int]:
    shape = tuple(int(dim.removeprefix("<=")) for dim in dims.split(",") if dim)
    bits = _BITS[dtype] if dtype in _BITS else int(re.findall(r"\d+", dtype)[0])
    return shape, -(-math.prod(shape) * bits // 8)


def device_groups(text: str, devices: int) -> list[tuple[int, ...]]:
    """Reads ``replica_groups`` in any of its forms.

    ``{{0,1},{2,3}}``; ``{}``, all devices; ``[2,2]<=[2,2]T(1,0)``, the numbers from 0 reshaped, transposed and reshaped
    to (groups, size); ``mesh['a'=2,'b'=2] {'b'}``, the groups that differ along b, optionally with ``device_ids=`` a
    list or a reshape and transpose, and with ``'b':(2)4`` for 4 of the indices of b after a factor of 2.
    """
    if text.startswith("{"):
        groups = [tuple(map(int, group.split(","))) for group in re.findall(r"[\d,]*\d", text.replace("},{", ";"))]
        return groups or [tuple(range(devices))]
    if text.startswith("["):
        shape, numbers = text.split("<=")
        return _rows(_iota(numbers).reshape(_numbers(shape)))
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", text)}
    given = re.search(r"device_ids=\(([^()]*(?:\([\d,]*\))?)\)", text)
    ids = np.arange(math.prod(sizes.values()))
    if given:
        ids = _iota(given[1]) if given[1].startswith("[") else np.array(_numbers(given[1]))
    crossed = {
        name: (int(before or 1), int(size or sizes[name]))
        for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", text[text.rindex("{") :])
    }
    dims: list[int] = []
    moved: list[int] = []
    for name, size in sizes.items():
        before, inside = crossed.get(name, (1, 1))
        moved.append(len(dims) + 1)
        dims += [before, inside, size // before // inside]
    ids = np.moveaxis(ids.reshape(dims), moved, range(-len(moved), 0))
    return _rows(ids.reshape(-1, math.prod(inside for _, inside in crossed.values())))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _rows(ids: np.ndarray) -> list[tuple[int, ...]]:
    return [tuple(group) for group in ids.tolist()]


def _iota(text: str) -> np.ndarray:
    """``[2,4]T(1,0)``: numbers from 0, reshaped and transposed, as a vector."""
    shape, _, order = text.partition("T")
    ids = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
    return ids.transpose(_numbers(order) or range(ids.ndim)).ravel()


def _axes_crossed(groups: Iterable[Sequence[int]], axis_sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Axes of the mesh along which devices of one group differ; devices are numbered in the mesh's order."""
    crossed = np.zeros(len(axis_sizes), bool)
    for group in groups:
        places = np.array(np.unravel_index(list(group), tuple(axis_sizes.values())))
        crossed |= (places != places[:, :1]).any(1)
    return tuple(axis for axis, differs in zip(axis_sizes, crossed, strict=True) if differs)


# ---------------------------------------------------------------------------------------------------------------------
# The compiled step
# ---------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One array of the parameters: its name, whole shape, partition spec, and bytes on each device."""

    name: str
    shape: Shape
    spec: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What one training step holds, computes and sends on each device; all sizes in bytes.

    Attributes:
        axis_sizes: The mesh.
        batch_size: Images a step, over all devices.
        rows: The same with the padding that makes it divide.
        microbatches: Parts that are computed one after another.
        parameters: Each parameter.
        rules: Partition rules, pattern and spec.
        optimizer_state: Of the optimiser.
        other_state: Batch statistics, moving average, counters.
        batch: Images, labels, weights, numbers.
        temporaries: Peak of everything else: activations, gradients, scratch.
        compiled: Arguments, temporaries and outputs less those that share memory, as the compiler counts them.
        gathered: Parameters as the layers use them, ``fsdp`` parts put together.
        whole_state: Bytes of parameters and optimiser state before they are split.
        flops: Floating-point operations, as the compiler counts them.
        network_flops: The same by the network's own count, divided by the devices.
        collectives: Each collective.
        notes: What the layout could not split.
    """

    axis_sizes: dict[str, int]
    batch_size: int
    rows: int
    microbatches: int
    parameters: tuple[Parameter, ...]
    rules: tuple[tuple[str, str], ...]
    optimizer_state: int
    other_state: int
    batch: int
    temporaries: int
    compiled: int
    gathered: int
    whole_state: int
    flops: float
    network_flops: float
    collectives: tuple[Collective, ...]
    notes: tuple[str, ...] = ()

    @property
    def devices(self) -> int:
        """Devices of the mesh."""
        return math.prod(self.axis_sizes.values())

    @property
    def parameter_bytes(self) -> int:
        """All parameters on one device."""
        return sum(parameter.bytes for parameter in self.parameters)

    @property
    def state(self) -> int:
        """What training keeps on one device between steps."""
        return self.parameter_bytes + self.optimizer_state + self.other_state

    @property
    def fixed(self) -> int:
        """What does not grow with the batch: the state; among the temporaries one gradient.

        Micro-batches add a sum of gradients, and ``fsdp`` the parameters gathered.
        """
        copies = 1 + (self.microbatches > 1) + (self.axis_sizes.get("fsdp", 1) > 1)
        return self.state + min(copies * self.gathered, self.temporaries)

    @property
    def total(self) -> int:
        """Peak on one device."""
        return self.state + self.batch + self.temporaries

    @property
    def per_image(self) -> float:
        """What one more image of the batch adds on a device, if the growing part is proportional to the batch."""
        return (self.total - self.fixed) / self.rows

    def memory_at(self, batch_size: int) -> float:
        """Estimated peak on one device with another batch size."""
        return self.fixed + self.per_image * batch_size

    def traffic(self) -> dict[tuple[tuple[str, ...], str], list[Collective]]:
        """Collectives by the axes that they cross and their kind, in the order of the mesh."""
        found = defaultdict(list)
        for collective in self.collectives:
            found[collective.axes, collective.kind].append(collective)
        order = list(self.axis_sizes)
        return dict(sorted(found.items(), key=lambda item: ([order.index(axis) for axis in item[0][0]], item[0][1])))


def abstract_state(steps: Steps) -> Any:
    """The train state as shapes, dtypes and shardings; allocates nothing."""
    return jax.tree.map(
        lambda array, sharding: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding),
        jax.eval_shape(steps.init),
        steps.state_shardings,
    )


def abstract_batch(layout: Layout, batch_size: int, image_shape: Shape) -> dict[str, jax.ShapeDtypeStruct]:
    """A batch of uint8 images likewise."""
    rows, sharding = len(layout.rows(batch_size)), layout.batch_sharding
    arrays = {"image": (jnp.uint8, image_shape), "label": (jnp.int32, ()), "weight": (jnp.float32, ()),
              "index": (jnp.int32, ())}  # fmt: skip
    return {
        name: jax.ShapeDtypeStruct((rows, *shape), dtype, sharding=sharding) for name, (dtype, shape) in arrays.items()
    }


def explain(
    recipe: Recipe,
    layout: Layout,
    input_shape: Shape,
    batch_size: int,
    strategy: str = "jit",
    image_shape: Shape | None = None,
) -> Explanation:
    """Compiles the training step and reads what it costs. Nothing is allocated on the devices or run.

    Args:
        recipe: What would be trained.
        layout: Where.
        input_shape: ``(height, width, channels)`` of one image as the network takes it.
        batch_size: Images a step, over all devices.
        strategy: As for `compile_steps`.
        image_shape: The same before cropping; ``input_shape`` where None.

    Raises:
        ValueError: If the mesh has an axis ``pipe``, whose stages are programs of their own.
    """
    if "pipe" in layout.mesh.shape:
        raise ValueError(
            f"--explain with --mesh {partition.describe(layout.mesh)}: allowed: meshes without pipe, whose stages are "
            "several programs"
        )
    steps = compile_steps(recipe, layout, input_shape, strategy)
    state, batch = abstract_state(steps), abstract_batch(layout, batch_size, image_shape or input_shape)
    # The machine code will not run, so it need not be fast; on CPU nothing else depends on this.
    quick = {"xla_backend_optimization_level": 0} if layout.mesh.devices.flat[0].platform == "cpu" else None
    compiled = steps.train.lower(state, batch).compile(compiler_options=quick)
    axis_sizes = dict(layout.mesh.shape)
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}
    parameters = tuple(
        Parameter(jax.tree_util.keystr(path, simple=True, separator="/"), leaf.shape, _spec(leaf.sharding.spec),
                  _bytes_each(leaf))
        for path, leaf in jax.tree_util.tree_leaves_with_path(state.params)
    )  # fmt: skip
    rows, summary = len(batch["label"]), networks.summary(recipe.network, input_shape)
    multiply_adds = [layer.multiply_adds for layer in summary if layer.multiply_adds]
    rules = partition.tensor_rules(recipe.network) if layout.rules is None else layout.rules
    return Explanation(
        axis_sizes=axis_sizes,
        batch_size=batch_size,
        rows=rows,
        microbatches=layout.microbatches,
        parameters=parameters,
        rules=tuple((pattern, _spec(spec)) for pattern, spec in rules),
        optimizer_state=_bytes_each(state.opt_state),
        other_state=_bytes_each(state) - _bytes_each((state.params, state.opt_state)),
        batch=_bytes_each(batch),
        temporaries=memory.temp_size_in_bytes,
        compiled=memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
        - memory.alias_size_in_bytes,
        gathered=_bytes_each(
            jax.tree.map(lambda a: a.update(sharding=partition.without_fsdp(a.sharding)), state.params)
        ),
        whole_state=sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((state.params, state.opt_state))),
        # XLA counts the body of a loop once, and the loop over micro-batches holds nearly all of the work.
        flops=float(cost.get("flops", math.nan)) * layout.microbatches,
        # Two for each multiply-add; forward, gradient of the weights, and of the input except at the first layer.
        network_flops=2 * (3 * sum(multiply_adds) - multiply_adds[0]) * rows / math.prod(axis_sizes.values()),
        collectives=tuple(collectives(compiled.as_text(), axis_sizes)),
        notes=steps.notes,
    )  # fmt: skip


def _spec(spec: Any) -> str:
    return f"({', '.join('-' if axis is None else str(axis) for axis in spec)})" if len(spec) else "whole"


def _bytes_each(tree: Any) -> int:
    """Bytes of a tree of abstract arrays on one device."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


# ---------------------------------------------------------------------------------------------------------------------
# In words
# ---------------------------------------------------------------------------------------------------------------------


def report(found: Explanation, machine: Machine = Machine()) -> str:
    """The explanation as text for a terminal."""
    mesh = ",".join(f"{axis}={size}" for axis, size in found.axis_sizes.items())
    padded = f", padded to {found.rows:,} rows" if found.rows != found.batch_size else ""
    parts = f" in {found.microbatches} micro-batches" if found.microbatches > 1 else ""
    return "\n\n".join(
        [
            f"--explain: mesh {mesh} ({found.devices:,} device{'s' * (found.devices > 1)}), "
            f"batch of {found.batch_size:,} images{padded}{parts}. Compiled, not run.",
            _parameters_table(found),
            _rules_table(found),
            _memory_table(found),
            _work_table(found),
            _traffic_table(found, machine),
            "\n".join(_time(found, machine)),
            "\n".join(advice(found, machine)),
        ]
    )


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Columns, the first ``left`` of them flush left."""
    lines = [head, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = [
        "  ".join(f"{cell:<{width}}" if i < left else f"{cell:>{width}}" for i, (cell, width) in enumerate(cells))
        for cells in (list(zip(line, widths, strict=True)) for line in lines)
    ]
    return "\n".join([title, *(f"  {line.rstrip()}" for line in text)])


def size(count: float) -> str:
    """Bytes for a reader: ``12.3 MB``."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 999.5 or unit == "TB":
            break
        count /= 1000
    return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"


def _parameters_table(found: Explanation) -> str:
    rows = [(p.name, "x".join(map(str, p.shape)) or "scalar", p.spec, f"{p.bytes:,}") for p in found.parameters]
    rows.append(("total", "", "", f"{found.parameter_bytes:,}"))
    return _table("Parameters", ("name", "shape", "split over", "bytes on each device"), rows, left=3)


def _rules_table(found: Explanation) -> str:
    rows = [rule for rule in found.rules if "model" in found.axis_sizes or rule[1] == "whole"]
    lines = [_table("Partition rules: the first whose pattern is found in an array's path", ("pattern", "split over"),
                    rows, left=2)]  # fmt: skip
    if found.axis_sizes.get("fsdp", 1) > 1:
        lines.append("  then fsdp splits the largest dimension that is left and divides, also of the optimiser's state")
    return "\n".join([*lines, *(f"  note: {note}" for note in found.notes)])


def _memory_table(found: Explanation) -> str:
    parts = {
        "parameters": found.parameter_bytes,
        "optimiser state": found.optimizer_state,
        "other state": found.other_state,
        "batch": found.batch,
        "activations, gradients, scratch (peak)": found.temporaries,
        "total": found.total,
    }
    rows = [(name, f"{count:,}", size(count)) for name, count in parts.items()]
    if found.compiled != found.total:
        rows.append(("total by the compiler", f"{found.compiled:,}", size(found.compiled)))
    return _table("Memory of each device", ("", "bytes", ""), rows)


def _work_table(found: Explanation) -> str:
    ratio = found.flops / found.network_flops
    return (
        f"Work of each device\n  {found.flops:.4g} flops a step in the compiled program, {ratio:.3g} times the "
        f"{found.network_flops:.4g} that the network's own count gives\n  (2 flops for each multiply-add of "
        "convolutions and dense layers; forward, and gradients of weights and inputs)"
    )


def _traffic_table(found: Explanation, machine: Machine) -> str:
    if not found.collectives:
        return "Collectives\n  none"
    rows = []
    for (axes, kind), group in found.traffic().items():
        total = lambda value, group=group: sum(c.times * value(c) for c in group)  # noqa: E731
        rows.append(
            ("+".join(axes), kind, f"{total(lambda _: 1):,}", size(total(lambda c: c.payload)),
             size(total(lambda c: c.sent)), f"{1e3 * total(lambda c: c.seconds(machine)):.3f}")
        )  # fmt: skip
    head = ("axis", "kind", "a step", "arrays", "sent by each device", "ms")
    text = [_table("Collectives", head, rows, left=2)]
    largest = sorted(found.collectives, key=lambda c: -c.payload * c.times)[:3]
    text += [
        f"  largest: {'+'.join(c.axes)} {c.kind} of {size(c.payload)}, {len(c.shapes)} "
        f"array{'s' * (len(c.shapes) > 1)}{f', {c.times} times' * (c.times > 1)}: {_short(c.source)}"
        for c in largest
    ]
    return "\n".join(text)


def step_seconds(found: Explanation, machine: Machine) -> tuple[float, float]:
    """Estimated seconds of computing and of collectives in one step."""
    flops = found.network_flops if math.isnan(found.flops) else found.flops
    return flops / machine.flops_per_s, sum(c.times * c.seconds(machine) for c in found.collectives)


def _short(source: str) -> str:
    """The first of the operations that were combined into one."""
    first, *others = re.sub(r"jit\(\w+\)/", "", source).replace("/(", "/").split(":")
    return (first.lstrip("(") or "source unknown") + (f" and {len(others)} more" if others else "")


def _time(found: Explanation, machine: Machine) -> list[str]:
    compute, traffic = step_seconds(found, machine)
    lines = [
        "Time of a step, estimated",
        f"  assumed: {machine.flops_per_s:.3g} flops/s, {machine.bytes_per_s / 1e9:g} GB/s sent by each device, "
        f"{machine.latency_s * 1e6:g} us a message, the faster of ring and "
        "recursive doubling; memory bandwidth is not counted",
        f"  computing {1e3 * compute:.3f} ms, collectives {1e3 * traffic:.3f} ms: between "
        f"{1e3 * max(compute, traffic):.3f} ms (overlapped) and {1e3 * (compute + traffic):.3f} ms (one after another)",
    ]
    if found.collectives:
        no_bytes = dataclasses.replace(machine, bytes_per_s=math.inf)
        latency = sum(c.times * c.seconds(no_bytes) for c in found.collectives)
        by_axis: defaultdict[str, float] = defaultdict(float)
        for c in found.collectives:
            by_axis["+".join(c.axes)] += c.times * c.seconds(machine)
        axis = max(by_axis, key=lambda axis: by_axis[axis])
        lines.append(
            f"  {by_axis[axis] / traffic:.0%} of the collectives' time is on {axis}; {latency / traffic:.0%} of all is "
            f"latency of {sum(c.times for c in found.collectives):,} collectives, the rest bytes"
        )
    repeated = [c for c in found.collectives if c.times > 1 and c.kind == "all-reduce"]
    if (again := sum(c.payload for c in repeated)) > found.parameter_bytes / 2:
        lines.append(
            f"  {size(again)} of gradients are reduced {found.microbatches} times, once for each micro-batch; "
            "--strategy shard_map (axes data and fsdp) reduces them once"
        )
    return lines


def advice(found: Explanation, machine: Machine) -> list[str]:
    """What runs out of memory first as the batch grows, and what would help, with the numbers behind each sentence."""
    sizes = {axis: found.axis_sizes.get(axis, 1) for axis in partition.AXES}
    growing, room = found.total - found.fixed, machine.memory - found.fixed
    kept = found.parameter_bytes + found.optimizer_state
    lines = [
        f"Memory as the batch grows, on devices of {size(machine.memory)}",
        f"  {size(found.fixed)} on each device, state and gradients, do not depend on the batch; "
        f"{size(growing)} ({growing / found.total:.0%}) do, {size(found.per_image)} for each image",
    ]
    if room <= 0:
        times = _power_of_two(found.fixed / machine.memory)
        return [
            *lines,
            f"  the state runs out first, before any image: {size(found.fixed)} of {size(machine.memory)}. Try "
            f"fsdp={sizes['fsdp'] * times} or model={sizes['model'] * times}: about {size(found.fixed / times)}",
        ]
    largest = int(room / found.per_image)
    split = [axis for axis in ("data", "fsdp", "model", "space") if sizes[axis] > 1]
    lines.append(
        f"  activations run out first, at about {largest:,} images a step; "
        + (f"{' and '.join(split)} split{'s' * (len(split) == 1)} them so far" if split else "no axis splits them yet")
    )
    fits = found.total <= machine.memory
    times = 2 if fits else _power_of_two(growing / room)
    lines.append(
        (f"  this batch of {found.batch_size:,} takes {found.total / machine.memory:.2%}. For more: " if fits else
         f"  this batch of {found.batch_size:,} takes {size(found.total)}, which does not fit. Try ")
        + f"data={sizes['data'] * times} or --microbatches {found.microbatches * times}, each up to about "
        f"{largest * times:,} images;\n  space={sizes['space'] * times} would split single images"
    )  # fmt: skip
    if kept > growing:
        lines.append(
            f"  parameters and optimiser state take {size(kept)}, more than what the batch adds: "
            f"fsdp={sizes['fsdp'] * 4} leaves {size(kept / 4)} of them on each device"
        )
    elif sizes["fsdp"] > 1:
        lines.append(
            f"  fsdp saves {size(found.whole_state - kept)} of parameters and optimiser state on each device, "
            f"{(found.whole_state - kept) / found.total:.0%} of the total; data has the same batch and less traffic"
        )
    return lines


def _power_of_two(factor: float) -> int:
    """The smallest power of two that is above ``factor``."""
    return 2 ** (math.floor(math.log2(factor)) + 1)


def pretend(mesh: str, devices: int) -> str:
    """Makes ``--devices`` fake CPU devices, on any host; to be called before a backend starts.

    Returns:
        The mesh with every size written out.

    Raises:
        ValueError: If the mesh does not have as many.
    """
    sizes = partition.parse_mesh(mesh)
    fixed = math.prod(count for count in sizes.values() if count != -1)
    sizes = {axis: devices // fixed if count == -1 else count for axis, count in sizes.items()}
    if (product := math.prod(sizes.values())) != devices:
        raise ValueError(
            f"--devices is {devices}, but --mesh {mesh} has {product or fixed} devices; they must be equal"
        )
    jax.config.update("jax_platforms", "cpu")
    partition.request_cpu_devices(devices)
    return ",".join(f"{axis}={count}" for axis, count in sizes.items())
