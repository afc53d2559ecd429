"""Interface of environments: tasks, a conversation with the policy about each, and a reward for it.

An environment gives SFT its targets (`gold`), RL its rewards and evaluation its accuracy. `run` talks to the policy and
is async. `score` is plain code: it may hang, raise or exit, so only a `Scorer` calls it and can kill it. The policy
records the tokens of a conversation (`policy.py`), so an environment cannot change the trained tokens.
"""

from __future__ import annotations

import inspect
import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, cast

import msgspec

from slipstream.config.environment import GradedText
from slipstream.envs.answers import graded_part
from slipstream.envs.tools.tool_calls import call_function
from slipstream.errors import EnvironmentFault
from slipstream.records import Message, Rollout, Stop, Task, ToolCall

if TYPE_CHECKING:
    from slipstream.data.chat_template import ChatTokenizer

Split = Literal["train", "eval"]

MAX_METRICS = 64
"""Most metrics of one reward: each becomes a metric of the run."""
_MAX_NAME = 100
_LARGEST = 3.4e38
"""A number's largest size: training uses float32."""


class Score(msgspec.Struct, frozen=True):
    """Reward of one episode. `metrics` are reported with the reward and not trained on. `turn_rewards`: one for each
    turn of the policy, or none; they are added to `reward`, the reward of the whole episode."""

    reward: float
    metrics: dict[str, float] = {}
    turn_rewards: tuple[float, ...] = ()


class Reply(msgspec.Struct, frozen=True):
    """The policy's message in one turn; `length` means it was cut at the token limit."""

    text: str
    """The whole sampled text, with thinking and calls, without special tokens."""
    finish_reason: Literal["stop", "length"]
    tool_calls: tuple[ToolCall, ...] = ()
    """The calls in it, if the conversation has tools."""
    content: str = ""
    """The text without the calls; without tools, as `text`."""
    num_prompt_tokens: int = 0
    """Tokens of the conversation before it."""
    num_tokens: int = 0
    """Sampled tokens."""
    whole: str = ""
    """`text` with its special tokens, if it has any."""

    @property
    def message(self) -> Message:
        """The turn for the next conversation. It keeps its special tokens: some models call tools by them."""
        return Message("assistant", self.whole or self.text)


class Episode(msgspec.Struct, frozen=True):
    """One finished conversation; the policy holds its tokens."""

    completion: str
    """The text to grade."""
    outcome: Literal["done", "truncated"] = "done"
    num_turns: int = 1
    metrics: dict[str, float] = {}
    stop: Stop = "answer"
    """Why it ended."""
    messages: tuple[Message, ...] = ()
    """The messages after the task's prompt, with the last turn. Filled in if the environment leaves them out."""
    turn_rewards: tuple[float, ...] = ()
    """The environment's own reward for each turn; see `Score`."""
    reward: float | None = None
    """The environment's own grade of the episode; nothing else grades it then."""
    conversations: tuple[tuple[Message, ...], ...] = ()
    """All conversations of an agent, each with its last answer; also of its sub-agents, and before a compaction. Filled
    in."""


class ToolResult(msgspec.Struct, frozen=True):
    """The result of a tool call."""

    content: str
    """Text for the policy: the tool's answer, or a sentence about its failure."""
    failure: Literal["", "unknown", "arguments", "error", "timeout", "died"] = ""
    """Empty if the tool answered. Otherwise: no such tool, wrong arguments, the tool raised, it was killed at its
    deadline, or its process ended."""
    details: str = ""
    """For people: the traceback, or the last output of the process."""


class Address(msgspec.Struct, frozen=True):
    """The policy as a server of OpenAI's or Anthropic's form, for one episode."""

    base_url: str
    """With `/v1`, as `openai` wants it; `anthropic` wants it without."""
    api_key: str
    """The episode's own: by it requests are known."""
    model: str
    """Its name in requests."""


class Policy(Protocol):
    """The policy, as an environment talks to it."""

    state: Any
    """What the environment's `setup_episode` returned."""
    address: Address | None
    """Address of the server, for an environment with `needs_address`."""

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> Reply:
        """Generates the next assistant turn after `messages`, the whole conversation so far. It is offered the
        environment's tools with any messages; `tools`: schemas to offer instead, or `()` for none. `max_tokens`: less
        than `sampling.max_tokens`, for this turn. Raises `ContextFull` if the conversation leaves no room for a turn.
        """
        ...

    async def call_tool(self, call: ToolCall) -> ToolResult:
        """Runs one of the environment's tools in a killable process; a failure is a result too."""
        ...


