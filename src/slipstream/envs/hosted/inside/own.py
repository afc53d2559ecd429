"""Slipstream's own environments in processes of their own (`environment.processes`), with the run's interpreter."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec

from slipstream.config.environment import EnvironmentConfig
from slipstream.config.python_objects import PythonObject, give
from slipstream.envs.base import Address, ContextFull, Environment, Reply, ToolResult, plain_numbers
from slipstream.envs.lifetime import set_up, shut_down
from slipstream.envs.registry import load_environment
from slipstream.errors import SlipstreamError, one_line
from slipstream.records import Message, Task, ToolCall

from .host import Refused, Turns


def load(setup: dict[str, Any]) -> Own:
    """The environment of a planned section [environment]."""
    if passed := setup["passed"]:
        give(msgspec.msgpack.decode(base64.b64decode(passed), type=PythonObject))
    try:
        config = EnvironmentConfig.model_validate_json(setup["section"])
        return Own(load_environment(config), config.run_timeout_s)
    except SlipstreamError as error:
        raise Refused(str(error)) from error


class Own:
    """See `host.Hosted`."""

    def __init__(self, environment: Environment, setup_timeout_s: float) -> None:
        self._environment = environment
        self._setup_timeout_s = setup_timeout_s
        self._open: dict[str, tuple[Task, Any]] = {}
        """Episodes to be closed: their tasks, and the results of `setup_episode`."""

    def facts(self) -> dict[str, Any]:
        """None: the run's process knows them, and an environment of `verifiers` would start another process to say."""
        return {}

    def rows(self, split: str, start: int, count: int) -> list[dict[str, Any]]:
        """None: the run's process makes the tasks."""
        return []

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncGenerator[None]:
        """Sets the environment up, and closes it."""
        complaints: list[str] = []
        try:
            try:
                await set_up(self._environment, self._setup_timeout_s)
            except SlipstreamError as error:
                raise Refused(str(error)) from error
            yield
        finally:
            for task, state in [self._open.pop(name) for name in list(self._open)]:  # the run has ended without them
                with contextlib.suppress(Exception):
                    await self._environment.close_episode(task, state)
            await shut_down(self._environment, complaints.append)
        if complaints:
            raise Refused("; ".join(complaints))

    async def play(self, task: Any, turns: Turns) -> dict[str, Any]:
        """An episode, not graded; or the end of one, by its name: the environment's `close_episode`."""
        if "close" in task:
            try:
                await self._environment.close_episode(*self._open.pop(task["close"]))
            except (Exception, SystemExit) as error:  # noqa: BLE001 (the user's code; the run is told)
                return {"failed": one_line(error)}
            return {}
        known = msgspec.convert(task["task"], Task)
        policy = _Policy(turns)
        if "address" in task:
            policy.address = msgspec.convert(task["address"], Address)
        try:
            if task["name"]:
                self._open[task["name"]] = (known, None)
            policy.state = await self._environment.setup_episode(known)
            if task["name"]:
                self._open[task["name"]] = (known, policy.state)
            episode = await self._environment.run(known, policy)
        except ContextFull as full:
            return {"context_full": str(full)}
        return {"episode": msgspec.to_builtins(plain_numbers(episode))}


class _Policy:
    """See `envs.base.Policy`."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self.state: Any = None
        self.address: Address | None = None

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> Reply:
        """See `Policy`."""
        frame = {"op": "chat", "messages": msgspec.to_builtins(list(messages)), "max_tokens": max_tokens}
        frame["tools"] = None if tools is None else list(tools)
        answer = await self._turns.ask(frame)
        if answer["op"] == "refused":
            raise ContextFull(answer["message"])
        return msgspec.convert(answer["reply"], Reply)

    async def call_tool(self, call: ToolCall) -> ToolResult:
        """See `Policy`."""
        answer = await self._turns.ask({"op": "tool", "tool": msgspec.to_builtins(call)})
        return msgspec.convert(answer["result"], ToolResult)
