"""How many rollouts a second the orchestrator completes when the engine costs nothing.

Everything but the engine is real: chat template, `RolloutRunner`, `Batcher`, reward workers, reasoning_gym. The
engine answers from a script, at once. Prints one Markdown row for each task: median and spread of the repeats, and the
processor time of this process, without the reward worker's, which says more than the rate on a machine that is shared.

    python benchmarks/rollouts.py [--repeats 5] [--rollouts 4096] [--tasks spell_backward basic_arithmetic]
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import os
import pstats
import statistics
import tempfile
import time
from pathlib import Path

import uvloop

from slipstream.config import EnvironmentConfig
from slipstream.data.chat_template import ChatTokenizer
from slipstream.envs.registry import load_environment
from slipstream.envs.scoring.pool import ScorerPool
from slipstream.inference.scripted import ScriptedEngine
from slipstream.orchestrator.batches.batcher import Batcher
from slipstream.orchestrator.rollouts import RolloutRunner
from slipstream.records import SamplingParams, Version
from slipstream.trainer.model.tiny_qwen3 import new_tokenizer

GROUP_SIZE = 8


async def measure(
    task_name: str, tokenizer: AnsweringTokenizer, num_rollouts: int, repeats: int
) -> tuple[list[float], list[float], float]:
    """Rollouts a second and processor microseconds a rollout of each repeat, and the part of them that was right."""
    config = EnvironmentConfig(name=f"reasoning_gym/{task_name}")
    environment = load_environment(config)
    tasks = environment.tasks("train", num_rollouts // GROUP_SIZE)
    answers = {
        tuple(tokenizer.render(task.prompt)): [
            tokenizer.answer_ids(text) for text in (environment.gold(task) or "", "something else")
        ]
        for task in tasks
    }
    engine = ScriptedEngine(lambda prompt_ids, seed: answers[tuple(prompt_ids)][seed % 2])
    rates: list[float] = []
    processor: list[float] = []
    async with ScorerPool(config) as scorer:
        batcher = Batcher(
            RolloutRunner(environment, scorer, tokenizer, engine, request_timeout_s=60.0),
            group_size=GROUP_SIZE,
            sampling=SamplingParams(max_tokens=256, stop_token_ids=tuple(tokenizer.stop_token_ids)),
            seed=0,
            max_reward_failures=0.1,
            needs_logprobs=True,
        )
        right = 0.0
        for step in range(repeats + 1):
            started, used = time.perf_counter(), time.process_time()
            batch = await batcher.make(step, Version(0, step), tasks)
            seconds, used = time.perf_counter() - started, time.process_time() - used
            assert len(batch.rollouts) == len(tasks) * GROUP_SIZE, batch.dropped
            right = statistics.fmean(rollout.reward >= 1.0 for rollout in batch.rollouts)
            if step:  # the first fills caches
                rates.append(len(batch.rollouts) / seconds)
                processor.append(1e6 * used / len(batch.rollouts))
    return rates, processor, right


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
    parser.add_argument("--tasks", nargs="+", default=["spell_backward", "basic_arithmetic"])
    parser.add_argument("--profile", action="store_true", help="show where the time goes instead")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        new_tokenizer("char").save_pretrained(Path(folder))
        tokenizer = AnsweringTokenizer(folder)
        print("| task | rollouts/s, median | lowest to highest | CPU us each | rollouts x repeats | right | cores |")
        print("|---|---|---|---|---|---|---|")
        for task in arguments.tasks:
            work = measure(task, tokenizer, arguments.rollouts, arguments.repeats)
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


if __name__ == "__main__":
    main()
