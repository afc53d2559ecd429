"""Starts an environment process and talks to it; the other end is `inside/host.py`.

The process is below a guard (`processes/guarded.py`) and gets none of the run's keys. Its output goes into a log,
if there is one, and the output's end into error messages. Every wait has a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from slipstream.envs.hosted import inside
from slipstream.envs.scoring.process import worker_environment
from slipstream.patience import lasting
from slipstream.processes import guard
from slipstream.processes.channel import ChannelClosed, Garbage
from slipstream.processes.files import open_own
from slipstream.processes.guarded import Guarded, ending
from slipstream.processes.launchers import Resources

LOAD_TIMEOUT_S = 600.0
"""Time limit of loading an environment; it may fetch data."""
MAX_LOG_BYTES = 16 * 2**20
MAX_PROCESSES = 4096
"""Most processes below an environment process, for all its episodes together."""
_HOST = Path(str(inside.__file__)).with_name("host.py")
_NOT_FOR_OTHERS = ("PYTHONPATH", "PYTHONHOME", "PYTHONEXECUTABLE", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_PRELOAD")
"""Variables of this interpreter; they would mislead another."""
_MAX_FRAME_BYTES = 64 * 2**20
_OUTPUT_WAIT_S = 2.0

LAST = ("done", "raised", "cancelled")
"""An episode's last frame."""

Frame = dict[str, Any]


class HostDied(Exception):
    """The environment process ended, or wrote unreadable data; the text says how, and has its last output."""


class HostFailed(Exception):
    """The environment process refuses; the text is its own, and `details` a traceback, if there is one."""

    def __init__(self, message: str, details: str) -> None:
        super().__init__(message)
        self.details = details


def host_environment(python: str, names: Iterable[str], own: Mapping[str, str]) -> dict[str, str]:
    """The variables of `own` for an environment process with the interpreter `python`."""
    found = worker_environment(names, own)
    if os.path.realpath(os.path.dirname(python)) != os.path.realpath(os.path.dirname(sys.executable)):
        for name in _NOT_FOR_OTHERS:
            found.pop(name, None)
        # Programs from its packages come before others.
        found["PATH"] = os.pathsep.join([os.path.dirname(python), found.get("PATH", os.defpath)])
    return found


