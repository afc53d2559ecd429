"""One reward worker as a process, and what is said to it. The other half is `scorer_worker.py`.

Frames of four bytes of length and a msgpack record go over its standard streams: `Setup` first, then `Request`s,
each answered in order by an `Answer` that is written as soon as there is one. An answer repeats its request's `id`,
which nobody can guess, so what another process writes to the pipe is taken for no reward. Every wait here has a
deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from typing import Literal

import msgspec

from slipstream.envs.base import Score
from slipstream.records import Task

_STDERR_TAIL_BYTES = 4096
_STOP_TIMEOUT_S = 1.0
_LAST_WORDS_S = 2.0
_MORE_WORDS_S = 0.05
_LATE_S = 0.25


class Setup(msgspec.Struct, frozen=True):
    """A worker's first frame."""

    config_json: str
    parent_pid: int
    memory_limit_bytes: int | None


class Request(msgspec.Struct, frozen=True, array_like=True):
    """Grade this."""

    task: Task
    completion: str
    id: str


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """A worker's answer to its setup (no score) or to a request."""

    kind: Literal["ready", "score", "failed"]
    score: Score | None = None
    message: str = ""
    details: str = ""
    id: str = ""


def frame(record: msgspec.Struct) -> bytes:
    """A record as it goes over the pipe."""
    data = msgspec.msgpack.encode(record)
    return len(data).to_bytes(4, "big") + data


class WorkerDied(Exception):
    """The worker's pipe closed; the text says how the process ended."""


class Worker:
    """One worker process; only ever used by one coroutine."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._stdin = process.stdin
        self._stdout = process.stdout
        self._decoder = msgspec.msgpack.Decoder(Answer)
        self._tail = b""
        self._heard = asyncio.Event()
        self._drain = asyncio.create_task(self._keep_tail())

    @classmethod
    async def start(cls, setup: Setup) -> Worker:
        """A process that was sent its setup; its first answer says whether the environment could be made."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # a file in the current folder does not hide a module of the standard library
            "-m",
            "slipstream.envs.scorer_worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the run, and killing takes along what the reward started
        )
        worker = cls(process)
        worker.send(frame(setup))
        return worker

    @property
    def alive(self) -> bool:
        """Whether the process has not ended yet."""
        return self._process.returncode is None

    def send(self, data: bytes) -> None:
        """Start to write `data`; a pipe that is broken shows itself when the answer is read."""
        with contextlib.suppress(ConnectionError, RuntimeError):
            self._stdin.write(data)

    async def receive(self, timeout_s: float) -> Answer:
        """The next answer. Raises `TimeoutError`, or `WorkerDied`.

        A deadline that was met late means that this process was busy, not the worker: it is waited out once more.
        """
        loop = asyncio.get_running_loop()
        for chance in (1, 2):
            due = loop.time() + timeout_s
            try:
                async with asyncio.timeout_at(due):
                    length = int.from_bytes(await self._stdout.readexactly(4), "big")
                    return self._decoder.decode(await self._stdout.readexactly(length))
            except asyncio.IncompleteReadError:
                raise WorkerDied(await self._how_it_ended()) from None
            except msgspec.DecodeError:  # the reward wrote to a pipe that is not its own
                await self.kill()
                raise WorkerDied("an answer that cannot be read") from None
            except TimeoutError:
                if chance == 2 or loop.time() - due < _LATE_S:
                    raise
        raise AssertionError("unreachable")

    async def _how_it_ended(self) -> str:
        await self.kill()
        code = self._process.returncode or 0
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    @property
    def stderr_tail(self) -> str:
        """The last that the worker wrote to its output streams."""
        return self._tail.decode(errors="replace")

    async def _keep_tail(self) -> None:
        assert self._process.stderr is not None
        while chunk := await self._process.stderr.read(65536):
            self._tail = (self._tail + chunk)[-_STDERR_TAIL_BYTES:]
            self._heard.set()
        self._heard.set()

    async def stop(self) -> None:
        """Close its input, which it takes for its end; kill it when it does not."""
        self._stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await self._process.wait()
        await self.kill()

    async def kill(self) -> None:
        """Kill the worker and everything it started; returns when it is gone. Its last words are where it hung."""
        with contextlib.suppress(TimeoutError, ProcessLookupError):
            async with asyncio.timeout(_LAST_WORDS_S):
                if self.alive and not self._stdout.at_eof() and not self._drain.done():
                    self._heard.clear()
                    self._process.send_signal(signal.SIGUSR1)
                    # A busy machine may not let it speak at once, and it speaks in pieces.
                    await self._heard.wait()
                    await asyncio.sleep(_MORE_WORDS_S)
                else:
                    await self._process.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._stdin.close()
        await self._process.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await self._drain