class ContextFull(Exception):
    """A conversation leaves no room for another turn. If it ends an episode, the episode is graded as it stands and
    counts as truncated."""


class RewardError(EnvironmentFault):
    """A completion could not be graded; `details` holds the traceback or other facts."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


class RewardTimeout(RewardError):
    """The reward was killed at its deadline."""


class RewardFailed(RewardError):
    """The reward raised, ended its process, or returned something other than a finite number."""


class Scorer(Protocol):
    """Runs rewards; see `scoring/pool.py`."""

    async def score(self, task: Task, episode: Episode | str) -> Score:
        """Grades an episode, or only its text; raises `RewardTimeout` or `RewardFailed`."""
        ...

    async def score_group(self, task: Task, episodes: Sequence[Episode]) -> list[Score]:
        """Grades the episodes of a group in one call of the environment's `score_group`; raises as `score`."""
        ...

    async def call_tool(self, task: Task, call: ToolCall) -> ToolResult:
        """Runs the environment's `call_tool`; its failures are results."""
        ...


class Limits(msgspec.Struct, frozen=True):
    """Limits of a task's completions, beside the run's own; None: no further limit."""

    group_size: int | None = None
    max_tokens: int | None = None
    """Of one turn."""


class Environment(ABC):
    """Base class of environments. Constructed as `Class(seed=..., **settings)` in the run's process and again in every
    reward worker, so `score` may use the task and the settings only."""

    name: str = ""
    """Name in messages and reports; the class's name if empty."""
    max_turns: int
    """Most turns of the policy in one episode. The context length is planned for it, so every class with its own `run`
    must set it."""
    tools: Sequence[Callable[..., Any]] = ()
    """Functions for the policy to call, plain or coroutines; their schemas follow from type hints and docstrings
    (`tools/schemas.py`). They run in worker processes, like `score`."""
    max_tool_calls: int = 16
    """Most calls in one episode."""
    scores_groups: bool = False
    """Whether `score_group` grades, once for all episodes of a task, instead of `score_episode`."""
    graded_text: GradedText = "all"
    """`environment.graded_text` of the run file: the part of a completion for `score`."""
    num_solved_examples: int = 0
    """`environment.num_examples` of the run file."""
    hung: str = ""
    """Last output of its own process, if this hung and was killed: for the errors of its episodes."""
    is_held_up: bool = False
    """Whether a call blocks all episodes of its own process now, if it has one: this time makes no episode late."""
    bounds_itself: ClassVar[bool] = False
    """Whether it bounds the time of `setup` and `close` itself, because they run in its own process. `setup` is then
    called before each episode, too, and does nothing while the process lives."""
    on_warning: Callable[[str], None] = staticmethod(lambda text: None)
    """Tells the run's user something; set in a run."""
    log_folder: Path | None = None
    """Folder for the output of an environment's own processes; set in a run."""
    needs_address: bool = False
    """Whether episodes are played by a program with requests to `Policy.address`."""
    grades_special_tokens: bool = False
    """Whether the graded text of one turn holds its special tokens."""
    runs_user_code: bool = False
    """Whether `run` calls the user's code."""
    tools_in_prompts: ClassVar[bool] = False
    """Whether its tasks bring the schemas of their tools in their prompts; otherwise all get the schemas of `tools`."""
    takes_section: ClassVar[bool] = False
    """Whether it is constructed as `Class(section)`, with the section [environment] of the run file."""
    plays_itself: ClassVar[bool] = False
    """Whether it plays and grades its episodes in a process of its own, with `environment.python`."""
    package: ClassVar[str] = ""
    """The package of its tasks, if not its class's own."""
    given_settings: Mapping[str, Any] = MappingProxyType({})
    """`environment.settings` of the run file, for messages; set by the constructing code."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.name = self.name or type(self).__name__

    def attach(self, warn: Callable[[str], None] | None = None, log_folder: Path | None = None) -> None:
        """Sets `on_warning` and `log_folder`, if given."""
        if warn is not None:
            self.on_warning = warn
        if log_folder is not None:
            self.log_folder = log_folder

    def limits(self, task: Task) -> Limits:
        """Limits of the completions for this task; they can only lower the run's settings."""
        return Limits()

    def has_tools(self, task: Task) -> bool:
        """Whether the policy may call tools in this task's episodes."""
        return bool(self.tools)

    def grades_groups(self, task: Task) -> bool:
        """Whether the episodes of this task are graded by `score_group`."""
        return self.scores_groups

    @property
    def grades_texts(self) -> bool:
        """Whether the class says how a text alone is graded."""
        return type(self).score is not Environment.score

    @property
    def num_train_tasks(self) -> int:
        """Number of training tasks if the run file does not set it: all there are, or enough."""
        return 10_000

    @property
    def eval_source(self) -> str:
        """Source of the held-out tasks, shown in the plan; empty: nothing is shown."""
        return ""

    def held_out(self) -> Sequence[Task]:
        """All held-out tasks, if the environment can list them: a run trains on none of them."""
        return ()

    @abstractmethod
    def tasks(self, split: Split, num_tasks: int) -> Sequence[Task]:
        """The first `num_tasks` tasks of a split: the same for the same seed, fewer if there are no more. The first n
        tasks of a longer list are the list of length n, and no prompt occurs in both splits (by `split.split_of`)."""

    def gold(self, task: Task) -> str | Sequence[Message] | None:
        """The correct answer as the policy should write it, if known; or all correct messages after the prompt, with
        tool calls and the tools' answers, the policy's answer last."""
        return task.answer

    @abstractmethod
    async def run(self, task: Task, policy: Policy) -> Episode:
        """Talks to the policy about `task` until the episode ends. All episodes share one event loop, so a synchronous
        call blocks all of them: `await`, or use `asyncio.to_thread`. By default the loop runs in a process of its own
        (`environment.processes`), with the environment constructed again. No episode is run twice: if the engine dies,
        only the lost turn is requested again. The policy cannot be called after the return."""

    def score(self, task: Task, completion: str) -> Score | Awaitable[Score]:
        """Grades an episode's text; may be a coroutine, and several run concurrently. Its process may be killed: keep
        no state between calls. A class has this method, `score_episode`, or `score_group`."""
        raise NotImplementedError

    def score_episode(self, task: Task, episode: Episode) -> Score | Awaitable[Score]:
        """Grades an episode with all its messages. By default `score` grades its text; without `score`, `score_group`
        grades it as a group of one. Called in the same processes as `score`."""
        if self.grades_texts or not self.grades_groups(task):
            text = graded_part(episode.completion, self.graded_text)
            return Score(0.0, {"no_answer": 1.0}) if text is None else self.score(task, text)
        return scored(self.score_group(task, (episode,)), lambda scores: scores[0])

    def score_group(self, task: Task, episodes: Sequence[Episode]) -> Sequence[Score] | Awaitable[Sequence[Score]]:
        """Grades the episodes of one task together, a score for each in order: a ranking, say. Called under
        `scores_groups`, in the same processes as `score`."""
        raise NotImplementedError

    def call_tool(self, name: str, arguments: dict[str, Any], task: Task) -> Any:
        """Runs a tool for the policy, by default the one of `tools` with this name; may be a coroutine. Returns text, a
        value to write as JSON, or a `ToolResult`; `tools.calls.CallRefused` refuses the call. Its process may be
        killed, and has nothing of the episode but its task."""
        return call_function(self.tools, name, arguments, task)

    def check_tokenizer(self, tokenizer: ChatTokenizer) -> None:  # noqa: B027 (a hook)
        """Raises `ConfigError` if the tokenizer lacks something that answers need, before anything starts."""

    def figures(
        self, tasks: Sequence[Task], rollouts: Sequence[Rollout], tokenizer: ChatTokenizer | None
    ) -> dict[str, float]:
        """Further metrics of an evaluation, from all its rollouts, those of a task together. `tokenizer`: None if
        texts were received."""
        return {}

    def setup_scoring(self) -> None:  # noqa: B027 (a hook)
        """Called once in each grading process, before the deadlines of its calls: for a reward model, say."""

    async def setup(self) -> None:  # noqa: B027 (a hook)
        """Called once before the first episode, in the process of the episodes."""

    async def close(self) -> None:  # noqa: B027 (a hook)
        """Called once after the last episode, also if the run fails or is interrupted; bounded in time."""

    async def setup_episode(self, task: Task) -> Any:
        """Called before `run`; its result is `policy.state`."""
        return None

    @property
    def begins_with_turn(self) -> bool:
        """Whether an episode holds nothing and has no clock until the policy's first turn. This may take long then."""
        return False

    async def close_episode(self, task: Task, state: Any) -> None:  # noqa: B027 (a hook)
        """Called after `run`, also if `run` was cancelled, took too long or raised; bounded in time. `state` is None if
        `setup_episode` did not return."""