class Host:
    """One environment process, in one event loop."""

    def __init__(self, process: Guarded) -> None:
        self._process = process
        self._frames: dict[str, asyncio.Queue[Frame | None]] = {"": asyncio.Queue()}
        self._end = ""
        self.held_up_until = 0.0
        """By the monotonic clock; see `is_held_up`."""
        self.facts: Frame = {}
        """Its facts of the environment, sent after loading."""
        self.num_ended = 0
        """Episodes ended by it."""
        self.on_blocks: Callable[[Frame], None] = lambda frame: None
        """Gets the place of a synchronous call that blocks it, and the end of the block."""
        self._reading = lasting(self._read())

    @classmethod
    async def start(
        cls,
        python: str,
        setup: Frame,
        *,
        variables: Iterable[str] = (),
        log: Path | None = None,
        user_namespace: bool = True,
    ) -> Host:
        """Starts a process and waits until it has loaded the environment. Raises `HostDied`, `HostFailed`, or
        `TimeoutError`."""
        resources = Resources(python=python, max_processes=MAX_PROCESSES, user_namespace=user_namespace)
        environment = host_environment(python, variables, os.environ)
        process = await Guarded.start(
            _HOST, environment, resources, max_bytes=_MAX_FRAME_BYTES, on_output=OutputLog(log).write
        )
        host = cls(process)
        try:
            host.facts = await host.ask(setup, LOAD_TIMEOUT_S)
        except BaseException:
            await host.kill()
            raise
        return host

    @property
    def is_held_up(self) -> bool:
        """Whether a call blocks it and is going to be interrupted: it is not hanging."""
        return time.monotonic() < self.held_up_until

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return not self._end

    async def ask(self, frame: Frame, timeout_s: float) -> Frame:
        """Sends a request outside episodes, and returns the answer; one at a time. Raises as `start`."""
        self._send(frame)
        async with asyncio.timeout(timeout_s):
            answer = await self.next_of("")
        if answer["op"] == "failed":
            raise HostFailed(answer["message"], answer.get("details") or "")
        return answer

    def begin(self, episode: str, task: Any) -> None:
        """Starts an episode."""
        self._frames[episode] = asyncio.Queue()
        self._send({"op": "run", "id": episode, "task": task})

    def answer(self, episode: str, frame: Frame) -> None:
        """Answers a `chat` frame."""
        self._send({**frame, "id": episode})

    def finished(self, episode: str) -> None:
        """The episode has sent its last frame."""
        self._frames.pop(episode, None)
        self.num_ended += 1

    async def cancel(self, episode: str, within_s: float) -> bool:
        """Cancels an episode; false if the process does not confirm it in time. The time begins again while it is held
        up."""
        if not self.alive:
            return True
        self._send({"op": "cancel", "id": episode})
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(within_s):
                        while (await self.next_of(episode))["op"] not in LAST:
                            pass
                    return True
                if not self.is_held_up:
                    return False
        except HostDied:
            return True
        finally:
            self.finished(episode)

    def _send(self, frame: Frame) -> None:
        self._process.channel.send(json.dumps(frame).encode())

    async def next_of(self, episode: str) -> Frame:
        """The episode's next frame, or the answer to `ask` for "". Raises `HostDied`."""
        frame = await self._frames[episode].get() if not self._end or self._frames[episode].qsize() else None
        if frame is None:
            raise HostDied(f"{self._end}{self.last_lines()}")
        return frame

    async def _read(self) -> None:
        try:
            while True:
                frame = cast("Frame", json.loads(await self._process.channel.receive()))
                if frame.get("op") == "blocks":
                    self.on_blocks(frame)
                    continue
                queue = self._frames.get(frame.get("id", ""))
                if queue is not None:  # an episode given up may still send frames
                    queue.put_nowait(frame)
        except (Garbage, ValueError, AttributeError):  # something else wrote to the channel
            how = "wrote what cannot be read"
        except ChannelClosed:
            await self._process.has_ended()
            code = self._process.poll()
            how = "closed its pipe" if code is None else _ended(code)
        await self._process.output_ended()
        self._end = self._end or f"the environment process {how}"
        for queue in self._frames.values():
            queue.put_nowait(None)

    def last_lines(self) -> str:
        """Its last output, indented; empty if it wrote nothing."""
        lines = self._process.tail.decode(errors="replace").strip().splitlines()[-12:]
        return "".join(f"\n    {line}" for line in lines)

    async def stop(self) -> None:
        """Closes its input, the signal to end; kills it if it does not end."""
        await self._finish("was stopped", self._process.stop)

    async def kill(self, why: str = "was killed") -> None:
        """Kills the process and all its descendants. A hanging process writes its stacks first."""
        await self._finish(why, self._process.kill)

    async def _finish(self, why: str, end: Callable[[], Awaitable[None]]) -> None:
        self._end = self._end or f"the environment process {why}"
        await end()
        for queue in self._frames.values():
            queue.put_nowait(None)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_OUTPUT_WAIT_S):
                await asyncio.gather(self._reading, return_exceptions=True)


class OutputLog:
    """Keeps the process's output in a file, if there is one, up to `MAX_LOG_BYTES`."""

    def __init__(self, path: Path | None) -> None:
        self._handle = -1
        self._written = 0
        if path is not None:
            with contextlib.suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                self._handle = open_own(path, os.O_WRONLY | os.O_APPEND)

    def write(self, chunk: bytes) -> None:
        """Append; at the bound, and at the end (an empty chunk), the file is closed."""
        if self._handle < 0:
            return
        self._written += len(chunk)
        is_full = self._written >= MAX_LOG_BYTES
        with contextlib.suppress(OSError):
            os.write(self._handle, chunk + b"\n(further output is left out)\n" if is_full else chunk)
        if is_full or not chunk:
            os.close(self._handle)
            self._handle = -1


def _ended(code: int) -> str:
    if code == guard.TOO_MANY:
        return f"was killed, as it had more than {MAX_PROCESSES} processes"
    return f"ended with {ending(code, '')}"
