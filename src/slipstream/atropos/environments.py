"""The environments of a run, and the answers to them. Pure, but for a clock.

Differences from `run-api` (docs/atropos.md lists all):
- The queue counts groups, each as `batch_size / prompts_per_batch` sequences. Groups of any size make a batch.
- A group leaves the queue as soon as the run wants another in its place, never before a version is released.
- An environment without a call for `LEASE_S` counts as disconnected until its next one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.atropos.protocol import RegisterEnv

LEASE_S = 60.0
"""A working environment asks ten times a second."""
_LEAST_WEIGHT = 0.01
Holding = tuple[int | None, int]
"""A group of the queue: its environment and its sequences."""


class UnknownEnvironment(Exception):
    """No environment has this number."""


@dataclass
class _Environment:
    asked: RegisterEnv
    name: str
    last_s: float
    has_left: bool = False
    is_connected: bool = True


class Environments:
    """All registered ones, by number."""

    def __init__(
        self,
        batch_size: int,
        group_size: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_change: Callable[[str, str], None] = lambda name, change: None,
    ) -> None:
        """`group_size`: a group counts as so many sequences. `on_change` gets a name and `connected`, `left`, `lost` or
        `back`."""
        self._batch_size, self._group_size = batch_size, group_size
        self._clock, self._on_change = clock, on_change
        self._all: list[_Environment] = []

    def register(self, asked: RegisterEnv) -> tuple[int, str]:
        """The number and the name of a new environment."""
        name = f"{asked.desired_name}_{sum(each.asked.desired_name == asked.desired_name for each in self._all)}"
        self._all.append(_Environment(asked, name, self._clock()))
        self._on_change(name, "connected")
        return len(self._all) - 1, name

    def disconnect(self, number: int) -> None:
        """It leaves. Raises IndexError, as `run-api` reports it."""
        environment = self._all[number]
        if not environment.has_left:
            self._on_change(environment.name, "left")
        environment.has_left, environment.is_connected = True, False

    def name_of(self, number: int | None) -> str:
        """Empty for an unknown one."""
        return self._all[number].name if number is not None and 0 <= number < len(self._all) else ""

    def seen(self, number: int | None) -> None:
        """It lives."""
        if number is None or not 0 <= number < len(self._all):
            return
        environment = self._all[number]
        environment.last_s = self._clock()
        if not environment.is_connected and not environment.has_left:
            environment.is_connected = True
            self._on_change(environment.name, "back")

    def have_asked_since(self, moment: float) -> bool:
        """Whether all connected ones have asked since then, by the clock."""
        return all(each.last_s > moment for each in self._all if each.is_connected)

    def expire(self) -> None:
        """Disconnect all without a call for too long."""
        for each in self._all:
            if each.is_connected and self._clock() - each.last_s > LEASE_S:
                each.is_connected = False
                self._on_change(each.name, "lost")

    def status(self, number: int, held: Sequence[Holding], num_free: int) -> dict[str, Any]:
        """The answer to one of them. `held`: the queue. `num_free`: further places without room. Raises
        `UnknownEnvironment`."""
        if not 0 <= number < len(self._all):
            raise UnknownEnvironment(f"no environment has the number {number}: register first")
        self.seen(number)
        self.expire()
        connected = [(place, each.asked) for place, each in enumerate(self._all) if each.is_connected]
        own, size = self._all[number].asked, max(1, self._all[number].asked.group_size)
        total = sum(asked.max_token_length * max(0.0, asked.weight) for _, asked in connected)
        weight = own.max_token_length * own.weight / total if total else 0.0
        minimum: dict[int | None, float] = {
            place: asked.min_batch_allocation for place, asked in connected if asked.min_batch_allocation is not None
        }
        counts: dict[int | None, int] = {}
        for maker, _ in held:
            counts[maker] = counts.get(maker, 0) + self._group_size
        mine = counts.pop(number, 0)
        spare = [max(0, count - int(self._batch_size * minimum.get(maker, 0.0))) for maker, count in counts.items()]
        return {
            "queue_size": self._queue_size(mine + sum(spare) + num_free * self._group_size, size),
            "unallocated_fraction": 1.0 - min(sum(minimum.values()), 1.0),
            "self_queue_size": self._queue_size(mine, size),
            "max_group_size": max((sequences for _, sequences in held), default=1),
            "env_weight": max(_LEAST_WEIGHT, weight),
        }

    def _queue_size(self, sequences: int, size: int) -> int:
        """In groups of the environment's size. Until a whole batch is there it is one less than a batch at most: an
        environment that rounds must not stop before."""
        batches, rest = divmod(sequences, self._batch_size)
        whole, after = (count * self._batch_size // size for count in (batches, batches + 1))
        return whole + min(rest // size, max(0, after - whole - 1))
