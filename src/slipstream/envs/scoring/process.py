"""One reward worker as a process, and what is said to it. The other half is `worker.py`.

Frames of four bytes of length and a record go over its standard streams: `Setup` first, then `Request`s, each answered
by an `Answer` that is written as soon as there is one, in order but for coroutines, which have `begun` first. An answer
repeats its request's `id`, which nobody can guess, so what another process writes to the pipe is taken for no reward.
A guard (`guard.py`) is the worker's parent and ends it with all that it started. Every wait here has a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import msgspec

from slipstream.config.python_objects import PythonObject
from slipstream.envs.base import Score
from slipstream.envs.scoring import guard
from slipstream.records import Task

_STDERR_TAIL_BYTES = 4096
_LAST_WORDS_S = 2.0
_MORE_WORDS_S = 0.05
_LATE_S = 0.25
_POLL_S = 0.005
_MAX_ANSWER_BYTES = 64 * 2**20
_LENGTH = 4

PASSED_ON = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|TERM|TZ|TMPDIR|TMP|TEMP|LANG|LANGUAGE|LC_.*|XDG_.*|PYTHON.*|VIRTUAL_ENV|CONDA_PREFIX"
    r"|LD_LIBRARY_PATH|LD_PRELOAD|SSL_CERT_(FILE|DIR)|CUDA_.*|NVIDIA_VISIBLE_DEVICES|(OMP|MKL|OPENBLAS|NUMEXPR|KMP)_.*"
    r"|TOKENIZERS_PARALLELISM|HF_(HOME|HUB_CACHE|HUB_OFFLINE|DATASETS_CACHE|DATASETS_OFFLINE)|TRANSFORMERS_OFFLINE"
    r"|COVERAGE_PROCESS_START|SLIPSTREAM_COVERAGE"
)
"""Environment variables that every worker has; no key and no token is among them."""


class Setup(msgspec.Struct, frozen=True):
    """A worker's first frame."""

    config_json: str
    timeout_s: float
    memory_limit_bytes: int
    environment: PythonObject | None = None
    """What the config's name stands for, where a Python caller passed it."""


class Request(msgspec.Struct, frozen=True, array_like=True):
    """Grade this."""

    task: Task
    completion: str
    id: str


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """A worker's answer to its setup (`ready`, `failed`) or to a request. A coroutine has `begun` before it has a
    score; `died` is the end of a process that graded nothing else."""

    kind: Literal["ready", "begun", "score", "failed", "timeout", "died"]
    score: Score | None = None
    message: str = ""
    details: str = ""
    id: str = ""


_Record = TypeVar("_Record", Setup, Request, Answer)


def encode(record: msgspec.Struct) -> bytes:
    """As msgpack; as JSON where a text holds half a surrogate pair, which only JSON's escapes can say."""
    try:
        return msgspec.msgpack.encode(record)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(record)).encode()


def decode(data: bytes, kind: type[_Record]) -> _Record:
    """The record that `encode` wrote. Raises `msgspec.DecodeError`."""
    if data[:1] not in (b"[", b"{"):
        return msgspec.msgpack.decode(data, type=kind)
    try:
        return msgspec.convert(json.loads(data), kind)
    except ValueError as error:
        raise msgspec.DecodeError(str(error)) from error


def frame(record: msgspec.Struct) -> bytes:
    """A record as it goes over the pipe."""
    data = encode(record)
    return len(data).to_bytes(_LENGTH, "big") + data


