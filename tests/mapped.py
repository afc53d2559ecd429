"""What processes have mapped, for tests that look at shared memory."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def maps_of(pids: Iterable[int]) -> str:
    """The mappings of these processes, a line each (proc_pid_maps(5)); a process that has ended meanwhile has none."""
    found = []
    for pid in pids:
        try:
            found.append(Path(f"/proc/{pid}/maps").read_text())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return "".join(found)
