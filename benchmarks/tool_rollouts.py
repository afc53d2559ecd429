"""How many rollouts a second concurrent episodes with tools complete, with tools that wait and with instant ones.

Everything but the engine is real: chat template, `RolloutRunner`, the conversation with tools, reward and tool workers.
The engine answers from a script, as one does that takes 5 ms a step and batches all requests: a turn takes as many
steps as it has tokens. An episode is two turns with a call each, and an answer; the next one takes its place when it
ends. Prints a Markdown table: medians and ranges of repeats that were made in turn.

    python benchmarks/tool_rollouts.py [--repeats 3] [--concurrent 500] [--each 20] [--tool-ms 20] [--workers 1]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from benchmarks.scripted_engine import ScriptedEngine
from slipstream.commands.small_models.tiny_qwen3 import new_tokenizer
from slipstream.config import EnvironmentConfig
from slipstream.data.chat_template import ChatTokenizer
from slipstream.envs.registry import load_environment
from slipstream.envs.scoring.pool import ScorerPool
from slipstream.envs.single_turn import make_tasks
from slipstream.orchestrator.rollouts import RolloutRunner, seed_of
from slipstream.records import Completion, GenerateRequest, Message, Rollout, SamplingParams, Task, ToolCall

ENVIRONMENT = '''
import asyncio
from slipstream.envs import Message, SingleTurn, Task

class Looks(SingleTurn):
    max_turns = 4

    def __init__(self, seed=0, seconds=0.0):
        super().__init__(seed)

        async def look_up(name: str, year: int = 0) -> str:
            """Looks up where somebody was.

            Args:
                name: Who.
                year: In which year.
            """
            if seconds:
                await asyncio.sleep(seconds)
            return f"{name} was there in {year}"

        self.tools = (look_up,)

    def tasks(self, split, num_tasks):
        return [Task(str(i), (Message("user", f"Where was number {i}?"),), "I") for i in range(num_tasks)]

    def reward(self, task, completion):
        return float(completion.startswith(task.answer))
'''
NUM_CALLS = 2
SHORTEST, LONGEST = 32, 96
"""Tokens of a turn, drawn evenly: 64 on average."""
CALL = ToolCall("look_up", {"name": "number 7", "year": "1907"})


class SteppingEngine(ScriptedEngine):
    """Also takes a step for each token. Steps begin at fixed times, as they do in another process, whatever this one is
    doing."""

    step_s = 0.005

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `ScriptedEngine`."""
        loop = asyncio.get_running_loop()
        first = math.ceil(loop.time() / self.step_s)
        completion = await super().generate(request)
        await asyncio.sleep((first + len(completion.token_ids)) * self.step_s - loop.time())
        return completion


def engine_of(tokenizer: ChatTokenizer) -> SteppingEngine:
    """An engine whose turns call the tool until the prompt holds the results of all calls."""
    text = tokenizer.plain_tokens("I look it up. " * LONGEST)
    begin = tokenizer.render([Message("user", "")])[0]

    def script(prompt_ids: list[int], seed: int) -> list[int]:
        length = SHORTEST + seed % (LONGEST - SHORTEST + 1)
        return [*text[: length - 1], tokenizer.end_token_id]

    def parse(request: GenerateRequest, tokens: list[int]) -> tuple[list[ToolCall], str]:
        num_results = (request.prompt_ids.count(begin) - 3) // 2  # system, user, (assistant, tool) each, assistant
        return ([CALL] if num_results < NUM_CALLS else []), ""

    engine = SteppingEngine(script)
    engine.parse = parse
    return engine


@dataclass
class Case:
    """A kind of tool, ready to be measured."""

    runner: RolloutRunner
    tasks: list[Task]
    sampling: SamplingParams
    rates: list[float] = field(default_factory=list[float])
    lags: list[float] = field(default_factory=list[float])
    """How late the event loop ran what was due, in ms: the 99th percentile of each repeat."""
    cpu: list[float] = field(default_factory=list[float])
    """CPU time of this process for an episode, in ms."""
    beyond: list[float] = field(default_factory=list[float])
    """How long an episode takes beside the engine's steps, in ms, on average."""

    async def measure(self, concurrent: int, number: int) -> None:
        """A repeat of `number` episodes, which `concurrent` places take. Measures while all places are taken, from the
        end of the first `concurrent` episodes to the beginning of the last."""
        coming, ends, begins = iter(range(number)), list[float](), list[float]()
        late, beyond = list[float](), list[float]()

        async def place() -> None:
            for episode in coming:
                begins.append(time.perf_counter())
                rollout = await self._episode(episode)
                ends.append(time.perf_counter())
                if len(ends) > concurrent:
                    beyond.append(1000 * (rollout.seconds - rollout.num_sampled * SteppingEngine.step_s))

        watch = asyncio.create_task(lag(late))
        used = time.process_time()
        await asyncio.gather(*(place() for _ in range(concurrent)))
        self.cpu.append(1000 * (time.process_time() - used) / number)
        watch.cancel()
        measured = [end for end in ends[concurrent:] if end <= begins[-1]]
        self.rates.append(len(measured) / (begins[-1] - ends[concurrent - 1]))
        self.lags.append(statistics.quantiles(late, n=100)[-1])
        self.beyond.append(statistics.fmean(beyond))

    async def _episode(self, number: int) -> Rollout:
        rollout = await self.runner.run(
            self.tasks[number % len(self.tasks)],
            rollout_id=str(number),
            group_id=str(number),
            sampling=self.sampling,
            seed=seed_of(number),
        )
        assert (rollout.outcome, rollout.reward) == ("done", 1.0), rollout.error
        assert (rollout.num_turns, rollout.metrics["tool_calls"]) == (NUM_CALLS + 1, NUM_CALLS)
        assert rollout.metrics["tool_failures"] == 0
        return rollout


