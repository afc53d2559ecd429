"""Makes one rollout: runs an environment against the engine and grades the episode.

A rollout ends with an outcome, not with an exception, unless the engine cannot come back. A turn is requested again if
its engine died or gave it up (`retries.py`); the environment does not notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import hashlib
import itertools
import math
import time
import traceback
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import msgspec

from slipstream.data.images.parts import joined
from slipstream.engine_protocols import Generates, RecordsAgents
from slipstream.envs.base import (
    ContextFull,
    Environment,
    Episode,
    RewardError,
    RewardFailed,
    RewardTimeout,
    Scorer,
    ToolResult,
    plain_numbers,
    with_turn_rewards,
)
from slipstream.envs.hosted.apart import placement
from slipstream.envs.hosted.keeper import EnvironmentBlocked, EnvironmentRaised
from slipstream.envs.openai_messages import as_message
from slipstream.envs.policy import Prompts, RecordingPolicy, Tokenizer, following
from slipstream.errors import EngineError, EnvironmentFault, IntegrityError, one_line
from slipstream.orchestrator.batches.idle_time import IdleTime
from slipstream.orchestrator.concurrency import retry_on_restart
from slipstream.orchestrator.gateway import AgentSession, Gateway, SessionLost
from slipstream.orchestrator.grading import GroupGrades, Place
from slipstream.orchestrator.retries import Retries
from slipstream.patience import Patience, is_cancelled
from slipstream.records import (
    Completion,
    GenerateRequest,
    Media,
    Message,
    Outcome,
    Rollout,
    SamplingParams,
    Stop,
    Task,
    ToolCall,
)


class RequestAborted(Exception):
    """The engine aborted a request; the text says why."""


class PromptMismatch(Exception):
    """For a prompt with images, the engine used other tokens than requested; the text names the first difference."""


class EnvironmentTimeout(Exception):
    """An environment took longer than `environment.run_timeout_s` between two turns."""


class EnvironmentDeadline(Patience):
    """The deadline of an environment between two turns: `async with` it, and `paused` around each request to the
    engine. Raises `EnvironmentTimeout`."""

    async def __aexit__(self, *raised: Any) -> None:
        try:
            await super().__aexit__(*raised)
        except TimeoutError as error:
            raise EnvironmentTimeout from error


_CLOSE_S = 10.0
"""How long `Environment.close_episode` may take."""


_OUTCOMES: tuple[tuple[type[BaseException], Outcome | None], ...] = (
    (RewardTimeout, "reward_timeout"),
    (RewardFailed, "reward_error"),
    (RequestAborted, "engine_error"),
    (SessionLost, "engine_error"),
    (PromptMismatch, "prompt_mismatch"),
    (EnvironmentTimeout, "environment_error"),
    (EngineError, None),  # the engine cannot come back
    (IntegrityError, None),
    (EnvironmentFault, None),  # no reward worker can be started
    (KeyboardInterrupt, None),
    (GeneratorExit, None),
    (asyncio.CancelledError, "environment_error"),  # unless the rollout's own task is cancelled: then it is raised
    (BaseException, "environment_error"),  # the environment is the user's code and may raise anything
)
"""Outcome of a rollout by its exception: the first matching class decides; None raises the exception."""


class PromptTokenizer(Tokenizer, Protocol):
    """A tokenizer with the engine's form of a prompt with images."""

    def request(self, token_ids: Sequence[int], media: Sequence[Media]) -> tuple[list[int], tuple[bytes, ...]]:
        """The prompt's tokens with one placeholder for each image, and the images."""
        ...


