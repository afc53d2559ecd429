"""Deadlines that count only the time for which the event loop turned."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from slipstream import patience as patience_module
from slipstream.patience import Patience

from .quick_time import event_loop_policy  # noqa: F401 (a fixture)


def hold_up(seconds):
    asyncio.get_running_loop().held_up(seconds)


@pytest.fixture
def quicker(monkeypatch):
    """Looks twice a second, and takes half a second for late."""
    monkeypatch.setattr(patience_module, "_TICK_S", 0.5)
    monkeypatch.setattr(patience_module, "_LATE_S", 0.5)


async def lasted(patience, seconds):
    loop = asyncio.get_running_loop()
    began = loop.time()
    try:
        async with patience:
            await asyncio.sleep(seconds)
    except TimeoutError:
        return loop.time() - began
    return None


async def test_a_wait_ends_at_its_deadline_or_with_what_is_waited_for():
    assert await lasted(Patience(0.1), 30.0) == pytest.approx(0.1, abs=1e-3)
    assert await lasted(Patience(30.0), 0.01) is None
    assert await lasted(Patience(None), 0.01) is None


async def test_a_sign_of_life_begins_it_anew():
    async with Patience(0.3) as patience:
        for _ in range(6):
            await asyncio.sleep(0.1)
            patience.restart()
    again = Patience(0.2)
    asyncio.get_running_loop().call_later(0.1, again.restart)
    assert await lasted(again, 30.0) == pytest.approx(0.3, abs=2e-3)


async def test_time_for_which_the_loop_was_held_up_is_not_counted(quicker):
    async with Patience(0.4):
        await asyncio.sleep(0.05)
        hold_up(1.1)
        await asyncio.sleep(0.05)


async def test_a_deadline_further_away_counts_in_the_same_way(quicker):
    held = asyncio.create_task(lasted(Patience(0.75), 1.4))
    exact = asyncio.create_task(lasted(Patience(2.0), 30.0))
    await asyncio.sleep(0.05)
    hold_up(1.3)
    assert await held is None
    assert 2.0 < await exact < 4.0


async def test_deadlines_further_away_share_one_timer(quicker):
    async def wait(patience):
        async with patience:
            await asyncio.sleep(0)
            return len(asyncio.get_running_loop()._scheduled)

    before = len(asyncio.get_running_loop()._scheduled)
    most = await asyncio.gather(*(wait(Patience(30.0)) for _ in range(100)))
    assert max(most) <= before + 1
    far = Patience(1.6)
    asyncio.get_running_loop().call_later(0.9, far.restart)
    assert await lasted(far, 30.0) == pytest.approx(2.5, abs=5e-3)


async def test_a_loop_that_is_always_late_has_an_end_too(monkeypatch):
    monkeypatch.setattr(patience_module, "_LATE_S", 0.02)

    async def always():
        while True:
            hold_up(0.05)
            await asyncio.sleep(0)

    holding = asyncio.create_task(always())
    assert await lasted(Patience(0.01), 30.0) is not None
    holding.cancel()


async def test_time_that_is_not_to_be_counted_is_not():
    counting = asyncio.Event()
    patience = Patience(0.1, counting.is_set)
    waiting = asyncio.create_task(lasted(patience, 30.0))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    counting.set()
    assert await asyncio.wait_for(waiting, 20) is not None


async def test_what_the_block_raises_and_its_cancellation_leave_it():
    with pytest.raises(KeyError):
        async with Patience(1.0):
            raise KeyError
    waiting = asyncio.create_task(lasted(Patience(30.0), 30.0))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


STOPPED = """
import asyncio, os, signal, sys
from slipstream import patience
from slipstream.patience import Patience
patience._LATE_S = 0.3
async def main():
    loop, has_heard = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(0, has_heard.set)
    async with Patience(float(sys.argv[1])):
        os.kill(os.getpid(), signal.SIGSTOP)  # by itself, so that it has waited no longer by then
        await has_heard.wait()
        for _ in range(5):  # turns of the loop: a deadline that had passed would be noticed
            await asyncio.sleep(0)
    print("heard", flush=True)
asyncio.run(main())
"""


def test_a_process_that_was_stopped_hears_what_came_meanwhile():
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPED, "0.8"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    time.sleep(1.5)
    process.stdin.write("\n")
    process.stdin.flush()
    os.kill(process.pid, signal.SIGCONT)
    assert process.communicate(timeout=60)[0] == "heard\n"
