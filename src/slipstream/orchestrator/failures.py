"""Chooses a run's failed rollouts to keep for people to read: so many of each step and of each evaluation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Literal

from slipstream.records import TRAINABLE_OUTCOMES, Rollout

Kind = Literal["failed", "tools"]


def failure_of(rollout: Rollout) -> Kind | None:
    """`failed` if it was lost, `tools` if it was graded and a call of a tool failed."""
    if rollout.outcome not in TRAINABLE_OUTCOMES:
        return "failed"
    return "tools" if rollout.metrics.get("tool_failures") else None


class Failures:
    """Passes on the first rollouts of each kind of failure: `most` of each training step, `most_held_out` of each
    evaluation."""

    def __init__(
        self, most: int, most_held_out: int, keep: Callable[[Rollout, int, bool], None], version: Callable[[], int]
    ) -> None:
        """`keep` gets the rollout, its step and whether it is of an evaluation; `version` is the step of an
        evaluation's version."""
        self._most = {False: most, True: most_held_out}
        self._keep = keep
        self._version = version
        self._kept: Counter[tuple[int, bool, Kind]] = Counter()

    def ended(self, rollout: Rollout) -> None:
        """Looks at an ended rollout."""
        kind = failure_of(rollout)
        if kind is None:
            return
        of, is_held_out = rollout.id.partition(".")[0], rollout.id.startswith("eval.")
        step = int(of) if of.isdigit() else self._version()
        self._kept[step, is_held_out, kind] += 1
        if self._kept[step, is_held_out, kind] <= self._most[is_held_out]:
            self._keep(rollout, step, is_held_out)