class RolloutRunner:
    """Makes rollouts of one environment with one engine."""

    def __init__(
        self,
        environment: Environment,
        scorer: Scorer,
        tokenizer: PromptTokenizer,
        engine: Generates,
        *,
        request_timeout_s: float,
        run_timeout_s: float = 300.0,
        context_length: int | None = None,
        retries: Retries | None = None,
        warn: Callable[[str], None] = lambda text: None,
        on_ended: Callable[[Rollout], None] = lambda rollout: None,
        idle: IdleTime | None = None,
        control_texts: frozenset[str] = frozenset(),
        gateway: Gateway | None = None,
    ) -> None:
        """`run_timeout_s`: how long the environment may take between two turns. `context_length`, in tokens: of the
        engine. `retries`: none by default. `warn` is told once when an episode cannot be closed, and once when a
        message of the environment holds one of `control_texts`. `on_ended` is told of each rollout. `idle` counts the
        engine's requests. `gateway`: if the environment needs an address."""
        self._environment = environment
        self._shares_tasks = placement(environment)[0] > 0
        self._scorer = scorer
        self.tokenizer = tokenizer
        self.engine = engine
        self.request_timeout_s = request_timeout_s
        self._run_timeout_s = run_timeout_s
        self.context_length = context_length
        self._warn = warn
        self._on_ended = on_ended
        self._control_texts = control_texts
        self._gateway = gateway
        self._told_overridden = False
        self._num_not_closed = 0
        self.retries = retries or Retries()
        self.idle = idle or IdleTime()
        self.serial = itertools.count()
        self.num_ended = 0
        """Ended rollouts and tries of turns; any thread may read it as a sign of progress."""

    def group_size(self, task: Task, size: int) -> int:
        """Completions of a task, in a run with groups of `size`."""
        return min(size, self._environment.limits(task).group_size or size)

    def group(self, task: Task, size: int) -> GroupGrades | None:
        """Grades a group of rollouts together; None if each is graded by itself."""
        return GroupGrades(self._scorer, size) if self._environment.grades_groups(task) else None

    def prompts(self) -> Prompts:
        """Renders the prompts of a group's rollouts; all begin with the same prompt."""
        return Prompts(self.tokenizer)

    async def run(
        self,
        task: Task,
        *,
        rollout_id: str,
        group_id: str,
        sampling: SamplingParams,
        seed: int,
        is_urgent: bool = False,
        place: Place | None = None,
        prompts: Prompts | None = None,
        engine: Generates | None = None,
    ) -> Rollout:
        """Make one rollout. `place`: the rollout's, in a group graded together; None grades it alone. `prompts`: its
        group's, if it has one. `engine`: if not the runner's. Raises `EngineError` or `IntegrityError` only when the
        engine cannot come back."""
        started, deadline = time.monotonic(), EnvironmentDeadline(self._run_timeout_s, self._may_go_on)
        if (most := self._environment.limits(task).max_tokens) is not None:
            sampling = msgspec.structs.replace(sampling, max_tokens=min(most, sampling.max_tokens))
        turns = _Turns(
            self, task, self._scorer, engine or self.engine, rollout_id, group_id, sampling, seed, is_urgent, deadline
        )
        policy = RecordingPolicy(
            turns.generate,
            self.tokenizer,
            context_length=self.context_length,
            task_prompt=task.prompt,
            call_tool=turns.call_tool,
            prompts=prompts,
        )
        rollout = Rollout(rollout_id, task.id, group_id, policy.sequences, reward=0.0, outcome="done")
        rollout.prompt = task.prompt[-1].content if task.prompt else ""
        rollout.answer = task.answer or ""
        rollout.source = task.source
        if place is None and self._environment.grades_groups(task):
            place = GroupGrades(self._scorer, 1).places[0]
        episode: Episode | None = None
        try:
            episode = await self._play(task, policy, turns, rollout)
            if policy.num_turns:
                await self._grade(task, episode, place or self._scorer, rollout)
            else:  # no token earned its reward
                rollout.outcome, episode = "no_tokens", None
                rollout.error = f"the episode ended ({rollout.stop}) before the policy's first turn"
        except BaseException as error:  # noqa: BLE001 (see `_OUTCOMES`)
            if turns.engine_error is not None:
                raise turns.engine_error from None  # the environment may have replaced it
            rollout.outcome, rollout.error = self._outcome_of(error)
            is_late = isinstance(error, EnvironmentTimeout | EnvironmentBlocked)
            rollout.stop = "timeout" if is_late else rollout.stop or "error"
            self._keep_unfinished(task, policy, rollout)
        finally:
            if place is not None and (episode is None or episode.reward is not None):
                place.leave(task)
        if turns.engine_error is not None:  # the environment suppressed it
            raise turns.engine_error
        rollout.error = rollout.error or policy.tool_error
        rollout.seconds = time.monotonic() - started
        self.num_ended += 1
        self._on_ended(rollout)
        return rollout

    def _may_go_on(self) -> bool:
        """False while another episode holds up the environment: this time makes no episode late."""
        return not self._environment.is_held_up

    async def _play(self, task: Task, policy: RecordingPolicy, turns: _Turns, rollout: Rollout) -> Episode:
        """Run the episode, and write its results into `rollout`."""
        of_run = task
        try:
            if self._shares_tasks:
                of_run = copy.deepcopy(task)  # `run` keeps state in it for this episode only, as in another process
            if self._environment.bounds_itself:
                await self._environment.setup()  # a new process, if the last one ended
            async with turns.deadline:
                policy.state = await self._environment.setup_episode(of_run)
                episode = plain_numbers(await self._run(of_run, policy, turns, rollout))
        except ContextFull:
            episode = Episode(policy.last_text, "truncated", policy.num_turns, stop="context_full")
        finally:
            await self._close_episode(of_run, policy.state)
            policy.close()
            messages = following(task.prompt, policy.conversation)
            self._warn_of_control_tokens(messages)
            if policy.num_turns > 1:
                rollout.turns = messages
        stop: Stop = episode.stop
        if stop == "answer" and policy.truncated:
            stop = "length"
        if stop == "length" and turns.filled_context:
            stop = "context_full"
        rollout.outcome = "truncated" if policy.truncated else episode.outcome
        rollout.completion, rollout.stop = episode.completion, stop
        rollout.num_turns, rollout.turn_spans = episode.num_turns, policy.spans
        rollout.num_thinking = policy.num_thinking
        rollout.metrics |= episode.metrics
        rollout.metrics |= self._tool_metrics(task, policy)
        return msgspec.structs.replace(episode, stop=stop, messages=episode.messages or tuple(messages))

    async def _run(self, task: Task, policy: RecordingPolicy, turns: _Turns, rollout: Rollout) -> Episode:
        """The environment's `run`; for a program with an address of its own, with its turns recorded afterwards."""
        if self._gateway is None:
            return await self._environment.run(task, policy)
        engine = cast("RecordsAgents", turns.engine)
        failure: Exception | None = None
        episode: Episode | None = None
        try:
            opening = self._gateway.session(
                engine, turns.sampling, turns.seed, turns.group_id, turns.busy, is_urgent=turns.is_urgent
            )
            async with opening as session:
                policy.address = session.address
                try:
                    episode = await self._environment.run(task, policy)
                except Exception as error:  # noqa: BLE001 (raised below, after its turns are recorded)
                    failure = error
        except EngineError as error:
            turns.engine_error = turns.engine_error or error
            raise
        conversations = _record(session, policy, turns.sampling)
        rollout.metrics |= _agent_metrics(session, policy)
        self._warn_of_overridden(session)
        if failure is not None or episode is None:
            if session.filled_context:
                raise ContextFull from failure
            raise failure or RuntimeError("the agent was stopped")
        stop: Stop = "turn_limit" if session.met_limit else episode.stop
        return msgspec.structs.replace(
            episode,
            completion=episode.completion or policy.last_text,
            num_turns=policy.num_turns,
            stop=stop,
            conversations=conversations,
        )

    def _warn_of_overridden(self, session: AgentSession) -> None:
        found = session.overridden
        if found and not self._told_overridden:
            self._told_overridden = True
            asked = ", ".join(_asked(name, value) for name, value in found.items())
            self._warn(
                f"the agent asks for {asked}, and the run's [sampling] holds instead, as ratios need it (later "
                "requests are not reported)"
            )

    def _warn_of_control_tokens(self, messages: Sequence[Message]) -> None:
        """A template renders a special token's text as the token itself, even in a tool's copy of a web page. The image
        marks of a message with images are its own."""
        given = [each for each in messages if each.role != "assistant" and not each.media]
        found = ((each.role, text) for each in given for text in self._control_texts if text in each.content)
        if (first := next(found, None)) is not None:
            self._control_texts = frozenset()
            role, text = first
            self._warn(
                f"a {role} message of environment {self._environment.name} holds {text} as text, which the model reads "
                "as a control token, so that a text can forge a turn: write it differently there (later ones are not "
                "counted)"
            )

    def _tool_metrics(self, task: Task, policy: RecordingPolicy) -> dict[str, float]:
        if not self._environment.has_tools(task):
            return {}
        return {"tool_calls": float(policy.num_tool_calls), "tool_failures": float(policy.num_tool_failures)}

    def _keep_unfinished(self, task: Task, policy: RecordingPolicy, rollout: Rollout) -> None:
        """Write the beginning of a failed episode into `rollout`, for people to read."""
        rollout.turns = following(task.prompt, policy.conversation)
        rollout.completion = rollout.completion or policy.last_text
        rollout.num_turns, rollout.turn_spans = max(1, policy.num_turns), policy.spans
        rollout.metrics |= self._tool_metrics(task, policy)

    async def _close_episode(self, task: Task, state: Any) -> None:
        if getattr(self._environment.close_episode, "__func__", None) is Environment.close_episode:
            return  # it has nothing to close, and needs no deadline
        limit = Patience(_CLOSE_S, self._may_go_on)
        try:
            async with limit:
                await self._environment.close_episode(task, state)
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # the user's code
            if isinstance(error, asyncio.CancelledError) and is_cancelled():
                raise
            self._num_not_closed += 1  # the rollout's own end is worth more
            if self._num_not_closed == 1:
                text = str(error) if isinstance(error, EnvironmentRaised) else one_line(error)
                why = f"did not return within {_CLOSE_S:g} s" if limit.expired else text
                self._warn(f"close_episode() of environment {self._environment.name} failed: {why}")

    async def _grade(self, task: Task, episode: Episode, grades: Scorer | Place, rollout: Rollout) -> None:
        score = await grades.score(task, episode) if episode.reward is None else None
        score = with_turn_rewards(score, episode, len(rollout.turn_spans), self._environment.name)
        rollout.reward = score.reward
        rollout.metrics |= score.metrics
        rollout.turn_rewards = list(score.turn_rewards)

    def _outcome_of(self, error: BaseException) -> tuple[Outcome, str]:
        """Outcome and error text of a rollout ended by `error`, see `_OUTCOMES`; raises an error without an outcome."""
        outcome: Outcome | None = next(outcome for kind, outcome in _OUTCOMES if isinstance(error, kind))
        if outcome is None or (isinstance(error, asyncio.CancelledError) and is_cancelled()):
            raise error
        return outcome, self._text_of(error)

    def _text_of(self, error: BaseException) -> str:
        name = self._environment.name
        match error:
            case RewardError():
                return f"{error}\n{error.details}".rstrip()
            case RequestAborted() | PromptMismatch():
                return str(error)
            case EnvironmentTimeout():
                hung = self._environment.hung
                return (
                    f"environment {name} did nothing for {self._run_timeout_s:g} s (environment.run_timeout_s), the "
                    f"engine's time not counted{f'; its process hung:{hung}' if hung else ''}"
                )
            case asyncio.CancelledError():
                why = "awaits a task that it has cancelled: suppress asyncio.CancelledError there"
                return f"environment {name} {why}\n{_traceback_of(error)}"
            case _:
                return _traceback_of(error)


