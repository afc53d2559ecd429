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


@pytest.fixture
def quicker(monkeypatch):
    """Looks twice a second, and takes half a second for late."""
    monkeypatch.setattr(patience_module, "_TICK_S", 0.5)
    monkeypatch.setattr(patience_module, "_LATE_S", 0.5)


async def lasted(patience, seconds):
    began = time.monotonic()
    try:
        async with patience:
            await asyncio.sleep(seconds)
    except TimeoutError:
        return time.monotonic() - began
    return None


async def test_a_wait_ends_at_its_deadline_or_with_what_is_waited_for():
    assert 0.09 < await lasted(Patience(0.1), 30.0) < 10
    assert await lasted(Patience(30.0), 0.01) is None
    assert await lasted(Patience(None), 0.01) is None


async def test_a_sign_of_life_begins_it_anew():
    async with Patience(0.3) as patience:
        for _ in range(6):
            await asyncio.sleep(0.1)
            patience.restart()
    again = Patience(0.2)
    asyncio.get_running_loop().call_later(0.1, again.restart)
    assert 0.29 < await lasted(again, 30.0) < 10


async def test_time_for_which_the_loop_was_held_up_is_not_counted(quicker):
    async with Patience(0.4):
        await asyncio.sleep(0.05)
        time.sleep(1.1)
        await asyncio.sleep(0.05)


async def test_a_deadline_further_away_counts_in_the_same_way(quicker):
    held = asyncio.create_task(lasted(Patience(0.75), 1.4))
    exact = asyncio.create_task(lasted(Patience(2.0), 30.0))
    await asyncio.sleep(0.05)
    time.sleep(1.3)
    assert await held is None
    assert 2.0 < await exact < 10


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
    assert 2.45 < await lasted(far, 30.0) < 10


async def test_a_loop_that_is_always_late_has_an_end_too(monkeypatch):
    monkeypatch.setattr(patience_module, "_LATE_S", 0.02)

    async def hold_up():
        while True:
            time.sleep(0.05)
            await asyncio.sleep(0)

    holding = asyncio.create_task(hold_up())
    assert await lasted(Patience(0.01), 30.0) is not None
    holding.cancel()


async def test_time_that_is_not_to_be_counted_is_not():
    counting = asyncio.Event()
    patience = Patience(0.1, counting.is_set)
    waiting = asyncio.create_task(lasted(patience, 30.0))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    counting.set()
    assert await asyncio.wait_for(waiting, 10) is not None


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
import asyncio, sys
from slipstream import patience
from slipstream.patience import Patience
patience._LATE_S = 0.3
async def main():
    async with Patience(float(sys.argv[1])):
        print("waiting", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    print("heard", flush=True)
asyncio.run(main())
"""


def test_a_process_that_was_stopped_hears_what_came_meanwhile():
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPED, "0.8"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "waiting\n"
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(1.5)
    os.kill(process.pid, signal.SIGCONT)
    assert process.communicate("\n", timeout=30)[0] == "heard\n"
