"""Starts a worker process, which grades or runs tools, and talks to it. The other end is `worker.py`.

Frames (four bytes of length and a record) go over its standard streams: `Setup` first, then `Request`s. Each gets an
`Answer` as soon as there is one, in order except for coroutines, which first answer `begun`. An answer repeats its
request's random `id`, so that data that another process writes to the pipe is not taken for an answer. A guard
(`guard.py`) is the worker's parent and ends it with all its descendants. Every wait has a deadline.
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
from slipstream.envs.base import Episode, Score, ToolResult
from slipstream.processes import guard
from slipstream.records import Task, ToolCall

_STDERR_TAIL_BYTES = 4096
_OUTPUT_WAIT_S = 2.0
_MORE_OUTPUT_S = 0.05
_LATE_S = 0.25
_POLL_S = 0.005
_MAX_ANSWER_BYTES = 64 * 2**20
_LENGTH = 4
_CHUNK = 1 << 16

PASSED_ON = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|TERM|TZ|TMPDIR|TMP|TEMP|LANG|LANGUAGE|LC_.*|XDG_.*|PYTHON.*|VIRTUAL_ENV|CONDA_PREFIX"
    r"|LD_LIBRARY_PATH|LD_PRELOAD|SSL_CERT_(FILE|DIR)|CUDA_.*|NVIDIA_VISIBLE_DEVICES|(OMP|MKL|OPENBLAS|NUMEXPR|KMP)_.*"
    r"|TOKENIZERS_PARALLELISM|HF_(HOME|HUB_CACHE|HUB_OFFLINE|DATASETS_CACHE|DATASETS_OFFLINE)|TRANSFORMERS_OFFLINE"
    r"|COVERAGE_PROCESS_START|SLIPSTREAM_COVERAGE"
)
"""Environment variables that every worker gets; none holds a key or token."""

create_process = asyncio.create_subprocess_exec
"""What starts a worker. Tests put a function in its place that forks a process which has imported all of it already."""


class Setup(msgspec.Struct, frozen=True):
    """A worker's first frame."""

    config_json: str
    timeout_s: float
    concurrency: int
    """Coroutines that it runs at once."""
    memory_limit_bytes: int
    max_processes: int
    """Most processes that it may have started and that live."""
    user_namespace: bool
    environment: PythonObject | None = None
    """What the config's name stands for, where a Python caller passed it."""


class Request(msgspec.Struct, frozen=True, array_like=True):
    """An episode or a group of them to grade, a tool to run, or the end of a coroutine that was begun with this id."""

    id: str
    kind: Literal["score", "group", "tool", "cancel"]
    task: Task
    episodes: tuple[Episode, ...] = ()
    call: ToolCall = ToolCall("")


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """A worker's answer to its setup (`ready`, `failed`) or to a request: the scores, in order, or the tool's result. A
    coroutine answers `begun` first; `died`: a process that did nothing else ended."""

    kind: Literal["ready", "begun", "score", "tool", "failed", "timeout", "died"]
    scores: tuple[Score, ...] = ()
    result: ToolResult | None = None
    message: str = ""
    details: str = ""
    id: str = ""
    has_tools: bool = False
    """With `ready`: whether the environment has tools."""
    is_apart: bool = False
    """With `ready`: whether the worker has a user namespace of its own."""

    def answers(self, request: Request) -> bool:
        """Whether what it holds is of the kind that was asked for."""
        if self.kind == "score":
            return request.kind != "tool" and len(self.scores) == len(request.episodes)
        return (self.result is not None and request.kind == "tool") if self.kind == "tool" else True


_Record = TypeVar("_Record", Setup, Request, Answer)


def encode(record: msgspec.Struct) -> bytes:
    """Encodes as msgpack; as JSON if a text holds an unpaired surrogate, which only JSON can escape."""
    try:
        return msgspec.msgpack.encode(record)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(record)).encode()


def decode(data: bytes, kind: type[_Record]) -> _Record:
    """Decodes what `encode` wrote. Raises `msgspec.DecodeError`."""
    if data[:1] not in (b"[", b"{"):
        return msgspec.msgpack.decode(data, type=kind)
    try:
        return msgspec.convert(json.loads(data), kind)
    except ValueError as error:
        raise msgspec.DecodeError(str(error)) from error


def frame(record: msgspec.Struct) -> bytes:
    """A record with its length, as sent over the pipe."""
    data = encode(record)
    return len(data).to_bytes(_LENGTH, "big") + data


def worker_environment(names: Iterable[str], own: Mapping[str, str]) -> dict[str, str]:
    """The variables of `own` that a worker gets: `PASSED_ON` and the named ones."""
    named = set(names)
    return {name: value for name, value in own.items() if name in named or PASSED_ON.fullmatch(name)}


class WorkerDied(Exception):
    """The worker's pipe closed; the message says how the process ended."""


