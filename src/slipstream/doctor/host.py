"""Checks of the host: system, cores, memory, limits, folders, network, clock."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from slipstream.config.bounds import GIB
from slipstream.doctor.findings import Finding
from slipstream.plan.machine import free_memory_bytes, usable_cpus, usable_memory_bytes
from slipstream.processes.rendezvous import INTERFACE

LEAST_MEMORY_GIB = 4.0
"""Memory of the smallest tried run: two cores, vLLM and a trainer on the CPU."""
_SHARED_GIB = 1.0
_TEMPORARY_GIB = 1.0
_OPEN_FILES = 4096
_PROCESSES = 1024
_LONGEST_SOCKET = 107
"""Bytes of a Unix socket's path on Linux (unix(7))."""
_SOCKET_NAME = 48
"""Bytes added to the temporary folder for one."""
_WAIT_S = 5.0
_NCCL = "NCCL_SOCKET_IFNAME"
_INTERFACES = (INTERFACE, "GLOO_SOCKET_IFNAME", _NCCL)
_FIRST_RELEASE = 1_760_000_000.0
"""Seconds since 1970 in October 2025, before this program was written."""


def check_system(system: str = sys.platform, machine: str = platform.machine()) -> Iterator[Finding]:
    """Linux on x86-64 or ARM."""
    if system != "linux":
        yield Finding("system", "fault", f"the system is {system}", "use Linux, or Linux in WSL 2 or a container")
    elif machine not in ("x86_64", "aarch64"):
        yield Finding("system", "warning", f"the processor is {machine}, an untried one", "use x86-64")
    else:
        yield Finding("system", "ok", f"Linux on {machine}, Python {platform.python_version()}")


def check_cpus(cpus: int | None = None, on_machine: int | None = None) -> Iterator[Finding]:
    """At least two cores: vLLM and the trainer work at once."""
    cpus, on_machine = cpus or usable_cpus(), on_machine or os.cpu_count() or 1
    of = f"{cpus} of {on_machine} cores are usable"
    if cpus < 2:
        remedy = (
            "give the job or container more (--cpus-per-task, --cpus, resources.limits.cpu), or change its affinity"
        )
        yield Finding("CPUs", "warning", f"{of}: trainer, engine and rewards share one", remedy)
    else:
        yield Finding("CPUs", "ok", of)


def check_memory(usable: int | None = None, free: int | None = None) -> Iterator[Finding]:
    """Enough memory, by the machine and its control group, and enough of it free."""
    usable, free, least = usable or usable_memory_bytes(), free or free_memory_bytes(), LEAST_MEMORY_GIB * GIB
    said = f"{min(free, usable) / GIB:.1f} GiB of {usable / GIB:.1f} GiB are free"
    if usable < least:
        remedy = "give the job or container more (--mem, --memory, resources.limits.memory)"
        yield Finding("memory", "fault", f"{said}, and the smallest run takes {LEAST_MEMORY_GIB:g} GiB", remedy)
    elif free < least:
        remedy = "end other processes: ps aux --sort=-rss shows the largest"
        yield Finding("memory", "warning", f"{said}, and the smallest run takes {LEAST_MEMORY_GIB:g} GiB", remedy)
    else:
        yield Finding("memory", "ok", said)


