"""Applies versions of the weights to the engine, and gates generation by version.

Guarantee: `current` advances only when every parameter's fingerprint in the engine matches the ticket.
"""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import AbstractAsyncContextManager

from slipstream.records import ApplyReport, Ticket, Version
from slipstream.weights import Receiver, check_report
from slipstream.weights.base import Fence


class Versions:
    """Applies one ticket at a time; rollouts wait until their version is released."""

    def __init__(self, receiver: Receiver, *, apply_timeout_s: float, fence: Fence | None = None) -> None:
        self._receiver = receiver
        self._fence = fence
        self._fenced: contextlib.AsyncExitStack | None = None
        """Holds the lock from a fence to the next `apply`."""
        self._fencing = asyncio.Lock()
        self._lock: AbstractAsyncContextManager[None] = asyncio.Lock()
        """Held while a batch is generated or a version applied, unless both may happen at once."""
        self._apply_timeout_s = apply_timeout_s
        self._changed = asyncio.Condition()
        self._released = -1
        self._begun = -1
        self.current: Version | None = None

    async def fence(self) -> None:
        """Pause the engine until the next `apply`, if the bridge asks for it: the optimizer is about to write the
        engine's weights."""
        async with self._fencing, contextlib.AsyncExitStack() as stack:
            if self._fence is not None and self._fenced is None:
                await stack.enter_async_context(self._lock)
                await self._fence(self._apply_timeout_s)
                self._fenced = stack.pop_all()

    async def begin(self, step: int) -> None:
        """Pause the engine as `fence` does, and let the batch of `step` begin: its requests wait in the engine for
        version `step`, the next one."""
        await self.fence()
        async with self._changed:
            self._begun = max(self._begun, step)
            self._changed.notify_all()

    async def apply(self, ticket: Ticket) -> ApplyReport:
        """Have the engine apply a version; raises `WeightsError` unless its fingerprints then match the ticket."""
        async with self._fencing:
            fenced, self._fenced = self._fenced, None
        async with fenced or self._lock:
            report = await self._receiver.apply(ticket, self._apply_timeout_s)
        check_report(report, ticket)
        async with self._changed:
            self.current = ticket.version
        return report

    def allow_in_flight(self) -> None:
        """Allow versions to be applied while rollouts are generated, not only between two batches."""
        self._lock = contextlib.nullcontext()

    def generating(self) -> AbstractAsyncContextManager[None]:
        """The context for generating a batch."""
        return self._lock

    async def release(self, step: int) -> None:
        """Allow rollouts to be made with version `step`."""
        async with self._changed:
            self._released = max(self._released, step)
            self._changed.notify_all()

    async def wait_to_begin(self, step: int, oldest: int) -> Version:
        """Wait until version `oldest` is released or the batch of `step` may begin before; returns the version of its
        first tokens."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._released >= oldest or self._begun >= step)
        assert self.current is not None
        return self.current if self._released >= oldest else Version(self.current.lineage, step)

    @property
    def released(self) -> int:
        """The newest released version; -1 before the first."""
        return self._released

    async def wait_for(self, step: int) -> Version:
        """Wait until version `step` is released, and return the current version. There is no deadline: when the trainer
        ends, so does this wait."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._released >= step)
        assert self.current is not None
        return self.current
