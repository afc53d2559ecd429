"""How many rollouts a second the orchestrator completes when the engine costs nothing.

Everything but the engines is real: chat template, `RolloutRunner`, `Batcher`, the ledger, `EngineReplicas`, reward
workers, reasoning_gym. Two engines answer from a script, at once. Prints one Markdown row for each task: median and
spread of the repeats, and the processor time of this process, without the reward worker's, which says more than the
rate on a machine that is shared.

The garbage collector is set as in an orchestrator's process (`orchestrator/garbage_collection.py`).

Then `--held` rollouts are held at once: no engine answers before all were asked; one engine dies with its half of
them, and all must end right all the same.

    python benchmarks/rollouts.py [--repeats 5] [--rollouts 4096] [--held 10000] [--replicas 2]
                                  [--tasks spell_backward basic_arithmetic]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import cProfile
import os
import pstats
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import psutil
import uvloop

from benchmarks.scripted_engine import ScriptedEngine
from slipstream.algo.readiness import group_has_signal
from slipstream.commands.small_models.tiny_qwen3 import new_tokenizer
from slipstream.config import EnvironmentConfig
from slipstream.data.chat_template import ChatTokenizer
from slipstream.envs.registry import load_environment
from slipstream.envs.scoring.pool import ScorerPool
from slipstream.inference.replicas import EngineReplicas
from slipstream.orchestrator.batches.batcher import Batcher
from slipstream.orchestrator.batches.idle_time import IdleTime
from slipstream.orchestrator.batches.share import Share
from slipstream.orchestrator.garbage_collection import fewer_collections, freeze
from slipstream.orchestrator.rollouts import RolloutRunner
from slipstream.progress import Progress
from slipstream.records import Completion, GenerateRequest, SamplingParams, Task, Version
from slipstream.runlog.ledger import Ledger, balance

GROUP_SIZE = 8


class HeldEngine(ScriptedEngine):
    """Answers once `gate` is open; those who wait when it dies are told so, as by a socket that closes."""

    gate: asyncio.Event | None = None
    num_waiting = 0

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `ScriptedEngine`."""
        if self.gate is not None and not self.gate.is_set():
            self.num_waiting += 1
            await self.gate.wait()
        return await super().generate(request)


