"""How an engine's process follows others, whose signals it heeds, and what it leaves; without other processes."""

import multiprocessing
import os
import signal
from multiprocessing import shared_memory
from types import SimpleNamespace

import pytest

from slipstream.processes import lifeline


@pytest.fixture
def started(monkeypatch):
    """The threads that were started; each has run to its end."""
    threads = []

    def start(target, name, daemon=None):
        return SimpleNamespace(start=lambda: (threads.append((name, daemon)), target()))

    monkeypatch.setattr(lifeline, "threading", SimpleNamespace(Thread=start))
    return threads


def test_a_process_ends_soon_after_its_parent_and_watches_it_once(started, monkeypatch):
    parents, slept, killed = [5, 5, 5, 5, 1, 1], [], []
    system = {"getpid": lambda: 77, "getppid": lambda: parents.pop(0), "kill": lambda *given: killed.append(given)}
    monkeypatch.setattr(lifeline, "os", SimpleNamespace(**system))
    monkeypatch.setattr(lifeline, "time", SimpleNamespace(sleep=slept.append))
    monkeypatch.setattr(lifeline, "_following", set())
    lifeline.follow_parent()
    assert (started, killed) == ([("follow-parent", True)], [(77, signal.SIGKILL)])
    assert len(slept) == 3
    assert 0 < max(slept) <= 0.5
    lifeline.follow_parent()
    assert len(started) == 1


def test_an_order_is_a_line_and_the_end_of_orders_the_end_of_all(started, monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    reading, writing = os.pipe()
    pieces = iter([b"one ", b"order\n", b"another\n", b"half"])
    killed = []

    def read(number, size):
        assert (number, size >= 4096) == (reading, True)
        return next(pieces, b"")

    monkeypatch.setattr(lifeline.sys, "stdin", SimpleNamespace(fileno=lambda: reading))
    monkeypatch.setattr(lifeline.os, "read", read)
    monkeypatch.setattr(lifeline.os, "getpgrp", lambda: 88)
    monkeypatch.setattr(lifeline.os, "killpg", lambda *given: killed.append((*given, file.exists())))
    monkeypatch.setattr(lifeline, "_to_remove", set())
    (file := tmp_path / "shared").touch()
    lifeline.remove_at_end(str(file))
    order = lifeline.follow_stdin()
    assert [order(), order()] == [b"one order\n", b"another\n"]
    assert (started, killed) == ([("follow-stdin", True)], [(88, signal.SIGKILL, False)])
    os.close(reading)
    os.close(writing)


def test_signals_for_the_trainer_end_what_is_forked_and_nothing_else(monkeypatch):
    handlers, forks = {signal.SIGUSR2: "own"}, []
    monkeypatch.setattr(lifeline.signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(lifeline.signal, "getsignal", handlers.get)
    monkeypatch.setattr(lifeline.os, "register_at_fork", lambda **given: forks.append(given))
    lifeline.leave_signals_to_trainer()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        assert handlers[number](number, None) is None
    handlers[signal.SIGUSR1] = "own"
    ((when, in_child),) = forks[0].items()
    assert (len(forks), when) == (1, "after_in_child")
    in_child()
    assert handlers == {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        **dict.fromkeys((signal.SIGUSR1, signal.SIGUSR2), "own"),
    }


@pytest.mark.parametrize("name", ["slipstream-engine-x", "another", None])
def test_shared_memory_belongs_to_the_temporary_folder_that_is_its_own(name, monkeypatch, tmp_path):
    monkeypatch.setattr(shared_memory, "_make_filename", theirs := lambda: "/theirs")
    monkeypatch.setitem(config := multiprocessing.current_process()._config, "semprefix", "/mp")
    noted, removed = [], []
    monkeypatch.setattr(lifeline, "note_shared", lambda folder, path: noted.append((folder.name, path)))
    monkeypatch.setattr(lifeline, "remove_shared", lambda folder: removed.append(folder.name))
    monkeypatch.setattr(lifeline, "_to_remove", set())
    if name is None:
        monkeypatch.delenv("TMPDIR", raising=False)
    else:
        monkeypatch.setenv("TMPDIR", str(tmp_path / name))
    lifeline.name_shared_memory()
    lifeline.remove_at_end(path := str(tmp_path / "noted"))
    lifeline.remove_files()
    if name != "slipstream-engine-x":
        assert (shared_memory._make_filename, config["semprefix"], noted, removed) == (theirs, "/mp", [], [])
        return
    first, second = (shared_memory._make_filename() for _ in range(2))
    assert first != second
    assert all(each.startswith("/psm_slipstream-engine-x_") and len(each) < 64 for each in (first, second))
    assert config["semprefix"] == "/slipstream-engine-x"
    assert (noted, removed) == ([(name, path)], [name])


def test_where_python_names_nothing_of_its_own_nothing_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "slipstream-engine-x"))
    monkeypatch.setattr(lifeline, "shared_memory", memory := SimpleNamespace())
    monkeypatch.setattr(lifeline.multiprocessing, "current_process", lambda: SimpleNamespace(_config=config))
    config = {"authkey": 1}
    lifeline.name_shared_memory()
    assert (vars(memory), config) == ({}, {"authkey": 1})
