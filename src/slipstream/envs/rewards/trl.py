"""TRL's reward functions, unchanged: `trl:path/to/file.py:function` or `trl:package.module:function`.

They are called as by TRL's trainers: `f(prompts=..., completions=..., completion_ids=..., trainer_state=...,
log_extra=..., log_metric=..., **columns)` with lists, and return a number or None for each completion. The row's prompt
decides the form: messages make completions conversational (`[[{"role": "assistant", "content": text}]]`), a text makes
them texts. Columns are the row's, without `prompt`, `completion` and `completion_ids`. They see the whole
completion, thinking included.

They get one completion at a time, or under `score_groups` those of a task together. The tokenizer of `tokenizer` makes
`completion_ids` from the text; without it they are empty, and a function that needs them is refused.
`trainer_state` is None; values for `log_metric` are metrics, and `log_extra` has no effect.
"""

from __future__ import annotations

import importlib
import inspect
import math
import numbers
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from slipstream.envs.base import RewardFailed, Score, scored
from slipstream.envs.rewards.contract import COLUMNS, Checked, NotApplicable, Reward
from slipstream.envs.rewards.functions import function_in
from slipstream.errors import ConfigError, DataError, one_line
from slipstream.records import Task

PREFIX = "trl:"
_OWN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
_NO_COLUMNS = ("prompt", "completion", "completion_ids")
_FORMS = '"trl:path/to/file.py:function" or "trl:package.module:function"'


class TrlFunction(Reward):
    """A reward function of TRL."""

    needs_columns = True
    needs_answers = False

    def __init__(self, function: Callable[..., Any], setting: str, tokenizer: str) -> None:
        self._function = function
        self.name = getattr(function, "__name__", type(function).__name__)
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{setting}: {self.name} is no function with a signature ({error})") from error
        self._takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
        named = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
        self._takes = [each.name for each in named]
        self._needs = [each.name for each in named if each.default is each.empty]
        if "completion_ids" in self._needs and not tokenizer:
            raise ConfigError(
                f"{setting}: {self.name} reads completion_ids, and a reward sees texts: name the folder of the model's "
                "tokenizer in environment.settings.tokenizer"
            )
        self._encode = _encoder(tokenizer) if tokenizer else None

    def check(self, rows: Sequence[Checked]) -> None:
        """Raises `DataError` for a row without a column needed by the function."""
        for where, task in rows:
            columns = _columns(task)
            if missing := [name for name in self._needs if name not in (*_OWN, *columns)]:
                raise DataError(
                    f"{where} has no column {missing[0]!r}, which {self.name}() needs: it has "
                    f"{', '.join(sorted(columns)) or 'none'}"
                )

    def __call__(self, task: Task, completion: str) -> Score | Awaitable[Score]:
        """The function's score for one completion. Raises `NotApplicable` if it is None."""
        metrics: dict[str, float] = {}
        found = self._call(task, [completion], metrics)
        return scored(found, lambda given: self._one(self._scores(given, 1, metrics), task))

    async def score_applicable(self, task: Task, completions: Sequence[str]) -> list[Score | None]:
        """The function's scores for all completions together."""
        metrics: dict[str, float] = {}
        found = self._call(task, completions, metrics)
        return self._scores(await found if inspect.isawaitable(found) else found, len(completions), metrics)

    def _call(self, task: Task, completions: Sequence[str], metrics: dict[str, float]) -> Any:
        number = len(completions)
        prompt = task.info.get(COLUMNS, {}).get("prompt")
        is_text = isinstance(prompt, str)
        messages: list[Any] = [message.as_chat() for message in task.prompt] if not isinstance(prompt, list) else prompt
        given: dict[str, Any] = {name: [value] * number for name, value in _columns(task).items()}
        given |= {
            "prompts": [prompt if is_text else messages for _ in completions],
            "completions": [text if is_text else [{"role": "assistant", "content": text}] for text in completions],
            "completion_ids": [self._encode(text) if self._encode else [] for text in completions],
            "trainer_state": None,
            "log_extra": lambda *_: None,  # pyright: ignore[reportUnknownLambdaType]
            "log_metric": lambda name, value: metrics.__setitem__(str(name), float(value)),
        }
        if not self._takes_all:
            given = {name: value for name, value in given.items() if name in self._takes}
        return self._function(**given)

    def _scores(self, found: Any, number: int, metrics: Mapping[str, float]) -> list[Score | None]:
        if hasattr(found, "tolist"):  # an array or a tensor
            found = found.tolist()
        if isinstance(found, str | Mapping) or not isinstance(found, Sequence):
            raise RewardFailed(f"{self.name}() returned a {type(found).__name__}: return a list of numbers or None")
        values = cast("Sequence[Any]", found)
        if len(values) != number:
            raise RewardFailed(
                f"{self.name}() returned {len(values)} rewards for {number} completions: return one each"
            )
        return [None if value is None else Score(self._finite(value), dict(metrics)) for value in values]

    def _finite(self, value: Any) -> float:
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise RewardFailed(f"{self.name}() returned {value!r:.60} among its rewards: return finite numbers or None")
        return float(value)

    def _one(self, scores: Sequence[Score | None], task: Task) -> Score:
        if (score := scores[0]) is None:
            raise NotApplicable(f"{self.name}() gave None for a completion of task {task.id}: it does not apply to it")
        return score


def trl_function(text: str, setting: str, tokenizer: str) -> TrlFunction:
    """The reward named by `trl:...`. Raises ConfigError."""
    place, _, name = text.removeprefix(PREFIX).rpartition(":")
    if not place or not name:
        raise ConfigError(f"{setting} = {text!r:.80} names no function: write {_FORMS}")
    if place.endswith(".py"):
        function = function_in(Path(place), name, setting)
    else:
        try:
            function = getattr(importlib.import_module(place), name)
        except Exception as error:  # any error of the module's code
            raise ConfigError(f"{setting} = {text}: {name} cannot be imported ({one_line(error)})") from error
    if not callable(function):
        raise ConfigError(f"{setting} = {text}: {name} is a {type(function).__name__}: name a function")
    return TrlFunction(function, setting, tokenizer)


def _columns(task: Task) -> dict[str, Any]:
    """The row's columns for TRL."""
    kept: Mapping[str, Any] | None = task.info.get(COLUMNS)
    columns = {**task.info, "answer": task.answer} if kept is None else dict(kept)
    return {name: value for name, value in columns.items() if name not in _NO_COLUMNS}


def _encoder(folder: str) -> Callable[[str], list[int]]:
    """Tokens of a text, without any special one not written in it."""
    file = Path(folder) / "tokenizer.json" if Path(folder).is_dir() else Path(folder)
    try:
        from tokenizers import Tokenizer  # pyright: ignore[reportMissingTypeStubs]

        tokenizer: Any = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises Exception itself
        raise ConfigError(
            f"environment.settings.tokenizer = {folder} has no tokenizer that can be read ({one_line(error)}): name a "
            "folder with a tokenizer.json"
        ) from error
    return lambda text: cast("list[int]", tokenizer.encode(text, add_special_tokens=False).ids)
