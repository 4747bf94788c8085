"""Collectives in the text of a compiled program, and the time that they would take."""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from cnnjax.networks import Shape


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


ASSUMED = Machine()


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
