"""Who blocks the event loop: what is watched, which frame is blamed, and what is said."""

import asyncio
import inspect
import json
import queue
import threading
import time
from traceback import FrameSummary

import pytest

from slipstream.orchestrator import concurrency
from slipstream.orchestrator import event_loop_watch as module
from slipstream.orchestrator.event_loop_watch import LoopWatch, blame

from .test_orchestrator import Odd

OURS, LIBRARY, THEIRS = concurrency.__file__, json.__file__, "/home/me/their_code.py"


def stack_of(*files):
    return [FrameSummary(file, 10 + place, f"f{place}", lookup_line=False) for place, file in enumerate(files)]


@pytest.mark.parametrize(
    ("files", "blamed"),
    [
        ([OURS, THEIRS, LIBRARY, LIBRARY], 1),  # a library that their code calls
        ([OURS, THEIRS, THEIRS], 2),
        ([THEIRS, OURS, LIBRARY], None),  # ours, that their code calls
        ([LIBRARY, LIBRARY], None),
    ],
)
def test_the_innermost_frame_of_an_environments_code_is_blamed(files, blamed):
    where, warning = blame(stack_of(*files), 2.34, Odd())
    place = len(files) - 1 if blamed is None else blamed
    assert where == f"f{place}, line {10 + place} of {files[place]}"
    if blamed is None:
        assert warning is None
    else:
        assert warning.startswith(f"environment Odd blocks all rollouts: a synchronous call ({where}) has held")
        assert "for 2.3 s" in warning


def test_an_environment_may_be_one_of_a_library_and_there_may_be_none():
    (its,) = {inspect.getsourcefile(Odd)}
    environment = type("Installed", (Odd,), {"__module__": "json"})()
    assert inspect.getsourcefile(type(environment)) == LIBRARY != its
    where, warning = blame(stack_of(OURS, LIBRARY), 1.0, environment)
    assert where.endswith(f"line 11 of {LIBRARY}")
    assert "environment Installed" in warning
    assert blame(stack_of(OURS, LIBRARY), 1.0, Odd())[1] is None
    where, warning = blame(stack_of(OURS, THEIRS, LIBRARY), 1.0, None)
    assert (where, warning) == (f"f1, line 11 of {THEIRS}", None)


@pytest.fixture
def loop(monkeypatch):
    """An event loop in a thread, watched in a hurry."""
    monkeypatch.setattr(module, "_INTERVAL_S", 0.02)
    monkeypatch.setattr(module, "_BLOCKED_S", 0.1)
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever, daemon=True)
    thread.start()
    yield made, thread
    made.call_soon_threadsafe(made.stop)
    thread.join(60)
    made.close()


def until(happened):
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_each_line_that_blocks_is_told_once_and_nothing_after_the_end(loop):
    running, thread = loop
    told, let_go = [], queue.SimpleQueue()

    def on_blocked(stack, seconds):
        if stack[-1].name.startswith("busy"):  # not where a loaded machine is late
            told.append((stack[-1].name, seconds))

    before = set(threading.enumerate())
    watch = LoopWatch(running, thread, on_blocked)

    def busy():
        let_go.get()

    def busy_too():
        let_go.get()

    for block, names in ((busy, ["busy"]), (busy_too, ["busy", "busy_too"])):
        running.call_soon_threadsafe(block)
        until(lambda names=names: [name for name, _ in told] == names)
        time.sleep(0.1)  # several looks
        let_go.put(None)
    assert [name for name, _ in told] == ["busy", "busy_too"]
    assert all(seconds > 0.1 for _, seconds in told)
    watch.end()
    until(lambda: not any(each.name == "loop-watch" for each in set(threading.enumerate()) - before))
