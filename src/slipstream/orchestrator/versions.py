"""Which weights the engine serves, and the proof that it does.

Guarantees: `current` advances only when every parameter's fingerprint in the engine matches the ticket; waiting
for a version has a deadline and says who was waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import AbstractAsyncContextManager

from slipstream.errors import DeadlineError
from slipstream.records import ApplyReport, Ticket, Version
from slipstream.weights import Receiver, check_report
from slipstream.weights.base import Fence


class Versions:
    """Applies tickets one at a time and gates the making of rollouts."""

    def __init__(self, receiver: Receiver, *, apply_timeout_s: float, fence: Fence | None = None) -> None:
        self._receiver = receiver
        self._fence = fence
        self._standing: contextlib.AsyncExitStack | None = None
        self._turns: AbstractAsyncContextManager[None] = asyncio.Lock()
        self._apply_timeout_s = apply_timeout_s
        self._changed = asyncio.Condition()
        self._released = -1
        self.current: Version | None = None

    async def fence(self) -> None:
        """Have the engine stand still until the next `apply`, where the bridge asks for it: the optimizer is about to
        write weights that the engine computes with."""
        if self._fence is None or self._standing is not None:
            return
        async with contextlib.AsyncExitStack() as standing:
            await standing.enter_async_context(self._turns)
            await self._fence(self._apply_timeout_s)
            self._standing = standing.pop_all()

    async def apply(self, ticket: Ticket) -> ApplyReport:
        """Have the engine take a version; raises `WeightsError` unless it then holds exactly that."""
        standing, self._standing = self._standing, None
        async with standing or self._turns:
            report = await self._receiver.apply(ticket, self._apply_timeout_s)
        check_report(report, ticket)
        async with self._changed:
            self.current = ticket.version
        return report

    def allow_in_flight(self) -> None:
        """From now on versions are applied while rollouts are being made, and no longer between two batches."""
        self._turns = contextlib.nullcontext()

    def generating(self) -> AbstractAsyncContextManager[None]:
        """Held while a batch is made."""
        return self._turns

    async def release(self, step: int) -> None:
        """Rollouts may now be made with version `step`."""
        async with self._changed:
            self._released = max(self._released, step)
            self._changed.notify_all()

    async def wait_for(self, step: int, timeout_s: float | None) -> Version:
        """The current version, once `step` has been released."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self._released >= step)
        except TimeoutError:
            raise DeadlineError(
                f"the trainer did not release version {step} within {timeout_s:.0f} s (it is at {self._released})"
            ) from None
        assert self.current is not None
        return self.current
