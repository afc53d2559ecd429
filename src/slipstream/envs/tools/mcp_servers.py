"""Tools of servers of the Model Context Protocol, over standard input and output (the official SDK, package `mcp`).

`tools_of("python server.py")` starts the server once, asks for its tools, and ends it. A call then starts it again in
the process for tools, and keeps it there: one server for each worker. Servers get the workers' environment variables,
and end with the workers.
"""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import Iterable
from typing import Any

from slipstream.envs.base import ToolResult
from slipstream.envs.own_loop import in_own_loop
from slipstream.envs.scoring.process import worker_environment
from slipstream.envs.tools.schemas import SCHEMA_ATTRIBUTE, Schema, Tool
from slipstream.errors import ConfigError, one_line
from slipstream.runlog.redaction import hide_in_command

START_S = 60.0
"""Time limit of a server to list its tools."""


def tools_of(command: str, variables: Iterable[str]) -> list[Tool]:
    """The tools of the server of `command`; it gets these environment variables too. Raises `ConfigError` if it does
    not start or has none."""
    setting = f"environment.tools: {hide_in_command(f'mcp:{command}')}"
    if not command.strip():
        raise ConfigError(f"{setting} names no command: write mcp:COMMAND, the command that starts the server")
    try:
        import mcp  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError:
        raise ConfigError(f"{setting} needs the package mcp, which is not installed: pip install mcp") from None
    try:
        server = _Server(shlex.split(command), worker_environment(variables, os.environ))
        schemas = in_own_loop(server.schemas)
    except TimeoutError:
        raise ConfigError(
            f"{setting} did not say which tools it has within {START_S:g} s: run the command by hand"
        ) from None
    except Exception as error:  # any error of the server or the SDK
        cause = error
        while isinstance(cause, ExceptionGroup):
            cause = cause.exceptions[0]
        raise ConfigError(
            f"{setting} cannot be asked for its tools ({one_line(cause)}): run the command by hand"
        ) from error
    if not schemas:
        raise ConfigError(f"{setting} has no tools: name another server")
    return [server.tool(schema) for schema in schemas]


class _Server:
    """A server, and the session with it in this process."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._command = command
        self._environment = environment
        self._session: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[Any] | None = None

    async def schemas(self) -> list[Schema]:
        """Its tools' schemas."""
        async with asyncio.timeout(START_S):
            session, running = await self._started()
            listed = await session.list_tools()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        return [_schema_of(tool.model_dump(mode="json", by_alias=True)) for tool in listed.tools]

    def tool(self, schema: Schema) -> Tool:
        """One of its tools."""
        name = schema["function"]["name"]

        async def call(**arguments: Any) -> ToolResult:
            session, running = await self._started()
            try:
                found = (await session.call_tool(name, arguments)).model_dump(mode="json", by_alias=True)
            except Exception as error:
                if _has_ended(error) and self._session is running:  # another call may have seen it before
                    running.cancel()  # the next call starts the server again
                    self._session = None
                raise
            return ToolResult("\n".join(map(_text_of, found["content"])), "error" if found.get("isError") else "")

        setattr(call, SCHEMA_ATTRIBUTE, schema)
        return call

    async def _started(self) -> tuple[Any, asyncio.Task[None]]:
        """The session, begun if there is none or the server has ended, and the task of keeping it open."""
        if self._session is None or self._session.done():
            self._ready = asyncio.get_running_loop().create_future()
            self._session = asyncio.create_task(self._run(self._ready))
        assert self._ready is not None
        running = self._session
        return await asyncio.shield(self._ready), running

    async def _run(self, ready: asyncio.Future[Any]) -> None:
        """Keeps the session open until cancelled: the SDK wants it opened and closed in one task."""
        from mcp import ClientSession, StdioServerParameters
        from mcp.client.stdio import stdio_client

        first, *arguments = self._command
        parameters = StdioServerParameters(command=first, args=arguments, env=self._environment)
        try:
            async with stdio_client(parameters) as streams, ClientSession(*streams) as session:
                await session.initialize()
                ready.set_result(session)
                await asyncio.Event().wait()
        except Exception as error:
            if ready.done():
                raise
            ready.set_exception(error)
            ready.exception()  # the waiting caller may have been cancelled


def _has_ended(error: Exception) -> bool:
    """Whether a call failed as the server's end of the connection was closed: the SDK's own error, or its streams'."""
    from mcp.types import CONNECTION_CLOSED

    code = getattr(getattr(error, "error", None), "code", None)
    return code == CONNECTION_CLOSED or type(error).__name__ in ("ClosedResourceError", "BrokenResourceError")


def _text_of(part: dict[str, Any]) -> str:
    return part["text"] if part.get("type") == "text" else f"[{part.get('type')}, which is not shown]"


def _schema_of(tool: dict[str, Any]) -> Schema:
    function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": tool["inputSchema"]}
    return {"type": "function", "function": function}
