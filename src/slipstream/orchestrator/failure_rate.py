"""Whether too many rollouts failed: the rate `environment.max_reward_failures`, judged over a batch and over recent
batches together, and the warnings about lost rollouts."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from slipstream.errors import EngineError, EnvironmentFault
from slipstream.records import TRAINABLE_OUTCOMES, Rollout

RECENT_BATCHES = 8
"""Batches to judge together."""
_FIRST = 8
_CHANCE = 1e-6
"""Failures less probable than this, at a rate of `environment.max_reward_failures`, end a run."""


class FailureCounts(NamedTuple):
    """How many rollouts of a batch failed."""

    num_failed: int
    num_rollouts: int
    num_groups: int

    def exceed(self, fraction: float) -> bool:
        """Whether they are more than chance makes of a rate of `fraction`. Rollouts of a group fail together, as
        if a row has no answer: so groups are drawn. A batch of failed rollouts alone has nothing to train on."""
        if self.num_failed == self.num_rollouts and self.num_rollouts:
            return fraction < 1.0
        if self.num_failed <= fraction * self.num_rollouts or fraction in (0.0, 1.0):
            return self.num_failed > fraction * self.num_rollouts
        return _tail(self.num_failed * self.num_groups // self.num_rollouts, self.num_groups, fraction) < _CHANCE


def _tail(least: int, number: int, rate: float) -> float:
    """Probability of at least so many of `number` at a rate."""

    def log_of(k: int) -> float:
        ways = math.lgamma(number + 1) - math.lgamma(k + 1) - math.lgamma(number - k + 1)
        return ways + k * math.log(rate) + (number - k) * math.log1p(-rate)

    return sum(math.exp(log_of(k)) for k in range(least, number + 1))


def check_failures(
    rollouts: Sequence[Rollout], of: str, max_failures: float, recent: deque[FailureCounts] | None = None
) -> None:
    """Raise with the first failure's text when more rollouts failed than a rate of `max_failures` explains, of these
    or of `recent` batches with them: `EngineError` if most of these failures are the engine's, else
    `EnvironmentFault`. Episodes without a token are no failures: tasks may be too long for the context. These are
    added to `recent`."""
    failed = [each for each in rollouts if each.outcome not in TRAINABLE_OUTCOMES and each.outcome != "no_tokens"]
    own = FailureCounts(len(failed), len(rollouts), len({rollout.group_id for rollout in rollouts}))
    batches = [own]
    if recent is not None:
        recent.append(own)
        batches = [*recent]
    together = FailureCounts(*map(sum, zip(*batches, strict=True)))
    if not failed or not (own.exceed(max_failures) or together.exceed(max_failures)):
        return
    found, where = (own, of) if own.exceed(max_failures) else (together, f"the last {len(batches)} batches")
    by_engine = [rollout for rollout in failed if rollout.outcome == "engine_error"]
    if mostly_engine := 2 * len(by_engine) > len(failed):
        failed, where, found = by_engine, of, own._replace(num_failed=len(by_engine))
    text = (
        f"{found.num_failed} of {found.num_rollouts} rollouts of {where} failed{' in the engine' * mostly_engine}, "
        f"more than chance makes of environment.max_reward_failures = {max_failures:g}; the first "
        f"({failed[0].outcome}): {failed[0].error}"
    )
    raise (EngineError if mostly_engine else EnvironmentFault)(text)


class FirstFailures:
    """Warns once if a run's first rollouts all fail: its first batch may take an hour if each one hangs."""

    def __init__(self) -> None:
        self._left = _FIRST

    def see(self, rollout: Rollout, warn: Callable[[str], None]) -> None:
        """A rollout has ended."""
        if self._left <= 0:
            return
        is_failed = rollout.outcome not in TRAINABLE_OUTCOMES and rollout.outcome != "no_tokens"
        self._left = self._left - 1 if is_failed else 0
        if is_failed and not self._left:
            warn(f"the first {_FIRST} rollouts have all failed ({rollout.outcome}): {rollout.error}")


def warn_of_losses(rollouts: Sequence[Rollout], of: str, warn: Callable[[str], None]) -> None:
    """Warn once if the engine lost rollouts: these are mostly the longest, and training would miss them."""
    lost = [rollout for rollout in rollouts if rollout.outcome == "engine_error"]
    if lost:
        warn(f"{len(lost)} of {len(rollouts)} rollouts of {of} were lost in the engine; the first: {lost[0].error}")


def warn_of_no_tokens(rollouts: Sequence[Rollout], of: str, warn: Callable[[str], None]) -> bool:
    """Warn if episodes ended before the policy sampled a token; returns whether there are any."""
    empty = [rollout for rollout in rollouts if rollout.outcome == "no_tokens"]
    if empty:
        warn(
            f"{len(empty)} of {len(rollouts)} rollouts of {of} have no token of the policy, and count in no mean or "
            f"baseline (dropped/no_tokens); the first: {empty[0].error}"
        )
    return bool(empty)