@dataclass(slots=True)
class _Turns:
    """Asks the engine for the turns of one rollout, and runs its tools."""

    runner: RolloutRunner
    task: Task
    scorer: Scorer
    engine: Generates
    rollout_id: str
    group_id: str
    sampling: SamplingParams
    seed: int
    is_urgent: bool
    deadline: EnvironmentDeadline
    engine_error: Exception | None = None
    """The first fatal one: no rollout can be made after it."""
    num_asked: int = 0
    filled_context: bool = False
    """Whether a turn was cut before its token limit, as the context was full."""

    async def generate(
        self,
        prompt_ids: list[int],
        max_tokens: int | None,
        tools: tuple[dict[str, Any], ...],
        media: tuple[Media, ...],
    ) -> Completion:
        """A turn, for `RecordingPolicy`; raises `RequestAborted` if the engine gave it up, and `PromptMismatch`."""
        turn = self.num_asked
        self.num_asked += 1
        attempt = partial(self._attempt, partial(self._ask, turn, prompt_ids, max_tokens, tools, media))
        try:
            with self.deadline.paused():
                name, idle = f"{self.rollout_id}.{turn}", self.runner.idle
                completion, tries = await self.runner.retries.until_answered(name, attempt, lambda: idle.went_on)
        except (EngineError, IntegrityError) as error:
            self.engine_error = self.engine_error or error
            raise
        if completion.finish_reason == "abort":
            last = f", in the last of {tries} tries" if tries > 1 else ""
            raise RequestAborted(f"request {completion.id} {completion.error or 'was aborted'}{last}")
        if media and completion.prompt_ids != prompt_ids:
            raise PromptMismatch(mismatch_of(completion, prompt_ids))
        most, size = self._most(max_tokens), len(completion.token_ids)
        if completion.finish_reason == "length" and size < most:
            self.filled_context |= len(prompt_ids) + size >= (self.runner.context_length or math.inf)
        return completion

    def _most(self, max_tokens: int | None) -> int:
        """Token limit of a turn, given its requested `max_tokens`."""
        most = self.sampling.max_tokens
        return most if max_tokens is None else max(1, min(max_tokens, most))

    @contextlib.contextmanager
    def busy(self) -> Generator[None]:
        """Held while the engine has a request of an agent."""
        with self.deadline.paused(), self.runner.idle.requests:
            yield
        self.runner.num_ended += 1

    async def call_tool(self, call: ToolCall) -> ToolResult:
        """A call of a tool, for `RecordingPolicy`."""
        with self.deadline.paused():  # it has a deadline of its own
            return await self.scorer.call_tool(self.task, call)

    async def _attempt(self, ask: Callable[[], Awaitable[Completion]]) -> Completion:
        try:
            return await retry_on_restart(self.engine, ask)
        finally:
            self.runner.num_ended += 1

    async def _ask(
        self,
        turn: int,
        prompt_ids: list[int],
        max_tokens: int | None,
        tools: tuple[dict[str, Any], ...],
        media: tuple[Media, ...],
    ) -> Completion:
        sampling = self.sampling
        if max_tokens is not None:
            sampling = msgspec.structs.replace(sampling, max_tokens=self._most(max_tokens))
        images: tuple[bytes, ...] = ()
        if media:
            prompt_ids, images = self.runner.tokenizer.request(prompt_ids, media)
        request = GenerateRequest(
            # The serial number keeps ids unique when a turn is requested again; the seed does not depend on it.
            id=f"{self.rollout_id}.{turn}-{next(self.runner.serial)}",
            prompt_ids=prompt_ids,
            sampling=sampling,
            seed=seed_of(self.seed, turn) if turn else self.seed,
            timeout_s=self.runner.request_timeout_s,
            group_id=self.group_id,
            is_urgent=self.is_urgent,
            tools=tools,
            images=images,
        )
        if self.engine is not self.runner.engine:  # one that is aside has no others
            return await self.engine.generate(request)
        with self.runner.idle.requests:
            return await self.engine.generate(request)


