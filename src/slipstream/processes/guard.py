"""Parent process of one worker, `python -I -S guard.py MAX_PROCESSES NAMESPACE COMMAND...`: ends the worker and all its
descendants.

It kills them, including daemons and processes in sessions of their own, when the worker has ended, when the run asks
for it (`END`; SIGTERM, which may come to all processes of a run, changes nothing), or when the run is gone: one second
after its standard input closes, which also tells the worker to end. Then it exits with the worker's status. Orphaned
descendants become its children (PR_SET_CHILD_SUBREAPER), so that none is missed. SIGUSR1 is forwarded to the worker. On
SIGUSR2 both write their stacks, as all processes of a run do (`processes/stacks.py`); the guard removes the files that
stayed empty. It imports only the standard library and is started by path, so that it starts fast.

It also ends them all, with the status `TOO_MANY`, when there are more than MAX_PROCESSES descendants, which it counts
20 times a second; it runs before them, where it may have a priority of real time.

A user namespace of the worker's own (`NAMESPACE`) keeps the worker from reading memory and environment of any process
outside. Users and groups are the same in it: all of them if this process is root's, or else its own. Where the kernel
refuses it the worker runs without, and without the variable `APART`. Unless the user is root, the kernel then bounds
the worker's threads and processes, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import resource
import select
import signal
import sys
import time

GRACE_S = 1.0
"""Time that the worker may continue after its input has closed."""
END = signal.SIGRTMIN
"""By it the run asks for the end."""
END_S = 20.0
"""Time limit for killing; processes left after it cannot be killed."""
STACKS = "SLIPSTREAM_STACKS"
"""Environment variable: `processes.stacks.VARIABLE`, which cannot be imported here."""
TOO_MANY = 117
"""Exit status after the worker was ended for the number of its descendants."""
NAMESPACE, NO_NAMESPACE = "namespace", "no-namespace"
APART = "SLIPSTREAM_APART"
"""Environment variable of a worker in a user namespace of its own."""
_POLL_S = 0.05
_PAUSE_S = 0.002
_THREADS = 8  # for each process, where the kernel counts both
_CLONE_NEWUSER = 0x10000000
PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36


def main(max_processes: int, namespace: bool, command: list[str]) -> None:
    """Starts the worker, waits until it or the run ends, and ends all descendants."""
    run = os.getppid()
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # uvloop leaves duplicate descriptors of the pipes open in children
    stacks = _answer_for_stacks()
    adopt()
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP, END):
        signal.signal(number, lambda *_: None)
    worker = (namespace and _start(command, max_processes)) or _start(command)
    with contextlib.suppress(OSError):  # only root may
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)  # only the worker may hold the pipe of its output
    status = _wait(worker, run, woken, max_processes)
    end_descendants(END_S)
    for path in (stacks, stacks.replace(f"-guard-{os.getpid()}.", f"-{worker}.")):
        with contextlib.suppress(OSError):
            if not os.stat(path).st_size:
                os.unlink(path)
    _end_like(status)


def _answer_for_stacks() -> str:
    """Registers this process as `processes.stacks.register` does; its file, empty without one."""
    path = f"{os.environ.get(STACKS, '')}-guard-{os.getpid()}.txt"
    if STACKS not in os.environ:
        return ""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        return ""
    faulthandler.register(signal.SIGUSR2, file)
    return path


def adopt() -> None:
    """Makes orphaned descendants children of this process."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_descendants(within_s: float) -> bool:
    """Kills all descendants of this process, which must have called `adopt`; false if some are left after
    `within_s`."""
    deadline = time.monotonic() + within_s
    while reap() and time.monotonic() < deadline:
        for pid in descendants():  # children of those that die here come to this process: it finds them next
            _send(pid, signal.SIGKILL)
        time.sleep(_PAUSE_S)
    return not reap()


