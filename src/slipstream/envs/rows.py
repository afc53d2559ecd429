"""The environment `rows`: questions with known answers from the user's file or folder, including verl's format.

Settings: `path` (JSON lines, parquet, or a folder; see `data/readers.py`), `split`, `eval_path`, `eval_split`, `format`
(`verl`, `messages`, `prompt-answer`; detected if not set), `prompt_column`, `answer_column`, `messages_column`,
`gold_column`, `reward` and `strip_thinking`.

Held-out tasks are the rows of `eval_path` or of `eval_split`; without both, one question in ten, by its text
(`split.split_of`). If `eval_path` is a folder of several splits and `eval_split` is not set, its `test`, `validation`
or `eval` split is used, in this order. Only requested rows are read: the reward worker reads none.

A reward is `exact` (the answer's text, ignoring white space), `number` (the last number), or
`path/to/file.py:function`, a function with verl's signature: `compute_score(data_source, solution_str, ground_truth,
extra_info)` returns a number, or a dictionary with `score`. In a table of rewards by `data_source`, each row gets the
longest name that its source begins with. Such a function gets the whole completion, as in verl, unless `strip_thinking`
is set.
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Awaitable, Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, cast, get_args

from slipstream.config.user_code import import_file
from slipstream.data.conversations import Columns, Form, Problem, read_problems
from slipstream.data.readers import held_out_split
from slipstream.envs.answers import final_answer, last_number, same_text
from slipstream.envs.base import Environment, Episode, Policy, RewardFailed, Score, Split, as_score, scored
from slipstream.envs.conversation import converse
from slipstream.envs.split import split_of
from slipstream.envs.suggest import did_you_mean
from slipstream.errors import ConfigError, DataError
from slipstream.records import NON_FINITE, Task

NAME = "rows"
_TEXTS = ("path", "split", "eval_path", "eval_split", "format")
_COLUMNS = ("prompt_column", "answer_column", "messages_column", "gold_column")
_SETTINGS = (*_TEXTS, *_COLUMNS, "reward", "strip_thinking")
_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
_REWARD_FORMS = '"exact", "number", "path/to/file.py:function", or a table of these by data_source'

Reward = Callable[[Task, str], Score | Awaitable[Score]]


class Rows(Environment):
    """The environment `rows`; see the module. Raises `ConfigError` for invalid settings, `DataError` for invalid
    rows."""

    max_turns = 1

    def __init__(self, seed: int = 0, settings: Mapping[str, Any] | None = None) -> None:
        super().__init__(seed)
        self.name = NAME
        self._settings = _checked(settings or {})
        reward = self._settings.get("reward", "exact")
        table = cast("dict[str, Any]", reward) if isinstance(reward, dict) else {"": reward}
        # Longest name first, so that the first match is the longest one.
        self._kinds = {name: table[name] for name in sorted(table, key=len, reverse=True)}
        strip = self._settings.get("strip_thinking")
        self._rewards = {
            name: _reward(kind, strip, f"environment.settings.reward{f'.{name}' if name else ''}")
            for name, kind in self._kinds.items()
        }

    @property
    def num_train_tasks(self) -> int:
        """All rows that are not held out."""
        return len(self._train)

    def tasks(self, split: Split, num_tasks: int) -> list[Task]:
        """See `Environment.tasks`: the first rows of the split, fewer if there are no more."""
        found = self._train if split == "train" else self._eval
        if not found:
            path = self._settings["path"]
            if split == "train":
                raise DataError(
                    f"every question of {path} is held out: add rows, or set environment.settings.eval_path"
                )
            raise DataError(
                f"none of the {len(self._train)} questions of {path} is held out (one in ten is, by its text): set "
                "environment.settings.eval_path or eval_split, add rows, or turn the evaluation off"
            )
        return found[:num_tasks]

    async def run(self, task: Task, policy: Policy) -> Episode:
        """A single turn, or several where there are tools: see `conversation.py`."""
        return await converse(self, task, policy)

    def score(self, task: Task, completion: str) -> Score | Awaitable[Score]:
        """The reward function that the row's `data_source` selects."""
        return self._rewards[self._reward_name(str(task.info["data_source"]))](task, completion)

    def _reward_name(self, source: str) -> str:
        return next(name for name in self._kinds if source.startswith(name))

    @cached_property
    def _train(self) -> list[Task]:
        if self._has_own_eval:
            return self._main
        return [task for task in self._main if split_of(_question(task)) == "train"]

    @cached_property
    def _eval(self) -> list[Task]:
        if not self._has_own_eval:
            return [task for task in self._main if split_of(_question(task)) == "eval"]
        return self._read(self._eval_setting, self._eval_split)

    @cached_property
    def _main(self) -> list[Task]:
        return self._read("path", self._settings.get("split", ""))

    @property
    def _eval_setting(self) -> str:
        return "eval_path" if "eval_path" in self._settings else "path"

    @cached_property
    def _eval_split(self) -> str:
        """`eval_split`; if not set, the test split of the folder, unless it is trained on."""
        settings = self._settings
        folder = Path(settings[self._eval_setting])
        if "eval_split" in settings or not folder.is_dir():
            return settings.get("eval_split", "")
        is_same = folder.resolve() == Path(settings["path"]).resolve()
        trained = settings.get("split", "train") if is_same else ""
        return held_out_split(folder, trained, f"environment.settings.{self._eval_setting}")

    @property
    def eval_source(self) -> str:
        """See `Environment`."""
        if not self._has_own_eval:
            return f"one question in ten of {self._settings['path']}, by its text"
        split = f"split {self._eval_split!r} of " if self._eval_split else ""
        return f"{split}{self._settings[self._eval_setting]}"

    @property
    def _has_own_eval(self) -> bool:
        return "eval_path" in self._settings or "eval_split" in self._settings

    def _read(self, which: str, split: str) -> list[Task]:
        settings = self._settings
        columns = Columns(*(settings.get(f"{name}_column", "") for name in ("messages", "prompt", "answer", "gold")))
        form = cast("Form", settings.get("format", "auto"))
        path = Path(settings[which])
        problems = read_problems(path, columns, form, split, f"environment.settings.{which}")
        return [self._task(problem, f"{which}/{row}") for row, problem in enumerate(problems)]

    def _task(self, problem: Problem, id_: str) -> Task:
        kind = next((kind for name, kind in self._kinds.items() if problem.source.startswith(name)), None)
        if kind is None:
            raise DataError(
                f"{problem.where}: data_source = {problem.source!r} has no reward: "
                f"environment.settings.reward has {', '.join(self._kinds)}"
            )
        _check_answer(problem, kind)
        gold = problem.gold
        if gold is None and isinstance(problem.answer, list) and problem.answer:
            gold = str(cast("list[Any]", problem.answer)[0])
        info = {"data_source": problem.source, "ground_truth": problem.answer, "extra_info": problem.extra or {}}
        return Task(id_, problem.prompt, gold, info)


