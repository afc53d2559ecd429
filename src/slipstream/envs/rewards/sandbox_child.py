"""Program that runs another program in a sandbox, `python -I -S -B sandbox_child.py FD FD`; started by `sandbox.py`.

It reads its orders (JSON) from the first descriptor. If no sandbox could be made, it writes the reason to the second
one. The program lacks the second one and cannot say the same: its status and output are its own.

With namespaces there are three processes. The caller can kill this one. The first process of a new process namespace
dies with it; the kernel then kills all others there. The third one is the program. It sees a file system in memory with
the interpreter, read-only, no network but an unused loopback, and no process of the machine. It can gain no privileges.
Without namespaces there are limits alone, and this process kills the program's descendants as far as it finds them.

It imports only the standard library and is started by path, so that it starts fast.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys
from typing import Any, NoReturn

FAILED = 125
"""Exit status if the sandbox could not be made."""
_REPORTS: list[int] = []
_NEWNS, _NEWCGROUP, _NEWUTS, _NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
_NEWUSER, _NEWPID, _NEWNET = 0x10000000, 0x20000000, 0x40000000
_RDONLY, _NOSUID, _NODEV, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_DETACH = 2
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS, _PR_CAPBSET_DROP = 1, 4, 38, 24
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR, _RECURSIVE = 442, 0x8000
_INSIDE = 65534
_OWN_IDS = 0x6F000000
"""First of the user ids of a root user's sandboxes, each with its own: limits of processes count by user."""
_LIBC = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Makes the sandbox and runs the program; exits as it does."""
    fd, report = map(int, sys.argv[1:])
    os.set_inheritable(report, False)
    _REPORTS.append(report)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as score:
        score.write("1000")  # without memory, the program goes before the trainer and the engine
    with os.fdopen(fd, "rb") as file:
        file.seek(0)
        orders: dict[str, Any] = json.loads(file.read())
    try:
        status = _in_namespaces(orders) if orders["namespaces"] else _limited(orders)
    except OSError as error:
        _report(str(error.args[-1]))
        os._exit(FAILED)
    _end_like(status)


def _in_namespaces(orders: dict[str, Any]) -> int:
    """Runs the program in namespaces of its own; its status."""
    _check(_LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    kinds = _NEWNS | _NEWPID | _NEWNET | _NEWIPC | _NEWUTS | _NEWCGROUP
    own_id = _own_id(int(orders["serial"])) if os.geteuid() == 0 else None
    if own_id is not None and _LIBC.unshare(kinds):  # root in a container
        _give_up_root(own_id)
        own_id = None
    if own_id is None:
        uid, gid = os.geteuid(), os.getegid()
        _check(_LIBC.unshare(kinds | _NEWUSER), "user namespaces (unshare)")
        for name, text in (("setgroups", "deny"), ("uid_map", f"{_INSIDE} {uid} 1"), ("gid_map", f"{_INSIDE} {gid} 1")):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)
    here, there = os.pipe()
    first = os.fork()
    if first == 0:
        os.close(there)
        _guarded(lambda: _first_process(orders, here, own_id))
    os.close(here)
    _done()
    # The first process takes the closing of `there` for the end of this one.
    _, status = os.waitpid(first, 0)
    return status


def _own_id(serial: int) -> int | None:
    """User and group id for a root user's program: one of its own, or nobody's in a container with a plain user as
    root; None if there is neither."""
    for wanted in (_OWN_IDS + serial % 0x10000000, _INSIDE):
        if all(_is_mapped(wanted, name) for name in ("uid_map", "gid_map")):
            return wanted
    return None


def _is_mapped(number: int, name: str) -> bool:
    with open(f"/proc/self/{name}", encoding="ascii") as file:
        ranges = [tuple(map(int, line.split())) for line in file]
    return any(first <= number < first + length for first, _, length in ranges)


def _first_process(orders: dict[str, Any], here: int, own_id: int | None) -> int:
    _check(_LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    if select.select([here], [], [], 0)[0]:  # its parent ended before the prctl
        os._exit(FAILED)
    _new_root(orders, _INSIDE if own_id is None else own_id)
    program = os.fork()
    if program == 0:
        os.close(here)
        _guarded(lambda: _become(orders, own_id))
    _done()
    while True:
        ended, status = os.wait()
        if ended == program:
            return status


def _new_root(orders: dict[str, Any], own_id: int) -> None:
    """Replaces the file system by one in memory with the interpreter, read-only, and the program's folder."""
    base = orders["folder"].encode()
    _mount(b"none", b"/", None, _REC | _PRIVATE, None)
    _mount(b"tmpfs", base, b"tmpfs", _NOSUID | _NODEV, b"size=%d,nr_inodes=4096,mode=755" % orders["folder_bytes"])
    root = base + b"/root"  # `chroot` applies inside of it, if the kernel gives no user namespaces
    os.makedirs(root)
    for path in map(str.encode, orders["readable"]):
        _bind(path, root + path)
    for device in (b"/dev/null", b"/dev/zero", b"/dev/urandom"):
        _bind(device, root + device, _NOSUID)
    for folder in (b"/work", b"/tmp"):
        os.mkdir(root + folder)
        os.chown(root + folder, own_id, own_id)
        os.chmod(root + folder, 0o700)
    for name, text in orders["files"].items():
        with open(root + b"/work/" + name.encode(), "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(text)
        os.chmod(root + b"/work/" + name.encode(), 0o444)
    os.mkdir(base + b"/old")
    os.chdir(base)
    number = _PIVOT_ROOT.get(os.uname().machine)
    if number is None:
        raise OSError(f"pivot_root is not known for {os.uname().machine}")
    _check(_LIBC.syscall(number, b".", b"old"), "pivot_root")
    os.chdir("/")
    _check(_LIBC.umount2(b"/old", _DETACH), "umount")
    os.rmdir("/old")
    os.chroot("/root")
    os.chdir("/work")


def _bind(source: bytes, target: bytes, flags: int = _NOSUID | _NODEV) -> None:
    if os.path.islink(source):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.symlink(os.readlink(source), target)
        return
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT, 0o644))
    _mount(source, target, None, _BIND | _REC, None)
    attributes = (ctypes.c_uint64 * 4)(_RDONLY | flags)
    if not _LIBC.syscall(_MOUNT_SETATTR, -100, target, _RECURSIVE, ctypes.byref(attributes), 32):
        return
    # An old kernel. In a user namespace, flags set already may not be dropped.
    held = os.statvfs(target).f_flag & ~1
    _mount(None, target, None, _BIND | _REMOUNT | _RDONLY | flags | held, None)


