"""The LoRA adapters that an engine holds: the one that new requests are computed with, and the one before it, which
requests that were running when the newer one came go on with, to their end."""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import Generator

from slipstream.inference.plugin.hosts import Host, LoadedAdapter
from slipstream.records import Ticket


class Adapters:
    """At most two, each under a name and a number that no other ever had. More are held only after a failure."""

    def __init__(self, host: Host) -> None:
        self.current: LoadedAdapter | None = None
        """What every request that comes is computed with."""
        self._host = host
        self._old: LoadedAdapter | None = None
        self._stray: list[LoadedAdapter] = []
        """To be removed before the next is loaded: its removal failed, or the load that it was part of."""
        self._users: collections.Counter[int] = collections.Counter()
        self._ended = asyncio.Event()
        self._num_loaded = 0

    @property
    def ids(self) -> list[int]:
        """Of those that the engine should hold, the current one first."""
        return [adapter.id for adapter in (self.current, self._old, *self._stray) if adapter is not None]

    @contextlib.contextmanager
    def used(self, adapter: LoadedAdapter) -> Generator[None]:
        """While a request is computed with it."""
        self._users[adapter.id] += 1
        try:
            yield
        finally:
            self._users[adapter.id] -= 1
            self._ended.set()

    async def until_room(self) -> None:
        """Wait for the last request of the old one: it has its deadline, and what waits here ends with its client."""
        while self._old is not None and self._users[self._old.id]:
            self._ended.clear()
            await self._ended.wait()

    async def load(self, ticket: Ticket) -> None:
        """Put the ticket's adapter in the place of the old one, by vLLM's own loader; new requests have it."""
        self._num_loaded += 1
        name = f"{ticket.version.name}-{ticket.version.digest}-{self._num_loaded}"
        loaded = LoadedAdapter(name, self._num_loaded, ticket.location)
        if self._old is not None:
            del self._users[self._old.id]
            self._stray.append(self._old)
            self._old = None
        leaving, self._stray = self._stray, [*self._stray, loaded]  # all of them, should anything fail from here on
        # At once: each by itself would wait for the end of a step.
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