def as_score(value: object) -> Score:
    """Converts a reward function's result: a finite number, or a mapping of finite numbers with the key `reward`.
    Raises `RewardFailed` for anything else."""
    if isinstance(value, Score):
        whole = as_score({**value.metrics, "reward": value.reward})
        turns = [_finite(reward, f"turn_rewards[{number}]") for number, reward in enumerate(value.turn_rewards)]
        return Score(whole.reward, whole.metrics, tuple(turns))
    if isinstance(value, Mapping):
        named: dict[str, Any] = {str(key): part for key, part in value.items()}
        if "reward" not in named:
            keys = ", ".join(sorted(named)) or "nothing"
            raise RewardFailed(f"the reward returned a mapping of {keys} without the key 'reward': add it")
        _refuse_many(named)
        parts = {name: _finite(part, name) for name, part in named.items()}
        return Score(parts.pop("reward"), parts)
    return Score(_finite(value, "reward"))


def plain_numbers(episode: Episode) -> Episode:
    """`episode` with its metrics and rewards as floats: NumPy's numbers and truth values are numbers too. Raises
    ValueError for a metric other than a finite number, and TypeError for a value other than an episode."""
    if not isinstance(episode, Episode):  # pyright: ignore[reportUnnecessaryIsInstance]  (the user's code)
        raise TypeError(f"run() returned a {type(episode).__name__}: return an Episode")
    if episode.metrics == {} and episode.turn_rewards == () and episode.reward is None:
        return episode
    try:
        metrics = as_score(Score(0.0, dict(episode.metrics))).metrics
    except RewardFailed as error:
        raise ValueError(str(error).replace("the reward", "run()")) from None
    turns = tuple(float(value) if isinstance(value, numbers.Real) else value for value in episode.turn_rewards)
    reward = float(episode.reward) if isinstance(episode.reward, numbers.Real) else episode.reward
    return msgspec.structs.replace(episode, metrics=metrics, turn_rewards=turns, reward=reward)