def _become(orders: dict[str, Any], own_id: int | None) -> NoReturn:
    """Gives up all privileges and becomes the program."""
    os.setsid()
    for capability in range(64):
        if _LIBC.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0):
            break
    _limit(orders)
    if own_id is not None:
        _give_up_root(own_id)
    _check(_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    os.execve(orders["command"][0], orders["command"], orders["environment"])


def _give_up_root(own_id: int) -> None:
    os.setgroups([])
    os.setresgid(own_id, own_id, own_id)
    os.setresuid(own_id, own_id, own_id)


def _limited(orders: dict[str, Any]) -> int:
    """Runs the program with limits alone, in the caller's folder for it; its status."""
    sys.path.insert(0, orders["guard"])
    import guard  # pyright: ignore[reportMissingImports]

    guard.adopt()
    program = os.fork()
    if program == 0:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.chdir(orders["folder"])

        def run() -> NoReturn:
            os.setsid()
            _limit(orders)
            _check(_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
            os.execve(orders["command"][0], orders["command"], orders["environment"])

        _guarded(run)
    _done()
    signal.signal(signal.SIGTERM, lambda *_: os.kill(program, signal.SIGKILL))
    status = signal.SIGKILL
    with contextlib.suppress(ChildProcessError):
        _, status = os.waitpid(program, 0)
    guard.end_descendants(guard.END_S)
    return int(status)


def _limit(orders: dict[str, Any]) -> None:
    limits = (
        (resource.RLIMIT_CPU, orders["cpu_s"]),
        (resource.RLIMIT_AS, orders["memory_bytes"]),
        (resource.RLIMIT_FSIZE, orders["folder_bytes"]),
        (resource.RLIMIT_NPROC, orders["processes"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_STACK, 64 << 20),
    )
    for kind, most in limits:
        if most is not None:
            _, hard = resource.getrlimit(kind)
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(kind, (most, most))


def _report(reason: str) -> None:
    for fd in _REPORTS:
        os.write(fd, reason.encode(errors="replace"))


def _done() -> None:
    """The program has its sandbox: without namespaces it might open this process's descriptors."""
    while _REPORTS:
        os.close(_REPORTS.pop())


def _guarded(work: Any) -> NoReturn:
    """In a fork: does the work and exits like its status; never returns into the caller's code."""
    try:
        _end_like(work())
    except OSError as error:
        _report(str(error))
    finally:
        os._exit(FAILED)


def _end_like(status: int) -> NoReturn:
    """Exits with the same status, or with 128 and the signal's number."""
    os._exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))


def _mount(source: bytes | None, target: bytes, kind: bytes | None, flags: int, data: bytes | None) -> None:
    _check(_LIBC.mount(source, target, kind, ctypes.c_ulong(flags), data), f"mount {target.decode()}")


def _check(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