@contextlib.asynccontextmanager
async def parts(
    task_name: str, tokenizer: AnsweringTokenizer, num_rollouts: int, num_replicas: int
) -> AsyncIterator[tuple[Batcher, list[Task], list[HeldEngine]]]:
    """A batcher over engines that say the right answer to half of the requests, with tasks and a ledger."""
    config = EnvironmentConfig(name=f"reasoning_gym/{task_name}")
    environment = load_environment(config)
    tasks = list(environment.tasks("train", num_rollouts // GROUP_SIZE))
    answers = {
        tuple(tokenizer.render(task.prompt)): [
            tokenizer.answer_ids(text) for text in (environment.gold(task) or "", "something else")
        ]
        for task in tasks
    }
    engines = [
        HeldEngine(lambda prompt_ids, seed: answers[tuple(prompt_ids)][seed % 2], max_restarts=1)
        for _ in range(num_replicas)
    ]
    replicas = EngineReplicas(engines, num_places=num_rollouts, on_event=lambda kind, **fields: None)
    with tempfile.TemporaryDirectory() as folder:
        later = asyncio.get_running_loop().call_later
        ledger = Ledger(Path(folder), 0, 0, staleness=0, shape={}, later=later)
        async with ScorerPool(config) as scorer:
            batcher = Batcher(
                RolloutRunner(environment, scorer, tokenizer, replicas, request_timeout_s=600.0),
                group_size=GROUP_SIZE,
                sampling=SamplingParams(max_tokens=256, stop_token_ids=tuple(tokenizer.stop_token_ids)),
                seed=0,
                max_reward_failures=0.1,
                needs_logprobs=True,
                ledger=ledger,
                progress=cast(Progress, SimpleNamespace(advance=lambda n=1: None)),
                warn=print,
                staleness=0,
                has_signal=group_has_signal,
                parts=(),
                refills=None,
                teacher=None,
                share=Share(),
                idle=IdleTime(),
            )
            with fewer_collections():
                yield batcher, tasks, engines
            ledger.close(0)
        found = balance(Path(folder))
        assert found.num_open == 0, found


async def measure(
    task_name: str, tokenizer: AnsweringTokenizer, num_rollouts: int, num_replicas: int, repeats: int
) -> tuple[list[float], list[float], float]:
    """Rollouts a second and processor microseconds a rollout of each repeat, and the part of them that was right."""
    rates: list[float] = []
    processor: list[float] = []
    right = 0.0
    async with parts(task_name, tokenizer, num_rollouts, num_replicas) as (batcher, tasks, _):
        for step in range(repeats + 1):
            started, used = time.perf_counter(), time.process_time()
            batch = await batcher.make(step, Version(0, step), tasks)
            seconds, used = time.perf_counter() - started, time.process_time() - used
            batcher.ledger.trained(step + 1)
            assert len(batch.rollouts) == len(tasks) * GROUP_SIZE, batch.dropped
            right = statistics.fmean(rollout.reward >= 1.0 for rollout in batch.rollouts)
            if step:  # the first fills caches
                rates.append(len(batch.rollouts) / seconds)
                processor.append(1e6 * used / len(batch.rollouts))
    return rates, processor, right


async def hold(task_name: str, tokenizer: AnsweringTokenizer, num_rollouts: int, num_replicas: int) -> str:
    """Hold so many at once, kill an engine, and say what became of them."""
    async with parts(task_name, tokenizer, num_rollouts, num_replicas) as (batcher, tasks, engines):
        gate = asyncio.Event()
        for engine in engines:
            engine.gate = gate
        begun = time.perf_counter()
        making = asyncio.create_task(batcher.make(0, Version(0, 0), tasks))
        while (num_held := sum(engine.num_waiting for engine in engines)) < len(tasks) * GROUP_SIZE:
            assert not making.done(), making.result()
            await asyncio.sleep(0.01)
        held_s, held_mib = time.perf_counter() - begun, psutil.Process().memory_info().rss / 2**20
        num_lost, engines[0].is_alive = engines[0].num_waiting, False
        gate.set()
        batch = await making
        seconds = time.perf_counter() - begun
        batcher.ledger.trained(1)
        right = statistics.fmean(rollout.reward >= 1.0 for rollout in batch.rollouts)
        return (
            f"{num_held:,} rollouts held at once after {held_s:.1f} s, {held_mib:,.0f} MiB; an engine died with "
            f"{num_lost:,} of them; after {seconds:.1f} s {len(batch.rollouts):,} were complete ({100 * right:.0f} % "
            f"right), {sum(batch.dropped.values())} dropped"
        )


class AnsweringTokenizer(ChatTokenizer):
    """Also knows what a completion's tokens are."""

    def answer_ids(self, text: str) -> list[int]:
        """As a policy would sample it, end token included."""
        return [*self._tokenizer(text, add_special_tokens=False)["input_ids"], self.end_token_id]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rollouts", type=int, default=4096)
    parser.add_argument("--held", type=int, default=10_000)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--tasks", nargs="+", default=["spell_backward", "basic_arithmetic"])
    parser.add_argument("--profile", action="store_true", help="show where the time goes instead")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        new_tokenizer("char").save_pretrained(Path(folder))
        tokenizer = AnsweringTokenizer(folder)
        freeze()
        print("| task | rollouts/s, median | lowest to highest | CPU us each | rollouts x repeats | right | cores |")
        print("|---|---|---|---|---|---|---|")
        for task in arguments.tasks:
            work = measure(task, tokenizer, arguments.rollouts, arguments.replicas, arguments.repeats)
            if arguments.profile:
                profiler = cProfile.Profile()
                profiler.runcall(asyncio.run, work)
                pstats.Stats(profiler).sort_stats("tottime").print_stats(30)
                continue
            rates, processor, right = uvloop.run(work)
            print(
                f"| {task} | {statistics.median(rates):,.0f} | {min(rates):,.0f} to {max(rates):,.0f} "
                f"| {statistics.median(processor):,.0f} ({min(processor):,.0f} to {max(processor):,.0f}) "
                f"| {arguments.rollouts} x {arguments.repeats} | {100 * right:.0f} % "
                f"| {len(os.sched_getaffinity(0))} |",
                flush=True,
            )
        if arguments.held and not arguments.profile:
            print(uvloop.run(hold(arguments.tasks[0], tokenizer, arguments.held, arguments.replicas)))


if __name__ == "__main__":
    main()
