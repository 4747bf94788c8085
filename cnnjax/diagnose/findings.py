"""What was found, in words."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

Severity = Literal["error", "warning", "note"]
_ORDER = ("error", "warning", "note")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or may be.

    Attributes:
        severity: ``error``: it cannot work like this; ``warning``: it will work badly, or its numbers mislead;
            ``note``: good to know.
        check: Name of the check, such as ``learning_rate``.
        seen: What was seen, with numbers.
        why: Why it matters.
        change: What to change.
    """

    severity: Severity
    check: str
    seen: str
    why: str
    change: str


def most_severe_first(findings: Sequence[Finding]) -> list[Finding]:
    """Sorted by severity; those alike stay in their order."""
    return sorted(findings, key=lambda finding: _ORDER.index(finding.severity))


def in_words(findings: Sequence[Finding]) -> str:
    """One paragraph a finding, the most severe first; or that there is none."""
    if not findings:
        return "nothing wrong was found"
    return "\n\n".join(
        f"{finding.severity}: {finding.seen} ({finding.check})\n  why it matters: {finding.why}\n"
        f"  what to change: {finding.change}"
        for finding in most_severe_first(findings)
    )


def as_dicts(findings: Sequence[Finding]) -> list[dict[str, str]]:
    """As ``diagnosis.json`` has them."""
    return [dataclasses.asdict(finding) for finding in most_severe_first(findings)]
