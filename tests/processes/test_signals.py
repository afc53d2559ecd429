"""Which signal asks for a stop, which ends the run at once, and which deadline follows."""

import contextlib
import ctypes
import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest

from slipstream.processes import signals
from slipstream.processes.signals import StopRequest
from tests.waiting import until


class Ended(BaseException):
    """In the place of `os._exit`."""


class Grace:
    """Remembers when it was told to end the process."""

    def __init__(self, seconds=0.2):
        self.seconds = seconds
        self.ended = []
        self.over = threading.Event()

    def end(self, number, at_once):
        self.ended.append((number, time.monotonic()))
        at_once()
        self.over.set()


@pytest.fixture
def at_once(monkeypatch):
    """Calls of what ends the children; the process itself lives on."""

    def end(code):
        raise Ended(code)

    monkeypatch.setattr(signals.os, "_exit", end)
    return []


def send(*numbers):
    for number in numbers:
        os.kill(os.getpid(), number)
        time.sleep(0.01)


USR1, TERM, INT = signal.SIGUSR1, signal.SIGTERM, signal.SIGINT


@pytest.mark.parametrize("numbers", [(INT,), (TERM,), (USR1,), (USR1, USR1), (TERM, USR1), (INT, USR1), (USR1, TERM)])
def test_what_asks_for_a_stop(at_once, numbers):
    first = []
    with StopRequest(lambda: at_once.append(1), first.append) as stop:
        assert not stop()
        send(*numbers)
        assert stop()
    assert first == [numbers[0]]
    assert at_once == []


@pytest.mark.parametrize("numbers", [(INT, INT), (INT, TERM), (TERM, TERM), (USR1, INT), (USR1, TERM, TERM)])
def test_what_ends_the_run_at_once(at_once, numbers):
    with StopRequest(lambda: at_once.append(1)), pytest.raises(Ended, match=str(128 + numbers[-1])):
        send(*numbers)
    assert at_once == [1]


def test_a_sigterm_that_a_scheduler_and_the_supervisor_send_is_one(at_once, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with StopRequest(lambda: at_once.append(1), num_passed_on=lambda: 0) as stop:
        send(TERM)
        now[0] += 0.9
        send(TERM)
        assert stop()
        assert at_once == []
        now[0] += 1.1
        with pytest.raises(Ended):
            send(TERM)
    with StopRequest(lambda: at_once.append(2), num_passed_on=lambda: 0), pytest.raises(Ended):
        send(INT, INT)
    assert at_once == [1, 2]


@pytest.mark.parametrize(
    ("passed_on", "ended"),
    [
        ((0, 1), False),  # the scheduler's, and then the supervisor's
        ((1, 1), False),
        ((1, 1, 2), True),
        ((0, 1, 1), True),  # the scheduler's second one
        ((0, 0), True),  # twice to this process
        ((1, 2), True),  # twice to the supervisor
    ],
)
def test_each_sender_s_sigterms_are_counted_however_late_they_are_seen(at_once, monkeypatch, passed_on, ended):
    monkeypatch.setattr(signals, "_SAME_S", 0.0)
    count = iter(passed_on)
    with StopRequest(lambda: at_once.append(1), num_passed_on=lambda: next(count)) as stop:
        send(*[TERM] * (len(passed_on) - 1))
        assert stop()
        assert at_once == []
        with pytest.raises(Ended) if ended else contextlib.nullcontext():
            send(TERM)
    assert at_once == [1] * ended


@pytest.mark.parametrize("number", [TERM, USR1])
def test_the_deadline_that_follows(number):
    grace, killed, before = Grace(), [], signal.getsignal(number)
    with StopRequest(lambda: killed.append(1), grace=grace):
        began = time.monotonic()
        send(number)
        assert grace.over.wait(60)
    ((ended, at),) = grace.ended
    assert ended == number
    assert at - began >= 0.2
    assert killed == [1]
    assert signal.getsignal(number) is before


def test_a_long_call_of_c_code_does_not_hold_the_deadline_up():
    """The main thread waits in the C library for a mutex, which no signal interrupts, and which only `end` unlocks."""
    library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)  # zeros are an unlocked mutex
    library.pthread_mutex_lock(mutex)
    grace = Grace()
    rescue = threading.Timer(60.0, library.pthread_mutex_unlock, (mutex,))
    rescue.start()
    with StopRequest(lambda: library.pthread_mutex_unlock(mutex), grace=grace) as stop:
        threading.Timer(0.1, os.kill, (os.getpid(), TERM)).start()
        library.pthread_mutex_lock(mutex)
        was_in_time = rescue.is_alive()
        assert stop()
    rescue.cancel()
    assert was_in_time
    assert [number for number, _ in grace.ended] == [TERM]


def test_there_is_no_deadline_for_those_who_leave_or_press_ctrl_c():
    grace, wakeup = Grace(0.3), signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    with StopRequest(grace=grace):
        send(INT)
        time.sleep(0.5)
    grace.seconds = 600.0  # only who waits no longer ends before
    with StopRequest(grace=grace) as stop:
        send(TERM)
        assert stop()
    assert signal.set_wakeup_fd(wakeup) == wakeup
    until(lambda: all(thread.name != "grace" for thread in threading.enumerate()))
    assert grace.ended == []


def test_a_signal_to_a_fork_is_not_its_parents():
    grace = Grace(0.1)
    with StopRequest(grace=grace) as stop:
        child = os.fork()
        if not child:
            signal.signal(TERM, lambda *_: None)
            os.kill(os.getpid(), TERM)
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
        time.sleep(0.3)
        assert not stop()
    assert grace.ended == []
