"""Environments of a user's file or a Python caller: a function or rows for tasks, and a reward."""

from __future__ import annotations

import inspect
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import msgspec

from slipstream.config.python_objects import PythonObject, load, pack
from slipstream.data.conversations import COMPLETIONS, MESSAGES, Columns, problems_of
from slipstream.data.files.arrow import with_lists, without_nulls
from slipstream.data.plain_values import plain_or_text
from slipstream.data.readers import Row
from slipstream.envs.base import Environment, Episode, Score, Split
from slipstream.envs.rewards import Options, named
from slipstream.envs.rewards import Reward as NamedReward
from slipstream.envs.rewards.contract import COLUMNS, Checked
from slipstream.envs.rewards.functions import by_signature
from slipstream.envs.rewards.named import BUILT_IN
from slipstream.envs.single_turn import Reward, SingleTurn, as_tasks
from slipstream.envs.split import split_of, text_of
from slipstream.errors import ConfigError, DataError
from slipstream.records import Task

PROMPTS = ("prompt", "question", "problem", "instruction", "query", "input")
"""Columns for the prompt, in this order."""
_RENDERED = {*MESSAGES, *PROMPTS, *COMPLETIONS, "tools"} - {"answer"}
"""Columns for the model to read or imitate; an answer may be a reward's input instead."""
RewardFunction = Callable[[Task, str], Reward | Awaitable[Reward]]
AnyReward = RewardFunction | NamedReward | str | Sequence[Any]
"""A function, a reward of `slipstream.envs.rewards`, its name, or the parts of a rubric."""
_TESTS = ("test", "validation", "eval")
"""Held-out splits of a `DatasetDict`."""
Maker = Callable[[int, Mapping[str, Any]], Environment]


class _Graded(SingleTurn):
    """An environment with a reward of the library. The reward takes its part from the whole text."""

    def __init__(self, name: str, reward: NamedReward, seed: int) -> None:
        super().__init__(seed)
        self.name = name
        self._reward = reward
        self.scores_groups = reward.grades_groups

    def _check(self, tasks: list[Task]) -> None:
        self._reward.check([Checked(f"task {task.id} of {self.name}", task) for task in tasks])

    def setup_scoring(self) -> None:
        """See `Environment`."""
        self._reward.setup_scoring()

    def score(self, task: Task, completion: str) -> Score | Awaitable[Score]:
        """See `Environment`."""
        return self._reward(task, completion)

    async def score_group(self, task: Task, episodes: Sequence[Episode]) -> list[Score]:
        """See `Environment`."""
        return await self._reward.score_group(task, [episode.completion for episode in episodes])


class RowEnvironment(_Graded):
    """Rows in memory. Without `eval_rows` one prompt in ten is held out, by its text, but never all."""

    def __init__(
        self,
        name: str,
        rows: Sequence[Mapping[str, Any]],
        eval_rows: Sequence[Mapping[str, Any]] | None,
        reward: AnyReward,
        seed: int = 0,
    ) -> None:
        super().__init__(name, named(reward), seed)
        self._checked: set[Split] = set()
        train = self._tasks_of(rows, "train")
        if eval_rows is None:
            self._splits = {split: [task for task in train if split_of(text_of(task)) == split] for split in _SPLITS}
            if not self._splits["train"]:  # few rows of one prompt, perhaps to overfit it
                self._splits = {"train": train, "eval": []}
        else:
            self._splits = {"train": train, "eval": self._tasks_of(eval_rows, "eval")}
        self._source = "" if eval_rows is not None else "one row in ten, by its text"

    def _tasks_of(self, rows: Sequence[Mapping[str, Any]], split: Split) -> list[Task]:
        made = (_as_task(row, self._reward, f"{split} task {n} of {self.name}") for n, row in enumerate(rows))
        return as_tasks(made, split, self.name)

    @property
    def num_train_tasks(self) -> int:
        """See `Environment`: all rows."""
        return max(1, len(self._splits["train"]))

    @property
    def eval_source(self) -> str:
        """See `Environment`."""
        return self._source

    def held_out(self) -> Sequence[Task]:
        """See `Environment`."""
        return self._splits["eval"]

    def tasks(self, split: Split, num_tasks: int) -> list[Task]:
        """See `Environment`; all of the split are checked."""
        if split not in self._checked:
            self._check(self._splits[split])
            self._checked.add(split)
        return self._splits[split][:num_tasks]


