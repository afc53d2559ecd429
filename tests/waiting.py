"""Waits for what other threads and processes do; a machine may be busy, so that only the deadline is generous."""

import time
from pathlib import Path

WAIT_S = 60.0


class Clock:
    """One that stands until it is moved."""

    def __init__(self, now=0.0):
        self.now = now

    def __call__(self):
        return self.now


def until(happened, timeout_s=WAIT_S):
    """What `happened` returns once it is true."""
    deadline = time.monotonic() + timeout_s
    while not (found := happened()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def is_there(pid):
    """Whether a process lives; one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def ends(pid, within_s=WAIT_S):
    """Whether a process ends within that time."""
    deadline = time.monotonic() + within_s
    while is_there(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_there(pid)
