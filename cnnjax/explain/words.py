"""An explanation as text for a terminal."""

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Sequence

from cnnjax import partition
from cnnjax.explain.cost import Explanation
from cnnjax.explain.hlo import ASSUMED, Machine


def report(found: Explanation, machine: Machine = ASSUMED) -> str:
    """The explanation as text for a terminal."""
    return "\n\n".join(
        [
            title(found),
            *tables(found, machine),
            "\n".join(_time(found, machine)),
            "\n".join(advice(found, machine)),
        ]
    )


def title(found: Explanation) -> str:
    """What is explained."""
    mesh = ",".join(f"{axis}={size}" for axis, size in found.axis_sizes.items())
    padded = f", padded to {found.rows:,} rows" if found.rows != found.batch_size else ""
    parts = f" in {found.microbatches} micro-batches" if found.microbatches > 1 else ""
    return (f"--explain: mesh {mesh} ({found.devices:,} device{'s' * (found.devices > 1)}), "
            f"batch of {found.batch_size:,} images{padded}{parts}. Compiled, not run.")  # fmt: skip


def tables(found: Explanation, machine: Machine) -> list[str]:
    """Parameters, rules, memory, work and traffic."""
    return [
        _parameters_table(found),
        _rules_table(found),
        _memory_table(found),
        _work_table(found),
        _traffic_table(found, machine),
    ]


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


def assumptions(machine: Machine) -> str:
    """The line that times rest on."""
    return (
        f"  assumed: {machine.flops_per_s:.3g} flops/s, {machine.bytes_per_s / 1e9:g} GB/s sent by each device, "
        f"{machine.latency_s * 1e6:g} us a message, the faster of ring and recursive doubling; memory bandwidth is not "
        "counted"
    )


def _time(found: Explanation, machine: Machine) -> list[str]:
    compute, traffic = step_seconds(found, machine)
    lines = [
        "Time of a step, estimated",
        assumptions(machine),
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
    split = [axis for axis in partition.AXES if sizes[axis] > 1]
    lines.append(
        f"  activations run out first, at about {largest:,} images a step; "
        + (f"{' and '.join(split)} split{'s' * (len(split) == 1)} them so far" if split else "no axis splits them yet")
    )
    fits = found.total <= machine.memory
    times = 2 if fits else _power_of_two(growing / room)
    lines.append(
        (f"  this batch of {found.batch_size:,} takes {found.total / machine.memory:.2%}. For more: " if fits else
         f"  this batch of {found.batch_size:,} takes {size(found.total)}, which does not fit. Try ")
        + f"data={sizes['data'] * times}{_or_microbatches(found, times)} up to about "
        f"{largest * times:,} images"
        + ("" if found.stage else f";\n  space={sizes['space'] * times} would split single images")
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


def _or_microbatches(found: Explanation, times: int) -> str:
    # A stage of pipe keeps the activations of all micro-batches until they come back.
    return "," if found.stage else f" or --microbatches {found.microbatches * times}, each"


def _power_of_two(factor: float) -> int:
    """The smallest power of two that is above ``factor``."""
    return 2 ** (math.floor(math.log2(factor)) + 1)
