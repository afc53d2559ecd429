"""The method of a plug-in, as a run calls it: training sequences, loss and source of batches.

Its section of the run file is a `config.methods.MethodSection`; a run without one is SFT by cross-entropy, or RL.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from slipstream.config import PlannedConfig, RunConfig
from slipstream.config.methods import loaded
from slipstream.config.sft import TrainOn
from slipstream.data.chat_template import ChatTokenizer
from slipstream.data.conversations import Columns, Conversation, plain_conversation
from slipstream.data.examples import Examples, SFTReader
from slipstream.data.readers import Row
from slipstream.envs.base import Environment
from slipstream.errors import ConfigError
from slipstream.orchestrator.evaluate import Evaluation
from slipstream.records import Batch, Message, Rollout, Task
from slipstream.records import Sequence as TokenSequence
from slipstream.trainer.learner import Learner, Scorer
from slipstream.trainer.loss import Objective
from slipstream.trainer.packing import StepBatch


class RollsOut(Protocol):
    """Makes one rollout of each training task with the weights of `step`."""

    def __call__(self, step: int, items: Sequence[int], *, seed: int, temperature: float) -> list[Rollout]:
        """In the order of the items, whatever their outcome."""
        ...


class Batches(Protocol):
    """The source of batches, as the training loop asks it."""

    def take(self, step: int) -> Batch:
        """The batch of the update `step -> step + 1`."""
        ...


@dataclass(frozen=True)
class Material:
    """A prepared run, for the source of batches."""

    config: PlannedConfig
    tasks: Sequence[Task]
    examples: Examples
    """As the method made them, one for each task."""
    tokenizer: ChatTokenizer
    context_length: int
    items_of_step: Callable[[int], list[int]]
    """The numbers of the tasks of a step, in a seeded order."""
    roll_out: RollsOut | None = None
    """None in a run without an engine."""
    on_rollouts: Callable[[int, Sequence[Rollout]], None] = lambda step, rollouts: None
    """Keeps samples: to be called with the rollouts of a step as they were sampled."""


class Method(ABC):
    """Base class. Constructed with its section, in the run's process and in each rank; it keeps no state."""

    def __init__(self, section: Any) -> None:
        self.section = section

    def check_tokenizer(self, tokenizer: ChatTokenizer) -> None:  # noqa: B027 (a hook)
        """Raises `ConfigError` for an unusable tokenizer, before anything starts."""

    def tasks(self, tasks: list[Task]) -> list[Task]:
        """The tasks, for training or held out, as environment and rewards shall see them."""
        return tasks

    def conversation(self, row: Row, columns: Columns) -> tuple[Conversation, set[str]]:
        """The conversation of a row of [data], and the columns used. A `Judged` one has rewards, or others. Raises
        `DataError`."""
        return plain_conversation(row, columns)

    def tokens(self, conversation: Sequence[Message], tokenizer: ChatTokenizer, train_on: TrainOn) -> TokenSequence:
        """The tokens of a conversation, and their loss mask. Raises `DataError`."""
        return tokenizer.training_tokens(conversation, train_on)

    def conversations(self, tasks: Sequence[Task], max_turns: int) -> list[Sequence[Message]]:
        """Without [data]: the training tasks with their gold answers, for people, checks and digests. Raises
        `ConfigError` for an environment of too many turns, or if the method knows rows alone."""
        raise ConfigError(f"{type(self).__name__} learns from rows, and there are none: give them in data.path")

    def examples(self, tasks: Sequence[Task], tokenizer: ChatTokenizer, limit: int) -> Examples:
        """Without [data]: the tokens of each task's gold answer, at most `limit`. Raises `DataError` with the task."""
        raise ConfigError(f"{type(self).__name__} makes no tokens of tasks: give rows in data.path")

    @abstractmethod
    def objective(self, tokenizer: ChatTokenizer) -> Objective:
        """The loss."""

    def batches(self, material: Material) -> Batches:
        """The source of batches."""
        return SFTReader(material.examples, material.items_of_step)

    def before_update(self, step: StepBatch, learner: Learner, reference: Scorer | None) -> dict[str, float]:
        """Before each optimizer step, in the run's process: may change the sequences of `step`, whose rewards are
        `step.advantages`. Returns metrics of the step."""
        return {}

    def held_out(self, examples: Examples, learner: Learner, reference: Scorer | None) -> dict[str, float] | None:
        """Metrics of the held-out rows of [data]; None: their cross-entropy is measured."""
        return None

    def figures(
        self, tasks: Sequence[Task], rollouts: Sequence[Rollout], tokenizer: ChatTokenizer | None
    ) -> dict[str, float]:
        """Further metrics of an evaluation; see `Environment.figures`."""
        return {}


def with_figures(
    found: Evaluation,
    tasks: Sequence[Task],
    environment: Environment,
    method: Method | None,
    tokenizer: ChatTokenizer | None,
) -> Evaluation:
    """An evaluation with the figures of the method, or else of the environment. `tokenizer`: None where texts were
    received."""
    source = environment if method is None else method
    return replace(found, further=found.further | source.figures(tasks, found.rollouts, tokenizer))


def method_of(config: RunConfig) -> Method | None:
    """The method of the run file, if any."""
    section = config.method
    return None if section is None else loaded(section.implementation)(section)