def _record(
    session: AgentSession, policy: RecordingPolicy, sampling: SamplingParams
) -> tuple[tuple[Message, ...], ...]:
    """Record the turns of an agent's session in the policy; returns its conversations, the last one last."""
    histories: list[list[Message]] = []
    conversations: dict[int, tuple[Message, ...]] = {}
    for number, turn in enumerate(session.turns):
        before = histories[turn.continues] if turn.continues >= 0 else []
        messages = [*before, *map(_as_message, turn.given)]
        policy.record(turn.prompt_ids, turn.completion, messages, sampling.max_tokens)
        histories.append([*messages, _as_message(turn.answer)])
        conversations.pop(turn.continues, None)
        conversations[number] = tuple(histories[-1])
    return tuple(conversations.values())


def _as_message(chat: Mapping[str, Any]) -> Message:
    given, images = chat.get("content"), tuple[Media, ...]()
    parts = cast("list[Any]", given) if isinstance(given, list) else []
    if any(isinstance(part, Mapping) and "image_url" in part for part in parts):
        parts = [{"type": "text", "text": text} if (text := _text_in(part)) else part for part in parts]
        text, images = joined(parts, "a message of the agent", None)
        chat = {**chat, "content": text}
    try:
        return msgspec.structs.replace(as_message(chat), media=images)
    except ValueError:
        return Message("user", str(chat.get("content") or ""))


