"""A user's environment whose `run` is played in a process of its own (`environment.apart`).

Code that blocks there holds up neither the engine nor other work of the run. When an episode has done nothing for
`environment.run_timeout_s` and its process does not answer, the process is killed; its stacks are in the error, and its
episodes count as failed. Tasks, rewards and tools stay where they are.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Awaitable, Sequence
from typing import Any

import msgspec

from slipstream.config.environment import EnvironmentConfig
from slipstream.config.python_objects import given, is_python_object
from slipstream.envs.base import ContextFull, Environment, Episode, Policy, Score, Split
from slipstream.envs.hosted.keeper import EnvironmentRaised, Keeper
from slipstream.envs.hosted.process import Frame, Host, HostDied, HostFailed
from slipstream.errors import EnvironmentFault
from slipstream.records import Message, Task, ToolCall

LOG = "environment.log"


class Apart(Environment):
    """`environment`, whose `run`, `setup` and `close` happen in another process."""

    def __init__(self, environment: Environment, config: EnvironmentConfig) -> None:
        self.name = environment.name
        super().__init__(environment.seed)
        self._environment = environment
        self._config = config
        self.max_turns = environment.max_turns
        self.max_tool_calls = environment.max_tool_calls
        self.tools = environment.tools
        self.scores_groups = environment.scores_groups  # pyright: ignore[reportAttributeAccessIssue]
        self.given_settings = environment.given_settings
        self.keeper = Keeper(self.name, self._started, self._where)

    @property
    def hung(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """See `Environment`."""
        return self.keeper.hung

    @property
    def num_train_tasks(self) -> int:
        """See `Environment`."""
        return self._environment.num_train_tasks

    @property
    def eval_source(self) -> str:
        """See `Environment`."""
        return self._environment.eval_source

    def tasks(self, split: Split, num_tasks: int) -> Sequence[Task]:
        """See `Environment`."""
        return self._environment.tasks(split, num_tasks)

    def gold(self, task: Task) -> str | Sequence[Message] | None:
        """See `Environment`."""
        return self._environment.gold(task)

    def score(self, task: Task, completion: str) -> Score | Awaitable[Score]:
        """See `Environment`."""
        return self._environment.score(task, completion)

    def score_episode(self, task: Task, episode: Episode) -> Score | Awaitable[Score]:
        """See `Environment`."""
        return self._environment.score_episode(task, episode)

    def score_group(self, task: Task, episodes: Sequence[Episode]) -> Sequence[Score] | Awaitable[Sequence[Score]]:
        """See `Environment`."""
        return self._environment.score_group(task, episodes)

    def call_tool(self, name: str, arguments: dict[str, Any], task: Task) -> Any:
        """See `Environment`."""
        return self._environment.call_tool(name, arguments, task)

    async def setup(self) -> None:
        """Starts the process."""
        await self.keeper.ready()

    async def close(self) -> None:
        """Ends it."""
        await self.keeper.close()

    async def run(self, task: Task, policy: Policy) -> Episode:
        """An episode, played in the process."""
        frame = await self.keeper.play(msgspec.to_builtins(task), lambda asked: _answer(asked, policy))
        if frame["op"] == "raised":
            raise EnvironmentRaised(f"in the environment process:\n{frame['details']}")
        if frame["op"] == "cancelled":
            raise EnvironmentRaised(f"{self.name} cancelled the episode's own task")
        if "episode" not in frame:
            raise ContextFull(frame["context_full"])
        return msgspec.convert(frame["episode"], Episode)

    def _where(self) -> str:
        return f"; its output is in {self.log_folder / LOG}" if self.log_folder else ""

    async def _started(self) -> Host:
        passed = given(self._config.name) if is_python_object(self._config.name) else None
        setup: Frame = {
            "own": self._config.model_copy(update={"apart": False}).model_dump_json(
                exclude={"num_train_tasks", "reward_workers"}
            ),
            "passed": base64.b64encode(msgspec.msgpack.encode(passed)).decode() if passed is not None else "",
        }
        log = self.log_folder and self.log_folder / LOG
        namespace = self._config.user_namespace
        try:
            return await Host.start(
                sys.executable, setup, variables=self._config.variables, log=log, user_namespace=namespace
            )
        except (HostFailed, HostDied, TimeoutError, OSError) as error:
            reason = str(error) or "it was not loaded in time"
            raise EnvironmentFault(f"the process of {self.name} did not start: {reason}{self._where()}") from error


async def _answer(frame: Frame, policy: Policy) -> Frame:
    if frame["op"] == "tool":
        result = await policy.call_tool(msgspec.convert(frame["tool"], ToolCall))
        return {"op": "result", "result": msgspec.to_builtins(result)}
    messages = msgspec.convert(frame["messages"], list[Message])
    try:
        reply = await policy.chat(messages, max_tokens=frame["max_tokens"])
    except ContextFull as full:
        return {"op": "refused", "message": str(full)}
    return {"op": "reply", "reply": msgspec.to_builtins(reply)}
