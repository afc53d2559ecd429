"""Environments made of what a Python caller passes: a function or rows that give tasks, and a reward."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from slipstream.config.python_objects import PythonObject, load, pack
from slipstream.envs.answers import last_number, same_text
from slipstream.envs.base import Environment, Split
from slipstream.envs.single_turn import FunctionEnvironment, Reward, SingleTurn, as_tasks
from slipstream.envs.split import split_of
from slipstream.errors import ConfigError
from slipstream.records import Task

REWARDS = ("exact", "number")
"""Rewards by name: the completion equals the row's answer, white space aside; or its last number does."""
PROMPTS = ("prompt", "question", "problem", "instruction", "query", "input")
"""Columns that hold the prompt, in this order."""
RewardFunction = Callable[[Task, str], Reward | Awaitable[Reward]]
Maker = Callable[[int, Mapping[str, Any]], Environment]


class RowEnvironment(SingleTurn):
    """Rows in memory. Without `eval_rows` one prompt in ten is held out, by its text."""

    def __init__(
        self,
        name: str,
        rows: Sequence[Mapping[str, Any]],
        eval_rows: Sequence[Mapping[str, Any]] | None,
        reward: RewardFunction | str,
        seed: int = 0,
    ) -> None:
        super().__init__(seed)
        self.name = name
        self._reward = _named_reward(reward) if isinstance(reward, str) else reward
        train = as_tasks(map(_as_task, rows), "train", name)
        if eval_rows is None:
            self._splits = {split: [task for task in train if split_of(_text(task)) == split] for split in _SPLITS}
        else:
            self._splits = {"train": train, "eval": as_tasks(map(_as_task, eval_rows), "eval", name)}
        self._source = "" if eval_rows is not None else "one row in ten, by its text"

    @property
    def num_train_tasks(self) -> int:
        """See `Environment`: all rows."""
        return max(1, len(self._splits["train"]))

    @property
    def eval_source(self) -> str:
        """See `Environment`."""
        return self._source

    def tasks(self, split: Split, num_tasks: int) -> list[Task]:
        """See `Environment`."""
        return self._splits[split][:num_tasks]

    def reward(self, task: Task, completion: str) -> Reward | Awaitable[Reward]:
        """What the caller's reward gives."""
        return self._reward(task, completion)


_SPLITS: tuple[Split, ...] = ("train", "eval")


def pack_environment(tasks: Any, eval_tasks: Any = None, reward: Any = None) -> PythonObject:
    """An environment of what a caller passes as `tasks`: an `Environment` (object or class), a function
    `tasks(split, num_tasks, seed)`, or rows, of which each is a mapping with a prompt and perhaps an `answer`.

    `reward` is a function `reward(task, completion)` or one of `REWARDS`, and is not given with an `Environment`.
    Raises ConfigError.
    """
    if isinstance(tasks, Environment) or (isinstance(tasks, type) and issubclass(tasks, Environment)):
        if reward is not None or eval_tasks is not None:
            raise ConfigError("tasks is an Environment, which has its own reward and held-out tasks: give it alone")
        if isinstance(tasks, Environment):
            state = {key: repr(value) for key, value in vars(tasks).items()}
            return pack(tasks.name, partial(_of_object, tasks), tasks, state)
        return pack(tasks.__name__, partial(_of_class, tasks), tasks)
    if reward is None:
        raise ConfigError(f"tasks has no reward: give reward=a function(task, completion), or one of {_choices()}")
    _check_reward(reward)
    if callable(tasks):
        if eval_tasks is not None:
            raise ConfigError("tasks is a function and gives held-out tasks too (split = 'eval'): omit eval_tasks")
        _check_call(tasks, ("train", 1, 0), "tasks", "split, num_tasks, seed")
        label = getattr(tasks, "__name__", "tasks")
        return pack(label, partial(_of_functions, label, tasks, _function(reward)), tasks, reward)
    rows, held_out = _rows_of(tasks, "tasks"), None if eval_tasks is None else _rows_of(eval_tasks, "eval_tasks")
    RowEnvironment("tasks", rows, held_out, reward)  # what is wrong with a row is said here
    return pack("rows", partial(_of_rows, rows, held_out, reward), rows, held_out, reward)


