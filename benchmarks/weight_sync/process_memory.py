"""Reads the memory use of running processes from /proc and, for GPUs, from nvidia-smi."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_TIMEOUT_S = 10.0


def pids_of(engine: Any) -> list[int]:
    """Return the running processes of one engine, or of several as one; vLLM's own are their children."""
    return [each.process.process.pid for each in engine.each if each.process.process.poll() is None]


def session_of(leader: int) -> list[int]:
    """Return the ids of all processes in the session of `leader`, itself included."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The process name, in parentheses, may contain any character; the session is the fourth field after it.
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == leader:
            found.append(int(path.parent.name))
    return found


def host_memory(pids: Iterable[int]) -> dict[str, int]:
    """Return the bytes that `pids` use: `rss` counts a shared page in every process, `pss` divides it among them."""
    total = {"rss": 0, "pss": 0}
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, value = line.partition(":")
            if name.lower() in total:
                total[name.lower()] += int(value.split()[0]) << 10
    return total


def gpu_memory(pids: Iterable[int]) -> int | None:
    """Return the GPU memory of these processes in bytes; None if nvidia-smi lists none of them."""
    rows = _nvidia_smi("--query-compute-apps=pid,used_memory")
    wanted = set(pids)
    used = [int(row[1]) << 20 for row in rows if row[0].isdigit() and int(row[0]) in wanted and row[1].isdigit()]
    return sum(used) if used else None


def gpus_in_use() -> list[int]:
    """Return the bytes in use on each GPU, by any process; empty without nvidia-smi."""
    return [int(row[0]) << 20 for row in _nvidia_smi("--query-gpu=memory.used") if row[0].isdigit()]


def _nvidia_smi(query: str) -> list[list[str]]:
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
