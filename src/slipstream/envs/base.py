"""The environment contract: tasks, one conversation about each with a policy, and the judgement of what it said.

The same environment gives SFT its targets (`gold`), RL its rewards and evaluation its accuracy. Two kinds of code
meet here, and the contract keeps them apart: `run` talks to the policy and is async; `score` is plain code that may
hang, raise or exit, and is only ever called through a `Scorer`, which can kill it. The tokens of a conversation are
kept by the policy (`policy.py`), so an environment cannot change what is trained on.
"""

from __future__ import annotations

import inspect
import math
import numbers
import traceback
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Protocol

import msgspec

from slipstream.config.user_code import place_of
from slipstream.errors import EnvironmentFault
from slipstream.records import Message, Task

Split = Literal["train", "eval"]

MAX_METRICS = 64
"""Most metrics of one reward: each of them is a column of the whole run."""
_MAX_NAME, _MAX_SAID, _MAX_DETAILS = 100, 1000, 20_000
_PACKAGE = str(Path(__file__).resolve().parents[1])


class Score(msgspec.Struct, frozen=True):
    """The judgement of one completion. `metrics` are reported beside the reward and never trained on."""

    reward: float
    metrics: dict[str, float] = {}


class Reply(msgspec.Struct, frozen=True):
    """What the policy said in one turn; `length` means it was cut at the token limit."""

    text: str
    finish_reason: Literal["stop", "length"]


class Episode(msgspec.Struct, frozen=True):
    """One finished conversation; its tokens are in the policy that was talked to."""

    completion: str
    """The text to be graded."""
    outcome: Literal["done", "truncated"] = "done"
    num_turns: int = 1
    metrics: dict[str, float] = {}


class Policy(Protocol):
    """Whom an environment talks to."""

    async def chat(self, messages: Sequence[Message]) -> Reply:
        """The next assistant turn after `messages` (the whole conversation so far)."""
        ...