def _start(command: list[str], apart_with: int = 0) -> int:
    """Starts the worker. `apart_with`: in a user namespace of its own, with at most so many processes; 0 is returned if
    that cannot be."""
    guard = os.getpid()
    told, tell = os.pipe()  # the worker: it has its namespace
    granted, grant = os.pipe()  # the guard: its users are in it
    worker = os.fork()
    if worker:
        os.close(tell)
        os.close(granted)
        is_apart = bool(apart_with and os.read(told, 1)) and _let_in(worker)
        if is_apart:
            os.write(grant, b"x")
        os.close(told)
        os.close(grant)
        if apart_with and not is_apart:
            os.waitpid(worker, 0)
            return 0
        return worker
    try:
        os.close(told)
        os.close(grant)
        if apart_with:
            _go_apart(tell, granted, apart_with)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == guard:
            os.setsid()  # signals to its process group must not reach the guard
            os.execv(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]} cannot be started: {error}\n".encode())
    os._exit(127)


def _go_apart(tell: int, granted: int, max_processes: int) -> None:
    """Moves this process to a new user namespace; exits if it cannot have one."""
    if ctypes.CDLL(None).unshare(_CLONE_NEWUSER):
        os._exit(1)
    os.write(tell, b"x")
    if not os.read(granted, 1):
        os._exit(1)
    os.environ[APART] = "1"
    _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    limit = max_processes * _THREADS
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit))


def _let_in(worker: int) -> bool:
    """Gives the worker's namespace the users and groups of this one: all of them, or else this process's own."""
    alone = (f"{os.getuid()} {os.getuid()} 1", f"{os.getgid()} {os.getgid()} 1")
    for users, groups in ((_same_ids("uid_map"), _same_ids("gid_map")), alone):
        with contextlib.suppress(OSError):
            if users == alone[0]:
                _write(f"/proc/{worker}/setgroups", "deny")
            _write(f"/proc/{worker}/uid_map", users)
            _write(f"/proc/{worker}/gid_map", groups)
            return True
    return False


def _same_ids(name: str) -> str:
    """A map for a namespace below this one in which every id is what it is here."""
    with open(f"/proc/self/{name}") as file:
        ranges = [line.split() for line in file]
    return "\n".join(f"{first} {first} {count}" for first, _, count in ranges)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _wait(worker: int, run: int, woken: int, max_processes: int) -> int | None:
    """Waits for the worker; its status, or None if it is to be ended."""
    poller = select.poll()
    poller.register(0, select.POLLRDHUP)  # only hang-ups: the data is for the worker
    poller.register(woken, select.POLLIN)
    deadline: float | None = None
    while deadline is None or time.monotonic() < deadline:
        ready = dict(poller.poll((_POLL_S if deadline is None else GRACE_S / 20) * 1000))
        received = os.read(woken, 4096) if woken in ready else b""
        if signal.SIGUSR1 in received:
            _send(worker, signal.SIGUSR1)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == worker:
                    return ended[1]
        if END in received:
            return None
        if _has_more(max_processes):
            os.write(2, f"\nmore than {max_processes} processes were started and live\n".encode())
            return TOO_MANY << 8
        if deadline is None and (0 in ready or os.getppid() != run):
            poller.unregister(0)
            deadline = time.monotonic() + GRACE_S
    return None


def reap() -> bool:
    """Whether there are children left, as the kernel reports it."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def descendants() -> set[int]:
    """Ids of all processes below this one."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
    found, last = set[int](), {os.getpid()}
    while last := {pid for pid, parent in parents.items() if parent in last} - found:
        found |= last
    return found


def _has_more(number: int) -> bool:
    """Whether this process has more descendants than that, by the kernel's own lists of children."""
    found, to_ask = 0, [os.getpid()]
    while to_ask and found <= number:
        children = children_of(to_ask.pop())
        found += len(children)
        to_ask += children
    return found > number


def children_of(pid: int) -> list[int]:
    """Ids of the processes that are children of any of its threads."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                found += map(int, file.read().split())
    return found


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _end_like(status: int | None) -> None:
    """Exits with the same status."""
    if status is not None and os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        prctl(_PR_SET_DUMPABLE, 0)  # one core dump, the worker's, is enough
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(0 if status is None else os.WEXITSTATUS(status))


def prctl(option: int, value: int) -> None:
    """Sets an attribute of this process; see prctl(2)."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option})")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] == NAMESPACE, sys.argv[3:])
