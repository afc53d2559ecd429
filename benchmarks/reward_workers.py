"""How fast reward and tool workers are: trivial calls a second, and how long calls that wait take together.

Everything is real: worker processes, their guards, the protocol. Prints a Markdown table: the median of the repeats and
their spread, and the target where there is one. Workers are warm: as many as can be have started before the clock does.

    python benchmarks/reward_workers.py [--repeats 3] [--workers 1 2]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import uvloop

from slipstream.config import EnvironmentConfig
from slipstream.envs.scoring.pool import ScorerPool
from slipstream.records import Message, Task, ToolCall

ENVIRONMENT = '''
import asyncio, time
from slipstream.envs import Environment, Episode, Score

def instant(text: str) -> str:
    """Answers at once."""
    return text

async def wait(seconds: float) -> str:
    """Answers after a while."""
    await asyncio.sleep(seconds)
    return "done"

class Timed(Environment):
    max_turns = 1
    tools = (instant, wait)

    def tasks(self, split, num_tasks):
        return []

    async def run(self, task, policy):
        return Episode("")

    def score(self, task, completion):
        kind, _, seconds = completion.partition(" ")
        if kind == "wait":
            return self._wait(float(seconds))
        if kind == "block":
            time.sleep(float(seconds))
        return Score(float(completion == task.answer))

    async def _wait(self, seconds):
        await asyncio.sleep(seconds)
        return Score(1.0)
'''
TASK = Task("1", (Message("user", "What is 2 + 2?"),), "4")
Measure = Callable[[ScorerPool], Awaitable[float]]


async def rate(pool: ScorerPool, number: int) -> float:
    """Trivial rewards a second."""
    started = time.perf_counter()
    scores = await asyncio.gather(*(pool.score(TASK, "4" if i % 2 else "5") for i in range(number)))
    assert sum(score.reward for score in scores) == number // 2
    return number / (time.perf_counter() - started)


async def together(pool: ScorerPool, completion: str, number: int) -> float:
    """Seconds until all of them are graded."""
    started = time.perf_counter()
    await asyncio.gather(*(pool.score(TASK, completion) for _ in range(number)))
    return time.perf_counter() - started


async def calls(pool: ScorerPool, call: ToolCall, episodes: int, each: int) -> float:
    """Calls a second of concurrent episodes, each of which calls one after the other."""

    async def episode() -> None:
        for _ in range(each):
            assert not (await pool.call_tool(TASK, call)).failure

    started = time.perf_counter()
    await asyncio.gather(*(episode() for _ in range(episodes)))
    return episodes * each / (time.perf_counter() - started)


async def latency(pool: ScorerPool, call: ToolCall, episodes: int) -> float:
    """Median milliseconds of a call where each episode makes one a second."""
    found: list[float] = []

    async def episode(number: int) -> None:
        await asyncio.sleep(number / episodes)
        for _ in range(4):
            started = time.perf_counter()
            await pool.call_tool(TASK, call)
            found.append(time.perf_counter() - started)
            await asyncio.sleep(max(0.0, 1.0 - found[-1]))

    await asyncio.gather(*(episode(number) for number in range(episodes)))
    return 1000 * statistics.median(found)


def measures(workers: int) -> dict[str, tuple[Measure, str]]:
    """What is measured, and its target."""
    answer, wait = ToolCall("instant", {"text": "x"}), ToolCall("wait", {"seconds": 0.02})
    return {
        "trivial rewards/s": (lambda pool: rate(pool, 5000), "at least 5,000"),
        "60 coroutine rewards that wait 0.1 s: s": (lambda pool: together(pool, "wait 0.1", 60), "at most 0.5"),
        "60 blocking rewards of 0.1 s: s": (
            lambda pool: together(pool, "block 0.1", 60),
            f"at most {7.2 / workers:.1f}",
        ),
        "instant tools of 500 episodes: calls/s": (lambda pool: calls(pool, answer, 500, 10), ""),
        "coroutine tools of 20 ms, 500 episodes: calls/s": (lambda pool: calls(pool, wait, 500, 10), ""),
        "the same, a call a second and episode: ms a call": (
            lambda pool: latency(pool, wait, 500),
            "20, little more",
        ),
    }


async def measure(path: Path, workers: int, repeats: int) -> dict[str, list[float]]:
    """All measures, each with a pool of its own."""
    found: dict[str, list[float]] = {}
    for name, (run, _) in measures(workers).items():
        config = EnvironmentConfig(name=f"{path}:Timed", reward_workers=workers)
        async with ScorerPool(config) as pool:
            while (await together(pool, "block 0.1", 10 * workers)) > 1.5 and workers > 1:
                pass  # until all workers have started
            await run(pool)  # the first shows the pool how quick they are
            found[name] = [await run(pool) for _ in range(repeats)]
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    arguments = parser.parse_args()
    print(f"| {len(os.sched_getaffinity(0))} cores | workers | median (range of {arguments.repeats}) | target |")
    print("|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "timed.py"
        path.write_text(ENVIRONMENT)
        for workers in arguments.workers:
            for name, values in uvloop.run(measure(path, workers, arguments.repeats)).items():
                shown = [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in (min(values), max(values))]
                median = statistics.median(values)
                middle = f"{median:,.0f}" if median >= 100 else f"{median:.3g}"
                target = measures(workers)[name][1]
                print(f"| {name} | {workers} | {middle} ({shown[0]} to {shown[1]}) | {target} |", flush=True)


if __name__ == "__main__":
    main()