def check_shared_memory(folder: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """vLLM's processes, NCCL and `single_copy` on a CPU share memory there."""
    if not folder.is_dir():
        yield Finding("shared memory", "fault", f"{folder} is missing", "mount a tmpfs there")
        return
    free = shutil.disk_usage(folder).free / GIB
    if not os.access(folder, os.W_OK):
        yield Finding("shared memory", "fault", f"{folder} cannot be written", "chmod 1777 /dev/shm")
    elif free < _SHARED_GIB:
        remedy = (
            "start the container with --shm-size=8g or --ipc=host; in Kubernetes mount an emptyDir of medium Memory"
        )
        yield Finding("shared memory", "fault", f"{folder} has {free:.2f} GiB free, less than {_SHARED_GIB:g}", remedy)
    else:
        yield Finding("shared memory", "ok", f"{folder} has {free:.1f} GiB free")


def check_limits(limits: Mapping[str, int] | None = None) -> Iterator[Finding]:
    """Limits of this process on open files, processes, address space, size of a file."""
    names = ("NOFILE", "NPROC", "AS", "FSIZE")
    found = limits or {name: resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[0] for name in names}
    options = {"NOFILE": "n", "NPROC": "u", "AS": "v", "FSIZE": "f"}
    wanted = {"NOFILE": (_OPEN_FILES, "open files"), "NPROC": (_PROCESSES, "processes")}
    is_fine = True
    for name, soft in found.items():
        least, what = wanted.get(name, (None, "bytes of address space" if name == "AS" else "bytes a file"))
        if soft in (-1, resource.RLIM_INFINITY) or (least is not None and soft >= least):
            continue
        is_fine = False
        target = least or "unlimited"
        reason = f"this process may have {soft:,} {what}" + (f", and runs were tried with {least:,}" if least else "")
        yield Finding("limits", "warning" if least else "fault", reason, f"ulimit -{options[name]} {target}")
    if is_fine:
        files = found["NOFILE"]
        said = "any number of" if files in (-1, resource.RLIM_INFINITY) else f"{files:,}"
        yield Finding("limits", "ok", f"{said} open files; no limit too low for a run")


def check_temporary_folder(folder: Path | None = None) -> Iterator[Finding]:
    """TMPDIR: writable, with room, and short enough for Unix sockets."""
    try:
        folder = folder or Path(tempfile.gettempdir())
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(b"x")
        free = shutil.disk_usage(folder).free / GIB
    except OSError as error:
        remedy = "set TMPDIR to a writable folder on a local disk"
        yield Finding("temporary folder", "fault", f"nothing can be written: {error.strerror or error}", remedy)
        return
    longest = _LONGEST_SOCKET - _SOCKET_NAME
    if len(os.fsencode(folder)) > longest:
        reason = f"the path {folder} is longer than {longest} bytes, and Unix sockets lie in it"
        yield Finding("temporary folder", "fault", reason, "set TMPDIR to a shorter path")
    elif free < _TEMPORARY_GIB:
        reason = f"{folder} has {free:.2f} GiB free, less than {_TEMPORARY_GIB:g}"
        yield Finding("temporary folder", "warning", reason, "free some, or set TMPDIR to another disk")
    else:
        yield Finding("temporary folder", "ok", f"{folder} has {free:.0f} GiB free")


def check_network(host: str = "127.0.0.1", name: str | None = None) -> Iterator[Finding]:
    """A connection over loopback, and an address for the host's own name: gloo looks it up."""
    try:
        with socket.create_server((host, 0)) as server:
            server.settimeout(_WAIT_S)
            with socket.create_connection(server.getsockname()[:2], timeout=_WAIT_S):
                server.accept()[0].close()
    except OSError as error:
        reason = f"no connection over {host}: {error.strerror or error}"
        yield Finding("network", "fault", reason, "ip link set lo up; allow loopback in the firewall")
        return
    name = name or socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        reason = f"the host's own name {name} has no address: {error.strerror or error}"
        yield Finding("network", "warning", reason, f"add '127.0.0.1 {name}' to /etc/hosts, or set GLOO_SOCKET_IFNAME")
        return
    yield Finding("network", "ok", f"loopback works, and {name} has an address")


def check_interfaces(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Variables to choose network interfaces name ones that are up."""
    found = psutil.net_if_stats()
    for variable in _INTERFACES:
        names = environ.get(variable, "")
        if not names or names.startswith("^"):  # NCCL's: any but these
            continue
        for name in names.removeprefix("=").split(","):
            # NCCL takes beginnings of names.
            alike = [each for each in found if each == name or (variable == _NCCL and each.startswith(name))]
            if not alike:
                reason = f"{variable} = {names} names no network interface of this host"
                yield Finding("interfaces", "fault", reason, f"unset {variable}, or name one of {', '.join(found)}")
            elif not any(found[each].isup for each in alike):
                yield Finding("interfaces", "fault", f"{variable} = {names} is down", f"ip link set {alike[0]} up")


def check_proxies(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """No proxy gets requests to this host's own servers."""
    names = [name for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY") if environ.get(name)]
    spared = ",".join(environ.get(name, "") for name in ("no_proxy", "NO_PROXY")).split(",")
    if names and not {"127.0.0.1", "localhost", "*"} & {each.strip() for each in spared}:
        reason = f"{names[0]} is set, and NO_PROXY does not name this host: requests to local servers go to the proxy"
        yield Finding("proxies", "warning", reason, "export NO_PROXY=localhost,127.0.0.1")


def check_clock(now: float | None = None) -> Iterator[Finding]:
    """A clock after the first release: certificates, and the ages of files and leases, depend on it."""
    now = time.time() if now is None else now
    if now < _FIRST_RELEASE:
        date = time.strftime("%Y-%m-%d", time.gmtime(now))
        yield Finding("clock", "fault", f"the clock says {date}", "set it: timedatectl set-ntp true")
    else:
        yield Finding("clock", "ok", time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now)))
