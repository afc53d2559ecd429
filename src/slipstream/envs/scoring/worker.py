"""Reward worker, `python -m slipstream.envs.scoring.worker`: the other end of the protocol in `process.py`.

It constructs the environment from its config, answers requests one after another, and ends when its input closes.
Coroutine rewards run concurrently, up to `reward_concurrency`, on one event loop, which a plain reward blocks; a
coroutine that passes its deadline is cancelled. Under `fresh_worker` each request is graded in a fork of this process,
which keeps its initial state.

Rewards may print and read: the protocol's pipes are moved away from the standard streams first, and closed in every
process that a reward forks; a fork that returns from the reward exits. On SIGUSR1 it writes its traceback, also from
inside C code.
"""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import mmap
import os
import resource
import signal
import sys
import traceback
from collections.abc import Awaitable
from io import FileIO
from types import FrameType
from typing import Any, NoReturn

import msgspec

from slipstream.config.python_objects import give
from slipstream.config.schema import EnvironmentConfig
from slipstream.envs.base import Environment, RewardError, Score, explained, judge
from slipstream.envs.registry import load_environment
from slipstream.envs.scoring.guard import END_S, adopt, end_descendants
from slipstream.envs.scoring.process import Answer, Request, Setup, decode, frame
from slipstream.errors import SlipstreamError
from slipstream.runlog import stacks

_CHUNK = 1 << 16
_LENGTH = 4
_MAX_BYTES = 1 << 20


