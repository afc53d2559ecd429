"""One rollout: an environment run against the engine, then graded. Its end is an outcome, never an exception,
unless the engine is gone for good. A turn that lost its engine is asked for again; the environment does not notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import traceback
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any

from slipstream.engine_protocols import Generates
from slipstream.envs.base import Environment, RewardFailed, RewardTimeout, Scorer
from slipstream.envs.policy import RecordingPolicy, Tokenizer
from slipstream.errors import EngineError, EnvironmentFault, IntegrityError
from slipstream.orchestrator.concurrency import outliving
from slipstream.orchestrator.seeds import seed_of
from slipstream.patience import Patience
from slipstream.records import TRAINABLE_OUTCOMES, Completion, GenerateRequest, Outcome, Rollout, SamplingParams, Task


class RequestAborted(Exception):
    """The engine ended a request before it was finished; the text says why."""


class OwnTimeOver(Exception):
    """An environment took longer between two turns than it may."""


class OwnTime:
    """A deadline that stands still while the engine is asked: `async with` it, and `paused` around each request."""

    def __init__(self, limit_s: float) -> None:
        self._num_paused = 0
        self._patience = Patience(limit_s, lambda: not self._num_paused)

    async def __aenter__(self) -> None:
        await self._patience.__aenter__()

    async def __aexit__(self, *raised: Any) -> None:
        try:
            await self._patience.__aexit__(*raised)
        except TimeoutError as error:
            raise OwnTimeOver from error

    @contextlib.contextmanager
    def paused(self) -> Generator[None]:
        """The clock starts anew afterwards."""
        self._num_paused += 1
        try:
            yield
        finally:
            self._num_paused -= 1
            self._patience.restart()


class RolloutRunner:
    """Runs attempts of one environment against one engine."""

    def __init__(
        self,
        environment: Environment,
        scorer: Scorer,
        tokenizer: Tokenizer,
        engine: Generates,
        *,
        request_timeout_s: float,
        run_timeout_s: float = 300.0,
    ) -> None:
        """`run_timeout_s`: how long the environment may take between two turns."""
        self._environment = environment
        self._scorer = scorer
        self._tokenizer = tokenizer
        self._engine = engine
        self._request_timeout_s = request_timeout_s
        self._run_timeout_s = run_timeout_s
        self._serial = itertools.count()
        self.num_signs = 0
        """Turns and rollouts that have ended; for any thread to see whether there is progress."""

    async def run(
        self,
        task: Task,
        *,
        rollout_id: str,
        group_id: str,
        sampling: SamplingParams,
        seed: int,
        is_urgent: bool = False,
    ) -> Rollout:
        """The finished rollout, whatever became of it. Raises `EngineError` only when the engine cannot come back."""
        started, turns, own_time = time.monotonic(), itertools.count(), OwnTime(self._run_timeout_s)
        lost: list[Exception] = []

        async def generate(prompt_ids: list[int]) -> Completion:
            turn = next(turns)

            def ask() -> Awaitable[Completion]:
                # The serial keeps ids unique when a turn is asked for again; the seed does not depend on it.
                request = GenerateRequest(
                    id=f"{rollout_id}.{turn}-{next(self._serial)}",
                    prompt_ids=prompt_ids,
                    sampling=sampling,
                    seed=seed_of(seed, turn) if turn else seed,
                    timeout_s=self._request_timeout_s,
                    group_id=group_id,
                    is_urgent=is_urgent,
                )
                return self._engine.generate(request)

            try:
                with own_time.paused():
                    completion = await outliving(self._engine, ask)
            except (EngineError, IntegrityError) as error:
                lost.append(error)
                raise
            finally:
                self.num_signs += 1
            if completion.finish_reason == "abort":
                raise RequestAborted(f"request {completion.id} {completion.error or 'was aborted'}")
            return completion

        policy = RecordingPolicy(generate, self._tokenizer)
        rollout = Rollout(rollout_id, task.id, group_id, policy.sequences, reward=0.0, outcome="done")
        rollout.prompt = task.prompt[-1].content if task.prompt else ""
        rollout.answer = task.answer or ""
        try:
            await self._play(task, policy, own_time, rollout)
        except BaseException as error:  # noqa: BLE001 (the environment's code may raise anything; it is sorted there)
            if lost:
                raise lost[0] from None  # whatever the environment made of it
            rollout.outcome, rollout.error = self._outcome_of(error)
        if lost:
            raise lost[0]
        rollout.seconds = time.monotonic() - started
        self.num_signs += 1
        return rollout

    async def _play(self, task: Task, policy: RecordingPolicy, own_time: OwnTime, rollout: Rollout) -> None:
        """The episode and its grade, written into `rollout`."""
        try:
            async with own_time:
                episode = await self._environment.run(task, policy)
        finally:
            policy.close()
        rollout.completion = episode.completion
        rollout.num_turns = episode.num_turns
        rollout.num_thinking = policy.num_thinking
        rollout.metrics = dict(episode.metrics)
        rollout.outcome = "truncated" if policy.truncated else episode.outcome
        score = await self._scorer.score(task, episode.completion)
        rollout.reward = score.reward
        rollout.metrics |= score.metrics

    def _outcome_of(self, error: BaseException) -> tuple[Outcome, str]:
        """What a rollout that ended with `error` counts as, and why; raises what is not the rollout's."""
        name = self._environment.name
        match error:
            case RewardTimeout():
                return "reward_timeout", f"{error}\n{error.details}".rstrip()
            case RewardFailed():
                return "reward_error", f"{error}\n{error.details}".rstrip()
            case RequestAborted():
                return "engine_error", str(error)
            case OwnTimeOver():
                return "environment_error", (
                    f"environment {name} did nothing for {self._run_timeout_s:g} s (environment.run_timeout_s), the "
                    "engine's time not counted"
                )
            case EngineError() | IntegrityError() | EnvironmentFault() | KeyboardInterrupt() | GeneratorExit():
                raise error  # the engine is gone, or no reward worker can be started any more
            case asyncio.CancelledError() if (ours := asyncio.current_task()) is None or ours.cancelling():
                raise error
            case asyncio.CancelledError():
                why = "awaits a task that it has cancelled: suppress asyncio.CancelledError there"
                return "environment_error", f"environment {name} {why}\n{_their_traceback(error)}"
            case _:  # the environment is the user's code: its failure is an outcome, counted as such
                return "environment_error", _their_traceback(error)


