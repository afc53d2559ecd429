"""Checks rewards before a run: those of gold answers and of junk, by the environment's own workers and episodes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from slipstream.commands.evaluate_address import settled
from slipstream.config import RunConfig
from slipstream.config.schema import EvaluationConfig, RLConfig
from slipstream.data.unknown_characters import read_vocabulary
from slipstream.envs.base import Environment
from slipstream.envs.check import EnvironmentCheck, check_environment
from slipstream.envs.hosted.apart import placement
from slipstream.envs.lifetime import in_use
from slipstream.envs.registry import played
from slipstream.envs.scoring.pool import ScorerPool
from slipstream.envs.scoring.rehearsal import Rehearsal
from slipstream.envs.single_turn import make_tasks
from slipstream.errors import DataError
from slipstream.plan.preflight.unknown_characters import unknown_in_tasks
from slipstream.records import Task

_SLOW_REWARDS_S = 10.0
"""Rewards of a batch may take so long without a warning."""


@dataclass(frozen=True)
class Checked:
    """Rewards of gold answers and junk, judged."""

    result: EnvironmentCheck
    failures: list[str]
    notes: list[str]
    rewards_per_s: float

    def mean_reward(self, *, is_gold: bool, part: str = "") -> float | None:
        """Mean reward of the gold answers or of the junk, if any were graded; of one part of a mixture, if named."""
        counted = [r for r in self.result.results if (r.kind == "gold") == is_gold and part in ("", r.part)]
        rewards = [reward for result in counted for reward in result.rewards]
        return sum(rewards) / len(rewards) if rewards else None


def check_rewards(config: RunConfig, num_tasks: int) -> Checked:
    """Grade gold answers and junk of `num_tasks` training tasks."""
    assert config.environment is not None
    section, environment = settled(config.environment)
    threshold = (config.evaluation or EvaluationConfig()).threshold
    has_turns = placement(environment)[0] > 0 or bool(environment.tools) or section.processes not in ("auto", 0)
    has_turns = has_turns and not environment.needs_address  # an agent sends requests: its results alone are graded
    warnings: list[str] = []

    async def check() -> tuple[EnvironmentCheck, float]:
        async with contextlib.AsyncExitStack() as stack:
            scorer = await stack.enter_async_context(ScorerPool(section))
            rehearsal = None
            if has_turns and not environment.plays_itself:
                stage = played(environment, section) or environment
                await stack.enter_async_context(in_use(stage, section.run_timeout_s, warnings.append))
                rehearsal = Rehearsal(stage, scorer, section.run_timeout_s)
            began = monotonic()
            found = await check_environment(
                environment,
                scorer,
                num_tasks,
                threshold=threshold,
                held_out=config.evaluation is not None,
                rehearsal=rehearsal,
                stop=config.sampling.stop,
            )
            return found, monotonic() - began

    result, seconds = asyncio.run(check())
    rate = sum(r.num_scored + r.num_failed for r in result.results) / seconds
    notes, unknown = _unknown_characters(config, environment, make_tasks(environment, "train", num_tasks))
    notes += [*result.notes, *(f"warning: {text}" for text in warnings)]
    notes += _slow_reward_warnings(config, rate, section.reward_workers)
    return Checked(result, [*result.failures, *([unknown] if unknown else [])], notes, rate)


def _slow_reward_warnings(config: RunConfig, rate: float, num_workers: object) -> list[str]:
    """Warn if the rewards of one batch, at `rate` per second, take longer than `_SLOW_REWARDS_S`."""
    group = config.algorithm.group_size if isinstance(config.algorithm, RLConfig) else 1
    batch = config.training.prompts_per_batch * group
    if not rate or batch / rate < _SLOW_REWARDS_S:
        return []
    return [
        f"{rate:.3g} rewards a second with environment.reward_workers = {num_workers}: a batch of {batch} takes "
        f"{batch / rate:.0f} s; use more workers, or coroutines for rewards with waits (environment.reward_concurrency)"
    ]


def _unknown_characters(config: RunConfig, environment: Environment, tasks: Sequence[Task]) -> tuple[list[str], str]:
    """Return warnings about characters without a token, and an error, or an empty text, for tasks out of reach."""
    vocabulary = read_vocabulary(Path(config.model.path))
    if vocabulary is None:
        missing = f"{config.model.path} has no tokenizer.json here"
        return [f"{missing}: slipstream plan looks for a token of every character"], ""
    try:
        return [f"warning: {text}" for text in unknown_in_tasks(config, environment, vocabulary, tasks)], ""
    except DataError as error:
        return [], str(error)
