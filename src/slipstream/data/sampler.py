"""Deterministic order of training items: an endless shuffle by epoch, and refills for dynamic sampling."""

from __future__ import annotations

import random

from slipstream.errors import ConfigError


class DataOrder:
    """Indices of `num_items` items: every epoch contains each once, in a shuffle that depends on (seed, epoch) only, so
    a resumed run needs no saved position."""

    def __init__(self, num_items: int, seed: int | str) -> None:
        if num_items < 1:
            raise ConfigError(f"there are {num_items} items to train on: give at least one")
        self.num_items = num_items
        self.seed = seed
        self._epoch = -1
        self._shuffled: list[int] = []

    def at(self, start: int, num: int) -> list[int]:
        """The `num` indices from position `start` on; may cross the end of an epoch."""
        taken: list[int] = []
        while len(taken) < num:
            epoch, offset = divmod(start + len(taken), self.num_items)
            taken += self._epoch_order(epoch)[offset : offset + num - len(taken)]
        return taken

    def refill(self, step: int, size: int, number: int) -> list[int]:
        """`size` further items for refill `number` (from 1) of the batch of `step`: none that the batch or an earlier
        refill has used, while there are others. Depends on seed and arguments only; the order of the epochs does not
        change."""
        offered = set(self.at(step * size, size))
        drawn: list[int] = []
        for again in range(1, number + 1):
            chance = random.Random(f"{self.seed}/refill/{step}/{again}")
            candidates = chance.sample(range(self.num_items), min(self.num_items, size + len(offered)))
            # A stable sort: items not used so far first, in the order of the draw.
            drawn = sorted(candidates, key=lambda item: item in offered)[:size]
            offered.update(drawn)
        return drawn

    def _epoch_order(self, epoch: int) -> list[int]:
        if epoch != self._epoch:
            order = list(range(self.num_items))
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
            self._epoch, self._shuffled = epoch, order
        return self._shuffled
