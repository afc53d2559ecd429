"""Plays an environment's episodes with known turns, such as a gold answer, in place of a policy.

The environment's own `run` and its tools are real, each with its deadline; no model and no tokens are needed.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Sequence
from typing import Any

import msgspec

from slipstream.envs.base import (
    Address,
    Environment,
    Episode,
    Reply,
    RewardFailed,
    RewardTimeout,
    Score,
    Scorer,
    ToolResult,
    plain_numbers,
    with_turn_rewards,
)
from slipstream.envs.policy import following
from slipstream.errors import one_line
from slipstream.patience import Patience
from slipstream.records import Message, Task, ToolCall

_CLOSE_S = 10.0


class Rehearsal:
    """Plays and grades episodes of `environment`, already set up; `timeout_s` is `environment.run_timeout_s`."""

    def __init__(self, environment: Environment, scorer: Scorer, timeout_s: float) -> None:
        self._environment, self._scorer, self._timeout_s = environment, scorer, timeout_s
        self.differences: list[str] = []
        """Of gold answers whose messages between the policy's turns differ from the environment's."""

    async def score(self, task: Task, turns: Sequence[Message], *, is_gold: bool) -> Score:
        """The reward of an episode with the assistant's `turns` as the policy's, the last one again if the environment
        asks for more. Raises `RewardError`, also if the episode fails."""
        policy = _Saying(self._environment, self._scorer, task, turns)
        episode = await self._play(task, policy)
        if is_gold and policy.difference:
            self.differences.append(policy.difference)
        score = None
        if episode.reward is None:
            if not episode.messages:
                messages = tuple(following(task.prompt, policy.conversation))
                episode = msgspec.structs.replace(episode, messages=messages)
            score = await self._scorer.score(task, episode)
        return with_turn_rewards(score, episode, policy.num_turns, self._environment.name)

    async def _play(self, task: Task, policy: _Saying) -> Episode:
        environment, name = self._environment, self._environment.name
        try:
            async with Patience(self._timeout_s, lambda: not policy.num_tools):
                policy.state = await environment.setup_episode(task)
                return plain_numbers(await environment.run(task, policy))
        except TimeoutError as error:
            raise RewardTimeout(f"run() of {name} did nothing for {self._timeout_s:g} s") from error
        except (Exception, SystemExit) as error:
            text = "".join(traceback.format_exception(error, limit=-4))
            raise RewardFailed(f"the episode failed: {text.strip().splitlines()[-1]}", text) from error
        finally:
            await self._close(task, policy.state)

    async def _close(self, task: Task, state: Any) -> None:
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._environment.close_episode(task, state)
        except (Exception, SystemExit) as error:
            raise RewardFailed(f"close_episode() of {self._environment.name} failed: {one_line(error)}") from error


class _Saying:
    """A `Policy` that says given turns."""

    def __init__(self, environment: Environment, scorer: Scorer, task: Task, turns: Sequence[Message]) -> None:
        self._environment = environment
        self._scorer = scorer
        self._task = task
        self._said = [turn for turn in turns if turn.role == "assistant"]
        self._between = _others(turns)
        self.num_turns = 0
        self.state: Any = None
        self.address: Address | None = None
        self.num_tools = 0
        """Tool calls under way, with deadlines of their own."""
        self.conversation: list[Message] = []
        self.difference = ""

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> Reply:
        """See `Policy`."""
        if self.num_turns == self._environment.max_turns:
            raise RuntimeError(
                f"run() asked for turn {self.num_turns + 1}, and max_turns = {self._environment.max_turns}: raise it "
                "in the class, as the context is planned with it"
            )
        turn = self._said[min(self.num_turns, len(self._said) - 1)]
        self._compare(_others(following(self._task.prompt, messages)))
        self.num_turns += 1
        calls = tuple(_call(call) for call in turn.tool_calls)
        self.conversation = [*messages, turn]
        return Reply(turn.content, "stop", calls, turn.content)

    def _compare(self, came: Sequence[Message]) -> None:
        """Compares the environment's messages with the gold answer's in the same place."""
        for ours, theirs in zip(self._between, came, strict=False):
            if not self.difference and (ours.role, ours.content) != (theirs.role, theirs.content):
                says = f"it says {theirs.role} {theirs.content!r:.60}"
                self.difference = f"{ours.role} {ours.content!r:.60}, where {says}"

    async def call_tool(self, call: ToolCall) -> ToolResult:
        """See `Policy`."""
        self.num_tools += 1
        try:
            return await self._scorer.call_tool(self._task, call)
        finally:
            self.num_tools -= 1


def _others(messages: Sequence[Message]) -> list[Message]:
    return [message for message in messages if message.role != "assistant"]


def _call(call: dict[str, Any]) -> ToolCall:
    function: dict[str, Any] = call.get("function") or call
    return ToolCall(str(function.get("name", "")), dict(function.get("arguments") or {}), str(call.get("id") or ""))