def pack_rows(data: Any) -> PythonObject:
    """Rows of conversations for SFT, as `data.path` reads them from a file. Raises ConfigError."""
    rows = _rows_of(data, "data")
    return pack("rows", rows, rows)


def load_python_environment(name: str, seed: int, settings: Mapping[str, Any]) -> Environment:
    """The environment that was packed under `name`. Raises ConfigError."""
    maker: Maker = load(name)
    return maker(seed, settings)


def _of_class(kind: type[Environment], seed: int, settings: Mapping[str, Any]) -> Environment:
    return kind(seed=seed, **settings)


def _of_object(environment: Environment, seed: int, settings: Mapping[str, Any]) -> Environment:
    if settings:
        raise ConfigError("environment.settings has no effect on an Environment object: pass them when you make it")
    return environment


def _of_functions(
    name: str, tasks: Callable[..., Any], reward: RewardFunction, seed: int, settings: Mapping[str, Any]
) -> Environment:
    return FunctionEnvironment(name, tasks, reward, seed, settings)


def _of_rows(
    rows: list[dict[str, Any]],
    eval_rows: list[dict[str, Any]] | None,
    reward: RewardFunction | str,
    seed: int,
    settings: Mapping[str, Any],
) -> Environment:
    if settings:
        raise ConfigError("environment.settings has no effect on rows: leave it out")
    return RowEnvironment("rows", rows, eval_rows, reward, seed)


def _rows_of(given: Any, what: str) -> list[dict[str, Any]]:
    """Rows of a list, a Hugging Face data set, or a pandas or polars table."""
    if hasattr(given, "to_dicts"):  # polars
        given = given.to_dicts()
    elif hasattr(given, "to_dict") and hasattr(given, "columns"):  # pandas
        given = given.to_dict("records")
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        kind = type(given).__name__
        raise ConfigError(f"{what} is a {kind}: give a function, an Environment, a name, or rows with 'prompt'")
    rows: list[dict[str, Any]] = []
    for number, row in enumerate(cast("Iterable[Any]", given)):
        if not isinstance(row, Mapping):
            raise ConfigError(f"row {number} of {what} is a {type(row).__name__}: give mappings with 'prompt'")
        rows.append({str(key): value for key, value in cast("Mapping[Any, Any]", row).items()})
    if not rows:
        raise ConfigError(f"{what} holds no row: give at least one")
    return rows


def _as_task(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with its prompt under `prompt`, and a number for an answer as text."""
    found = dict(row)
    name = next((name for name in PROMPTS if name in found), None)
    if name is not None:
        found["prompt"] = found.pop(name)
    answer = found.get("answer")
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        found["answer"] = str(answer)
    return found


def _text(task: Task) -> str:
    return "\n".join(message.content for message in task.prompt if message.role != "system")


def _check_reward(reward: Any) -> None:
    if isinstance(reward, str):
        if reward not in REWARDS:
            raise ConfigError(f"reward = {reward!r} is not a reward: give a function, or one of {_choices()}")
        return
    if not callable(reward):
        raise ConfigError(f"reward is a {type(reward).__name__}: give a function, or one of {_choices()}")
    _check_call(reward, (None, ""), "reward", "task, completion")


def _check_call(function: Callable[..., Any], arguments: tuple[Any, ...], what: str, expected: str) -> None:
    try:
        inspect.signature(function).bind_partial(*arguments)
    except TypeError as error:
        raise ConfigError(f"{what}() cannot be called with {expected} ({error}): give it these arguments") from None
    except ValueError:  # a builtin tells no signature
        return


def _choices() -> str:
    return " and ".join(f'"{name}"' for name in REWARDS)


def _function(reward: RewardFunction | str) -> RewardFunction:
    return _named_reward(reward) if isinstance(reward, str) else reward


def _named_reward(name: str) -> RewardFunction:
    return _exact if name == "exact" else _number


def _exact(task: Task, completion: str) -> float:
    return float(same_text(completion, task.answer or ""))


def _number(task: Task, completion: str) -> float:
    found = last_number(completion)
    return float(found is not None and found == last_number(task.answer or ""))
