"""A finding of the doctor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warning", "fault"]
WORST: dict[Verdict, int] = {"ok": 0, "warning": 1, "fault": 2}
"""The exit code of each verdict."""


@dataclass(frozen=True)
class Finding:
    """The verdict of a check, with the reason. A finding that is not `ok` has a remedy, or its reason ends with one."""

    check: str
    verdict: Verdict
    reason: str
    remedy: str = ""

    def __str__(self) -> str:
        """In one sentence."""
        return ": ".join(filter(None, (self.check, self.reason, self.remedy)))


def exit_code(findings: Iterable[Finding]) -> int:
    """The code of the worst verdict; 0 without findings."""
    return max((WORST[each.verdict] for each in findings), default=0)
