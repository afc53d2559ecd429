"""Interface of named rewards: their needs of a task, their checks at the start, their grading.

A call `reward(task, completion)` gets the policy's whole text, thinking included; rewards of an answer remove the
thinking themselves. The right answer is `task.info["ground_truth"]`, as in verl's rows, or else `task.answer`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import msgspec

from slipstream.envs.answers import final_answer
from slipstream.envs.base import RewardFailed, Score, scored
from slipstream.errors import DataError
from slipstream.records import Task

COLUMNS = "columns"
"""Key of `task.info` for all columns of a row, for the rewards of TRL."""
UNCLOSED = Score(0.0, {"unclosed_thinking": 1.0})
"""The score for unclosed thinking."""


class Checked(NamedTuple):
    """A task to check before the run, and the row it came from."""

    where: str
    task: Task


class NotApplicable(RewardFailed):
    """A reward does not apply to a completion. In a rubric its part is left out; alone it is a failure."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of named rewards, besides their name."""

    reward_timeout_s: float = 10.0
    """`environment.reward_timeout_s`: rewards with deadlines of their own stay below it."""
    strip_thinking: bool = False
    """Whether verl's functions get the completion without its thinking."""
    sandbox: Literal["namespaces", "limits"] = "namespaces"
    code: Mapping[str, Any] = {}
    """Limits of the reward `code`."""
    judges: Mapping[str, Any] = {}
    """Judges by name, each with its settings."""
    score_groups: bool = False
    """Whether a Python caller's reward grades the completions of a task together."""
    tokenizer: str = ""
    """Folder of the tokenizer, for TRL's functions with `completion_ids`."""


class Reward:
    """Base class of named rewards."""

    name = ""
    """Name in messages and metrics."""
    answer_is_gold = True
    """Whether a perfect policy would write the right answer itself."""
    needs_columns = False
    """Whether `task.info` must hold the row's columns."""
    needs_answers = True
    """Whether a row must have a right answer."""

    grades_groups = False
    """Whether it was asked to grade the completions of a task together."""
    made_by: tuple[Any, ...] = ()
    """A function and its arguments to make this reward again, in another process; empty: it is sent as it is."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Sends `made_by`, if any: functions of a user's file, and keys, exist only where they are loaded."""
        return (self.made_by[0], self.made_by[1:]) if self.made_by else super().__reduce_ex__(protocol)

    def sources(self) -> list[Any]:
        """Functions and texts of this reward, to tell it from others."""
        return list(_leaves(self.made_by[1:])) or [self]

    def check(self, rows: Sequence[Checked]) -> None:
        """Raises `DataError` with the first row this reward cannot grade."""

    def setup_scoring(self) -> None:
        """See `Environment`."""

    def __call__(self, task: Task, completion: str) -> Score | Awaitable[Score]:
        """Grades one completion."""
        raise NotImplementedError

    async def score_group(self, task: Task, completions: Sequence[str]) -> list[Score]:
        """Grades the completions of one task. Raises `NotApplicable` if it does not apply to one."""
        scores = await self.score_applicable(task, completions)
        if None in scores:
            raise NotApplicable(f"{self.name} does not apply to completion {scores.index(None)} of task {task.id}")
        return [score for score in scores if score is not None]

    async def score_applicable(self, task: Task, completions: Sequence[str]) -> list[Score | None]:
        """Grades the completions of one task, None if it does not apply; by default by a call for each, at once."""

        async def one(completion: str) -> Score | None:
            try:
                return await settled(self(task, completion))
            except NotApplicable:
                return None

        return await asyncio.gather(*map(one, completions))


class Graded(Reward):
    """Base class of rewards of the answer: the text after the thinking."""

    def __call__(self, task: Task, completion: str) -> Score | Awaitable[Score]:
        """See `Reward`; unclosed thinking has no answer."""
        answer = final_answer(completion)
        return UNCLOSED if answer is None else self.grade(task, answer)

    def grade(self, task: Task, answer: str) -> Score | Awaitable[Score]:
        """Grades an answer."""
        raise NotImplementedError


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Reward):
        yield from value.sources()
    elif isinstance(value, msgspec.Struct):
        yield from _leaves(msgspec.structs.asdict(value))
    elif isinstance(value, Mapping):
        for key, part in cast("Mapping[Any, Any]", value).items():
            yield from (key, *_leaves(part))
    elif isinstance(value, list | tuple):
        for part in cast("Sequence[Any]", value):
            yield from _leaves(part)
    else:
        yield value


class Plain(Graded):
    """A function `reward(task, answer)` of a Python caller."""

    def __init__(self, function: Callable[[Task, str], Any]) -> None:
        self._function = function
        self.name = getattr(function, "__name__", type(function).__name__)

    needs_answers = False

    def sources(self) -> list[Any]:
        """See `Reward`."""
        return [self._function]

    def grade(self, task: Task, answer: str) -> Score | Awaitable[Score]:
        """The function's score."""
        return scored(self._function(task, answer))


async def settled(score: Score | Awaitable[Score]) -> Score:
    """The score, awaited if it is coming."""
    return score if isinstance(score, Score) else await score


def right_answer(task: Task) -> Any:
    """The task's right answer: text, or a row's value."""
    return task.info.get("ground_truth", task.answer)


def right_answers(task: Task) -> list[Any]:
    """The right answers, each right by itself."""
    answer = right_answer(task)
    return cast("list[Any]", answer) if isinstance(answer, list) else [answer]


def texts_of(rows: Sequence[Checked], reward: str) -> list[tuple[str, str]]:
    """The right answers of rows as text, each with its row. Raises `DataError` for one no text could equal."""
    found: list[tuple[str, str]] = []
    for where, task in rows:
        for answer in right_answers(task):
            if answer is None:
                raise DataError(f'{where} has no answer, which reward = "{reward}" needs: give it, or another reward')
            if not isinstance(answer, str | int | float) or isinstance(answer, bool):
                raise DataError(
                    f'{where}: the answer {answer!r:.60} is a {type(answer).__name__}, and reward = "{reward}" reads '
                    "texts: name another answer_column, or give a reward function"
                )
            found.append((where, str(answer)))
    return found