def with_turn_rewards(score: Score | None, episode: Episode, num_turns: int, name: str) -> Score:
    """The score of an episode of environment `name`, with its turn rewards and their sum in the reward; `score` is None
    if the episode has its reward. Raises RewardFailed for any number of turn rewards but 0 and `num_turns`."""
    if score is None:
        score = as_score({**episode.metrics, "reward": episode.reward})
    turns = score.turn_rewards
    if not turns and episode.turn_rewards:
        turns = as_score(Score(0.0, turn_rewards=tuple(episode.turn_rewards))).turn_rewards
    if turns and len(turns) != num_turns:
        raise RewardFailed(
            f"environment {name} gave {len(turns)} turn rewards for an episode of {num_turns} turns: give one for each "
            "turn of the policy"
        )
    return Score(score.reward + sum(turns), score.metrics, turns)


def scored(value: Any, convert: Callable[[Any], Score] = as_score) -> Score | Awaitable[Score]:
    """Converts a reward function's result, or a coroutine of it."""
    if not inspect.isawaitable(value):
        return convert(value)

    async def later() -> Score:
        return convert(await value)

    return later()


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
    # Number types of Python and NumPy are registered as Real; not all of other libraries are, nor NumPy's truth values.
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        value = cast("Any", value).item()
    if not isinstance(value, numbers.Real):
        raise RewardFailed(f"the reward returned {name} = {value!r:.80}, a {type(value).__name__}: return a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RewardFailed(f"the reward returned {name} = {number}, which is not finite: return a finite number")
    if abs(number) > _LARGEST:
        raise RewardFailed(f"the reward returned {name} = {number:g}, and float32 ends at {_LARGEST:g}: scale it down")
    return number