class FunctionEnvironment(_Graded):
    """A function for tasks, and their reward."""

    def __init__(
        self,
        name: str,
        make_tasks: Callable[..., Any],
        reward: NamedReward,
        seed: int,
        settings: Mapping[str, Any],
    ) -> None:
        super().__init__(name, reward, seed)
        self._make_tasks, self._settings = make_tasks, settings

    def tasks(self, split: Split, num_tasks: int) -> list[Task]:
        """The tasks, checked by the reward."""
        found = as_tasks(self._make_tasks(split, num_tasks, self.seed, **self._settings), split, self.name)
        self._check(found)
        return found


_SPLITS: tuple[Split, ...] = ("train", "eval")


def pack_environment(tasks: Any, eval_tasks: Any = None, reward: Any = None) -> PythonObject:
    """An environment of a caller's `tasks`: an `Environment` (object or class), a function
    `tasks(split, num_tasks, seed)`, or rows: mappings with a prompt and perhaps an `answer`.

    `reward` is a function `reward(task, completion)`, a reward of `slipstream.envs.rewards`, or its name, and is not
    given with an `Environment`. A `DatasetDict` of Hugging Face's `datasets` holds out its split for tests.
    Raises ConfigError.
    """
    if isinstance(tasks, Environment) or (isinstance(tasks, type) and issubclass(tasks, Environment)):
        if reward is not None or eval_tasks is not None:
            raise ConfigError("tasks is an Environment, which has its own reward and held-out tasks: give it alone")
        if isinstance(tasks, Environment):
            state = {key: _stable(value) for key, value in vars(tasks).items()}
            return pack(tasks.name, partial(_of_object, tasks), tasks, state)
        return pack(tasks.__name__, partial(_of_class, tasks), tasks)
    if reward is None:
        raise ConfigError(f"tasks has no reward: give reward=a function(task, completion), or one of {_choices()}")
    reward = _checked_reward(reward)
    tasks, eval_tasks = _splits_of(tasks, eval_tasks)
    if callable(tasks):
        if eval_tasks is not None:
            raise ConfigError("tasks is a function and gives held-out tasks too (split = 'eval'): omit eval_tasks")
        _check_call(tasks)
        label = getattr(tasks, "__name__", "tasks")
        return pack(label, partial(FunctionEnvironment, label, tasks, reward), tasks, *reward.sources())
    rows, held_out = _rows_of(tasks, "tasks"), None if eval_tasks is None else _rows_of(eval_tasks, "eval_tasks")
    RowEnvironment("tasks", rows, held_out, reward)  # reports a row's faults here
    return pack("rows", partial(_of_rows, rows, held_out, reward), rows, held_out, *reward.sources())


def _stable(value: Any) -> str:
    """The `repr` of a value; a set's elements are in the same order in each process."""
    if isinstance(value, set | frozenset):
        return repr(sorted(map(repr, cast("set[Any]", value))))
    return repr(value)


def pack_rows(data: Any) -> PythonObject:
    """Rows of conversations for SFT, as `data.path` reads them from a file. Raises ConfigError."""
    rows = _rows_of(data, "data")
    return pack("rows", rows, rows)


def load_python_environment(name: str, seed: int, settings: Mapping[str, Any]) -> Environment:
    """The environment packed under `name`. Raises ConfigError."""
    maker: Maker = load(name)
    return maker(seed, settings)


def _of_class(kind: type[Environment], seed: int, settings: Mapping[str, Any]) -> Environment:
    return kind(seed=seed, **settings)


def _of_object(environment: Environment, seed: int, settings: Mapping[str, Any]) -> Environment:
    if settings:
        raise ConfigError("environment.settings has no effect on an Environment object: pass them when you make it")
    return environment


def _of_rows(
    rows: list[dict[str, Any]],
    eval_rows: list[dict[str, Any]] | None,
    reward: NamedReward,
    seed: int,
    settings: Mapping[str, Any],
) -> Environment:
    if settings:
        raise ConfigError("environment.settings has no effect on rows: leave it out")
    return RowEnvironment("rows", rows, eval_rows, reward, seed)


