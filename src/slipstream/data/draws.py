"""Which draws of an endless task order a run has used up, where batches do not follow that order. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Draws:
    """All draws below `next` are used up but those `left`."""

    next: int = 0
    left: set[int] = field(default_factory=set[int])

    def use(self, numbers: Iterable[int]) -> None:
        """A batch has used up these draws."""
        for number in numbers:
            if number >= self.next:
                self.left.update(range(self.next, number))
                self.next = number + 1
            else:
                self.left.remove(number)

    def unused(self) -> Iterator[int]:
        """The draws to go on with, in order; never ends. Later `use` does not change it."""
        return itertools.chain(sorted(self.left), itertools.count(self.next))

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"next": self.next, "left": sorted(self.left)}

    @staticmethod
    def of_state(state: Mapping[str, Any]) -> Draws:
        """What `state` returned."""
        return Draws(int(state["next"]), set(map(int, state["left"])))
