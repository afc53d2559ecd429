"""Reward functions of the user, in a file (`path/to/file.py:function`) or of a Python caller, by their signature.

- `reward(task, completion)` returns a number, or a mapping with `reward`; it gets the answer, the text after the
  thinking.
- verl's `compute_score(data_source, solution_str, ground_truth, extra_info)` returns a number, or a dictionary with
  `score`. It gets the whole completion, as in verl, unless `strip_thinking` is set.
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, cast

from slipstream.config.user_code import import_file
from slipstream.envs.answers import final_answer
from slipstream.envs.base import RewardFailed, Score, as_score, scored
from slipstream.envs.rewards.contract import UNCLOSED, Plain, Reward, right_answer
from slipstream.errors import ConfigError, did_you_mean
from slipstream.records import NON_FINITE, Task

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
TRL_ARGUMENTS = ("prompts", "completions", "completion_ids")


class VerlFunction(Reward):
    """A function with verl's signature."""

    def __init__(self, function: Callable[..., Any], *, strip_thinking: bool) -> None:
        self._function = function
        self._strip = strip_thinking
        self.name = getattr(function, "__name__", "reward")

    def sources(self) -> list[Any]:
        """See `Reward`."""
        return super().sources() if self.made_by else [self._function]

    def __call__(self, task: Task, completion: str) -> Score | Awaitable[Score]:
        """What the function gives."""
        solution = final_answer(completion) if self._strip else completion
        if solution is None:
            return UNCLOSED
        info = task.info
        values = (info.get("data_source", ""), solution, right_answer(task), info.get("extra_info") or {})
        return scored(self._function(**dict(zip(ARGUMENTS, values, strict=True))), _as_verl_score)


def function_in(file: Path, name: str, setting: str) -> Callable[..., Any]:
    """The function `name` of a file. Raises ConfigError."""
    module = import_file(file, setting)
    function = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise ConfigError(f"{setting}: {file} has no function {name!r}{did_you_mean(name, known)}")
    return function


def function_of_file(text: str, setting: str, *, strip_thinking: bool) -> Reward:
    """The reward that `path/to/file.py:function` names; `compute_score` without a name. Raises ConfigError."""
    file, _, name = text.partition(":")
    name = name or "compute_score"
    function = function_in(Path(file), name, setting)
    return by_signature(function, f"{setting}: {name}() in {file}", strip_thinking=strip_thinking)


def by_signature(function: Callable[..., Any], what: str, *, strip_thinking: bool = False) -> Reward:
    """The reward that a function is. Raises ConfigError, which calls it `what`."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin tells none
        return Plain(function)
    try:
        signature.bind(**dict.fromkeys(ARGUMENTS))
        return VerlFunction(function, strip_thinking=strip_thinking)
    except TypeError as error:
        reason = error
    foreign = [name for name in signature.parameters if name in (*ARGUMENTS, *TRL_ARGUMENTS)]
    if not foreign:
        try:
            signature.bind(None, "")
            return Plain(function)
        except TypeError as error:
            reason = error
    raise ConfigError(
        f"{what} cannot be called with task, completion, nor as verl's functions with {', '.join(ARGUMENTS)} "
        f"({reason}): give it these arguments, or write trl: before the name of a function of TRL"
    )


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
