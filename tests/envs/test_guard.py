"""The guard by itself, for root and for a normal user: what its worker cannot read, and a fork bomb."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from slipstream.envs.scoring import worker
from slipstream.processes import guard

PYTHON = "/usr/bin/python3"  # a normal user may not be able to run the one of the tests
BOMB = """
    import mmap, os, signal, sys, time
    def readable(pid):
        try:
            return b"s3cr3t" in open(f"/proc/{pid}/environ", "rb").read()
        except PermissionError:
            return "denied"
    print(os.getuid(), readable(sys.argv[1]), readable(os.getppid()), flush=True)
    made = mmap.mmap(-1, 8)
    while int.from_bytes(made[:8], "big") < 1500:
        try:
            if os.fork() == 0:
                signal.alarm(30)
                os.setsid()
        except BlockingIOError:
            time.sleep(0.01)
        made[:8] = (int.from_bytes(made[:8], "big") + 1).to_bytes(8, "big")
    time.sleep(30)
"""
RUN = """
    import os, subprocess, sys
    number = int(sys.argv[1])
    if number != os.getuid():
        os.setgroups([]), os.setgid(number), os.setuid(number)
    run = [sys.executable, "-I", "-S", "run.py", sys.argv[2]]
    os.execve(sys.executable, run, {"KEY": "s3cr3t", "PATH": os.environ["PATH"]})
"""
START = """
    import os, subprocess, sys
    python = [sys.executable, "-I", "-S"]
    process = subprocess.Popen(
        [*python, "guard.py", "64", sys.argv[1], *python, "bomb.py", str(os.getpid())], stdin=subprocess.PIPE, env={}
    )
    sys.exit(process.wait())
"""


@pytest.mark.skipif("COVERAGE_PROCESS_START" in os.environ, reason="coverage.py has SIGTERM for itself")
def test_a_signal_to_all_processes_ends_neither_guard_nor_worker():
    command = [sys.executable, "-I", "-S", guard.__file__, "64", guard.NO_NAMESPACE]
    command += [sys.executable, "-m", worker.__name__]
    _, theirs = sockets = socket.socketpair()
    with (
        contextlib.ExitStack() as stack,
        subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, start_new_session=True) as process,
    ):
        for each in sockets:
            stack.callback(each.close)
        until = time.monotonic() + 60
        while not (pids := guard.children_of(process.pid)) or not is_ready(pids[0]):
            assert time.monotonic() < until
            time.sleep(0.05)
        for pid in (process.pid, *pids):
            os.kill(pid, signal.SIGTERM)
        time.sleep(0.5)
        assert guard.children_of(process.pid) == pids
        process.send_signal(guard.END)
        process.wait(60)
        assert not Path(f"/proc/{pids[0]}").exists()


def is_ready(pid):
    """Whether it is the worker and catches SIGTERM; the guard's fork, which becomes the worker, has the guard's handler
    until then."""
    is_fork = guard.__file__.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    return not is_fork and catches(pid, signal.SIGTERM)


def catches(pid, number):
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
    return int(caught.split()[1], 16) >> (number - 1) & 1


def has_namespaces():
    """Whether the kernel allows user namespaces here."""
    script = "import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare(0x10000000))"
    return subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def left(folder):
    """Processes that still run in the folder."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and os.readlink(process / "cwd") == str(folder):
                found.append(process.name)
        except OSError:
            continue
    return found


@pytest.mark.full
@pytest.mark.skipif(os.getuid() != 0 or not Path(PYTHON).exists(), reason="another user is needed")
@pytest.mark.parametrize("user", [0, 12345])
@pytest.mark.parametrize("namespace", [guard.NAMESPACE, guard.NO_NAMESPACE])
def test_keys_and_a_fork_bomb(user, namespace):
    if namespace == guard.NAMESPACE and not has_namespaces():
        pytest.skip("the kernel refuses user namespaces")
    folder = Path(f"/tmp/slipstream-guard-{os.getpid()}")
    folder.mkdir(mode=0o755)
    try:
        shutil.copy(guard.__file__, folder / "guard.py")
        for name, text in (("bomb", BOMB), ("start", RUN), ("run", START)):
            (folder / f"{name}.py").write_text(textwrap.dedent(text))
        for path in folder.iterdir():
            path.chmod(0o644)
        done = subprocess.run(
            [PYTHON, "-I", "-S", "start.py", str(user), namespace],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert left(folder) == []
        assert done.returncode == guard.TOO_MANY, done.stderr[-500:]
        assert "more than 64 processes" in done.stderr
        seen = "denied denied" if namespace == guard.NAMESPACE else "True False"
        assert done.stdout.split("\n")[0] == f"{user} {seen}"
    finally:
        shutil.rmtree(folder)
