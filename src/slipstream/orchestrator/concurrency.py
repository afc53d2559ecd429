"""Runs coroutines concurrently, and retries requests to an engine after its death and restart."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from slipstream.engine_protocols import Generates
from slipstream.errors import DeadlineError, EngineError

T = TypeVar("T")

_PATIENCE_S = 15.0
"""How long a living engine may refuse requests: a dying one takes a moment to end."""
_PAUSE_S = 0.25


async def all_of(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all coroutines concurrently and return their results in order. The first failure cancels the others and is
    raised itself, not in an exception group."""
    tasks: list[asyncio.Task[T]] = []
    async with task_group() as group:
        tasks += [group.create_task(each) for each in work]
    return [task.result() for task in tasks]


@contextlib.asynccontextmanager
async def task_group() -> AsyncGenerator[asyncio.TaskGroup]:
    """`asyncio.TaskGroup`, but its first failure is raised itself, not in an exception group."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as failures:
        raise _first(failures) from None


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    first = failures.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


async def retry_on_restart(engine: Generates, attempt: Callable[[], Awaitable[T]]) -> T:
    """Await `attempt`, again whenever the engine died meanwhile and was restarted.

    Raises the engine's own error when it may not be restarted, does not answer within its deadline, or is alive and
    keeps refusing.
    """
    refused_since: float | None = None
    while True:
        num_restarts = engine.num_restarts
        try:
            return await attempt()
        except DeadlineError:
            raise
        except EngineError:
            await engine.revive()
            if engine.num_restarts > num_restarts:
                refused_since = None
                continue
            refused_since = refused_since or time.monotonic()
            if time.monotonic() - refused_since > _PATIENCE_S:
                raise
        await asyncio.sleep(_PAUSE_S)
