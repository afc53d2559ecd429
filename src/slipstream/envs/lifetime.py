"""An environment's setup, once for a run, and its close at the end, both bounded in time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable

from slipstream.config.user_code import place_of
from slipstream.envs.base import Environment
from slipstream.envs.single_turn import shown_settings
from slipstream.errors import EnvironmentFault, SlipstreamError, one_line
from slipstream.patience import is_cancelled

CLOSE_S = 10.0
"""How long `close` may take."""


async def set_up(environment: Environment, timeout_s: float) -> None:
    """Calls `setup`. Raises `EnvironmentFault` if it raises or takes longer than `timeout_s`."""
    limit = asyncio.timeout(None if environment.bounds_itself else timeout_s)
    try:
        async with limit:
            await environment.setup()
    except SlipstreamError:
        raise
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # any error of the user's code
        if isinstance(error, asyncio.CancelledError) and is_cancelled():
            raise
        if isinstance(error, TimeoutError) and limit.expired():
            reason = f"did not return within {timeout_s:g} s (environment.run_timeout_s)"
        else:
            reason = f"raised {one_line(error)} ({place_of(error)}{shown_settings(environment.given_settings)})"
        raise EnvironmentFault(f"setup() of {environment.name} {reason}: correct it") from error


async def shut_down(environment: Environment, warn: Callable[[str], None]) -> None:
    """Calls `close`; `warn` is told if it raises or takes longer than `CLOSE_S`."""
    limit = asyncio.timeout(None if environment.bounds_itself else CLOSE_S)
    try:
        async with limit:
            await environment.close()
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # the user's code; the run's end is worth more
        if isinstance(error, asyncio.CancelledError) and is_cancelled():
            raise
        is_late = isinstance(error, TimeoutError) and limit.expired()
        reason = f"did not return within {CLOSE_S:g} s" if is_late else f"raised {one_line(error)} ({place_of(error)})"
        warn(f"close() of {environment.name} {reason}")


@contextlib.asynccontextmanager
async def in_use(environment: Environment, timeout_s: float, warn: Callable[[str], None]) -> AsyncGenerator[None]:
    """Sets the environment up for the block, and closes it afterwards, even if the setup failed half-way."""
    environment.attach(warn)
    try:
        await set_up(environment, timeout_s)
        yield
    finally:
        await shut_down(environment, warn)