class Worker:
    """One worker process; used by one coroutine only."""

    def __init__(self, process: asyncio.subprocess.Process, max_processes: int) -> None:
        self._max_processes = max_processes
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._stdin = process.stdin
        self._stdout = process.stdout
        self._received = bytearray()
        self._is_ending = False
        self._tail = b""
        self._output_seen = asyncio.Event()
        self._drain = asyncio.create_task(self._keep_tail())

    @classmethod
    async def start(cls, setup: Setup, variables: Iterable[str] = (), stacks: Path | None = None) -> Worker:
        """Starts a process and sends its setup; its first answer says whether the environment was constructed.
        `stacks`: see `ScorerPool`."""
        python = sys.executable
        process = await create_process(
            *(python, "-I", "-S", str(Path(guard.__file__)), str(setup.max_processes)),
            guard.NAMESPACE if setup.user_namespace else guard.NO_NAMESPACE,
            # -P: a file in the current folder does not hide a module of the standard library
            *(python, "-P", "-m", "slipstream.envs.scoring.worker"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=worker_environment(variables, os.environ) | ({guard.STACKS: str(stacks)} if stacks else {}),
            start_new_session=True,  # Ctrl-C must reach the run only
        )
        worker = cls(process, setup.max_processes)
        worker.send(frame(setup))
        return worker

    @property
    def alive(self) -> bool:
        """Whether the process is running."""
        return self._process.returncode is None

    @property
    def is_open(self) -> bool:
        """Whether it may be sent requests: it has not ended, as far as is known, and is not being killed."""
        return not self._is_ending and not self._stdout.at_eof()

    def send(self, data: bytes) -> None:
        """Starts to write `data`; a broken pipe is noticed when the answer is read."""
        with contextlib.suppress(ConnectionError, RuntimeError):
            self._stdin.write(data)

    async def receive(self, due: float, timeout_s: float) -> Answer:
        """The next answer. Raises `TimeoutError` if there is none by `due` (the loop's clock), or `WorkerDied`.
        Cancelling it loses no data. If the deadline passed because this process was busy, it waits another
        `timeout_s`."""
        loop = asyncio.get_running_loop()
        for chance in (1, 2):
            try:
                while (answer := self._take_answer()) is None:
                    async with asyncio.timeout_at(due):
                        await self._read()
                return answer
            except (asyncio.IncompleteReadError, ConnectionError):
                raise WorkerDied(await self._how_it_ended()) from None
            except msgspec.DecodeError:  # the reward wrote to the protocol's pipe
                await self.kill()
                raise WorkerDied("an answer that cannot be read") from None
            except TimeoutError:
                if chance == 2 or loop.time() - due < _LATE_S:
                    raise
                due = loop.time() + timeout_s
        raise AssertionError("unreachable")

    async def _read(self) -> None:
        """Waits for data and takes what is there, perhaps several answers."""
        data = await self._stdout.read(_CHUNK)
        if not data:
            raise asyncio.IncompleteReadError(bytes(self._received), None)
        self._received += data

    def _take_answer(self) -> Answer | None:
        """The first answer among the data that was read; None while it is not complete."""
        if len(self._received) < _LENGTH:
            return None
        length = int.from_bytes(self._received[:_LENGTH], "big")
        if length > _MAX_ANSWER_BYTES:
            raise msgspec.DecodeError
        end = _LENGTH + length
        if len(self._received) < end:
            return None
        data = bytes(self._received[_LENGTH:end])
        del self._received[:end]
        return decode(data, Answer)

    async def _how_it_ended(self) -> str:
        by_itself = await self._has_ended(_OUTPUT_WAIT_S)
        await self.kill()
        code = self._process.returncode or 0
        # A guard that stands still for long tells later, but not of a worker that it has to end.
        if not by_itself and code in (0, -signal.SIGKILL):
            return "a closed pipe"
        if code == guard.TOO_MANY:
            return f"more than {self._max_processes} processes (environment.reward_processes)"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    @property
    def stderr_tail(self) -> str:
        """The end of what the worker wrote to its output streams."""
        return self._tail.decode(errors="replace")

    async def _keep_tail(self) -> None:
        assert self._process.stderr is not None
        with contextlib.suppress(ConnectionError):
            while chunk := await self._process.stderr.read(65536):
                self._tail = (self._tail + chunk)[-_STDERR_TAIL_BYTES:]
                self._output_seen.set()
        self._output_seen.set()

    async def stop(self) -> None:
        """Closes its input, which tells it to end; kills it if it does not."""
        self._stdin.close()
        await self._has_ended(guard.GRACE_S)
        await self._end()

    async def kill(self) -> None:
        """Kills the worker and all its descendants and waits for their end. What it wrote last, which shows where it
        hung, is in `stderr_tail`."""
        self._is_ending = True
        if self.alive and not self._stdout.at_eof() and not self._drain.done():
            self._output_seen.clear()
            self._signal(signal.SIGUSR1)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_OUTPUT_WAIT_S):
                    # On a busy machine its output comes late and in pieces.
                    await self._output_seen.wait()
                    await asyncio.sleep(_MORE_OUTPUT_S)
        await self._end()

    async def _end(self) -> None:
        self._signal(signal.SIGCONT)
        self._signal(guard.END)
        self._stdin.close()
        if not await self._has_ended(guard.END_S + _OUTPUT_WAIT_S):
            self._signal(signal.SIGKILL)
            await self._has_ended(_OUTPUT_WAIT_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_OUTPUT_WAIT_S):
                await self._drain
        cast("Any", self._process)._transport.close()  # even if another process holds the other ends

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def _has_ended(self, within_s: float) -> bool:
        """Whether the guard ends in time. Not `wait`, which in asyncio also waits for other holders of its pipes."""
        loop = asyncio.get_running_loop()
        due = loop.time() + within_s
        while self.alive and loop.time() < due:
            await asyncio.sleep(_POLL_S)
        return not self.alive
