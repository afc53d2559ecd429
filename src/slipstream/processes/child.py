"""A started process, as its parent reaches and ends it.

Guarantees: `end` and `kill` also end what a child's session holds, whatever became of the child itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Protocol

END = signal.SIGRTMIN
"""Asks a child to end in order: SIGTERM may come from whoever signals all processes of a run, which is the trainer's
matter."""
DYING_S = 30.0
"""How long a killed process may take to end."""


class Child(Protocol):
    """A started process."""

    @property
    def pid(self) -> int:
        """Its number on its node."""
        ...

    @property
    def socket(self) -> socket.socket:
        """This side of its standard input, for a `Channel`."""
        ...

    @property
    def output(self) -> int:
        """The descriptor that its output is read from, under `PIPE`."""
        ...

    def forward(self, path: Path) -> None:
        """Have the Unix socket `path` of this host reach the child's own of the same name, in its temporary folder. One
        on this host listens at `path` itself."""
        ...

    def poll(self) -> int | None:
        """Its exit code, or minus the signal that ended it; None while it runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises subprocess.TimeoutExpired."""
        ...

    def send_signal(self, number: int) -> None:
        """Send it a signal; nothing if it has ended."""
        ...

    def end(self, timeout_s: float, first: int = END) -> None:
        """End it and its session: by the signal `first`, unless `timeout_s` is 0, and by SIGKILL at the deadline. One
        that hangs in the kernel (in a driver) lives on, as `poll` then says."""
        ...

    def kill(self) -> None:
        """Kill it and its session without waiting, from any thread."""
        ...


class LocalChild:
    """See `Child`."""

    def __init__(self, process: subprocess.Popen[bytes], end: socket.socket, *, has_session: bool) -> None:
        self._process, self.socket, self._has_session = process, end, has_session

    @property
    def pid(self) -> int:
        """See `Child`."""
        return self._process.pid

    @property
    def output(self) -> int:
        """See `Child`."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def forward(self, path: Path) -> None:
        """See `Child`."""

    def poll(self) -> int | None:
        """See `Child`."""
        return self._process.poll()

    def wait(self, timeout: float | None = None) -> int:
        """See `Child`."""
        return self._process.wait(timeout)

    def send_signal(self, number: int) -> None:
        """See `Child`."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def end(self, timeout_s: float, first: int = END) -> None:
        """See `Child`."""
        if self.poll() is None and timeout_s > 0:
            self.send_signal(first)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.wait(timeout_s)
        # The session outlives its leader when the leader died alone: always end it too.
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(DYING_S)
        self.socket.close()

    def kill(self) -> None:
        """See `Child`."""
        with contextlib.suppress(ProcessLookupError):
            if self._has_session:
                os.killpg(self.pid, signal.SIGKILL)
            elif self.poll() is None:
                self._process.kill()
