"""An engine's LoRA adapters: the current one, for new requests, and the one before, for requests
begun with it.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import Callable, Generator

from slipstream.inference.plugin.hosts import Host, LoadedAdapter
from slipstream.records import Ticket

_POLL_S = 0.02


class Adapters:
    """At most two adapters, each with a name and an id, never reused; more only after a failed load."""

    def __init__(self, host: Host, is_used: Callable[[int], bool] = lambda adapter_id: False) -> None:
        """`is_used`: whether further requests, not counted by `used`, are computed with an adapter."""
        self.current: LoadedAdapter | None = None
        """The adapter of new requests."""
        self._host = host
        self._is_used = is_used
        self._old: LoadedAdapter | None = None
        self._stray: list[LoadedAdapter] = []
        """Adapters to remove before the next load: their removal failed, or the load around it."""
        self._users: collections.Counter[int] = collections.Counter()
        self._ended = asyncio.Event()
        self._num_loaded = 0

    @property
    def ids(self) -> list[int]:
        """Ids of the adapters for vLLM to hold, the current one first."""
        return [adapter.id for adapter in (self.current, self._old, *self._stray) if adapter is not None]

    @contextlib.contextmanager
    def used(self, adapter: LoadedAdapter) -> Generator[None]:
        """Counts a request computed with `adapter`, for as long as the block runs."""
        self._users[adapter.id] += 1
        try:
            yield
        finally:
            self._users[adapter.id] -= 1
            self._ended.set()

    async def until_room(self) -> None:
        """Wait for the last request of the old adapter; bounded by the requests' deadlines."""
        while self._old is not None and (self._users[self._old.id] or self._is_used(self._old.id)):
            self._ended.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLL_S):
                    await self._ended.wait()

    async def load(self, ticket: Ticket) -> None:
        """Replace the old adapter with the ticket's, by vLLM's own loader, and make it the current one."""
        self._num_loaded += 1
        name = f"{ticket.version.name}-{ticket.version.digest}-{self._num_loaded}"
        loaded = LoadedAdapter(name, self._num_loaded, ticket.location)
        if self._old is not None:
            del self._users[self._old.id]
            self._stray.append(self._old)
            self._old = None
        leaving, self._stray = self._stray, [*self._stray, loaded]  # all, until everything below has succeeded
        # Concurrently: one after another, each call would wait for the end of a step.
        *removed, is_loaded = await asyncio.gather(
            *(self._host.remove_adapter(adapter) for adapter in leaving),
            self._host.load_adapter(loaded),
            return_exceptions=True,
        )
        for outcome in (*removed, is_loaded):
            if isinstance(outcome, BaseException):
                raise outcome
        self._stray = []
        if not is_loaded:
            raise RuntimeError(f"vLLM refused the adapter in {ticket.location}")
        self._old, self.current = self.current, loaded
