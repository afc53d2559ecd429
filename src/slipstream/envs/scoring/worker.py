"""Worker, `python -m slipstream.envs.scoring.worker`: the other end of the protocol in `process.py`.

It constructs the environment from its config, carries out requests one after another (`worker_calls.py`), and ends
when its input closes. Coroutines run concurrently, as many as the pool sends, on one event loop; a plain function
blocks it. A coroutine is cancelled at its deadline, or when its caller gives it up. Under `fresh_worker`, forks carry
out the requests, and this process keeps its initial state.

Rewards and tools may print and read: the channel is moved away from standard input first, and closed in all their
forks; a fork exits when it returns from its call. On SIGUSR1 it writes its traceback, also from
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
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Any, NoReturn

import msgspec

from slipstream.config.environment import EnvironmentConfig
from slipstream.config.python_objects import give
from slipstream.envs.base import Environment, RewardError, Score, ToolResult
from slipstream.envs.mixed import parts_of
from slipstream.envs.registry import load_environment
from slipstream.envs.scoring.process import Answer, Request, Setup, decode, encode
from slipstream.envs.scoring.worker_calls import explained, failed_tool, judge, judge_group, run_tool
from slipstream.errors import SlipstreamError
from slipstream.processes import lifeline, stacks
from slipstream.processes.channel import LENGTH, Channel, ChannelClosed, length_of, pack
from slipstream.processes.guard import APART, END_S, adopt, end_descendants

_MAX_BYTES = 64 << 20
_CLEANUP_S = 0.5
"""How long cancelled coroutines may clean up when the input has ended."""
_CANCELLED = Answer("failed", message="was cancelled")


def main() -> int:
    """Serves until the input ends; the exit code is 1 if the environment could not be constructed."""
    stacks.register(beats=False)  # the pool has a deadline for each call, and a call may fork
    lifeline.leave_signals_to_trainer()  # its guard ends it
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    requests = _take_standard_streams()
    answers = _Answers(requests)
    data = _next(requests)
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
        for part in parts_of(environment).values():
            part.setup_scoring()
    except SlipstreamError as error:
        answers.write(Answer("failed", message=str(error)))
        return 1
    has_tools = bool(environment.tools) or type(environment).call_tool is not Environment.call_tool
    answers.write(Answer("ready", has_tools=has_tools, is_apart=APART in os.environ))
    if config.fresh_worker:
        _work_apart(environment, requests, answers)
    else:
        _Work(environment, requests, answers, setup.timeout_s).run()
    return 0


class _Answers:
    """Writes answers to the pool, only from the process of its construction."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._own = os.getpid()

    def write(self, answer: Answer) -> None:
        """Writes an answer. A call's fork exits here after its return from the call: its parent answers."""
        if os.getpid() != self._own:
            os._exit(0)
        self._channel.send(encode(answer))


class _Work:
    """Carries out requests in this process."""

    def __init__(self, environment: Environment, requests: Channel, answers: _Answers, timeout_s: float) -> None:
        self._environment = environment
        self._requests = requests
        self._answers = answers
        self._timeout_s = timeout_s
        self._loop = asyncio.new_event_loop()
        self._under_way: dict[str, asyncio.Task[Answer]] = {}
        self._readable = False
        self._broken: BaseException | None = None

    def run(self) -> None:
        """Carries out requests until the input ends, and then cancels coroutines under way."""
        while True:
            if self._under_way:
                self._go_on()
            data = _next(self._requests)
            if data is None:
                return self._end()
            request = decode(data, Request)
            if request.kind == "cancel":
                self._cancel(request.id)
            else:
                self._take(request)

    def _cancel(self, id_: str) -> None:
        """Cancels a coroutine given up by its caller; it is answered when it ends, at its deadline at the latest."""
        if (task := self._under_way.get(id_)) is not None:
            task.cancel()

    def _end(self) -> None:
        tasks = [*self._under_way.values()]
        self._under_way.clear()  # nobody reads their answers
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.wait(tasks, timeout=_CLEANUP_S))

    def _take(self, request: Request) -> None:
        # Outside of the event loop: a plain function may run its own.
        found = _called(self._environment, request)
        if isinstance(found, Answer):
            self._answers.write(msgspec.structs.replace(found, id=request.id))
            return
        self._answers.write(Answer("begun", id=request.id))
        task = self._loop.create_task(_awaited(self._environment, request, found))
        self._under_way[request.id] = task
        timer = self._loop.call_later(self._timeout_s, self._late, request.id, found)

        def ended(task: asyncio.Task[Answer]) -> None:
            timer.cancel()
            if self._under_way.pop(request.id, None) is not None:
                self._answer(request.id, lambda: _CANCELLED if task.cancelled() else task.result())
            self._stop_if_idle()

        task.add_done_callback(ended)

    def _late(self, id_: str, coming: Awaitable[Any], has_chance: bool = True) -> None:
        if has_chance:  # a plain function may have blocked the loop: it may be done as soon as it goes on
            self._loop.call_soon(self._late, id_, coming, False)
        elif (task := self._under_way.get(id_)) is not None and not task.done():
            details = _where(coming)
            del self._under_way[id_]
            self._answer(id_, lambda: Answer("timeout", details=details))
            task.cancel()
            self._stop_if_idle()

    def _answer(self, id_: str, made: Callable[[], Answer]) -> None:
        try:
            self._answers.write(msgspec.structs.replace(made(), id=id_))
        except BaseException as error:  # noqa: BLE001 (`run` raises it; the loop would only report it)
            self._broken = error
            self._loop.stop()

    def _stop_if_idle(self) -> None:
        """Goes back to the requests if none is under way."""
        if not self._under_way:
            self._loop.stop()

    def _go_on(self) -> None:
        """Runs coroutines until there is a request to read, or none is left."""
        self._loop.call_soon(self._loop.stop)  # each a little, however many requests there are
        self._loop.run_forever()
        self._readable = False
        while self._under_way and not self._readable and self._broken is None:
            if self._requests.has_message:
                return
            self._loop.add_reader(self._requests, self._stop_to_read)
            self._loop.run_forever()
            self._loop.remove_reader(self._requests)
        if self._broken is not None:
            raise self._broken

    def _stop_to_read(self) -> None:
        self._readable = True
        self._loop.stop()


