"""The environment `atropos`: programs on `atroposlib` make the rollouts, and the run trains on what they send.

There are no tasks here. A few short prompts stand in their place, by which the plan and the probe measure.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.config.atropos import NAME, atropos_settings
from slipstream.config.environment import EnvironmentConfig
from slipstream.envs.base import Environment, Episode, Policy, Score, Split
from slipstream.errors import EnvironmentFault
from slipstream.records import Message, Task

_NUM_TASKS = 8


class Atropos(Environment):
    """See the module."""

    name = NAME
    max_turns = 2
    """Nobody knows how many: this plans for the model's whole context."""

    def __init__(self, config: EnvironmentConfig) -> None:
        super().__init__(config.seed)
        atropos_settings(config)

    @property
    def num_train_tasks(self) -> int:
        """See `Environment`."""
        return _NUM_TASKS

    def tasks(self, split: Split, num_tasks: int) -> Sequence[Task]:
        """See `Environment.tasks`."""
        if split == "eval":
            return []
        return [Task(f"atropos-{number}", (Message("user", str(number)),)) for number in range(num_tasks)]

    async def run(self, task: Task, policy: Policy) -> Episode:
        """Nothing is played here."""
        raise EnvironmentFault(
            "episodes of the environment atropos are played by its own program: evaluate with `python PROGRAM evaluate`"
        )

    def score(self, task: Task, completion: str) -> Score:
        """Nothing is graded here."""
        raise EnvironmentFault("rollouts of the environment atropos come with their scores")
