"""Each parent with its child, by what may happen to either: who notices within which time, what is said, what is left.
`pytest tests/processes/test_pairs.py -s` prints the table."""

import contextlib
import ctypes
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time

import pytest

from tests import fork_server
from tests.processes import owner
from tests.waiting import WAIT_S, ends, is_there

pytestmark = pytest.mark.real_start
KINDS = ["engine", "orchestrator", "rank", "reward_worker", "hosted_environment", "python_call"]
GUARDED = ("reward_worker", "hosted_environment")
NOTICED = {
    "child killed": {
        "engine": "code -9",
        "orchestrator": "code -9",
        "rank": "SIGKILL",
        "reward_worker": "SIGKILL",
        "hosted_environment": "SIGKILL",
        "python_call": "SIGKILL",
    },
    "child stopped": {
        "engine": "was killed, as it said nothing",
        "orchestrator": "was stopped (state T)",
        "rank": "training.rank_timeout_s",
        "reward_worker": "TimeoutError",
        "hosted_environment": "TimeoutError",
    },
    "garbage": {
        "rank": "sent what cannot be read",
        "reward_worker": "an answer that cannot be read",
        "hosted_environment": "wrote what cannot be read",
    },
}
"""Part of what the parent says. The missing ones are not read while the child lives; a call has no deadline."""


@pytest.fixture(params=KINDS)
def pair(request, tmp_path, monkeypatch):
    """The parent is forked, since it only owns: its child begins as ever."""
    monkeypatch.setitem(fork_server.KINDS, owner.__name__, "trainer")
    command = [sys.executable, "-m", owner.__name__, request.param, str(tmp_path)]
    how = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    with fork_server.ForkedPopen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, **how) as parent:
        pids = json.loads(parent.stdout.readline())["pids"]
        yield request.param, parent, pids
        for pid in (parent.pid, *pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def end_of_channel(pid, parent):
    """A copy of the child's end, taken from outside."""
    get_descriptor, process = 438, os.pidfd_open(pid)
    for name in os.listdir(f"/proc/{pid}/fd"):
        if not os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):
            continue
        copy = ctypes.CDLL(None, use_errno=True).syscall(get_descriptor, process, int(name), 0)
        if copy < 0:
            pytest.skip("this user may not take descriptors of other processes")
        end = socket.socket(fileno=copy)
        if struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0] == parent:
            return end
        end.close()
    raise AssertionError("the child has no channel")


@pytest.mark.parametrize(
    "event", ["parent killed", "parent stopped", "child killed", "child stopped", "closed", "garbage"]
)
def test_what_comes_of(pair, event):
    kind, parent, pids = pair
    child = pids[-1]
    began, message = time.monotonic(), ""
    if event == "parent killed":
        parent.kill()
        assert [ends(pid) for pid in pids] == [True] * len(pids), "no child outlives its parent"
    elif event == "parent stopped":
        parent.send_signal(signal.SIGSTOP)
        time.sleep(1.0)
        assert [is_there(pid) for pid in pids] == [True] * len(pids), "a parent that may go on keeps its child"
        message = "no bound: another process looks at a parent"
    elif event == "closed":
        with end_of_channel(child, parent.pid) as end:
            end.shutdown(socket.SHUT_RDWR)
        assert [ends(pid) for pid in pids] == [True] * len(pids)
    else:
        if event == "garbage":
            with end_of_channel(child, parent.pid) as end:
                end.sendall(b"\xff" * 64)
        else:
            os.kill(child, signal.SIGKILL if event == "child killed" else signal.SIGSTOP)
        expected = NOTICED[event].get(kind)
        if expected is None:
            return
        message = json.loads(parent.stdout.readline())["noticed"]
        assert expected in message
        assert [ends(pid) for pid in pids] == [True] * len(pids), "the parent leaves nothing of it"
    seconds = time.monotonic() - began
    assert seconds < WAIT_S
    print(f"| {kind} | {event} | {seconds:.1f} s | {message[:110]} |")
