"""One rollout: an environment run against the engine, then graded. Its end is an outcome, never an exception,
unless the engine is gone for good.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import traceback
from collections.abc import Generator, Sequence
from typing import Any, Protocol

from slipstream.envs.base import Environment, RewardFailed, RewardTimeout, Scorer
from slipstream.envs.policy import RecordingPolicy, Tokenizer
from slipstream.errors import EngineError, EnvironmentFault
from slipstream.orchestrator.seeds import seed_of
from slipstream.orchestrator.tasks import Revivable, outliving
from slipstream.records import TRAINABLE_OUTCOMES, Completion, GenerateRequest, Rollout, SamplingParams, Task


class Engine(Revivable, Protocol):
    """What rollouts need of the engine."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """Tokens in, tokens out."""
        ...


class RequestAborted(Exception):
    """The engine ended a request before it was finished; the text says why."""


class OwnTimeOver(Exception):
    """An environment took longer between two turns than it may."""


class OwnTime:
    """A deadline that stands still while the engine is asked: `async with` it, and `paused` around each request."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._timeout = asyncio.timeout(None)
        self._num_paused = 0

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()
        self._set()

    async def __aexit__(self, *raised: Any) -> None:
        try:
            await self._timeout.__aexit__(*raised)
        except TimeoutError as error:
            raise OwnTimeOver from error

    @contextlib.contextmanager
    def paused(self) -> Generator[None]:
        """The clock starts anew afterwards."""
        self._num_paused += 1
        self._set()
        try:
            yield
        finally:
            self._num_paused -= 1
            self._set()

    def _set(self) -> None:
        if not self._timeout.expired():
            now = asyncio.get_running_loop().time()
            self._timeout.reschedule(None if self._num_paused else now + self._limit_s)


class RolloutRunner:
    """Runs attempts of one environment against one engine."""

    def __init__(
        self,
        environment: Environment,
        scorer: Scorer,
        tokenizer: Tokenizer,
        engine: Engine,
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

    async def run(self, task: Task, *, rollout_id: str, group_id: str, sampling: SamplingParams, seed: int) -> Rollout:
        """The finished rollout, whatever became of it. Raises `EngineError` only when the engine cannot come back."""
        started = time.monotonic()
        rollout = await outliving(self._engine, lambda: self._attempt(task, rollout_id, group_id, sampling, seed))
        rollout.seconds = time.monotonic() - started
        return rollout

    async def _attempt(
        self, task: Task, rollout_id: str, group_id: str, sampling: SamplingParams, seed: int
    ) -> Rollout:
        turns = itertools.count()
        own_time = OwnTime(self._run_timeout_s)

        async def generate(prompt_ids: list[int]) -> Completion:
            turn = next(turns)
            # The serial keeps ids unique when a rollout is run again; the seed does not depend on it.
            request = GenerateRequest(
                id=f"{rollout_id}.{turn}-{next(self._serial)}",
                prompt_ids=prompt_ids,
                sampling=sampling,
                seed=seed_of(seed, turn) if turn else seed,
                timeout_s=self._request_timeout_s,
                group_id=group_id,
            )
            with own_time.paused():
                completion = await self._engine.generate(request)
            if completion.finish_reason == "abort":
                raise RequestAborted(f"request {request.id} {completion.error or 'was aborted'}")
            return completion

        policy = RecordingPolicy(generate, self._tokenizer)
        rollout = Rollout(rollout_id, task.id, group_id, policy.sequences, reward=0.0, outcome="done")
        rollout.prompt = task.prompt[-1].content if task.prompt else ""
        try:
            async with own_time:
                episode = await self._environment.run(task, policy)
            rollout.completion = episode.completion
            rollout.num_turns = episode.num_turns
            rollout.num_thinking = policy.num_thinking
            rollout.metrics = dict(episode.metrics)
            rollout.outcome = "truncated" if policy.truncated else episode.outcome
            score = await self._scorer.score(task, episode.completion)
        except RewardTimeout as error:
            rollout.outcome, rollout.error = "reward_timeout", f"{error}\n{error.details}".rstrip()
        except RewardFailed as error:
            rollout.outcome, rollout.error = "reward_error", f"{error}\n{error.details}".rstrip()
        except RequestAborted as error:
            rollout.outcome, rollout.error = "engine_error", str(error)
        except (EngineError, EnvironmentFault):
            raise  # the engine is gone, or no reward worker can be started any more: not this rollout's outcome
        except OwnTimeOver:
            rollout.outcome = "environment_error"
            rollout.error = (
                f"environment {self._environment.name} did nothing for {self._run_timeout_s:g} s "
                "(environment.run_timeout_s), the engine's time not counted"
            )
        except Exception:  # noqa: BLE001 (the environment is the user's code: its failure is an outcome, counted as such)
            rollout.outcome, rollout.error = "environment_error", traceback.format_exc(limit=-4)
        else:
            rollout.reward = score.reward
            rollout.metrics |= score.metrics
        return rollout


def check_failures(rollouts: Sequence[Rollout], of: str, max_failures: float) -> None:
    """Raise `EnvironmentFault` with the first failure's text when more than that part of the rollouts failed."""
    failed = [rollout for rollout in rollouts if rollout.outcome not in TRAINABLE_OUTCOMES]
    if len(failed) > max_failures * len(rollouts):
        raise EnvironmentFault(
            f"{len(failed)} of {len(rollouts)} rollouts of {of} failed, more than "
            f"environment.max_reward_failures = {max_failures:g} allows; the first "
            f"({failed[0].outcome}): {failed[0].error}"
        )
