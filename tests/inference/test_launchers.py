"""Processes that a command of the user's starts: orders, and the end of either side."""

import fcntl
import math
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import pytest

from slipstream.errors import ConfigError
from slipstream.inference import launchers
from slipstream.inference.launchers import Elsewhere, Orders, is_locked, lock, name_of_part, take_orders
from slipstream.processes import child_process

MODULE = "tests.inference.quick_part"
OWNER = """
import sys, time
from pathlib import Path
from slipstream.inference.launchers import Elsewhere
child = Elsewhere(Path(sys.argv[1])).launch("", ["stay"], {}, Path(sys.argv[1]) / "engine.log")
print(child.poll(), flush=True)
time.sleep(600)
"""
SERVER = """
import sys
from pathlib import Path
from slipstream.inference.launchers import Orders, take_orders
take_orders(Orders(Path(sys.argv[1]), "engine-0"), sys.argv[2], lambda: False, 600.0, print)
"""


@pytest.fixture
def orders(tmp_path):
    return Orders(tmp_path, "engine-0")


@pytest.fixture
def server(orders):
    """Takes orders in a thread until the test ends."""
    over, said, result = threading.Event(), [], []
    thread = threading.Thread(
        target=lambda: result.append(take_orders(orders, MODULE, over.is_set, 600.0, said.append)), daemon=True
    )
    thread.start()
    yield said
    over.set()
    thread.join(60)
    assert result == [True]


def order(folder, *arguments, **variables):
    return Elsewhere(folder).launch("", arguments, {**os.environ, **variables}, folder / "engine.log")


