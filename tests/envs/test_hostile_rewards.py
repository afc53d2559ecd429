"""Rewards that do their worst, among others that do no harm: every score is that of its completion, every call ends
in time, and nothing of theirs lives on."""

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy
import pytest
import tests.envs.hostile as hostile
import uvloop
from tests.envs.environments import shorten, task

from slipstream.config.schema import EnvironmentConfig
from slipstream.envs.base import RewardFailed, RewardTimeout
from slipstream.envs.scoring.pool import ScorerPool

VALUES = {
    "returns true": 1.0,
    "returns float32": float(numpy.float32(0.1)),
    "returns int64": -7.0,
    "returns largest": 3.4e38,
    "returns tiny": 5e-324,
    "returns third": 1 / 3,
    "returns odd_keys": 0.5,
    "returns sixty_keys": 0.5,
    **dict.fromkeys(
        (f"returns {what}" for what in ("nan", "inf_metric", "beyond", "huge", "none", "text")), RewardFailed
    ),
    **dict.fromkeys((f"returns {what}" for what in ("complex", "decimal", "list", "array", "class")), RewardFailed),
    **dict.fromkeys((f"returns {what}" for what in ("generator", "no_key", "nested")), RewardFailed),
    **dict.fromkeys((f"returns {what}" for what in ("many_keys", "long_key")), RewardFailed),
    "length half \ud83d of it": float(sum(map(ord, "half \ud83d of it"))),
    "length x" + "\0" * 100_000: float(ord("x")),
    **dict.fromkeys((f"raises {what}" for what in ("exit", "interrupt", "base", "generator_exit")), RewardFailed),
    **dict.fromkeys((f"raises {what}" for what in ("cancelled", "unspeakable", "surrogate")), RewardFailed),
    **dict.fromkeys((f"raises {what}" for what in ("long", "group", "stop")), RewardFailed),
    "recursion x": RewardFailed,
    "memory x": RewardFailed,
}
LEAVING = dict.fromkeys(
    [
        *("child plain", "child session", "child group", "child bare", "child stopped", "child deaf"),
        *("daemon x", "many x", "forks returns", "forks raises", "forks answers", "forks unseen"),
        *("thread x", "at_exit x", "elsewhere x", "limits x", "prints x", "takes_input x"),
        *("no_streams x", "no_output x", "own_loop x"),
    ],
    0.5,
)
ENDING = {
    **dict.fromkeys((f"dies {how}" for how in ("exit0", "exit3", "SEGV", "KILL", "HUP", "ABRT")), RewardFailed),
    **dict.fromkeys(("forges x", "junk x", "closes x", "guard KILL", "guard RTMIN"), RewardFailed),
}
HANGING = {
    **dict.fromkeys((f"hangs {how}" for how in ("sleep", "loop", "regex", "stop", "deaf", "program")), RewardTimeout),
    **dict.fromkeys(("guard STOP", "hangs bomb"), RewardTimeout),
}
AWAITING = {f"coroutine {number}": float(number) for number in range(20)} | dict.fromkeys(
    ("awaits ever", "awaits blocked", "awaits stubborn"), RewardTimeout
)


