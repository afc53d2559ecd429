"""The order of the training set's items in batches.

Guarantees: the items of a batch, refills included, are a pure function of seed and step: a resumed run needs no saved
position. Under a curriculum they also depend on its weights, saved in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slipstream.algo.readiness import signal_rule
from slipstream.config import PlannedConfig, SFTConfig
from slipstream.data.mixture_order import MixtureOrder, Weights, changes_of
from slipstream.data.sampler import DataOrder
from slipstream.errors import IntegrityError
from slipstream.orchestrator.batches.dynamic_sampling import Refills
from slipstream.records import Task


class BatchOrder:
    """The items of each batch, from one run's training set."""

    def __init__(
        self, config: PlannedConfig, tasks: Sequence[Task], num_items: int, part_of_item: Sequence[int] = ()
    ) -> None:
        """`part_of_item`: of a mixture, the number of each item's part."""
        self._config, self._tasks = config, tasks
        self._size, seed = config.training.prompts_per_batch, config.run.seed
        self._order = DataOrder(num_items, seed)
        self._mixture: MixtureOrder | None = None
        self._refused = ""
        if part_of_item:
            self._mixture = MixtureOrder(part_of_item, Weights(mixture_weights(config)), self._size, seed)

    def items(self, step: int) -> list[int]:
        """The first items of the batch of `step`, without refills."""
        if self._refused:
            raise IntegrityError(f"the curriculum changed tasks that were drawn already ({self._refused}): report it")
        if self._mixture is not None:
            return self._mixture.at(step)
        return self._order.at(step * self._size, self._size)

    def set_changes(self, changes: Sequence[Any]) -> None:
        """The changes of a mixture's weights so far, as `Curriculum.state` has them."""
        if changes and self._mixture is not None:
            self._mixture.weights.changes = changes_of(changes)

    def change(self, step: int, weights: Sequence[float]) -> None:
        """Further changes, from `step` of the order of the tasks on. Nobody waits for this call's end: an error is
        raised when items are asked for."""
        assert self._mixture is not None
        try:
            self._mixture.change(step, weights)
        except ValueError as error:
            self._refused = str(error)

    def tasks(self, step: int) -> list[Task]:
        """The first tasks of the batch of `step`, without refills."""
        return [self._tasks[item] for item in self.items(step)]

    def refills(self) -> Refills | None:
        """How a batch gets further tasks under dynamic sampling; None without it."""
        algorithm = self._config.algorithm
        if isinstance(algorithm, SFTConfig) or not algorithm.max_refills:
            return None
        return Refills(self._refill, algorithm.max_refills, signal_rule(algorithm))

    def _refill(self, step: int, number: int) -> list[Task]:
        if self._mixture is not None:
            return [self._tasks[item] for item in self._mixture.refill(step, number)]
        return [self._tasks[item] for item in self._order.refill(step, self._size, number)]


def mixture_weights(config: PlannedConfig) -> tuple[float, ...]:
    """The weights of a mixture's parts, as they are set."""
    section = config.environment
    return tuple(part.weight for part in section.mixture.values()) if section is not None else ()
