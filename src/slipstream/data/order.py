"""In which order items are used: endless, shuffled anew in every epoch, known at any position from the seed alone."""

from __future__ import annotations

import random
from typing import TypedDict

from slipstream.errors import ConfigError


class OrderState(TypedDict):
    """Where an order stands; the same for all time and all processes."""

    num_items: int
    seed: int
    position: int


class DataOrder:
    """Indices of `num_items` items: every epoch holds each once, in a shuffle that depends on (seed, epoch) only.

    Resuming costs one shuffle, wherever it is.
    """

    def __init__(self, num_items: int, seed: int, position: int = 0) -> None:
        if num_items < 1:
            raise ConfigError(f"there are {num_items} items to train on: give at least one")
        self.num_items = num_items
        self.seed = seed
        self.position = position
        """Items handed out so far."""
        self._epoch = -1
        self._shuffled: list[int] = []

    @classmethod
    def from_state(cls, state: OrderState, num_items: int, seed: int) -> DataOrder:
        """The order as it was; raises `ConfigError` when the data or the seed is not what it was."""
        for what, now, then in (("items", num_items, state["num_items"]), ("seed", seed, state["seed"])):
            if now != then:
                raise ConfigError(f"the checkpoint was made with {what} = {then}, now it is {now}: use the same data")
        return cls(num_items, seed, state["position"])

    def state(self) -> OrderState:
        """What `from_state` needs."""
        return {"num_items": self.num_items, "seed": self.seed, "position": self.position}

    @property
    def num_epochs(self) -> int:
        """How often all items were handed out."""
        return self.position // self.num_items

    def take(self, num: int) -> list[int]:
        """The next `num` indices; across the end of an epoch the next one begins."""
        taken: list[int] = []
        while len(taken) < num:
            epoch, offset = divmod(self.position, self.num_items)
            part = self._epoch_order(epoch)[offset : offset + num - len(taken)]
            taken += part
            self.position += len(part)
        return taken

    def at(self, start: int, num: int) -> list[int]:
        """The `num` indices from position `start` on, without moving."""
        return DataOrder(self.num_items, self.seed, start).take(num)

    def _epoch_order(self, epoch: int) -> list[int]:
        if epoch != self._epoch:
            order = list(range(self.num_items))
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
            self._epoch, self._shuffled = epoch, order
        return self._shuffled
