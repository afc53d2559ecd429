"""The order of the tasks of a mixture. Pure.

Every group of a batch is for a part that is drawn by weight; within its part, tasks follow a shuffle of their own, by
epoch. Both depend on the seed and on the weights of the steps so far only, so that a resumed run draws the same tasks.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.data.sampler import DataOrder


@dataclass
class Weights:
    """The weights of a mixture's parts at each step of the order of the tasks."""

    base: tuple[float, ...]
    changes: list[tuple[int, tuple[float, ...]]] = field(default_factory=list[tuple[int, tuple[float, ...]]])
    """(first step, weights from there on), by step."""

    def at(self, step: int) -> tuple[float, ...]:
        """The weights of a step."""
        place = bisect_right(self.changes, step, key=lambda change: change[0])
        return self.changes[place - 1][1] if place else self.base

    def change(self, step: int, weights: Sequence[float]) -> None:
        """From `step` on, which comes after all changes so far, other weights hold."""
        if self.changes and step <= self.changes[-1][0]:
            raise ValueError(f"weights from step {step} on, after those from step {self.changes[-1][0]} on")
        self.changes.append((step, tuple(weights)))


class MixtureOrder:
    """As `DataOrder`, of items that belong to parts."""

    def __init__(self, part_of_item: Sequence[int], weights: Weights, size: int, seed: int) -> None:
        """`part_of_item`: the number of each item's part. `size`: groups in a batch. Every part has an item."""
        self._items: list[list[int]] = [[] for _ in weights.base]
        for item, part in enumerate(part_of_item):
            self._items[part].append(item)
        self._orders = [DataOrder(len(items), f"{seed}/{part}") for part, items in enumerate(self._items)]
        self.weights, self._size, self._seed = weights, size, seed
        self._drawn: list[tuple[int, ...]] = [(0,) * len(self._items)]
        """For each step how many items of each part come before it, as far as they were counted."""
        self._asked = -1
        """The largest step of which somebody knows the parts."""

    def change(self, step: int, weights: Sequence[float]) -> None:
        """See `Weights.change`. Raises ValueError for a step that was drawn by other weights."""
        if step <= self._asked:
            raise ValueError(f"weights from step {step} on, and step {self._asked} was drawn")
        self.weights.change(step, weights)

    def at(self, step: int) -> list[int]:
        """The items that the batch of `step` begins with."""
        while len(self._drawn) <= step:
            counts = Counter(self._parts(len(self._drawn) - 1))
            self._drawn.append(tuple(before + counts[part] for part, before in enumerate(self._drawn[-1])))
        place, items = list(self._drawn[step]), list[int]()
        for part in self._parts(step):
            (index,) = self._orders[part].at(place[part], 1)
            items.append(self._items[part][index])
            place[part] += 1
        return items

    def refill(self, step: int, number: int) -> list[int]:
        """As many further items for refill `number` (from 1) of the batch of `step`: none that the batch or an earlier
        refill has used, while its part has others."""
        offered, drawn = set(self.at(step)), list[int]()
        for again in range(1, number + 1):
            chance = random.Random(f"{self._seed}/refill/{step}/{again}")
            parts = chance.choices(range(len(self._items)), self.weights.at(step), k=self._size)
            fresh: dict[int, list[int]] = {}
            for part, wanted in Counter(parts).items():
                items = self._items[part]
                candidates = chance.sample(items, min(len(items), wanted + len(offered)))
                found = sorted(candidates, key=lambda item: item in offered)[:wanted]
                fresh[part] = [found[place % len(found)] for place in range(wanted)][::-1]
            drawn = [fresh[part].pop() for part in parts]
            offered.update(drawn)
        return drawn

    def epochs(self, step: int) -> list[float]:
        """How often each part's items were gone through before the batch of `step`."""
        self.at(step)
        return [count / len(items) for count, items in zip(self._drawn[step], self._items, strict=True)]

    def _parts(self, step: int) -> list[int]:
        self._asked = max(self._asked, step)
        chance = random.Random(f"{self._seed}/mixture/{step}")
        return chance.choices(range(len(self._items)), self.weights.at(step), k=self._size)


def changes_of(written: Sequence[Any]) -> list[tuple[int, tuple[float, ...]]]:
    """`Weights.changes` from a record."""
    return [(int(step), tuple(map(float, new))) for step, new in written]
