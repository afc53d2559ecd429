"""The part of each batch from one of several orchestrators, and the batch of all parts. Pure.

A group has the same place in the order of the tasks as with one orchestrator, and with it the same id and seeds. In the
order of the data several make the same batches as one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from slipstream.orchestrator.batches.staleness import staleness_metrics
from slipstream.records import Batch

T = TypeVar("T")
_GENERATE_S = "time/generate_s"
_RATE, _LARGEST = "throughput/", ("time/", "rollout/refills")
_SIDES = ("engine", "trainer")
"""Each has idle seconds as a whole and by reason; the reasons add up to the whole."""
_OF_GROUPS = "reward/drawn_mean"
"""A mean over the rollouts of the drawn groups."""
_LEFT_OUT = ("no_signal", "surplus")
"""Why trainable rollouts are not in the batch."""


@dataclass(frozen=True)
class Share:
    """One orchestrator's groups: `size` from `number * size` on, of every `of * size` in the order of the tasks."""

    number: int = 0
    of: int = 1

    def part(self, items: Sequence[T]) -> list[T]:
        """Its part of a batch's items."""
        size = len(items) // self.of
        return list(items[self.number * size : (self.number + 1) * size])

    def place(self, place: int, size: int) -> int:
        """The place in the whole order of its own item at `place`; `size`: groups in its part of a batch."""
        batch, own = divmod(place, size)
        return (batch * self.of + self.number) * size + own

    def draws(self, numbers: Iterator[int], size: int) -> Iterator[int]:
        """Its own draws among the draws of the whole order."""
        return (number for number in numbers if number // size % self.of == self.number)


def join(parts: Sequence[Batch]) -> Batch:
    """The batch of one step, of the parts of all orchestrators in their order. Times are the longest, rates are over
    these, idle time is the worst orchestrator's, counts are summed up."""
    if len(parts) == 1:
        return parts[0]
    if len(steps := {part.step for part in parts}) > 1:
        raise ValueError(f"parts of the batches of several steps, {sorted(steps)}, make no batch")
    step, rollouts = parts[0].step, [rollout for part in parts for rollout in part.rollouts]
    names = {name: None for part in parts for name in part.metrics}
    metrics: dict[str, float] = {}
    for name in names:
        values = [part.metrics[name] for part in parts if name in part.metrics]
        metrics[name] = max(values) if name.startswith(_LARGEST) else sum(values)
    for side in _SIDES:
        worst = max(parts, key=lambda part: part.metrics.get(f"idle/{side}_s", 0.0))
        metrics |= {name: worst.metrics.get(name, 0.0) for name in names if name.startswith(f"idle/{side}_")}
    for name in names:
        if name.startswith(_RATE):
            totals = (part.metrics[name] * part.metrics[_GENERATE_S] for part in parts if name in part.metrics)
            metrics[name] = sum(totals) / metrics[_GENERATE_S]
    if _OF_GROUPS in names:
        weighed = [part for part in parts if _OF_GROUPS in part.metrics]
        sizes = [len(part.rollouts) + sum(part.dropped.get(why, 0) for why in _LEFT_OUT) for part in weighed]
        total = sum(size * part.metrics[_OF_GROUPS] for size, part in zip(sizes, weighed, strict=True))
        metrics[_OF_GROUPS] = total / max(1, sum(sizes))
    dropped: Counter[str] = Counter()
    for part in parts:
        dropped.update(part.dropped)
    return Batch(
        step=step,
        version=min((part.version for part in parts), key=lambda version: version.step),
        rollouts=rollouts,
        dropped=dict(dropped),
        metrics=metrics | staleness_metrics(step, rollouts),
        draws=sorted(draw for part in parts for draw in part.draws),
    )
