"""Which items of the training set make which batch, and the deadlines for making one.

Guarantees: the items of a batch, refills included, are a pure function of seed and step, so that a resumed run needs no
saved position; under a curriculum also of its weights, which are in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from slipstream.algo.readiness import signal_rule
from slipstream.config import PlannedConfig
from slipstream.config.traits import apply_timeout_s
from slipstream.data.mixture import MixtureOrder, Weights, changes_of
from slipstream.data.sampler import DataOrder
from slipstream.errors import IntegrityError
from slipstream.launch.prepare import Prepared
from slipstream.orchestrator.batches.dynamic_sampling import Refills
from slipstream.orchestrator.control.handle import Waits
from slipstream.orchestrator.retries import BUDGET, LONGEST_WAIT_S, Retries
from slipstream.records import Task

START_GRACE_S = 60.0


class BatchOrder:
    """Which items of one run's training set each batch is made of."""

    def __init__(self, prepared: Prepared) -> None:
        self._config, self._tasks = prepared.config, prepared.train_tasks
        self._size, seed = prepared.config.training.prompts_per_batch, prepared.config.run.seed
        self._order = DataOrder(prepared.num_items, seed)
        self._mixture: MixtureOrder | None = None
        self._refused = ""
        if prepared.part_of_item:
            weights = Weights(mixture_weights(prepared.config))
            self._mixture = MixtureOrder(prepared.part_of_item, weights, self._size, seed)

    def items(self, step: int) -> list[int]:
        """The items that the batch of `step` begins with."""
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
        """Further ones, from `step` of the order of the tasks on. Nobody waits for this call's end: what is wrong with
        it is raised when items are asked for."""
        assert self._mixture is not None
        try:
            self._mixture.change(step, weights)
        except ValueError as error:
            self._refused = str(error)

    def tasks(self, step: int) -> list[Task]:
        """The tasks that the batch of `step` begins with."""
        return [self._tasks[item] for item in self.items(step)]

    def refills(self) -> Refills | None:
        """How a batch gets further tasks under dynamic sampling; None without it."""
        algorithm, max_refills = self._config.algorithm, max_refills_of(self._config)
        if algorithm.kind == "sft" or not max_refills:
            return None
        return Refills(self._refill, max_refills, signal_rule(algorithm))

    def _refill(self, step: int, number: int) -> list[Task]:
        if self._mixture is not None:
            return [self._tasks[item] for item in self._mixture.refill(step, number)]
        return [self._tasks[item] for item in self._order.refill(step, self._size, number)]


def mixture_weights(config: PlannedConfig) -> tuple[float, ...]:
    """The weights of a mixture's parts, as they are set."""
    section = config.environment
    return tuple(part.weight for part in section.mixture.values()) if section is not None else ()


def max_refills_of(config: PlannedConfig) -> int:
    """`algorithm.max_refills` of a planned config; 0 where nothing is generated to train on."""
    return 0 if config.algorithm.kind == "sft" else config.algorithm.max_refills


def silence_limit_s(config: PlannedConfig) -> float:
    """How long a batch or an evaluation may go on without a turn, a try of one or a rollout that ends, in seconds: the
    sum of all deadlines that one rollout may wait for, and of the longest wait between two tries of a request."""
    section, inference = config.environment, config.inference
    own_s = section.run_timeout_s + section.reward_timeout_s if section is not None else 0.0
    engine_s = inference.request_timeout_s + inference.start_timeout_s
    return own_s + engine_s + apply_timeout_s(config) + (LONGEST_WAIT_S if inference.request_retries else 0.0)


def retries_of(config: PlannedConfig, count: Callable[[dict[str, float]], None] = lambda values: None) -> Retries:
    """How often the requests of rollouts are tried again; `count` adds up metrics of each further try, by its reason,
    and of each request that has used all of them."""
    inference = config.inference
    return Retries(
        inference.request_retries,
        BUDGET * inference.request_timeout_s,
        on_retry=lambda reason: count({f"retry/{reason}": 1.0}),
        on_exhausted=lambda: count({"retry/exhausted": 1.0}),
    )


def waits_of(config: PlannedConfig) -> Waits:
    """Deadlines of the trainer's waits for the orchestrator."""
    start_s = config.inference.start_timeout_s
    # With staleness, an engine that cannot keep its requests first ends the batch that it is making.
    apply_s = apply_timeout_s(config) + start_s + bool(config.training.staleness) * silence_limit_s(config)
    return Waits(start_s + START_GRACE_S, apply_s, silence_limit_s(config))
