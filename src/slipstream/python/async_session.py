"""A session for coroutines: each call runs in the session's own thread, so an event loop, such as a notebook's,
goes on meanwhile.

A cancelled call goes on in the thread until it has ended; the next one waits for it, and the end of the session
ends its waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

from slipstream.python.groups import Trained
from slipstream.python.session import Session
from slipstream.records import Message, Rollout, Task

if TYPE_CHECKING:
    from slipstream.trainer.chosen_loss import Loss
    from slipstream.trainer.learner import Scores

T = TypeVar("T")
P = ParamSpec("P")


class NewSession(Session):
    """A session before its start: `with` opens it for calls, `async with` for the same calls as coroutines."""

    _for_coroutines: AsyncSession | None = None

    async def __aenter__(self) -> AsyncSession:
        """Start the engine and load the model; each call runs in a thread of the session's."""
        self._for_coroutines = await AsyncSession(self).begin()
        return self._for_coroutines

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End everything; a cancelled call in the thread ends first."""
        assert self._for_coroutines is not None
        await self._for_coroutines.end(kind, error, trace)


class AsyncSession:
    """The calls of `Session` as coroutines; one at a time is carried out."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._thread = ThreadPoolExecutor(1, "slipstream-session")

    async def begin(self) -> Self:
        """Open the session."""
        try:
            await self._do(self._session.__enter__)
        except BaseException:
            self._thread.shutdown(wait=False)
            raise
        return self

    async def end(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the session."""
        self._session.stop_waiting()
        try:
            await asyncio.shield(self._do(self._session.__exit__, kind, error, trace))
        finally:
            self._thread.shutdown(wait=False)

    async def _do(self, call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: call(*arguments, **named))

    @property
    def step(self) -> int:
        """See `Session`."""
        return self._session.step

    @property
    def folder(self) -> Path:
        """See `Session`."""
        return self._session.folder

    @property
    def tasks(self) -> list[Task]:
        """See `Session`."""
        return self._session.tasks

    @property
    def eval_tasks(self) -> list[Task]:
        """See `Session`."""
        return self._session.eval_tasks

    @property
    def state(self) -> dict[str, Any]:
        """See `Session`."""
        return self._session.state

    async def resume(self) -> int:
        """See `Session`."""
        return await self._do(self._session.resume)

    async def rollouts(
        self, tasks: Iterable[Task | Mapping[str, Any]] | None = None, n: int | None = None
    ) -> list[list[Rollout]]:
        """See `Session`."""
        return await self._do(self._session.rollouts, tasks, n)

    async def stream(
        self, tasks: Iterable[Task | Mapping[str, Any]] | None = None, n: int | None = None
    ) -> AsyncGenerator[list[list[Rollout]]]:
        """See `Session`; for `async for`."""
        batches = self._session.stream(tasks, n)
        try:
            while (groups := await self._do(next, batches, None)) is not None:
                yield groups
        finally:
            await self._do(batches.close)

    async def train(self, data: Trained, loss: Loss | None = None) -> dict[str, float]:
        """See `Session`."""
        return await self._do(self._session.train, data, loss)

    async def prompt_tokens(self, messages: str | Sequence[Message | Mapping[str, Any]]) -> list[int]:
        """See `Session.prompt_tokens`."""
        return await self._do(self._session.prompt_tokens, messages)

    async def forward(self, data: Trained) -> Scores:
        """See `Session`."""
        return await self._do(self._session.forward, data)

    async def credit(self, groups: Trained) -> list[float]:
        """See `Session`."""
        return await self._do(self._session.credit, groups)

    async def sync(self) -> dict[str, float]:
        """See `Session`."""
        return await self._do(self._session.sync)

    async def evaluate(self) -> dict[str, float]:
        """See `Session`."""
        return await self._do(self._session.evaluate)

    async def save(self) -> Path:
        """See `Session`."""
        return await self._do(self._session.save)
