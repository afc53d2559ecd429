"""Reward and tool workers that are forked instead of started: their guard, and they as its children, are what the
started ones are, but have imported what a worker imports; see `fork_server`."""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
from collections.abc import Callable
from typing import NoReturn

from slipstream.processes import guard


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
