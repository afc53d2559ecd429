"""Runs rewards and tools in killable worker processes.

Guarantees: a hanging reward is killed at its deadline with all its descendants (`RewardTimeout`). An exception, an exit
or a value that is not finite is a `RewardFailed`. A new worker then takes the other requests, and no call waits longer
than the deadlines allow. A reward's deadline counts from the moment the worker was free for it, not from the call.
Output of a reward appears only in the `details` of its failure. No descendant of a reward outlives the pool, however
the pool ends. The same holds for tools; the policy reads their failures as results.

Rewards and tools have workers of their own (`workers.py`), and neither delays or ends the other: a hung tool costs
no reward its deadline.

Neither is sandboxed: they may read and write all files of this user. If the kernel allows it, they cannot read the
environment or memory of processes started by others (`guard.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from slipstream.config.bounds import GIB
from slipstream.config.environment import EnvironmentConfig
from slipstream.config.python_objects import given, is_python_object
from slipstream.envs.base import Episode, RewardError, RewardFailed, RewardTimeout, Score, ToolResult
from slipstream.envs.scoring.process import Answer, Setup, worker_environment
from slipstream.envs.scoring.workers import Workers
from slipstream.records import Task, ToolCall
from slipstream.runlog.redaction import is_secret_variable

MAX_NAMES = 256
"""Most distinct metric names in a pool's life: each becomes a metric of the run."""


class ScorerPool:
    """Killable workers for one environment. Use as `async with ScorerPool(...) as scorer`.

    Entering starts a worker for rewards, and one for tools if the environment has any, and waits for them:
    `EnvironmentFault` if the environment cannot be constructed there. Further workers, up to `reward_workers` of each
    (`auto`: one), start when calls wait. `warn` receives a sentence. `stacks`: the place of the workers' stacks, see
    `processes.stacks.register`.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        *,
        warn: Callable[[str], None] = lambda text: None,
        stacks: Path | None = None,
    ) -> None:
        self._config = config
        passed = given(config.name) if is_python_object(config.name) else None

        def workers(role: str, timeout_s: float, concurrency: int) -> Workers:
            setup = Setup(
                # A planned section has values here for "no effect", invalid in a run file; a worker needs neither.
                config_json=config.model_dump_json(exclude={"num_train_tasks", "reward_workers"}),
                timeout_s=timeout_s,
                memory_limit_bytes=int(config.reward_memory_gib * GIB),
                max_processes=config.reward_processes,
                user_namespace=config.user_namespace,
                environment=passed,
            )
            return Workers(
                config.name,
                setup,
                role=role,
                num_workers=1 if config.reward_workers == "auto" else config.reward_workers,
                concurrency=1 if config.fresh_worker else concurrency,  # a fork sees none but its own
                variables=config.variables,
                stacks=stacks,
            )

        self._rewards = workers("reward worker", config.reward_timeout_s, config.reward_concurrency)
        self._tools = workers("tool worker", config.tool_timeout_s, config.tool_concurrency)
        self._warn = warn
        self._names: set[str] = set()
        self._warned = False

    async def __aenter__(self) -> ScorerPool:
        try:
            await self._rewards.start()
            if self._rewards.ready.has_tools:
                await self._tools.start()
        except BaseException:
            await self._stop()
            raise
        if self._config.user_namespace and not self._rewards.ready.is_apart:
            self._warn_of_keys()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    async def _stop(self) -> None:
        try:
            await self._tools.stop()
        finally:
            await self._rewards.stop()

    @property
    def num_restarts(self) -> int:
        """Replaced workers."""
        return self._rewards.num_restarts + self._tools.num_restarts

    async def score(self, task: Task, episode: Episode | str) -> Score:
        """See `base.Scorer`. Raises `EnvironmentFault` if no worker can be started any more."""
        episode = Episode(episode) if isinstance(episode, str) else episode
        scores = self._scores(await self._rewards.ask("score", task, (episode,)))
        return self._limit_metrics(scores[0])

    async def score_group(self, task: Task, episodes: Sequence[Episode]) -> list[Score]:
        """See `base.Scorer`; otherwise as `score`."""
        scores = self._scores(await self._rewards.ask("group", task, tuple(episodes)))
        return [self._limit_metrics(score) for score in scores]

    async def call_tool(self, task: Task, call: ToolCall) -> ToolResult:
        """See `base.Scorer`. Raises `EnvironmentFault` if no worker can be started any more."""
        if call.error:
            return unreadable(call)
        if not self._rewards.ready.has_tools:
            return ToolResult(f"There is no tool {call.name[:80]!r}: there are no tools.", "unknown")
        answer = await self._tools.ask("tool", task, call=call)
        if answer.result is not None:
            return answer.result
        if answer.kind == "timeout":
            text = f"{call.name:.80} did not answer within {self._config.tool_timeout_s:g} s and was stopped."
            return ToolResult(text, "timeout", answer.details)
        return ToolResult(f"{call.name:.80} {answer.message}.", "died", answer.details)

    def _scores(self, answer: Answer) -> tuple[Score, ...]:
        if answer.kind == "score":
            return answer.scores
        if answer.kind == "failed":
            raise RewardFailed(answer.message, answer.details)
        kind: type[RewardError] = RewardTimeout if answer.kind == "timeout" else RewardFailed
        raise kind(f"the reward of {self._config.name} {answer.message}", answer.details)

    def _limit_metrics(self, score: Score) -> Score:
        """The score without metrics beyond `MAX_NAMES`; `metrics_left_out` counts these."""
        known = [name for name in score.metrics if name in self._names]
        new = [name for name in score.metrics if name not in self._names][: MAX_NAMES - len(self._names)]
        self._names.update(new)
        left_out = len(score.metrics) - len(known) - len(new)
        if not left_out:
            return score
        if not self._warned:
            self._warned = True
            self._warn(
                f"the rewards of {self._config.name} have more than {MAX_NAMES} metrics by name (the first that is "
                f"left out: {next(name for name in score.metrics if name not in self._names):.60}): use fewer names"
            )
        kept = {name: score.metrics[name] for name in (*known, *new)}
        return msgspec.structs.replace(score, metrics=kept | {"metrics_left_out": float(left_out)})

    def _warn_of_keys(self) -> None:
        passed = worker_environment(self._config.variables, os.environ)
        if keys := sorted(name for name in os.environ if is_secret_variable(name) and name not in passed):
            self._warn(
                f"rewards and tools can read the variables of this process in /proc, {', '.join(keys[:3])} among them, "
                "as the kernel gives reward workers no user namespace: start the run without keys that it does not need"
            )


def unreadable(call: ToolCall) -> ToolResult:
    """The result of a call the parser could not read."""
    return ToolResult(f"The call cannot be read: {call.error[:1000]}", "arguments")
