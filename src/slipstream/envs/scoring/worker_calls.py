"""Calls of user code in a worker: grade an episode, grade a group, run a tool.

Each function calls the environment in this process and returns the result, or an awaitable if it is a coroutine.
"""

from __future__ import annotations

import contextlib
import inspect
import traceback
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from slipstream.config.user_code import place_of
from slipstream.envs.base import Environment, Episode, RewardError, RewardFailed, Score, ToolResult, as_score
from slipstream.envs.tools.tool_calls import CallRefused, as_content
from slipstream.records import Task, ToolCall

T = TypeVar("T")
_MAX_MESSAGE, _MAX_DETAILS = 1000, 20_000
_PACKAGE = str(Path(__file__).resolve().parents[2])


def judge(environment: Environment, task: Task, episode: Episode) -> Score | Awaitable[Score]:
    """Runs the environment's `score_episode`. Exceptions become `RewardFailed`, except for the process's own."""
    return _graded(environment, lambda: environment.score_episode(task, episode), as_score)


def judge_group(
    environment: Environment, task: Task, episodes: Sequence[Episode]
) -> list[Score] | Awaitable[list[Score]]:
    """Runs the environment's `score_group`; otherwise as `judge`."""
    return _graded(
        environment, lambda: environment.score_group(task, episodes), lambda found: as_scores(found, len(episodes))
    )


def _graded(environment: Environment, grade: Callable[[], Any], convert: Callable[[Any], T]) -> T | Awaitable[T]:
    with _explaining(environment):
        found = grade()
        if not inspect.isawaitable(found):
            return convert(found)

    async def later() -> T:
        with _explaining(environment):
            return convert(await found)

    return later()


@contextlib.contextmanager
def _explaining(environment: Environment) -> Generator[None]:
    """Context manager: exceptions of the reward become `RewardFailed`, an outcome for the caller to count."""
    try:
        yield
    except RewardError:
        raise
    except (Exception, SystemExit) as error:
        raise explained(environment, error) from error


def as_scores(value: object, num_episodes: int) -> list[Score]:
    """Converts a group's scores: a sequence with one for each episode. Raises `RewardFailed` for anything else."""
    remedy = f"return a list of {num_episodes}, one for each episode"
    named: Any = value
    try:
        number = None if isinstance(value, str | bytes | Mapping) else len(named)
    except TypeError:
        number = None
    if number is None:
        raise RewardFailed(f"score_group returned a {type(value).__name__}: {remedy}")
    if number != num_episodes:
        raise RewardFailed(f"score_group returned {number} scores for {num_episodes} episodes: {remedy}")
    return [as_score(named[place]) for place in range(number)]


def run_tool(environment: Environment, task: Task, call: ToolCall) -> ToolResult | Awaitable[ToolResult]:
    """Runs the environment's `call_tool`. All it does is a result, except for ending or stopping the process."""
    try:
        found = environment.call_tool(call.name, call.arguments, task)
        if not inspect.isawaitable(found):
            return _result(found)
    except (Exception, SystemExit) as error:  # noqa: BLE001 (any error of a tool is its result)
        return failed_tool(call, error)

    async def later() -> ToolResult:
        try:
            return _result(await found)
        except (Exception, SystemExit) as error:  # noqa: BLE001 (as above)
            return failed_tool(call, error)

    return later()


def failed_tool(call: ToolCall, error: BaseException) -> ToolResult:
    """The result of a tool after it raised `error`."""
    if isinstance(error, CallRefused):
        return ToolResult(as_content(str(error)), error.failure)
    text = f"{call.name:.80} raised {_said(error)}"
    return ToolResult(as_content(text), "error", _details(error))


def explained(environment: Environment, error: BaseException) -> RewardFailed:
    """Wraps an exception of a reward in `RewardFailed`."""
    return RewardFailed(f"the reward of {environment.name} raised {_said(error)} ({place_of(error)})", _details(error))


def _result(found: object) -> ToolResult:
    if isinstance(found, ToolResult):
        found = msgspec.convert(msgspec.to_builtins(found), ToolResult)  # its fields may hold anything
        return ToolResult(as_content(found.content), found.failure, found.details[-_MAX_DETAILS:])
    return ToolResult(as_content(found))


def _said(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {_text_of(error)}".split())[:_MAX_MESSAGE]


def _details(error: BaseException) -> str:
    return "\n".join(_their_traceback(error).splitlines()[-12:])[-_MAX_DETAILS:]


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 (the exception is the user's class)
        return "(it cannot be written as text)"


def _their_traceback(error: BaseException) -> str:
    """Traceback of `error` without this package's own frames before the environment's."""
    found = traceback.TracebackException.from_exception(error)
    theirs = [frame for frame in found.stack if not Path(frame.filename).is_relative_to(_PACKAGE)]
    found.stack = traceback.StackSummary.from_list(theirs or found.stack)
    return "".join(found.format()).rstrip()