def _text_in(part: Any) -> str:
    return part if isinstance(part, str) else str(part.get("text") or "")


def _agent_metrics(session: AgentSession, policy: RecordingPolicy) -> dict[str, float]:
    return {
        "agent_requests": float(session.num_requests),
        "agent_rows": float(len(policy.sequences)),
        "agent_undelivered": float(session.num_undelivered),
    }


def mismatch_of(completion: Completion, prompt_ids: Sequence[int]) -> str:
    """Describe how the engine's tokens for a prompt with images differ from `prompt_ids`."""
    used = completion.prompt_ids or []
    pairs = zip(used, prompt_ids, strict=False)
    place = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(used), len(prompt_ids)))
    return (
        f"the engine used {len(used)} tokens for the prompt of request {completion.id} and the trainer counts "
        f"{len(prompt_ids)}, the first difference at token {place}: give both the same image processor, and no "
        "mm_processor_kwargs in inference.options"
    )


def _traceback_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(error, limit=-4))


def seed_of(*parts: int | str) -> int:
    """Return a sampling seed in [0, 2^31). It depends on all parts and on their order: on the rollout, and not on its
    time. So a run is repeatable."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") >> 1


def _asked(name: str, value: float | str) -> str:
    """A setting of a request, as its author may have written it."""
    if isinstance(value, str):
        return f'{name} = "{value}"' if value else name
    return f"{name} = {value:g}"
