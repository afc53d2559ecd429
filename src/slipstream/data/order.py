"""In which order items are used: endless, shuffled anew in every epoch, known at any position from the seed alone."""

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

    def _epoch_order(self, epoch: int) -> list[int]:
        if epoch != self._epoch:
            order = list(range(self.num_items))
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
            self._epoch, self._shuffled = epoch, order
        return self._shuffled