def _checked(given: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in given.items():
        path = f"environment.settings.{key}"
        if key not in _SETTINGS:
            raise ConfigError(f"{path}: {NAME} has no such setting{did_you_mean(key, _SETTINGS)}")
        if key in (*_TEXTS, *_COLUMNS) and not (isinstance(value, str) and value.strip()):
            raise ConfigError(f"{path} = {value!r:.60} is not a text: give one, or leave it out")
        if key == "strip_thinking" and not isinstance(value, bool):
            raise ConfigError(f"{path} = {value!r:.60} is a {type(value).__name__}: give true or false")
    if "path" not in given:
        raise ConfigError(f"environment.settings.path is missing: {NAME} needs the path of a file or folder of rows")
    if given.get("format", "auto") not in get_args(Form):
        raise ConfigError(
            f"environment.settings.format = {given['format']!r} is not a choice"
            f"{did_you_mean(str(given['format']), get_args(Form))}"
        )
    return dict(given)


def _reward(kind: Any, strip: bool | None, setting: str) -> Reward:
    if kind == "exact":
        return _on_answer(lambda task, answer: any(same_text(answer, str(right)) for right in _accepted(task)))
    if kind == "number":
        return _on_answer(lambda task, answer: last_number(answer) in [last_number(str(r)) for r in _accepted(task)])
    if not isinstance(kind, str) or not kind.partition(":")[0].endswith(".py"):
        raise ConfigError(f"{setting} = {kind!r:.80} is not a reward: use {_REWARD_FORMS}")
    file, _, name = kind.partition(":")
    function = _function(Path(file), name or "compute_score", setting)

    def call(task: Task, completion: str) -> Score | Awaitable[Score]:
        solution = final_answer(completion) if strip else completion
        if solution is None:
            return Score(0.0, {"unclosed_thinking": 1.0})
        values = (task.info["data_source"], solution, task.info["ground_truth"], task.info["extra_info"])
        return scored(function(**dict(zip(_ARGUMENTS, values, strict=True))), _as_verl_score)

    return call


def _on_answer(is_right: Callable[[Task, str], bool]) -> Reward:
    def call(task: Task, completion: str) -> Score:
        answer = final_answer(completion)
        if answer is None:
            return Score(0.0, {"unclosed_thinking": 1.0})
        return Score(float(is_right(task, answer)))

    return call


def _function(file: Path, name: str, setting: str) -> Callable[..., Any]:
    module = import_file(file, setting)
    function = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise ConfigError(f"{setting}: {file} has no function {name!r}{did_you_mean(name, known)}")
    try:
        inspect.signature(function).bind(**dict.fromkeys(_ARGUMENTS))
    except TypeError as error:
        raise ConfigError(
            f"{setting}: {name}() in {file} cannot be called with {', '.join(_ARGUMENTS)} ({error}): "
            "give it these arguments"
        ) from error
    return function


def _as_verl_score(found: Any) -> Score:
    """Converts verl's dictionaries: `score`, and other values, of which finite numbers become metrics and `non_finite`
    counts the rest."""
    if not isinstance(found, Mapping):
        return as_score(found)
    named = cast("Mapping[str, Any]", found)
    if "score" not in named:
        raise RewardFailed(f"the reward returned a dictionary of {', '.join(map(str, named))} without 'score': add it")
    numbers_of = {
        str(key): float(value)
        for key, value in named.items()
        if key not in ("score", "reward") and isinstance(value, numbers.Real)
    }
    metrics = {key: value for key, value in numbers_of.items() if math.isfinite(value)}
    if left_out := len(numbers_of) - len(metrics):
        metrics[NON_FINITE] = float(left_out)
    return as_score({**metrics, "reward": named["score"]})


def _accepted(task: Task) -> list[Any]:
    answer = task.info["ground_truth"]
    return cast("list[Any]", answer) if isinstance(answer, list) else [answer]


def _check_answer(problem: Problem, kind: Any) -> None:
    """Raises an error for a gold answer that a built-in reward could never match."""
    if kind not in ("exact", "number"):
        return
    answers = cast("list[Any]", problem.answer) if isinstance(problem.answer, list) else [problem.answer]
    for answer in answers:
        if not isinstance(answer, str | int | float) or isinstance(answer, bool):
            raise DataError(
                f'{problem.where}: the answer {answer!r:.60} is a {type(answer).__name__}, and reward = "{kind}" '
                "compares texts: name another answer_column, or give a reward function"
            )
        if kind == "number" and last_number(str(answer)) is None:
            raise DataError(
                f'{problem.where}: the answer {answer!r:.60} holds no number, which reward = "number" needs: correct '
                "the row, or use another reward"
            )


def _question(task: Task) -> str:
    return "\n".join(message.content for message in task.prompt if message.role != "system")
