"""Children that end with their parent: by their standard input, taking their files along, or by the parent's pid."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from slipstream.processes import temporary as temporary_folders
from slipstream.processes.child import END
from slipstream.processes.temporary import make_temporary, note_shared, remove_temporary

SIGNALLED = """
import os, signal, time
from slipstream.processes import lifeline
lifeline.leave_signals_to_trainer()
up, told = os.pipe()
if (fork := os.fork()) == 0:
    os.write(told, b".")
    time.sleep(600)
    os._exit(0)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    os.kill(os.getpid(), number)
os.read(up, 1)  # while it is forked, a signal to it would be lost
os.kill(fork, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]), flush=True)
time.sleep(600)
"""


@pytest.mark.skipif("COVERAGE_PROCESS_START" in os.environ, reason="coverage.py has SIGTERM for itself")
def test_a_child_lives_on_when_all_processes_are_signalled_and_ends_in_order():
    with subprocess.Popen([sys.executable, "-c", SIGNALLED], stdout=subprocess.PIPE, start_new_session=True) as child:
        assert int(child.stdout.readline()) == -signal.SIGTERM, "what it forks ends as usual"
        child.send_signal(END)
        assert child.wait(60) == -END


PARENT = """
import subprocess, sys
child = "import time; from slipstream.processes import lifeline; lifeline.follow_parent(); "
child += "print('up', flush=True); time.sleep(600)"
process = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE)
assert process.stdout.readline() == b"up\\n"
print(process.pid)
"""


def test_a_child_that_follows_its_parent():
    # Its standard output is a pipe of its own, so that `run` does not wait for it.
    result = subprocess.run([sys.executable, "-c", PARENT], capture_output=True, text=True, check=True, timeout=60)
    with contextlib.suppress(psutil.NoSuchProcess):
        child, until = psutil.Process(int(result.stdout)), time.monotonic() + 60
        while child.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < until, "it outlives its parent"
            time.sleep(0.05)


def test_a_server_outlives_its_parent():
    lines = "lifeline.outlive_parent(); lifeline.follow_parent(); "
    command = [sys.executable, "-c", PARENT.replace("lifeline.follow_parent(); ", lines)]
    # The child has this standard error, too, for which `run` would wait.
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True, timeout=60)
    child = psutil.Process(int(result.stdout))
    try:
        time.sleep(2)
        assert child.status() != psutil.STATUS_ZOMBIE
    finally:
        child.kill()


SHARING = """
import multiprocessing, os, sys, time
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from slipstream.processes import lifeline
resource_tracker.register = lambda *_: None
lifeline.name_shared_memory()

def make(noted):
    memory = SharedMemory(create=True, size=1 << 20)
    lock = multiprocessing.get_context("spawn").Lock()
    open(f"/dev/shm/{noted}", "w").close()
    lifeline.remove_at_end(f"/dev/shm/{noted}")
    store = os.path.join(os.environ["TMPDIR"], f"vllm_dist_{noted}")
    for path in (store, f"/dev/shm/vllm_dist_{noted}-tp:0"):
        open(path, "w").close()
    print(memory.name, "sem." + lock._semlock.name[1:], noted, f"vllm_dist_{noted}-tp:0", flush=True)
    time.sleep(600)

multiprocessing.get_context("fork").Process(target=make, args=(sys.argv[1] + "-child",)).start()
if len(sys.argv) > 2:
    lifeline.Parent()
make(sys.argv[1])
"""


@pytest.mark.parametrize("how", ["its owner kills it", "its owner is killed", "the next one is made"])
def test_what_killed_processes_have_in_shared_memory_goes_with_their_folder(tmp_path, how):
    folder = make_temporary("engine", tmp_path)
    name, shared = f"slipstream-test-{folder.name[-8:]}", Path("/dev/shm")
    foreign = [shared / f"psm_{name}", shared / f"{name}-foreign", shared / f"{name}-again"]
    command = [sys.executable, "-c", SHARING, name, *(["follow"] if how == "its owner is killed" else [])]
    environment = {"PYTHONPATH": ":".join(sys.path), "TMPDIR": str(folder)}
    own, theirs = socket.socketpair()
    with theirs:
        child = subprocess.Popen(
            command, stdin=theirs, stdout=subprocess.PIPE, start_new_session=True, text=True, env=environment
        )
    try:
        for path in foreign:
            path.touch()
        made = [shared / each for _ in range(2) for each in child.stdout.readline().split()]
        assert len(made) == 8
        note_shared(folder, str(foreign[2]))
        (held := foreign[2].with_suffix(".held")).hardlink_to(foreign[2])  # its number is not given again
        foreign[2].unlink()
        foreign[2].touch()
        foreign.append(held)
        assert all(path.exists() for path in made)
        if how == "its owner is killed":
            own.close()
        else:
            os.killpg(child.pid, signal.SIGKILL)
        assert child.wait(60) == -signal.SIGKILL
        assert all(path.exists() for path in made) is (how != "its owner is killed")
        if how == "its owner kills it":
            remove_temporary(folder)
        elif how == "the next one is made":
            os.close(temporary_folders._handles.pop(folder))
            remove_temporary(make_temporary("engine", tmp_path))
        assert [path for path in made if path.exists()] == []
        assert all(path.exists() for path in foreign)
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.wait(60)
        own.close()
        child.stdout.close()
        remove_temporary(folder)
        for path in foreign:
            path.unlink(missing_ok=True)
