"""Keeps the process of one environment: starts it at the first request, plays episodes, replaces a dead or hanging
one."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from slipstream.envs.base import Environment
from slipstream.envs.hosted.process import LAST, Frame, Host, HostDied
from slipstream.errors import EnvironmentFault
from slipstream.patience import lasting

LOG = "environment.log"
MAX_DEATHS = 3
"""Most processes to end one after another without a finished episode."""
_CANCEL_S = 5.0


class EnvironmentRaised(Exception):
    """The environment raised, or its process ended; the text has the known facts."""


class EnvironmentBlocked(EnvironmentRaised):
    """A synchronous call of the episode blocked its process for too long, and was interrupted."""


class KeptEnvironment(Environment):
    """An environment with its episodes in kept processes."""

    keepers: Sequence[Keeper]

    @property
    def hung(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """See `Environment`."""
        return next((each.hung for each in self.keepers if each.hung), "")

    async def setup(self) -> None:
        """Starts the missing processes, and sets the environment up in each."""
        await all_of(each.ready() for each in self.keepers if not each.is_up)

    @property
    def log(self) -> Path | None:
        """The file of their output."""
        return self.log_folder and self.log_folder / LOG

    def where(self) -> str:
        """In errors: where its output is."""
        return f"; its output is in {self.log}" if self.log else ""


async def all_of(calls: Iterable[Awaitable[Any]]) -> None:
    """Waits until all have ended, and raises the first failure."""
    for found in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(found, BaseException):
            raise found


class Keeper:
    """One environment process at a time, for the first event loop to ask. `start` starts one; `where` gives
    the end of an error message, with the path of its output."""

    def __init__(self, name: str, start: Callable[[], Awaitable[Host]], where: Callable[[], str]) -> None:
        self._name = name
        self._start = start
        self._where = where
        self.host: Host | None = None
        """The process, if there is one."""
        self.hung = ""
        """Stacks of the last process killed because it hung."""
        self.num_playing = 0
        """Episodes under way."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = asyncio.Lock()
        self._deaths = 0
        self._serial = itertools.count()

    @property
    def is_up(self) -> bool:
        """Whether there is a process in this event loop."""
        return self._loop is asyncio.get_running_loop() and self.host is not None and self.host.alive

    async def ready(self) -> Host:
        """The process, started if there is none."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # a process of another event loop ended with it
            self._loop, self.host, self._starting = loop, None, asyncio.Lock()
        async with self._starting:
            if self.host is None or not self.host.alive:
                self.host = await self._start()
            return self.host

    async def play(self, task: Any, answer: Callable[[Frame], Awaitable[Frame]]) -> Frame:
        """Plays an episode; `answer` answers its requests, several at once if it makes several. Returns its last frame:
        `done`, `raised` or `cancelled`. Raises `EnvironmentRaised` if the process ends, and the errors of `answer`."""
        self.num_playing += 1
        try:
            return await self._play(await self.ready(), task, answer)
        finally:
            self.num_playing -= 1

    async def _play(self, host: Host, task: Any, answer: Callable[[Frame], Awaitable[Frame]]) -> Frame:
        name = f"episode-{next(self._serial)}"
        host.begin(name, task)
        try:
            frame = await self._talk(host, name, answer)
        except HostDied as death:
            await self._lost(host)
            raise EnvironmentRaised(str(death)) from None
        except BaseException:
            # Confirmed even if this coroutine is cancelled again: a hung process must be found out.
            await asyncio.shield(lasting(self._give_up(host, name)))
            raise
        host.finished(name)
        self._deaths = 0
        return frame

    async def _talk(self, host: Host, name: str, answer: Callable[[Frame], Awaitable[Frame]]) -> Frame:
        async def respond(frame: Frame) -> None:
            host.answer(name, {**await answer(frame), "call": frame["call"]})

        responding: set[asyncio.Task[None]] = set()
        coming: asyncio.Task[Frame] | None = None
        try:
            while True:
                coming = coming or asyncio.create_task(host.next_of(name))
                done, _ = await asyncio.wait({coming, *responding}, return_when=asyncio.FIRST_COMPLETED)
                for task in done & responding:
                    task.result()
                responding -= done
                if coming in done:
                    frame, coming = coming.result(), None
                    if frame["op"] in LAST:
                        return frame
                    responding.add(asyncio.create_task(respond(frame)))
        finally:  # also requests the environment no longer waits for
            left: list[asyncio.Task[Any]] = [*responding, *([coming] if coming is not None else [])]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    async def close(self) -> None:
        """Ends the process."""
        host, self.host = self.host, None
        if host is not None:
            await host.stop()

    async def _give_up(self, host: Host, episode: str) -> None:
        if not await host.cancel(episode, _CANCEL_S):
            await host.kill(f"hung for {_CANCEL_S:g} s when an episode was given up, and was killed")
            self.hung = host.last_lines()
            await self._lost(host)

    async def _lost(self, host: Host) -> None:
        """Counts the death of a process, once; raises if it is one too many."""
        if host is not self.host:
            return
        self.host = None
        await host.kill()
        self._deaths = 1 if host.num_ended else self._deaths + 1
        if self._deaths > MAX_DEATHS:
            raise EnvironmentFault(
                f"{self._deaths} environment processes of {self._name} ended one after another without ending an "
                f"episode: correct the environment{self._where()}"
            )
