"""In which order items are used: endless, shuffled anew in every epoch, known at any position from the seed alone; and
which further ones a batch may draw."""

from __future__ import annotations

import random

from slipstream.errors import ConfigError


class DataOrder:
    """Indices of `num_items` items: every epoch holds each once, in a shuffle that depends on (seed, epoch) only, so
    that a resumed run needs no saved position."""

    def __init__(self, num_items: int, seed: int) -> None:
        if num_items < 1:
            raise ConfigError(f"there are {num_items} items to train on: give at least one")
        self.num_items = num_items
        self.seed = seed
        self._epoch = -1
        self._shuffled: list[int] = []

    def at(self, start: int, num: int) -> list[int]:
        """The `num` indices from position `start` on; across the end of an epoch the next one begins."""
        taken: list[int] = []
        while len(taken) < num:
            epoch, offset = divmod(start + len(taken), self.num_items)
            taken += self._epoch_order(epoch)[offset : offset + num - len(taken)]
        return taken

    def refill(self, step: int, size: int, number: int) -> list[int]:
        """`size` further items for the batch of `step`, the `number`-th time (from 1): none that the batch or an
        earlier refill has offered, as long as there are others. A pure function of seed and arguments; the order of
        the epochs goes on as if they had not been drawn."""
        offered = set(self.at(step * size, size))
        drawn: list[int] = []
        for again in range(1, number + 1):
            chance = random.Random(f"{self.seed}/refill/{step}/{again}")
            candidates = chance.sample(range(self.num_items), min(self.num_items, size + len(offered)))
            # Stable: new ones first, in the order in which they were drawn.
            drawn = sorted(candidates, key=lambda item: item in offered)[:size]
            offered.update(drawn)
        return drawn

    def _epoch_order(self, epoch: int) -> list[int]:
        if epoch != self._epoch:
            order = list(range(self.num_items))
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
            self._epoch, self._shuffled = epoch, order
        return self._shuffled
