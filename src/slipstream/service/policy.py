"""Whether another attempt follows a failed one. Pure; the decision is stored in the run's record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.launch.recovery.retry_policy import FIRST_WAIT_S, LONGEST_WAIT_S
from slipstream.service.records import Kind

LIMITS: dict[Kind, int] = {"finished": 0, "infrastructure": 3, "memory": 2, "user": 0, "stopped": 0}
"""Retries of a run by the kind of failure. A retry after out-of-memory plans smaller (`launch/recovery`)."""
USER_CODES = frozenset({1, 2, 3, 4, 6, 7})
"""Exit codes of failures by the user's side: settings, data, rewards, checks, a full disk, bugs."""
MEMORY_CODE = 9


@dataclass(frozen=True)
class Decision:
    """The next attempt, or none."""

    retries: bool
    wait_s: float
    why: str


def kind_of(exit_code: int | None, failure_class: str, *, retriable: bool, ran_out: bool) -> Kind:
    """The kind of an attempt's end. `exit_code` is None if nobody has waited for the process. `failure_class` and
    `retriable` come from `exit.json`; without one the class is empty. `ran_out`: the OOM killer ended it."""
    if failure_class:
        return "memory" if failure_class == "memory" else "infrastructure" if retriable else "user"
    if exit_code == 0:
        return "finished"
    if exit_code == MEMORY_CODE or ran_out:
        return "memory"
    return "user" if exit_code in USER_CODES else "infrastructure"


def decide(kind: Kind, earlier: Sequence[Kind | None]) -> Decision:
    """The decision after an attempt of this kind; `earlier`: the kinds of all attempts before."""
    limit, used = LIMITS[kind], sum(each == kind for each in earlier)
    if used >= limit:
        why = f"{limit} retries after failures of this kind are used up" if limit else "a retry would fail again"
        return Decision(False, 0.0, why)
    wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2**used) if kind == "infrastructure" else 0.0
    how = ", planned smaller" if kind == "memory" else f", after {wait_s:g} s"
    return Decision(True, wait_s, f"retry {used + 1} of {limit} after a failure of the kind {kind}{how}")


def decide_stopped(saved: int, earlier: Sequence[int]) -> Decision:
    """The decision after the time of a job was over. `saved`: step of the newest checkpoint; `earlier`: those at the
    ends of all attempts before."""
    if earlier and saved <= earlier[-1]:
        why = "two starts saved no further checkpoint: submit it again with --resume and more --time"
        return Decision(False, 0.0, why)
    return Decision(True, 0.0, f"the next start continues from step {saved}")