class RewardError(EnvironmentFault):
    """A completion could not be graded; `details` holds the traceback or whatever else is known."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


class RewardTimeout(RewardError):
    """The reward was killed at its deadline."""


class RewardFailed(RewardError):
    """The reward raised, ended its process, or returned something that is not a finite number."""


class Scorer(Protocol):
    """Where rewards are run; see `scoring/pool.py`."""

    async def score(self, task: Task, completion: str) -> Score:
        """The judgement of `completion`; raises `RewardTimeout` or `RewardFailed`."""
        ...


class Environment(ABC):
    """Base of all environments.

    It is made as `Class(seed=..., **settings)`, in the run's process and again in every scorer process, so
    whatever `score` needs of a task must be in the task or follow from the settings.
    """

    name: str = ""
    """Used in messages and reports; the class's name when empty."""
    max_turns: ClassVar[int]
    """Most turns of the policy in one episode. The engine gets room for them, so every class with a `run` of its own
    says it."""
    given_settings: Mapping[str, Any] = MappingProxyType({})
    """`environment.settings` of the run file, for messages; set by whoever makes the environment."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.name = self.name or type(self).__name__

    @property
    def num_train_tasks(self) -> int:
        """How many training tasks are asked for when the run file does not say: all there are, or enough."""
        return 10_000

    @property
    def eval_source(self) -> str:
        """Where the held-out tasks are from, for the plan to say; empty when nothing is to be said."""
        return ""

    @abstractmethod
    def tasks(self, split: Split, num_tasks: int) -> Sequence[Task]:
        """The first `num_tasks` tasks of a split: the same ones for the same seed, fewer if there are no more.

        The first n of a longer list are the list of length n, and no prompt occurs in both splits
        (`split.split_of` is an easy way to keep that).
        """

    def gold(self, task: Task) -> str | None:
        """The right answer as the policy should say it, if it is known."""
        return task.answer

    @abstractmethod
    async def run(self, task: Task, policy: Policy) -> Episode:
        """Talk to the policy about `task` until the episode ends.

        All episodes run in one event loop, and a synchronous call holds up all of them: `await` what waits, or use
        `asyncio.to_thread`. No episode is run twice: when the engine dies, the turn that it lost is asked for again.
        After the return the policy answers no more.
        """

    @abstractmethod
    def score(self, task: Task, completion: str) -> Score | Awaitable[Score]:
        """Judge an episode's text, or a coroutine that does; several of these run at once. Called in a process that
        may be killed: keep no state between calls."""


def as_score(value: object) -> Score:
    """The score meant by a reward function's result: a finite number, or a mapping of them with the key `reward`.

    Raises `RewardFailed` for anything else.
    """
    if isinstance(value, Score):
        value = {**value.metrics, "reward": value.reward}
    if isinstance(value, Mapping):
        named: dict[str, Any] = {str(key): part for key, part in value.items()}
        if "reward" not in named:
            keys = ", ".join(sorted(named)) or "nothing"
            raise RewardFailed(f"the reward returned a mapping of {keys} without the key 'reward': add it")
        _refuse_many(named)
        parts = {name: _finite(part, name) for name, part in named.items()}
        return Score(parts.pop("reward"), parts)
    return Score(_finite(value, "reward"))


def scored(value: Any, convert: Callable[[Any], Score] = as_score) -> Score | Awaitable[Score]:
    """The score meant by what a reward function returned, which may be a coroutine."""
    if not inspect.isawaitable(value):
        return convert(value)

    async def later() -> Score:
        return convert(await value)

    return later()


def judge(environment: Environment, task: Task, completion: str) -> Score | Awaitable[Score]:
    """Run the environment's `score` here and now, or when it is awaited where it is a coroutine. `RewardFailed` says
    what it raises, but for what is meant for the process."""
    try:
        found = environment.score(task, completion)
        if not inspect.isawaitable(found):
            return as_score(found)
    except RewardError:
        raise
    except (Exception, SystemExit) as error:  # a reward that raises is an outcome, and the caller counts it
        raise explained(environment, error) from error
    return _judge_later(environment, found)


async def _judge_later(environment: Environment, coming: Awaitable[Score]) -> Score:
    try:
        return as_score(await coming)
    except RewardError:
        raise
    except (Exception, SystemExit) as error:
        raise explained(environment, error) from error


def explained(environment: Environment, error: BaseException) -> RewardFailed:
    """What a reward raised, as the failure that it is."""
    lines = _their_traceback(error).splitlines()
    said = " ".join(f"{type(error).__name__}: {_text_of(error)}".split())
    return RewardFailed(
        f"the reward of {environment.name} raised {said[:_MAX_SAID]} ({place_of(error)})",
        "\n".join(lines[-12:])[-_MAX_DETAILS:],
    )


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 (the exception is the user's class)
        return "(it cannot be written as text)"


def _their_traceback(error: BaseException) -> str:
    """How the environment came to raise `error`, without the calls of this package before it."""
    found = traceback.TracebackException.from_exception(error)
    theirs = [frame for frame in found.stack if not Path(frame.filename).is_relative_to(_PACKAGE)]
    found.stack = traceback.StackSummary.from_list(theirs or found.stack)
    return "".join(found.format()).rstrip()


def _refuse_many(named: Collection[str]) -> None:
    if len(named) > MAX_METRICS + 1:
        raise RewardFailed(
            f"the reward returned {len(named)} numbers: return the reward and at most {MAX_METRICS} more"
        )
    if long := [name for name in named if len(name) > _MAX_NAME]:
        raise RewardFailed(
            f"the reward returned a number with a name of {len(long[0])} characters ({long[0]:.40}...): use at most "
            f"{_MAX_NAME}"
        )


def _finite(value: object, name: str) -> float:
    # Not every number type of other libraries is registered as Real, but those of Python and NumPy are.
    if not isinstance(value, numbers.Real):
        raise RewardFailed(f"the reward returned {name} = {value!r:.80}, a {type(value).__name__}: return a number")
    number = float(value)
    if not math.isfinite(number):
        raise RewardFailed(f"the reward returned {name} = {number}, which is not finite: return a finite number")
    return number
