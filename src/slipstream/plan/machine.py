"""Cores, memory and GPUs of this process's machine. Reads, never changes anything."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from slipstream.errors import one_line
from slipstream.plan.facts import DiskFacts
from slipstream.plan.memory.cards import STATE, Gpus, read_processes, read_state, read_used, with_held

IN_USE = "SLIPSTREAM_GPUS_IN_USE"
"""Variable with nvidia-smi's answers at the start of the command."""
_USED, _PROCESSES = f"gpu={','.join(STATE)}", "compute-apps=gpu_uuid,pid,used_memory,process_name"
_ASKING_S = 20.0
"""A driver loaded for the question alone takes seconds for each GPU."""
_GROUPS, _MEMBERSHIP, _COUNTERS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"), Path("/proc/vmstat")
_MEMORY = Path("/proc/meminfo")


def usable_cpus() -> int:
    """Cores of this process, or whole cores of a control group's smaller quota of time; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _control_groups("cpu", "cpu,cpuacct"):
        quota, period = (*_read(folder / "cpu.max").split(), "", "")[:2]  # version 2
        if not quota:
            quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(quota) > 0 and int(period) > 0:
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def usable_memory_bytes() -> int:
    """The machine's memory, or a control group's limit if lower."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for folder in _control_groups("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _read(folder / name)
            if text.isdigit() and int(text) > 0:
                memory = min(memory, int(text))
    return memory


def free_memory_bytes() -> int:
    """Bytes for a new process: MemAvailable, or the rest of a group's limit. A group's inactive files count as free."""
    free = {line.partition(":")[0]: line.split()[1] for line in _read(_MEMORY).splitlines() if line.count(" ")}
    found = [int(free["MemAvailable"]) * 1024] if "MemAvailable" in free else list[int]()
    for folder in _control_groups("memory"):
        for limit, usage in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            most, used = _read(folder / limit), _read(folder / usage)
            if most.isdigit() and used.isdigit():
                counts = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
                files = int(counts.get("total_inactive_file", counts.get("inactive_file", 0)))
                found.append(max(0, int(most) - max(0, int(used) - files)))
    return min([usable_memory_bytes(), *found])


def count_oom_kills() -> int:
    """Processes killed by the kernel for want of memory, in this one's control group; on the machine, if the group does
    not count them."""
    folders = [*_control_groups("memory")]
    counters = [folder / name for folder in folders for name in ("memory.events", "memory.oom_control")]
    for file in (*counters, _COUNTERS):
        for line in _read(file).split("\n"):
            name, _, count = line.partition(" ")
            if name == "oom_kill" and count.isdigit():
                return int(count)
    return 0


def measure_disk(folder: Path | None) -> DiskFacts | None:
    """The disk of the run folder, present or future; without one, of the current folder. None if it cannot be
    asked."""
    wanted = (folder or Path()).absolute()
    try:
        there = next(each for each in (wanted, *wanted.parents) if each.is_dir())
        folders = [wanted / name for name in ("checkpoints", "weights")] if folder is not None else []
        files = [file for each in folders for file in each.rglob("*") if file.is_file() and not file.is_symlink()]
        disk = shutil.disk_usage(there)
        if not disk.total:  # as /proc: no disk
            return None
        return DiskFacts(disk.free, sum(file.stat().st_size for file in files))
    except OSError:  # gone since, or not ours to ask: the run itself reports the fault of its folder
        return None


def query_gpus(*queries: str) -> list[str]:
    """nvidia-smi's answer to each, as rows without a header and units; nothing if it cannot be asked."""
    program = shutil.which("nvidia-smi")
    found: list[str] = []
    for query in queries if program else ():
        command = [str(program), f"--query-{query}", "--format=csv,noheader,nounits"]
        try:
            # A process may have any bytes for its name.
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=_ASKING_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return []
        found.append(done.stdout if done.returncode == 0 else "")
    return found


def list_gpus() -> tuple[str, str]:
    """The list of nvidia-smi, GPUs and their slices (MIG), and its error; both empty without the program."""
    if (program := shutil.which("nvidia-smi")) is None:
        return "", ""
    try:
        done = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=_ASKING_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", one_line(error)
    said = f"{done.stdout}{done.stderr}".strip()
    return ("", said or f"exit code {done.returncode}") if done.returncode else (said, "")


def gpus_in_use() -> tuple[dict[str, tuple[int, int]], dict[str, list[str]]]:
    """Bytes of each GPU, all and in use, and its processes, by its UUID, before any process of this run was on it."""
    used, processes = _ask_once()
    return read_used(used), read_processes(processes)


def gpus_at_start() -> list[dict[str, str | int | list[str]]]:
    """The GPUs of the machine in a run's record; empty if they cannot be asked."""
    return read_state(*_ask_once())


def _ask_once() -> tuple[str, str]:
    """nvidia-smi's answers at the start of a command. The run's processes, and a restart while earlier processes of the
    run may still be ending, get the same answers by their environment."""
    if IN_USE not in os.environ:
        answers = query_gpus(_USED, _PROCESSES)
        if not answers:
            return "", ""
        os.environ[IN_USE] = json.dumps(answers)
    used, processes = json.loads(os.environ[IN_USE])
    return used, processes


def describe_gpus() -> Gpus:
    """The visible GPUs of this machine, and the memory of them held by others."""
    count, memory_bytes = measure_gpus()
    if not count:
        return Gpus()
    import torch

    seen = [torch.cuda.get_device_properties(index) for index in range(count)]
    gpus = Gpus(count, memory_bytes, gpu_capability(), seen[0].name)
    in_use, processes = gpus_in_use()
    ids = [f"GPU-{str(getattr(each, 'uuid', '')).removeprefix('GPU-')}" for each in seen]
    totals = [int(each.total_memory) for each in seen]
    # A slice of a GPU (MIG) has the UUID of the whole; the whole's memory says nothing of it.
    used = [in_use[i][1] if i in in_use and in_use[i][0] < 1.1 * t else 0 for i, t in zip(ids, totals, strict=True)]
    return with_held(gpus, totals, used, [processes.get(each, []) for each in ids])


def measure_gpus() -> tuple[int, int]:
    """Number of GPUs and the memory of the smallest, in bytes."""
    import torch

    if not torch.cuda.is_available():
        return 0, 0
    count = torch.cuda.device_count()
    return count, min(int(torch.cuda.get_device_properties(index).total_memory) for index in range(count))


def gpu_capability() -> int:
    """The major compute capability of all GPUs; 0 without any, or if they differ."""
    import torch

    if not torch.cuda.is_available():  # too old a driver has devices all the same
        return 0
    found = {torch.cuda.get_device_capability(index)[0] for index in range(torch.cuda.device_count())}
    return found.pop() if len(found) == 1 else 0


def _control_groups(*controllers: str) -> Iterator[Path]:
    """The folders of this process's control group and of the groups above it, in the layouts of versions 2 and 1. In a
    container its own may be the visible root."""
    for line in _read(_MEMBERSHIP).split("\n"):
        _, _, own = line.partition(":")
        names, _, path = own.partition(":")
        if names and not set(controllers) & {names, *names.split(",")}:
            continue
        for root in [_GROUPS / name for name in controllers] if names else [_GROUPS]:
            folder = root / path.strip("/")
            while folder != root and folder.is_relative_to(root):
                yield folder
                folder = folder.parent
    yield from (_GROUPS, *(_GROUPS / name for name in controllers))


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
