"""Shared requests to an engine: hundreds of episodes begin at once, and a request costs more than a call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from slipstream.errors import EngineError, one_line

A = TypeVar("A")
R = TypeVar("R")


class SharedRequests(Generic[A, R]):
    """One request at a time, for all calls since the last one."""

    def __init__(self, send: Callable[[Sequence[A]], Awaitable[Sequence[R]]]) -> None:
        """`send`: one request with these arguments; returns their results in order."""
        self._send = send
        self._waiting: list[tuple[A, asyncio.Future[R]]] = []
        self._asked: list[tuple[A, asyncio.Future[R]]] = []
        """Calls of the request under way."""
        self._task: asyncio.Task[None] | None = None

    async def call(self, argument: A) -> R:
        """The result for `argument`. Raises `EngineError` for all calls of a failed request."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[R] = loop.create_future()
        self._waiting.append((argument, future))
        if self._task is None:
            self._task = loop.create_task(self._send_all())
            self._task.add_done_callback(self._ended)
        return await future

    def cancel(self) -> None:
        """Fail all open calls."""
        if self._task is not None:
            self._task.cancel()

    async def _send_all(self) -> None:
        while self._waiting:
            self._asked = [each for each in self._waiting if not each[1].done()]  # not cancelled
            self._waiting = []
            try:
                found = await self._send([argument for argument, _ in self._asked])
            except EngineError as error:
                self._fail(error)
            except Exception as error:  # noqa: BLE001 (all callers get it)
                self._fail(EngineError(f"the engine's answer cannot be read: {one_line(error)}"))
            else:
                for (_, future), result in zip(self._asked, found, strict=True):
                    if not future.done():
                        future.set_result(result)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if task.cancelled():
            self._asked += self._waiting
            self._waiting = []
            self._fail(EngineError("the connections to the engine were closed"))
        elif self._waiting:  # since its last look
            self._task = asyncio.get_running_loop().create_task(self._send_all())
            self._task.add_done_callback(self._ended)

    def _fail(self, failure: EngineError) -> None:
        for _, future in self._asked:
            if not future.done():
                future.set_exception(failure)
