"""Starts a worker process for grading or tools, and talks to it. The other end is `worker.py`.

Records go over its channel: `Setup` first, then `Request`s. Each gets an `Answer` as soon as there is one, in order
except for coroutines: these first answer `begun`. An answer repeats its request's random `id`: other processes' data on
the channel is thus not taken for an answer. The worker is below a guard (`processes/guarded.py`).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from slipstream.config.python_objects import PythonObject
from slipstream.envs.base import Episode, Score, ToolResult
from slipstream.processes import guard
from slipstream.processes.channel import ChannelClosed, Garbage
from slipstream.processes.guarded import Guarded, ending
from slipstream.processes.launchers import Resources
from slipstream.records import Task, ToolCall

_STDERR_TAIL_BYTES = 4096
_LATE_S = 0.25
_MAX_ANSWER_BYTES = 64 * 2**20
MODULE = "slipstream.envs.scoring.worker"

PASSED_ON = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|TERM|TZ|TMPDIR|TMP|TEMP|LANG|LANGUAGE|LC_.*|XDG_.*|PYTHON.*|VIRTUAL_ENV|CONDA_PREFIX"
    r"|LD_LIBRARY_PATH|LD_PRELOAD|SSL_CERT_(FILE|DIR)|CUDA_.*|NVIDIA_VISIBLE_DEVICES|(OMP|MKL|OPENBLAS|NUMEXPR|KMP)_.*"
    r"|TOKENIZERS_PARALLELISM|HF_(HOME|HUB_CACHE|HUB_OFFLINE|DATASETS_CACHE|DATASETS_OFFLINE)|TRANSFORMERS_OFFLINE"
    r"|COVERAGE_PROCESS_START|SLIPSTREAM_COVERAGE"
)
"""Environment variables of every worker; none holds a key or token."""


class Setup(msgspec.Struct, frozen=True):
    """A worker's first frame."""

    config_json: str
    timeout_s: float
    memory_limit_bytes: int
    max_processes: int
    """Most living processes it may have started."""
    user_namespace: bool
    environment: PythonObject | None = None
    """The object behind the config's name, if a Python caller passed it."""


class Request(msgspec.Struct, frozen=True, array_like=True):
    """An episode or a group of them to grade, a tool to run, or the end of the coroutine begun with this id."""

    id: str
    kind: Literal["score", "group", "tool", "cancel"]
    task: Task
    episodes: tuple[Episode, ...] = ()
    call: ToolCall = ToolCall("")


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """A worker's answer to its setup (`ready`, `failed`) or to a request: the scores, in order, or the tool's result. A
    coroutine answers `begun` first; `died`: a process for this request alone ended."""

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
        """Whether it fits the kind of the request."""
        if self.kind == "score":
            return request.kind != "tool" and len(self.scores) == len(request.episodes)
        return (self.result is not None and request.kind == "tool") if self.kind == "tool" else True


_Record = TypeVar("_Record", Setup, Request, Answer)


def encode(record: msgspec.Struct) -> bytes:
    """Encodes as msgpack; as JSON if a text holds an unpaired surrogate: only JSON can escape it."""
    try:
        return msgspec.msgpack.encode(record)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(record)).encode()


def decode(data: bytes, kind: type[_Record]) -> _Record:
    """Decodes the output of `encode`. Raises `msgspec.DecodeError`."""
    if data[:1] not in (b"[", b"{"):
        return msgspec.msgpack.decode(data, type=kind)
    try:
        return msgspec.convert(json.loads(data), kind)
    except ValueError as error:
        raise msgspec.DecodeError(str(error)) from error


def worker_environment(names: Iterable[str], own: Mapping[str, str]) -> dict[str, str]:
    """The variables of `own` for a worker: `PASSED_ON` and the named ones."""
    named = set(names)
    return {name: value for name, value in own.items() if name in named or PASSED_ON.fullmatch(name)}


class WorkerDied(Exception):
    """The worker's channel closed; the message says how the process ended."""


class Worker:
    """One worker process; used by one coroutine only."""

    def __init__(self, process: Guarded, max_processes: int) -> None:
        self._process, self._max_processes = process, max_processes
        self._is_ending = False

    @classmethod
    async def start(cls, setup: Setup, variables: Iterable[str] = (), stacks: Path | None = None) -> Worker:
        """Starts a process and sends its setup; its first answer says whether the environment was constructed.
        `stacks`: see `ScorerPool`."""
        environment = worker_environment(variables, os.environ) | ({guard.STACKS: str(stacks)} if stacks else {})
        resources = Resources(max_processes=setup.max_processes, user_namespace=setup.user_namespace)
        process = await Guarded.start(MODULE, environment, resources, max_bytes=_MAX_ANSWER_BYTES)
        worker = cls(process, setup.max_processes)
        worker.send(encode(setup))
        return worker

    @property
    def pid(self) -> int:
        """Its guard's."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process is running."""
        return self._process.poll() is None

    @property
    def is_open(self) -> bool:
        """Whether it may be sent requests: it has not ended, as far as is known, and is not being killed."""
        return not self._is_ending and not self._process.channel.is_closed

    def send(self, *records: bytes) -> None:
        """Starts to send encoded records; reading the answer shows if the worker has ended."""
        self._process.channel.send(*records)

    async def receive(self, due: float, timeout_s: float) -> Answer:
        """The next answer. Raises `TimeoutError` if there is none by `due` (the loop's clock), or `WorkerDied`.
        Cancelling it loses no data. If the deadline passed because this process was busy, it waits another
        `timeout_s`."""
        loop = asyncio.get_running_loop()
        for chance in (1, 2):
            try:
                async with asyncio.timeout_at(due):
                    return decode(await self._process.channel.receive(), Answer)
            except (Garbage, msgspec.DecodeError):  # the reward wrote to the channel
                await self.kill()
                raise WorkerDied("an answer that cannot be read") from None
            except ChannelClosed:
                raise WorkerDied(await self._how_it_ended()) from None
            except TimeoutError:
                if chance == 2 or loop.time() - due < _LATE_S:
                    raise
                due = loop.time() + timeout_s
        raise AssertionError("unreachable")

    async def _how_it_ended(self) -> str:
        by_itself = await self._process.has_ended()
        await self.kill()
        code = self._process.poll()
        # A guard stopped for long reports later, but not about a worker it has to end.
        if not by_itself and code in (0, -signal.SIGKILL):
            code = None
        return ending(code, f"more than {self._max_processes} processes (environment.reward_processes)")

    @property
    def stderr_tail(self) -> str:
        """The end of the worker's output streams."""
        return self._process.tail[-_STDERR_TAIL_BYTES:].decode(errors="replace")

    async def stop(self) -> None:
        """Closes its input, the signal to end; kills it if it does not end."""
        await self._process.stop()

    async def kill(self) -> None:
        """Kills the worker and all its descendants and waits for their end. Its last output, in `stderr_tail`, shows
        the place of a hang."""
        self._is_ending = True
        await self._process.kill()
