"""Reward and tool workers that are forked instead of started: their guard, and they as its children, are what the
started ones are, but have imported what a worker imports; see `fork_server`."""

from __future__ import annotations

import asyncio
import faulthandler
import fcntl
import io
import os
import signal
import subprocess
from collections.abc import Callable
from typing import Any, NoReturn

import uvloop

from slipstream.processes import guard


class Forked:
    """What a pool's worker uses of `asyncio.subprocess.Process`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._pipes: list[Any] = []

    @classmethod
    async def start(cls, process: subprocess.Popen[bytes]) -> Forked:
        forked, loop = cls(process), asyncio.get_running_loop()
        write, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, _own(process.stdin, loop))
        forked._pipes.append(write)
        forked.stdin = asyncio.StreamWriter(write, protocol, None, loop)
        forked.stdout, forked.stderr = [await forked._reader(pipe) for pipe in (process.stdout, process.stderr)]
        return forked

    async def _reader(self, pipe: Any) -> asyncio.StreamReader:
        reader, loop = asyncio.StreamReader(), asyncio.get_running_loop()
        read, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), _own(pipe, loop))
        self._pipes.append(read)
        return reader

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def send_signal(self, number: int) -> None:
        if self.returncode is not None:
            raise ProcessLookupError
        os.kill(self.pid, number)

    @property
    def _transport(self) -> Forked:
        return self

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()


def _own(pipe: Any, loop: asyncio.AbstractEventLoop) -> io.FileIO:
    """What the loop's transport closes, and nobody else; uvloop closes the descriptor beside the file."""
    with pipe:
        return io.FileIO(os.dup(pipe.fileno()), pipe.mode, closefd=not isinstance(loop, uvloop.Loop))


def starter(fork: Callable[..., subprocess.Popen[bytes]], may_fork: Callable[[list[str], dict[str, str]], bool]) -> Any:
    """In the place of `slipstream.envs.scoring.process.create_process`."""

    async def create_process(*command: str, env: dict[str, str], **options: Any) -> Any:
        if not may_fork(list(command), env):
            return await asyncio.create_subprocess_exec(*command, env=env, **options)
        return await Forked.start(await asyncio.to_thread(fork, command, env=env, bufsize=0, **options))

    return create_process


def be_guard(command: list[str], run: Callable[[list[str]], int], leave: Callable[[int], NoReturn]) -> None:
    """Be the guard of this command line to this process's end; its child runs the worker's module with `run` where it
    would execute a new Python."""

    def become_worker(path: str, command: list[str]) -> NoReturn:
        signal.set_wakeup_fd(-1)
        faulthandler.unregister(signal.SIGUSR2)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        for name in os.listdir("/proc/self/fd"):
            try:
                if fcntl.fcntl(int(name), fcntl.F_GETFD) & fcntl.FD_CLOEXEC:
                    os.close(int(name))
            except OSError:  # the list's own
                continue
        leave(run(command))

    os.execv = become_worker
    guard.main(int(command[4]), command[5] == guard.NAMESPACE, command[6:])
