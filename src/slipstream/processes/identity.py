"""Names a process by pid, start time and boot, so no later one is taken for it."""

from __future__ import annotations

import hashlib
import os
import socket
from pathlib import Path

import msgspec

from slipstream.processes.heartbeat import state_of
from slipstream.processes.stalls import ENDED

_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Handle(msgspec.Struct, frozen=True):
    """A process of a host."""

    pid: int
    started: int
    """Clock ticks since the boot."""
    boot: str
    host: str


def own_handle() -> Handle:
    """This process."""
    found = handle_of(os.getpid())
    assert found is not None
    return found


def handle_of(pid: int) -> Handle | None:
    """The process `pid` of this host; None without one."""
    started = _started(pid)
    return None if started is None else Handle(pid, started, _boot(), socket.gethostname())


def is_alive(handle: Handle) -> bool:
    """Whether the process runs. Another host's is taken to: it cannot be seen from here."""
    if handle.host != socket.gethostname():
        return True
    same = handle.boot == _boot() and _started(handle.pid) == handle.started
    return same and state_of(handle.pid) not in ENDED


def _started(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


def _boot() -> str:
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""


def this_machine() -> str:
    """A name of this machine's files, the same for all its processes until the next boot: of boot and root folder."""
    root = os.stat("/")
    return hashlib.sha256(f"{_boot()} {root.st_dev} {root.st_ino}".encode()).hexdigest()[:16]