def worker_environment(names: Iterable[str], own: Mapping[str, str]) -> dict[str, str]:
    """Of the variables `own` those that a worker gets: `PASSED_ON`, and what is named."""
    named = set(names)
    return {name: value for name, value in own.items() if name in named or PASSED_ON.fullmatch(name)}


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
        self._length: int | None = None
        self._tail = b""
        self._heard = asyncio.Event()
        self._drain = asyncio.create_task(self._keep_tail())

    @classmethod
    async def start(cls, setup: Setup, variables: Iterable[str] = ()) -> Worker:
        """A process that was sent its setup; its first answer says whether the environment could be made."""
        python = sys.executable
        process = await asyncio.create_subprocess_exec(
            *(python, "-I", "-S", str(Path(guard.__file__))),
            # -P: a file in the current folder does not hide a module of the standard library
            *(python, "-P", "-m", "slipstream.envs.scoring.worker"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=worker_environment(variables, os.environ),
            start_new_session=True,  # Ctrl-C is for the run
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

    async def receive(self, due: float, timeout_s: float) -> Answer:
        """The next answer. Raises `TimeoutError` when there is none at `due` (of the loop's clock), or `WorkerDied`.
        Nothing is lost when it is cancelled.

        A deadline that was met late means that this process was busy, not the worker: then it waits for `timeout_s`.
        """
        loop = asyncio.get_running_loop()
        for chance in (1, 2):
            try:
                async with asyncio.timeout_at(due):
                    return await self._next_answer()
            except (asyncio.IncompleteReadError, ConnectionError):
                raise WorkerDied(await self._how_it_ended()) from None
            except msgspec.DecodeError:  # the reward wrote to a pipe that is not its own
                await self.kill()
                raise WorkerDied("an answer that cannot be read") from None
            except TimeoutError:
                if chance == 2 or loop.time() - due < _LATE_S:
                    raise
                due = loop.time() + timeout_s
        raise AssertionError("unreachable")

    async def _next_answer(self) -> Answer:
        if self._length is None:
            self._length = int.from_bytes(await self._stdout.readexactly(_LENGTH), "big")
        if self._length > _MAX_ANSWER_BYTES:
            raise msgspec.DecodeError
        data = await self._stdout.readexactly(self._length)
        self._length = None
        return decode(data, Answer)

    async def _how_it_ended(self) -> str:
        by_itself = await self._has_ended(_LAST_WORDS_S)
        await self.kill()
        code = self._process.returncode or 0
        if not by_itself:
            return "a closed pipe"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    @property
    def stderr_tail(self) -> str:
        """The last that the worker wrote to its output streams."""
        return self._tail.decode(errors="replace")

    async def _keep_tail(self) -> None:
        assert self._process.stderr is not None
        with contextlib.suppress(ConnectionError):
            while chunk := await self._process.stderr.read(65536):
                self._tail = (self._tail + chunk)[-_STDERR_TAIL_BYTES:]
                self._heard.set()
        self._heard.set()

    async def stop(self) -> None:
        """Close its input, which it takes for its end; kill it when it does not."""
        self._stdin.close()
        await self._has_ended(guard.GRACE_S)
        await self._end()

    async def kill(self) -> None:
        """Kill the worker and everything it started; returns when it is gone. Its last words are where it hung."""
        if self.alive and not self._stdout.at_eof() and not self._drain.done():
            self._heard.clear()
            self._signal(signal.SIGUSR1)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS_S):
                    # A busy machine may not let it speak at once, and it speaks in pieces.
                    await self._heard.wait()
                    await asyncio.sleep(_MORE_WORDS_S)
        await self._end()

    async def _end(self) -> None:
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)
        self._stdin.close()
        if not await self._has_ended(guard.END_S + _LAST_WORDS_S):
            self._signal(signal.SIGKILL)
            await self._has_ended(_LAST_WORDS_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                await self._drain
        cast("Any", self._process)._transport.close()  # whoever may still hold the other ends of its pipes

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def _has_ended(self, within_s: float) -> bool:
        """Whether the guard ends in time. Not `wait`, which in asyncio also waits for whoever holds its pipes."""
        loop = asyncio.get_running_loop()
        due = loop.time() + within_s
        while self.alive and loop.time() < due:
            await asyncio.sleep(_POLL_S)
        return not self.alive
