"""Whether another attempt of a command follows one that failed. Pure: earlier attempts are events of the run folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

FIRST_WAIT_S, LONGEST_WAIT_S = 2.0, 120.0
"""Wait before the first restart, doubled for each further one, and its maximum."""


@dataclass(frozen=True)
class Restart:
    """The next attempt."""

    number: int
    wait_s: float


def earlier_attempts(events: Sequence[dict[str, Any]], lineage: int) -> list[dict[str, Any]]:
    """Return the `restart` events of the attempts of the same command before `lineage`, newest first: the consecutive
    lineages whose last event is a restart."""
    last = {event.get("lineage"): event for event in events}
    found: list[dict[str, Any]] = []
    while last.get(lineage - 1, {}).get("kind") == "restart":
        lineage -= 1
        found.append(last[lineage])
    return found


def trained_before(events: Sequence[dict[str, Any]], lineage: int) -> float:
    """Return the seconds of training in earlier attempts. A failure at the start says 0."""
    return max((float(attempt["trained_s"]) for attempt in earlier_attempts(events, lineage)), default=0.0)


def next_restart(step: int | None, attempts: Sequence[dict[str, Any]], max_restarts: int) -> Restart | str:
    """Decide what follows these attempts after another has failed: a restart, or the reason for none. `step`: where it
    failed, which it may do once at each step; None where the cause lies outside the run (a process was killed, a
    server lost its records), which says nothing of a step."""
    if len(attempts) >= max_restarts:
        return f"run.max_restarts = {max_restarts} allows no {'further ' if max_restarts else ''}restart"
    if step is not None and any(attempt["step"] == step and not attempt.get("outside") for attempt in attempts):
        return f"an attempt failed at step {step} before, and the next would again"
    return Restart(len(attempts) + 1, min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** len(attempts)))


def progress_of(
    metrics: Sequence[dict[str, Any]], lineage: int | None, attempts: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Step of the attempt `lineage`, if it began, and training time, also of `attempts` before it."""
    rows = [row for row in metrics if row.get("lineage") == lineage] if lineage is not None else []
    before_s = float(attempts[0]["trained_s"]) if attempts else 0.0
    seconds = float(rows[-1]["time"]) - float(rows[0]["time"]) if rows else 0.0
    return {"step": int(rows[-1]["step"]) if rows else 0, "trained_s": before_s + seconds}