async def lag(late: list[float]) -> None:
    """Adds by how many ms the event loop was late, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + 0.01
        await asyncio.sleep(0.01)
        late.append(1000 * (loop.time() - due))


@contextlib.asynccontextmanager
async def case(path: Path, tokenizer: ChatTokenizer, seconds: float, workers: int, size: int) -> AsyncGenerator[Case]:
    """Workers and runner for tools that wait for `seconds`."""
    config = EnvironmentConfig(name=str(path), settings={"seconds": seconds}, reward_workers=workers)
    environment = load_environment(config)
    async with ScorerPool(config) as scorer:
        yield Case(
            RolloutRunner(
                environment, scorer, tokenizer, engine_of(tokenizer), request_timeout_s=60.0, context_length=4096
            ),
            make_tasks(environment, "train", size),
            SamplingParams(max_tokens=LONGEST + 1, stop_token_ids=tuple(tokenizer.stop_token_ids)),
        )


async def compare(
    path: Path, tokenizer: ChatTokenizer, tool_s: float, workers: int, concurrent: int, each: int, repeats: int
) -> tuple[Case, Case]:
    """Instant tools, and tools that wait; the first repeat of both fills caches."""
    async with (
        case(path, tokenizer, 0.0, workers, concurrent) as instant,
        case(path, tokenizer, tool_s, workers, concurrent) as waiting,
    ):
        for repeat in range(repeats + 1):
            for measured in (instant, waiting) if repeat % 2 else (waiting, instant):
                await measured.measure(concurrent, concurrent * (each if repeat else 2))
        for measured in (instant, waiting):
            del measured.rates[0], measured.lags[0], measured.cpu[0], measured.beyond[0]
        return instant, waiting


def shown(values: list[float], digits: int = 0) -> str:
    """Median and range."""
    low, middle, high = (f"{value:,.{digits}f}" for value in (min(values), statistics.median(values), max(values)))
    return f"{middle} ({low} to {high})"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--concurrent", type=int, default=500)
    parser.add_argument("--each", type=int, default=20, help="episodes of each concurrent place, on average")
    parser.add_argument("--tool-ms", type=float, default=20.0)
    parser.add_argument("--workers", type=int, default=1, help="tool workers; the plan's number on two cores is 1")
    options = parser.parse_args()
    if options.each < 4:
        parser.error("--each must be at least 4: the beginning and the end are not measured")
    with tempfile.TemporaryDirectory() as folder:
        new_tokenizer("char", context_length=4096).save_pretrained(folder)
        tokenizer = ChatTokenizer(folder)
        path = Path(folder) / "looks.py"
        path.write_text(ENVIRONMENT)
        cases = uvloop.run(
            compare(
                path,
                tokenizer,
                options.tool_ms / 1000,
                options.workers,
                options.concurrent,
                options.each,
                options.repeats,
            )
        )
    cores = len(os.sched_getaffinity(0))
    print(f"| {cores} cores, tools | rollouts/s | ms beside the engine's | CPU ms a rollout | loop late, ms |")
    print("|---|---|---|---|---|")
    for name, found in zip(("instant", f"{options.tool_ms:g} ms"), cases, strict=True):
        print(
            f"| {name} | {shown(found.rates)} | {shown(found.beyond)} | {shown(found.cpu, 2)} | {shown(found.lags)} |"
        )
    instant, waiting = cases
    ratios = [100 * b / a for a, b in zip(instant.rates, waiting.rates, strict=True)]
    print(f"\nWith tools of {options.tool_ms:g} ms: {shown(ratios, 1)} % of the rollouts/s with instant ones.")


if __name__ == "__main__":
    main()
