"""Slipstream's own environments in a process of their own (`environment.apart`), with the run's interpreter."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec

from slipstream.config.environment import EnvironmentConfig
from slipstream.config.python_objects import PythonObject, give
from slipstream.envs.base import ContextFull, Environment, Episode, Reply, ToolResult
from slipstream.envs.registry import load_environment
from slipstream.errors import SlipstreamError
from slipstream.records import Message, Task, ToolCall

from .host import Refused, Turns


def load(setup: dict[str, Any]) -> Own:
    """The environment of a planned section [environment]."""
    if passed := setup["passed"]:
        give(msgspec.msgpack.decode(base64.b64decode(passed), type=PythonObject))
    try:
        return Own(load_environment(EnvironmentConfig.model_validate_json(setup["own"])))
    except SlipstreamError as error:
        raise Refused(str(error)) from error


class Own:
    """See `host.Hosted`."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    def facts(self) -> dict[str, Any]:
        """See `Hosted`."""
        return {"max_turns": self._environment.max_turns, "splits": [], "num_rows": {}}

    def rows(self, split: str, start: int, count: int) -> list[dict[str, Any]]:
        """None: the run's process makes the tasks."""
        return []

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncGenerator[None]:
        """Sets the environment up, and closes it."""
        try:
            await self._environment.setup()
            yield
        finally:
            await self._environment.close()

    async def play(self, task: Any, turns: Turns) -> dict[str, Any]:
        """One episode, not graded."""
        known = msgspec.convert(task, Task)
        policy = _Policy(turns)
        try:
            policy.state = await self._environment.setup_episode(known)
            episode = await self._environment.run(known, policy)
        except ContextFull as full:
            return {"context_full": str(full)}
        finally:
            await self._environment.close_episode(known, policy.state)
        if not isinstance(episode, Episode):  # pyright: ignore[reportUnnecessaryIsInstance]  (the user's code)
            raise Refused(f"run() returned a {type(episode).__name__}: return an Episode")
        return {"episode": msgspec.to_builtins(episode)}


class _Policy:
    """See `envs.base.Policy`."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self.state: Any = None

    async def chat(self, messages: Sequence[Message], *, max_tokens: int | None = None) -> Reply:
        """See `Policy`."""
        frame = {"op": "chat", "messages": msgspec.to_builtins(list(messages)), "max_tokens": max_tokens}
        answer = await self._turns.ask(frame)
        if answer["op"] == "refused":
            raise ContextFull(answer["message"])
        return msgspec.convert(answer["reply"], Reply)

    async def call_tool(self, call: ToolCall) -> ToolResult:
        """See `Policy`."""
        answer = await self._turns.ask({"op": "tool", "tool": msgspec.to_builtins(call)})
        return msgspec.convert(answer["result"], ToolResult)