def _rows_of(given: Any, what: str) -> list[dict[str, Any]]:
    """Rows of a list, a Hugging Face data set, or a pandas or polars table. Columns for the model lose the nulls of a
    table."""
    is_table = False
    if hasattr(given, "to_dicts"):  # polars
        given, is_table = given.to_dicts(), True
    elif hasattr(given, "to_dict") and hasattr(given, "columns"):  # pandas
        records = cast("list[dict[Any, Any]]", given.to_dict("records"))
        given, is_table = [{key: with_lists(value) for key, value in row.items()} for row in records], True
    elif hasattr(given, "features") and hasattr(given, "column_names"):  # Hugging Face
        is_table = True
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        kind = type(given).__name__
        raise ConfigError(f"{what} is a {kind}: give a function, an Environment, a name, or rows with 'prompt'")
    rows: list[dict[str, Any]] = []
    for number, row in enumerate(cast("Iterable[Any]", given)):
        if not isinstance(row, Mapping):
            raise ConfigError(f"row {number} of {what} is a {type(row).__name__}: give mappings with 'prompt'")
        values = {str(key): value for key, value in cast("Mapping[Any, Any]", row).items()}
        if is_table:
            values |= {name: without_nulls(values[name]) for name in _RENDERED if name in values}
        try:
            msgspec.json.encode(values, enc_hook=repr)  # its digest is of these bytes
        except (UnicodeEncodeError, RecursionError) as error:
            raise DataError(
                f"row {number} of {what} cannot be written as JSON ({' '.join(str(error).split())}): correct its text, "
                "or leave the row out"
            ) from None
        rows.append(values)
    if not rows:
        raise ConfigError(f"{what} holds no row: give at least one")
    return rows


def _splits_of(tasks: Any, eval_tasks: Any) -> tuple[Any, Any]:
    """Rows and held-out rows of a `DatasetDict`; anything else as it is."""
    if not isinstance(tasks, dict) or not hasattr(tasks, "num_rows") or not tasks:
        return tasks, eval_tasks
    splits = cast("dict[str, Any]", tasks)
    held_out = next((splits[name] for name in _TESTS if name in splits), None)
    train = splits["train"] if "train" in splits else next(iter(splits.values())) if len(splits) == 1 else None
    if train is None:
        raise ConfigError(f"tasks has the splits {', '.join(splits)} and no train: give one of them, tasks['...']")
    return train, held_out if eval_tasks is None else eval_tasks


def _as_task(row: Mapping[str, Any], reward: NamedReward, where: str) -> dict[str, Any]:
    """The row as a task: its prompt under `prompt`, its answer as text or as `ground_truth`. In rows of verl's form
    both are in verl's places."""
    if "reward_model" in row and "answer" not in row:
        found = _verl_task(row, where)
    else:
        found = dict(row)
        name = next((name for name in PROMPTS if name in found), None)
        if name is not None:
            found["prompt"] = found.pop(name)
    answer = found.get("answer")
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        found["answer"] = str(answer)
    elif isinstance(answer, list | dict) or (answer is not None and not reward.answer_is_gold):
        found.setdefault("ground_truth", found.pop("answer"))
    if reward.needs_columns:
        found[COLUMNS] = {name: plain_or_text(value) for name, value in row.items()}
    return found


def _verl_task(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    (problem,) = problems_of([Row(where, dict(row))], Columns(), "verl")
    answer = {} if problem.gold is None else {"answer": problem.gold}
    given = {"data_source": problem.source, "ground_truth": problem.answer, "extra_info": problem.extra}
    return {"prompt": list(problem.prompt), **answer, **given}


def _checked_reward(reward: Any) -> NamedReward:
    """A caller's reward as a `NamedReward`."""
    if isinstance(reward, NamedReward):
        return reward
    if isinstance(reward, str | list | tuple):
        return named(_absolute(reward), Options())
    if not callable(reward):
        raise ConfigError(f"reward is a {type(reward).__name__}: give a function, or one of {_choices()}")
    return by_signature(reward, "reward()")


def _absolute(reward: Any) -> Any:
    """The name of a function in a file, with the file's whole path."""
    if not isinstance(reward, str):
        return reward
    prefix = "trl:" if reward.startswith("trl:") else ""
    file, colon, function = reward.removeprefix(prefix).partition(":")
    return prefix + os.path.realpath(file) + colon + function if file.endswith(".py") else reward


def _check_call(tasks: Callable[..., Any]) -> None:
    try:
        inspect.signature(tasks).bind_partial("train", 1, 0)
    except TypeError as error:
        raise ConfigError(
            f"tasks() cannot be called with split, num_tasks, seed ({error}): give it these arguments"
        ) from None
    except ValueError:  # a builtin tells no signature
        return


def _choices() -> str:
    return ", ".join(f'"{name}"' for name in BUILT_IN)