def _their_traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error, limit=-4))


def check_failures(rollouts: Sequence[Rollout], of: str, max_failures: float) -> None:
    """Raise with the first failure's text when more than that part of the rollouts failed: `EngineError` where most of
    these failures are the engine's, else `EnvironmentFault`."""
    failed = [rollout for rollout in rollouts if rollout.outcome not in TRAINABLE_OUTCOMES]
    if len(failed) <= max_failures * len(rollouts):
        return
    by_engine = [rollout for rollout in failed if rollout.outcome == "engine_error"]
    if is_engines := 2 * len(by_engine) > len(failed):
        failed = by_engine
    text = (
        f"{len(failed)} of {len(rollouts)} rollouts of {of} failed{' in the engine' * is_engines}, more than "
        f"environment.max_reward_failures = {max_failures:g} allows; the first ({failed[0].outcome}): {failed[0].error}"
    )
    raise (EngineError if is_engines else EnvironmentFault)(text)


def warn_of_losses(rollouts: Sequence[Rollout], of: str, warn: Callable[[str], None]) -> None:
    """One warning where the engine lost some: the longest are lost first, and nothing is learned of them."""
    lost = [rollout for rollout in rollouts if rollout.outcome == "engine_error"]
    if lost:
        warn(f"{len(lost)} of {len(rollouts)} rollouts of {of} were lost in the engine; the first: {lost[0].error}")
