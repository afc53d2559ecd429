"""Waits for work elsewhere, and the end of the event loop's thread."""

import asyncio
import contextlib
import threading
from concurrent.futures import Future

import psutil
import pytest
from benchmarks.event_loop import call

from slipstream.errors import DeadlineError, EngineError, Interrupted
from slipstream.orchestrator import thread as module
from slipstream.orchestrator.thread import EventLoopThread, wait_for
from slipstream.patience import lasting


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(module, "POLL_S", 0.02)


@pytest.fixture
def begun():
    """The threads of this name that the test has begun, and that go on."""
    before = set(threading.enumerate())
    return lambda name: [each for each in threading.enumerate() if each.name == name and each not in before]


def failed(error):
    made = Future()
    made.set_exception(error)
    return made


def test_a_stop_request_ends_a_wait_unless_it_may_not():
    future = Future()
    with pytest.raises(Interrupted, match=r"^stopped while waiting for it: continue with --resume$"):
        wait_for(future, 1e6, "it", should_stop=lambda: True)
    assert future.cancelled()
    with pytest.raises(DeadlineError, match=r"^it did not end within 0 s$"):
        wait_for(late := Future(), 0.04, "it", should_stop=lambda: True, may_stop=False)
    assert late.cancelled()
    done = Future()
    done.set_result(3)
    assert wait_for(done, 1.0, "it", should_stop=lambda: True) == 3, "what has ended is not waited for"


@pytest.mark.parametrize("error", [EngineError("gone"), ValueError("a bug"), TimeoutError("its own")])
def test_a_failure_is_raised_itself(error):
    with pytest.raises(type(error), match=str(error)):
        wait_for(failed(error), 1e6, "it", should_stop=lambda: False)


def test_after_a_stop_request_only_a_failure_that_repeats_itself_counts():
    retriable, final = EngineError("gone\nat once"), EngineError("wrong")
    final.is_retriable = False
    assert retriable.is_retriable
    with pytest.raises(Interrupted, match=r"continue with --resume; meanwhile: gone$"):
        wait_for(failed(retriable), 1e6, "it", should_stop=lambda: True)
    for error, options in ((final, {}), (retriable, {"may_stop": False})):
        with pytest.raises(EngineError):
            wait_for(failed(error), 1e6, "it", should_stop=lambda: True, **options)


def test_a_thread_ends_with_its_last_work_and_all_others_cancelled(begun):
    told, has_begun = [], threading.Event()

    async def work():
        has_begun.set()
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            told.append("cancelled")
            raise

    async def last():
        told.append("last")

    thread = EventLoopThread(lambda: False)
    (its,) = begun("orchestrator")
    assert its.daemon
    thread.submit(work())
    assert has_begun.wait(60)
    assert thread.stop(last()) is True
    assert told == ["cancelled", "last"]
    assert not its.is_alive()


def test_an_ended_thread_leaves_no_descriptors():
    before = psutil.Process().num_fds()
    assert EventLoopThread(lambda: False).stop(asyncio.sleep(0))
    assert psutil.Process().num_fds() == before


def test_a_call_that_a_stop_request_may_not_end_is_carried_out():
    thread = EventLoopThread(lambda: True)
    assert call(thread, asyncio.sleep(0.1, 3), 10, "it", may_stop=False) == 3
    with pytest.raises(Interrupted, match="stopped while waiting for it"):
        call(thread, asyncio.sleep(600), 1e6, "it")
    assert thread.stop(asyncio.sleep(0))


def test_what_is_still_needed_for_the_end_is_not_cancelled():
    thread = EventLoopThread(lambda: False)

    async def begin():
        return lasting(asyncio.sleep(0.05, "closed"))

    async def last():
        found.append(await task)

    found, task = [], call(thread, begin(), 10, "it")
    assert thread.stop(last())
    assert found == ["closed"]


def test_work_that_suppresses_its_cancellation_does_not_keep_the_end_waiting(begun):
    let_go, has_begun = threading.Event(), threading.Event()

    async def stubborn():
        has_begun.set()
        while not let_go.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)

    async def last():
        raise AssertionError

    thread = EventLoopThread(lambda: False)
    thread.submit(stubborn())
    assert has_begun.wait(60)
    closing = last()
    (its,) = begun("orchestrator")
    assert thread.stop(closing, timeout_s=0.1) is False
    closing.close()
    its.join(60)
    assert not its.is_alive(), "it runs nothing more"
    let_go.set()