def _where(coming: Any) -> str:
    """The place of a waiting coroutine, as in a traceback."""
    frames: list[tuple[FrameType, int]] = []
    while (frame := getattr(coming, "cr_frame", None)) is not None:
        frames.append((frame, frame.f_lineno))
        coming = coming.cr_await
    return "".join(traceback.StackSummary.extract(iter(frames)).format())


def _work_apart(environment: Environment, requests: Channel, answers: _Answers) -> None:
    """Carries out each request in a fork of this process until the input ends; kills the fork's descendants."""
    adopt()
    child = 0
    # The child writes where it hangs: no call runs in this process.
    faulthandler.unregister(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, lambda *_: child and os.kill(child, signal.SIGUSR1))
    shared = mmap.mmap(-1, _MAX_BYTES)  # anonymous: a call can neither reach it by a descriptor nor block on it
    while (data := _next(requests)) is not None:
        request = decode(data, Request)
        shared[:LENGTH] = bytes(LENGTH)
        child = os.fork()
        if child == 0:
            _work_in_fork(environment, request, shared)
        _, status = os.waitpid(child, 0)
        child = 0
        end_descendants(END_S)
        answers.write(msgspec.structs.replace(_left_by_fork(shared, status), id=request.id))


def _work_in_fork(environment: Environment, request: Request, shared: mmap.mmap) -> NoReturn:
    own = os.getpid()
    try:
        lifeline.leave_signals_to_trainer()
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        faulthandler.register(signal.SIGUSR1, all_threads=False)
        found = _called(environment, request)
        if not isinstance(found, Answer):
            found = asyncio.run(_awaited(environment, request, found))
        if os.getpid() == own:
            data = pack(encode(found))
            shared[: len(data)] = data
            for stream in (sys.__stdout__, sys.__stderr__):
                if stream is not None:
                    stream.flush()
    finally:
        os._exit(0)


def _left_by_fork(shared: mmap.mmap, status: int) -> Answer:
    length = length_of(shared[:LENGTH])
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return Answer("died", message=f"signal {signal.Signals(-code).name}")
    if code or not length:
        return Answer("died", message=f"exit code {code}")
    try:
        answer = decode(shared[LENGTH : LENGTH + length], Answer)
    except msgspec.DecodeError:
        return Answer("died", message="an answer that cannot be read")
    if answer.kind not in ("score", "tool", "failed"):
        return Answer("died", message="an answer that cannot be read")
    return answer


def _called(environment: Environment, request: Request) -> Answer | Awaitable[Any]:
    try:
        if request.kind == "tool":
            found = run_tool(environment, request.task, request.call)
        elif request.kind == "group":
            found = judge_group(environment, request.task, request.episodes)
        else:
            found = judge(environment, request.task, request.episodes[0])
    except BaseException as error:  # noqa: BLE001 (whatever it is, it is the reward's or tool's)
        return _failed(environment, request, error)
    return found if inspect.isawaitable(found) else _answer_of(found)


async def _awaited(environment: Environment, request: Request, coming: Awaitable[Any]) -> Answer:
    try:
        return _answer_of(await coming)
    except BaseException as error:  # noqa: BLE001 (as above; a cancelled one is not asked any more)
        return _failed(environment, request, error)


def _answer_of(found: Any) -> Answer:
    if isinstance(found, ToolResult):
        return Answer("tool", result=found)
    return Answer("score", (found,) if isinstance(found, Score) else tuple(found))


def _failed(environment: Environment, request: Request, error: BaseException) -> Answer:
    remedy = ": raise environment.reward_memory_gib, or let it take less"
    if not isinstance(error.__cause__ or error, MemoryError):
        remedy = ""
    if request.kind == "tool":
        return Answer("tool", result=failed_tool(request.call, error))
    failure = error if isinstance(error, RewardError) else explained(environment, error)
    return Answer("failed", message=str(failure) + remedy, details=failure.details)


def _take_standard_streams() -> Channel:
    """The channel. Printed text goes to stderr, and reading returns nothing."""
    channel = Channel.of_parent()
    os.dup2(2, 1)
    os.register_at_fork(after_in_child=channel.close)
    return channel


def _next(channel: Channel) -> bytes | None:
    """Waits for a request; None at the end of the input."""
    try:
        return channel.receive()
    except ChannelClosed:
        return None


if __name__ == "__main__":
    sys.exit(main())
