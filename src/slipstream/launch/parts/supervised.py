"""The trainer's end of its bond with a supervisor (`supervisor.py`), which sends a byte every second,
and another one before it passes a SIGTERM on.

Guarantees: the trainer is killed, and with it all that it has started, when its supervisor has ended, also while it is
stopped itself and whatever has become of its terminal; a supervisor that is stopped is named once for each time.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Callable

from slipstream.launch.parts.supervisor import PASSES_ON
from slipstream.processes.channel import take_stdin
from slipstream.processes.guard import PR_SET_PDEATHSIG, prctl
from slipstream.processes.stalls import POLL_S

SILENT_POLLS = 15
"""How many waits of `POLL_S` it may be silent before the supervisor is looked for."""


class SupervisorWatch:
    """Watches standard input from a thread, from the first moment of this process on."""

    def __init__(self) -> None:
        descriptor = take_stdin()
        os.set_blocking(descriptor, False)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # for a trainer that is stopped then
        self._descriptor = descriptor
        self._supervisor = os.getppid()
        self.warn: Callable[[str], None] = lambda text: print(f"warning: {text}", file=sys.stderr)
        """Tells the user of a supervisor that is stopped."""
        self._reading = threading.RLock()
        self._passed_on = bytearray()
        """A byte for each; a handler that interrupts another one loses none."""
        threading.Thread(target=self._watch, name="supervisor-watch", daemon=True).start()

    def num_passed_on(self) -> int:
        """How many SIGTERMs the supervisor has passed on, or is about to; a signal's handler may ask."""
        with contextlib.suppress(BlockingIOError):
            self._read()
        return len(self._passed_on)

    def _read(self) -> bool:
        """Take what has arrived; False where the supervisor has ended. Raises BlockingIOError if it is empty, as
        where another thread has taken what `select` has told of."""
        with self._reading:
            data = os.read(self._descriptor, 4096)
            self._passed_on.extend(PASSES_ON * data.count(PASSES_ON))
        return bool(data)

    def _watch(self) -> None:
        num_silent = 0
        while True:
            is_silent = not select.select([self._descriptor], [], [], POLL_S)[0]
            num_silent = num_silent + 1 if is_silent else 0
            if num_silent == SILENT_POLLS:
                with contextlib.suppress(Exception):  # a full disk, which ends the run elsewhere
                    self.warn(
                        f"the supervisor, process {self._supervisor}, has said nothing for "
                        f"{POLL_S * num_silent:.0f} s, as if it were stopped: the run goes on, but nobody would "
                        "start it again"
                    )
            with contextlib.suppress(BlockingIOError):
                if not self._read():
                    with contextlib.suppress(OSError):  # the terminal has ended, too
                        print("error: the supervisor has ended, and the run: continue with --resume", file=sys.stderr)
                    os.kill(os.getpid(), signal.SIGKILL)