def main() -> int:
    """Serves until the input ends; the exit code is 1 if the environment could not be constructed."""
    stacks.register()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    requests, answers = _take_standard_streams()
    data = requests.next()
    if data is None:
        return 0
    setup = decode(data, Setup)
    config = EnvironmentConfig.model_validate_json(setup.config_json)
    if setup.environment is not None:
        give(setup.environment)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = setup.memory_limit_bytes if hard == resource.RLIM_INFINITY else min(setup.memory_limit_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        environment = load_environment(config)
    except SlipstreamError as error:
        answers.write(Answer("failed", message=str(error)))
        return 1
    answers.write(Answer("ready"))
    if config.fresh_worker:
        _grade_apart(environment, requests, answers)
    else:
        _Grader(environment, requests, answers, setup.timeout_s, config.reward_concurrency).run()
    return 0


class _Requests:
    """Reads requests from the pool."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._received = bytearray()

    def next(self) -> bytes | None:
        """Waits for a frame; None at the end of the input."""
        while not self.is_there():
            data = os.read(self.fd, _CHUNK)
            if not data:
                return None
            self._received += data
        end = _LENGTH + self._length()
        data = bytes(self._received[_LENGTH:end])
        del self._received[:end]
        return data

    def is_there(self) -> bool:
        """Whether `next` has a frame without reading."""
        return len(self._received) >= _LENGTH and len(self._received) >= _LENGTH + self._length()

    def _length(self) -> int:
        return int.from_bytes(self._received[:_LENGTH], "big")


class _Answers:
    """Writes answers to the pool, from the process that it was constructed in only."""

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self._own = os.getpid()

    def write(self, answer: Answer) -> None:
        """Writes an answer. A process that a reward forked and that returned from the reward exits here: its parent
        answers."""
        if os.getpid() != self._own:
            os._exit(0)
        view = memoryview(frame(answer))
        while view:
            view = view[self._file.write(view) :]


class _Grader:
    """Grades in this process."""

    def __init__(
        self, environment: Environment, requests: _Requests, answers: _Answers, timeout_s: float, concurrency: int
    ) -> None:
        self._environment = environment
        self._requests = requests
        self._answers = answers
        self._timeout_s = timeout_s
        self._concurrency = concurrency
        self._loop = asyncio.new_event_loop()
        self._under_way: set[asyncio.Task[None]] = set()

    def run(self) -> None:
        """Grades until the input ends."""
        while True:
            if self._under_way:
                self._loop.run_until_complete(self._go_on())
            data = self._requests.next()
            if data is None:
                return
            self._take(decode(data, Request))

    def _take(self, request: Request) -> None:
        # Outside of the event loop, so that a plain reward may run its own.
        found = _judged(self._environment, request)
        if isinstance(found, Answer):
            self._answers.write(msgspec.structs.replace(found, id=request.id))
            return
        self._answers.write(Answer("begun", id=request.id))
        task = self._loop.create_task(self._follow(request.id, found))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _follow(self, id_: str, coming: Awaitable[Score]) -> None:
        work = asyncio.create_task(_awaited(self._environment, coming))
        done, _ = await asyncio.wait([work], timeout=self._timeout_s)
        if done:
            answer = work.result()
        else:
            answer = Answer("timeout", details=_where(coming))
            work.cancel()
        self._answers.write(msgspec.structs.replace(answer, id=id_))

    async def _go_on(self) -> None:
        """Runs coroutines until there is a request to read, or none is left."""
        while self._under_way:
            waits: set[asyncio.Future[None]] = {*self._under_way}
            may_read = len(self._under_way) < self._concurrency
            readable = self._loop.create_future()
            if may_read:
                if self._requests.is_there():
                    return
                waits.add(readable)
                self._loop.add_reader(self._requests.fd, _set, readable)
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if may_read:
                self._loop.remove_reader(self._requests.fd)
            for each in done:
                each.result()
            if readable.done():
                return


def _where(coming: Any) -> str:
    """Where a coroutine is waiting, as in a traceback."""
    frames: list[tuple[FrameType, int]] = []
    while (frame := getattr(coming, "cr_frame", None)) is not None:
        frames.append((frame, frame.f_lineno))
        coming = coming.cr_await
    return "".join(traceback.StackSummary.extract(iter(frames)).format())


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _grade_apart(environment: Environment, requests: _Requests, answers: _Answers) -> None:
    """Grades each request in a fork of this process until the input ends; kills the fork's descendants."""
    adopt()
    child = 0
    # The child writes where it hangs: no reward runs in this process.
    faulthandler.unregister(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, lambda *_: child and os.kill(child, signal.SIGUSR1))
    shared = mmap.mmap(-1, _MAX_BYTES)  # anonymous: a reward can neither reach it by a descriptor nor block on it
    while (data := requests.next()) is not None:
        request = decode(data, Request)
        shared[:_LENGTH] = bytes(_LENGTH)
        child = os.fork()
        if child == 0:
            _grade_in_fork(environment, request, shared)
        _, status = os.waitpid(child, 0)
        child = 0
        end_descendants(END_S)
        answers.write(msgspec.structs.replace(_left_by_fork(shared, status), id=request.id))


def _grade_in_fork(environment: Environment, request: Request, shared: mmap.mmap) -> NoReturn:
    own = os.getpid()
    try:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        faulthandler.register(signal.SIGUSR1, all_threads=False)
        found = _judged(environment, request)
        if not isinstance(found, Answer):
            found = asyncio.run(_awaited(environment, found))
        if os.getpid() == own:
            data = frame(found)
            shared[: len(data)] = data
            for stream in (sys.__stdout__, sys.__stderr__):
                if stream is not None:
                    stream.flush()
    finally:
        os._exit(0)


def _left_by_fork(shared: mmap.mmap, status: int) -> Answer:
    length = int.from_bytes(shared[:_LENGTH], "big")
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return Answer("died", message=f"signal {signal.Signals(-code).name}")
    if code or not length:
        return Answer("died", message=f"exit code {code}")
    try:
        answer = decode(shared[_LENGTH : _LENGTH + length], Answer)
    except msgspec.DecodeError:
        return Answer("died", message="an answer that cannot be read")
    return answer if answer.kind in ("score", "failed") else Answer("died", message="an answer that cannot be read")


def _judged(environment: Environment, request: Request) -> Answer | Awaitable[Score]:
    try:
        found = judge(environment, request.task, request.completion)
    except BaseException as error:  # noqa: BLE001 (whatever it is, it is the reward's)
        return _failed(environment, error)
    return found if inspect.isawaitable(found) else Answer("score", found)


async def _awaited(environment: Environment, coming: Awaitable[Score]) -> Answer:
    try:
        return Answer("score", await coming)
    except BaseException as error:  # noqa: BLE001 (as above; a cancelled one is not asked any more)
        return _failed(environment, error)


def _failed(environment: Environment, error: BaseException) -> Answer:
    failure = error if isinstance(error, RewardError) else explained(environment, error)
    message = str(failure)
    if isinstance(error.__cause__ or error, MemoryError):
        message += ": raise environment.reward_memory_gib, or let it take less"
    return Answer("failed", None, message, failure.details)


def _take_standard_streams() -> tuple[_Requests, _Answers]:
    """Moves input and output to private files; printed text then goes to stderr, and reading returns nothing."""
    requests, answers = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    os.register_at_fork(after_in_child=lambda: (os.close(requests), os.close(answers)))
    return _Requests(requests), _Answers(FileIO(answers, "w"))


if __name__ == "__main__":
    sys.exit(main())