def until(condition, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def python(program, *arguments):
    return subprocess.Popen([sys.executable, "-c", program, *map(str, arguments)], stdout=subprocess.PIPE, text=True)


def test_it_runs_with_what_is_ordered_and_ends_by_itself(server, tmp_path, orders, monkeypatch):
    monkeypatch.setenv("SECRET", "password")
    child = order(tmp_path, "say", VLLM_PLUGINS="ours", OTHER="not sent")
    assert child.wait(60) == 3
    assert (tmp_path / "engine.log").read_text() == "ours password\n"
    assert not {"password", "not sent"} & set(orders.order.read_text().split('"'))
    assert orders.order.stat().st_mode & 0o77 == 0
    assert child.poll() == 3
    Elsewhere(tmp_path).end(child, 1.0)  # it has ended


def test_it_is_ended_when_that_is_ordered_and_another_one_follows(server, tmp_path):
    launcher = Elsewhere(tmp_path)
    first = launcher.launch("", ["stay"], {}, tmp_path / "engine.log")
    until(lambda: first.pid)
    assert first.poll() is None
    launcher.end(first, 60.0)
    assert first.poll() == -child_process.END
    second = launcher.launch("", ["stay"], {}, tmp_path / "engine.log")
    until(lambda: second.pid)
    assert second.pid != first.pid
    launcher.kill(second)
    assert second.wait(60) == -signal.SIGKILL
    launcher.end(second, 0.0)


def test_one_that_is_ordered_again_replaces_what_has_ended(server, tmp_path):
    launcher = Elsewhere(tmp_path)
    first = launcher.launch("", ["stay"], {}, tmp_path / "engine.log")
    until(lambda: first.pid)
    os.kill(first.pid, signal.SIGKILL)
    until(lambda: first.poll() is not None)
    second = launcher.launch("", ["say"], {"VLLM_PLUGINS": "again"}, tmp_path / "engine.log")
    assert second.wait(60) == 3
    launcher.end(second, 0.0)


def test_it_is_killed_with_the_process_that_needed_it(server, tmp_path, orders):
    owner = python(OWNER, tmp_path)
    assert owner.stdout.readline() == "None\n"
    until(lambda: orders.read_state())
    pid = orders.read_state().pid
    owner.kill()
    owner.wait()
    until(lambda: orders.read_state().code is not None)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert any("the process that needed it has ended" in text for text in server)
    assert not is_locked(orders.owner)


def test_the_end_of_the_command_is_the_end_of_its_process(tmp_path, orders):
    server = python(SERVER, tmp_path, MODULE)
    child = order(tmp_path, "stay")
    until(lambda: child.pid)
    assert child.poll() is None
    server.kill()
    server.wait()
    until(lambda: child.poll() is not None)
    assert child.poll() == -signal.SIGKILL
    assert (
        "the command `slipstream engine` that had started this process has ended"
        in (tmp_path / "engine.log").read_text()
    )
    Elsewhere(tmp_path).end(child, 0.0)


def test_an_order_that_nobody_takes_fails_in_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(launchers, "TAKEN_S", 0.1)
    child = order(tmp_path, "stay")
    assert not child.is_taken
    until(lambda: child.poll() is not None)
    assert "nobody has started `slipstream engine` for this run" in (tmp_path / "engine.log").read_text()
    Elsewhere(tmp_path).end(child, 0.0)


def test_the_order_of_a_killed_attempt_is_not_taken(tmp_path, orders):
    child = order(tmp_path, "stay")
    child.release()  # as the kernel does
    assert take_orders(orders, MODULE, lambda: False, 0.3, print) is False
    assert orders.read_state() is None


def test_two_commands_do_not_serve_one_part(tmp_path, orders, monkeypatch):
    monkeypatch.setattr(launchers, "_LOOK_S", 0.1)
    handle = lock(orders.server, 0.0)
    with pytest.raises(ConfigError, match="another process takes the orders for engine-0"):
        take_orders(orders, MODULE, lambda: False, 0.1, print)
    os.close(handle)
    assert take_orders(orders, MODULE, lambda: True, 0.1, print)


def test_who_looks_whether_a_command_takes_orders_does_not_keep_one_from_it(tmp_path, orders, monkeypatch):
    """As a run does that has been stopped within its look."""
    look = fcntl.flock
    looks = threading.Event()

    def flock(handle, how):
        look(handle, how)
        if how & fcntl.LOCK_SH:
            looks.set()
            time.sleep(0.5)

    assert take_orders(orders, MODULE, lambda: True, 0.1, print), "its file is there"
    monkeypatch.setattr(launchers.fcntl, "flock", flock)
    looking = threading.Thread(target=is_locked, args=(orders.server,))
    looking.start()
    assert looks.wait(60)
    assert take_orders(orders, MODULE, lambda: True, 60.0, print)
    looking.join(60)


def test_names_of_parts():
    assert name_of_part("engine") == "engine-0"
    assert name_of_part("engine-3") == "engine-3"
    assert name_of_part("orchestrator") == "orchestrator-0"


def test_a_command_that_is_started_again_does_not_take_the_order_again(tmp_path, orders):
    server = python(SERVER, tmp_path, MODULE)
    child = order(tmp_path, "stay")
    until(lambda: child.pid)
    pid = child.pid
    server.kill()
    server.wait()
    again = python(SERVER, tmp_path, MODULE)  # before anybody has looked
    until(lambda: is_locked(orders.server) and child.poll() is not None)
    assert (child.poll(), child.pid) == (-signal.SIGKILL, pid)
    Elsewhere(tmp_path).end(child, 0.0)
    again.kill()
    again.wait()


def test_two_threads_may_end_it_and_the_shorter_deadline_counts(server, tmp_path, orders):
    launcher = Elsewhere(tmp_path)
    child = launcher.launch("", ["deaf"], {}, tmp_path / "engine.log")
    until(lambda: (tmp_path / "engine.log").exists() and "deaf" in (tmp_path / "engine.log").read_text())
    began = time.monotonic()
    threads = [threading.Thread(target=launcher.end, args=(child, wait)) for wait in (500.0, 0.0)]
    for thread, wait in zip(threads, (500.0, 0.0), strict=True):
        thread.start()
        until(lambda wait=wait: child.poll() is not None or orders.read_order().ends_in_s == wait)
    for thread in threads:
        thread.join(100)
        assert not thread.is_alive()
    assert time.monotonic() - began < 300
    assert child.poll() == -signal.SIGKILL


def test_one_that_is_stopped_goes_on_until_its_process_is_not_needed(tmp_path, orders):
    told, ends = [], [math.inf]
    serve = partial(take_orders, orders, MODULE, lambda: False, 600.0, print, lambda: ends[0])
    for _ in ("ordered", "killed"):
        ends[0] = math.inf
        thread = threading.Thread(target=lambda: told.append(serve()))
        thread.start()
        child = order(tmp_path, "stay")
        until(lambda child=child: child.pid)
        ends[0] = time.monotonic() + 600.0
        time.sleep(0.5)
        assert child.poll() is None
        if not told:
            Elsewhere(tmp_path).end(child, 60.0)
        else:
            ends[0] = time.monotonic()
        thread.join(60)
        assert child.poll() == (-child_process.END if len(told) == 1 else -signal.SIGKILL)
        child.release()
    assert told == [True, True]


def test_what_cannot_be_started_is_said(server, tmp_path):
    child = Elsewhere(tmp_path).launch("", ["say"], {}, tmp_path / "engine-0.server" / "engine.log")
    assert child.wait(60) == 1
    assert any("cannot be started" in text for text in server)
    Elsewhere(tmp_path).end(child, 0.0)
