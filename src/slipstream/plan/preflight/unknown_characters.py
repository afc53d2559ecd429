"""Finds characters without a token in everything for the model to learn, generate or read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from slipstream.config import RunConfig, SFTConfig
from slipstream.data.unknown_characters import Text, Vocabulary, check_vocabulary
from slipstream.envs.base import Environment
from slipstream.envs.single_turn import gold_of
from slipstream.plan.preflight.rows import source_of
from slipstream.records import Message, Task


def unknown_characters(
    config: RunConfig,
    environment: Environment | None,
    vocabulary: Vocabulary,
    conversations: Sequence[Sequence[Message]],
    train_tasks: Sequence[Task],
    eval_tasks: Sequence[Task],
) -> list[str]:
    """Check all texts of a run, see `check_vocabulary`. `conversations` is the training set of SFT: the rows of
    `data.path`, or the gold answers of `train_tasks`."""
    trained: list[Text] = []
    read: list[Text] = []
    for conversation in conversations:
        where = partial(source_of, config, train_tasks, conversation)
        turns = _trained_turns(config, conversation)
        trained.append((where, "".join(turn.content for turn in turns)))
        read.append((where, "".join(turn.content for turn in conversation if turn not in turns)))
    tasks = [*([] if conversations else train_tasks), *eval_tasks]
    read += task_prompts(config, tasks)
    answers = gold_answers(environment, tasks)
    return check_vocabulary(vocabulary, trained=trained, answers=answers, read=read)


def unknown_in_tasks(
    config: RunConfig, environment: Environment, vocabulary: Vocabulary, tasks: Sequence[Task]
) -> list[str]:
    """Check the texts of some training tasks."""
    answers = gold_answers(environment, tasks)
    trained = answers if isinstance(config.algorithm, SFTConfig) and config.data is None else []
    return check_vocabulary(vocabulary, trained=trained, answers=answers, read=task_prompts(config, tasks))


def task_prompts(config: RunConfig, tasks: Sequence[Task]) -> list[tuple[str, str]]:
    """The prompts of `tasks` and the system prompt, each with its origin."""
    system = config.environment.system_prompt if config.environment else ""
    prompts = [(f"task {task.id}", "".join(turn.content for turn in task.prompt)) for task in tasks]
    return [*([("environment.system_prompt", system)] if system else []), *prompts]


def gold_answers(environment: Environment | None, tasks: Sequence[Task]) -> list[tuple[str, str]]:
    """The existing gold answers of `tasks`, each with its origin."""
    golds = [(task.id, gold_of(environment, task) if environment else task.answer) for task in tasks]
    return [(f"task {name}", gold) for name, gold in golds if gold is not None]


def _trained_turns(config: RunConfig, conversation: Sequence[Message]) -> list[Message]:
    if isinstance(config.algorithm, SFTConfig) and config.algorithm.train_on == "everything":
        return [turn for turn in conversation if turn.carries_loss]
    turns = [turn for turn in conversation if turn.role == "assistant" and turn.carries_loss]
    is_last = isinstance(config.algorithm, SFTConfig) and config.algorithm.train_on == "last"
    return turns[-1:] if is_last else turns
