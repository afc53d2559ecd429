"""The trainer's side of a real `run-api`: register, poll once so that environments may begin, then poll for batches.

The run polls only while it waits for groups. So the queue there tells environments how far they are ahead.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import aiohttp
from pydantic import ValidationError

from slipstream.atropos.groups import Refused
from slipstream.atropos.protocol import Registration, ScoredData
from slipstream.errors import EnvironmentFault, one_line

_POLL_S = 0.25
_REQUEST_S = 60.0
_PAUSE_S = 1.0


class RunApi:
    """Polls a `run-api` as its trainer."""

    def __init__(
        self,
        url: str,
        registration: Registration,
        *,
        token: str = "",
        patience_s: float,
        is_wanted: Callable[[], bool],
        take_in: Callable[[ScoredData, str], None],
        warn: Callable[[str], None],
    ) -> None:
        """`is_wanted`: whether the run waits for groups. `take_in` gets each; it raises `Refused`. `patience_s`: how
        long the server may be away."""
        self._url, self._registration = url.rstrip("/"), registration
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._patience_s = patience_s
        self._is_wanted, self._take_in, self._warn = is_wanted, take_in, warn

    async def run(self) -> None:
        """Register, and pass groups on until cancelled. Raises `EnvironmentFault`."""
        timeout = aiohttp.ClientTimeout(total=_REQUEST_S)
        async with aiohttp.ClientSession(headers=self._headers, timeout=timeout) as session:
            await self._ask(session, "POST", "/register", json=self._registration.model_dump())
            info = await self._ask(session, "GET", "/info")
            if info["batch_size"] != self._registration.batch_size:
                self._warn(
                    f"{self._url} keeps an earlier trainer's registration, with {info['batch_size']} sequences in a "
                    f"batch and not {self._registration.batch_size}: restart run-api for each run"
                )
            self._pass_on(await self._batch(session))
            while True:
                batch = await self._batch(session) if self._is_wanted() else None
                if batch is None:
                    await asyncio.sleep(_POLL_S)
                else:
                    self._pass_on(batch)

    async def _batch(self, session: aiohttp.ClientSession) -> list[Any] | None:
        answer = await self._ask(session, "GET", "/batch")
        if answer.get("status") == "error":
            raise EnvironmentFault(
                f"{self._url} takes no trainer any more, as a group came before the first one registered "
                f"({answer.get('message')}): restart run-api, then the run, then the environments"
            )
        return answer["batch"]

    def _pass_on(self, batch: list[Any] | None) -> None:
        for group in batch or ():
            try:
                data = ScoredData.model_validate(group)
            except ValidationError as error:
                self._warn(f"{self._url} sent a group of another form: {one_line(error)}")
                continue
            with contextlib.suppress(Refused):  # counted
                self._take_in(data, "")

    async def _ask(self, session: aiohttp.ClientSession, method: str, path: str, **options: Any) -> Any:
        """The answer; asked again while the server is away."""
        until = time.monotonic() + self._patience_s
        while True:
            try:
                async with session.request(method, self._url + path, **options) as answer:
                    answer.raise_for_status()
                    return await answer.json()
            except (aiohttp.ClientError, TimeoutError) as error:
                if time.monotonic() > until:
                    raise EnvironmentFault(
                        f"{self._url}{path} did not answer for {self._patience_s:g} s ({one_line(error)}): start "
                        "run-api there, or correct environment.settings.url"
                    ) from error
            await asyncio.sleep(_PAUSE_S)
