"""Runs a coroutine to its end from a plain function, also inside another event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
_CANCELLED_S = 10.0
"""How long an interrupted caller waits for `work` to clean up."""


def in_own_loop(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run `work` in a thread and return its result. An interrupt of the wait cancels it."""
    coming: Future[T] = Future()
    tasks: list[asyncio.Task[Any] | None] = []

    async def main() -> T:
        tasks.append(asyncio.current_task())
        return await work()

    def run() -> None:
        try:
            coming.set_result(asyncio.run(main()))
        except BaseException as error:  # noqa: BLE001 (raised in the caller)
            coming.set_exception(error)

    thread = threading.Thread(target=run, name="own-loop", daemon=True)
    thread.start()
    try:
        thread.join()
    except BaseException:
        for task in filter(None, tasks):
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                task.get_loop().call_soon_threadsafe(task.cancel)
        thread.join(_CANCELLED_S)
        raise
    return coming.result()
