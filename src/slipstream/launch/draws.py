"""Which items of the training set make which batch, as a planned config says, and how long making one may take.

Guarantees: what the batch of a step is offered, refills included, is a pure function of seed and step, so that a
resumed run needs no saved position.
"""

from __future__ import annotations

from collections.abc import Callable

from slipstream.config import RunConfig
from slipstream.data.order import DataOrder
from slipstream.launch.prepare import Prepared
from slipstream.orchestrator.refills import Refills
from slipstream.records import Task

REQUESTS = 4
"""A round of a batch, or an evaluation, may take as long as this many requests one after the other."""


class Draws:
    """The order of one run's training set."""

    def __init__(self, prepared: Prepared) -> None:
        self._config, self._tasks = prepared.config, prepared.train_tasks
        self._order = DataOrder(prepared.num_items, prepared.config.run.seed)
        self._size = prepared.config.training.prompts_per_batch

    def items(self, step: int) -> list[int]:
        """Which items the batch of `step` begins with."""
        return self._order.at(step * self._size, self._size)

    def tasks(self, step: int) -> list[Task]:
        """The same, as tasks."""
        return [self._tasks[item] for item in self.items(step)]

    def refills(self, on_begin: Callable[[int], None]) -> Refills | None:
        """What may be drawn beside them, under dynamic sampling."""
        algorithm, max_refills = self._config.algorithm, max_refills_of(self._config)
        if algorithm.kind == "sft" or not max_refills:
            return None
        return Refills(self._further, max_refills, algorithm.reward_threshold, on_begin)

    def _further(self, step: int, number: int) -> list[Task]:
        return [self._tasks[item] for item in self._order.refill(step, self._size, number)]


def max_refills_of(config: RunConfig) -> int:
    """`algorithm.max_refills` of a planned config; 0 where nothing is generated to train on."""
    return 0 if config.algorithm.kind == "sft" else int(config.algorithm.max_refills)


def batch_deadline_s(config: RunConfig) -> float:
    """How long generating a batch may take, all its refills included."""
    return (1 + max_refills_of(config)) * REQUESTS * config.inference.request_timeout_s