@pytest.fixture
def mark(monkeypatch, request):
    """A text in the environment, or the command line, of everything that rewards start."""
    value = f"m{os.getpid()}-{abs(hash(request.node.nodeid))}"
    monkeypatch.setenv(hostile.MARK, value)
    yield value
    for pid in marked(value):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def marked(mark):
    """Living processes of the test's rewards, and their workers and guards."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                texts = (folder / "environ").read_bytes() + (folder / "cmdline").read_bytes()
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if mark.encode() in texts and state != "Z":
                found.append(int(folder.name))
    return found


async def none_left(mark, within_s=60.0):
    end = time.monotonic() + within_s
    while marked(mark) and time.monotonic() < end:
        await asyncio.sleep(0.05)
    return not marked(mark)


def config(timeout_s=60.0, **options):
    return EnvironmentConfig(
        name=hostile.__file__, reward_timeout_s=timeout_s, variables=(hostile.MARK,), reward_workers=1, **options
    )


async def grade(pool, modes):
    """All of them, and others that do no harm in between."""
    asked = {}
    numbers = itertools.count(1)
    for mode, due in modes.items():
        asked[mode] = due
        asked |= {f"number {number}": float(number) for number in itertools.islice(numbers, 3)}
    found = await asyncio.gather(*(pool.score(task(), text) for text in asked), return_exceptions=True)
    got = [type(each) if isinstance(each, Exception) else each.reward for each in found]
    differ = {
        text[:40]: (has, str(each)[:200])
        for (text, due), has, each in zip(asked.items(), got, found, strict=True)
        if has != due
    }
    assert differ == {}
    return dict(zip(asked, found, strict=True))


async def test_values_and_what_is_left_behind(mark):
    async with ScorerPool(config()) as pool:
        found = await grade(pool, VALUES | LEAVING)
        assert pool.num_restarts == 0
        assert len(marked(mark)) > 20
        assert found["returns odd_keys"].metrics["\ud83d"] == 5.0
        assert len(found["returns sixty_keys"].metrics) == 60
        assert "100001 numbers" in str(found["returns many_keys"])
        assert "reward_memory_gib" in str(found["memory x"])
        ended = time.monotonic()
    assert time.monotonic() - ended < 22, "a guard that ended nothing would be killed after 23 s"
    assert await none_left(mark)


@pytest.mark.full
async def test_what_ends_the_worker(mark):
    async with ScorerPool(config()) as pool:
        await grade(pool, ENDING)
        assert pool.num_restarts == len(ENDING)
    assert await none_left(mark)


@pytest.mark.full
@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_what_hangs_ends_with_all_that_was_left(mark, run):
    async def main():
        async with ScorerPool(config()) as pool:
            await grade(pool, LEAVING)
            shorten(pool, 1.0)
            started = time.monotonic()
            await grade(pool, HANGING)
            assert pool.num_restarts == len(HANGING)
            assert time.monotonic() - started < 15 * len(HANGING)
            assert len(marked(mark)) <= 2, "the last worker and its guard"
        assert await none_left(mark)

    run(main())


@pytest.mark.full
async def test_coroutines(mark):
    async with ScorerPool(config(timeout_s=1.5)) as pool:
        await grade(pool, AWAITING)
    assert await none_left(mark)


@pytest.mark.full
async def test_a_worker_for_each_call_bears_everything(mark):
    modes = VALUES | LEAVING | ENDING | {"patches x": 0.5, "alarm x": 0.5, "coroutine 7": 7.0}
    modes |= dict.fromkeys(("forges x", "junk x", "closes x"), 0.5)  # none of them has a pipe of the protocol's
    async with ScorerPool(config(fresh_worker=True)) as pool:
        await grade(pool, modes)
        assert len(marked(mark)) <= 2, "the worker and its guard"
        assert pool.num_restarts <= 5
    assert await none_left(mark)


@pytest.mark.parametrize("fresh", [False, pytest.param(True, marks=pytest.mark.full)])
async def test_nothing_lives_on_when_the_run_is_killed(mark, tmp_path, fresh):
    script = tmp_path / "run.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import asyncio, sys
            sys.path.insert(0, {str(Path(__file__).parents[2])!r})
            from tests.envs.environments import task
            from tests.envs.test_hostile_rewards import LEAVING, ScorerPool, config
            async def main():
                async with ScorerPool(config(timeout_s=60, fresh_worker={fresh})) as pool:
                    await asyncio.gather(*(pool.score(task(), mode) for mode in LEAVING))
                    print("left", flush=True)
                    await pool.score(task(), "hangs program")
            asyncio.run(main())
            """
        )
    )
    environment = {name: value for name, value in os.environ.items() if name != hostile.MARK}
    command = ["env", f"{hostile.MARK}={mark}", sys.executable, str(script)]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert run.stdout.readline() == "left\n"
    end = time.monotonic() + 20
    while len(marked(mark)) < 4 and time.monotonic() < end:  # run, guard, worker and the program that it waits for
        await asyncio.sleep(0.05)
    run.kill()
    run.wait()
    run.stdout.close()
    assert await none_left(mark)
