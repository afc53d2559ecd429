"""Our changes to vLLM, on against off: the same tokens, and log-probabilities that a second computation confirms.

    python benchmarks/patches.py exact [--tokens 1000000] [--shape 1.5b] [--out FOLDER]
    python benchmarks/patches.py scored [--tokens 10000000] [--shape 1.5b] [--out FOLDER]

Two engines run side by side, one with `inference.patches = "all"` and one with "required" (`--settings`). Rounds of
requests have prompts and lengths of many sizes, groups of eight with one prompt, and tokens that end them early.

`exact`: both have the same requests and seeds, on a GPU under VLLM_BATCH_INVARIANT=1 (unless `--as-it-comes`),
and all tokens and log-probabilities are compared with each other.

`scored`: as a run has it. Each engine scores all that it made once more, as prompts, through the route that a teacher
is asked by. Counted are tokens whose two log-probabilities are more than two nats apart. A token that is another one's,
or a number that is, is off by that much: the random model's logits have a standard deviation of `--spread`.

A call ends before `--minutes` are over; called again with the same `--out`, it goes on with the next round. What is
found is in `<out>/exact.json`, or `<out>/scored-<setting>.json`, and printed as a Markdown table. The exit code is 1
when tokens differ, a number is off by more than `--limit` in `exact`, or a request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.inference.engine import SupervisedEngine
from slipstream.inference.settings import EngineSettings
from slipstream.records import Completion, GenerateRequest, SamplingParams

START_S, REQUEST_S = 400.0, 900.0
GROUP, FAR = 8, 2.0
NUM_SHOWN = 20


def requests(options: argparse.Namespace, number: int) -> list[GenerateRequest]:
    """Those of a round; they follow from its number alone."""
    draw = np.random.default_rng(number)
    size = options.vocabulary
    stops = tuple(int(token) for token in draw.integers(4, size, max(1, size // 1000)))
    made: list[GenerateRequest] = []
    for place in range(options.sequences):
        if place % GROUP == 0:
            prompt = draw.integers(4, size, draw.integers(1, options.prompt + 1)).tolist()
        most = int(draw.integers(1, options.length + 1)) if place % 4 else options.length
        sampling = SamplingParams(max_tokens=most, temperature=1.0, stop_token_ids=stops)
        seed = number * options.sequences + place
        made.append(GenerateRequest(f"{number}.{place}", prompt, sampling, seed=seed, timeout_s=REQUEST_S))
    return made


def again(request: GenerateRequest, completion: Completion) -> GenerateRequest:
    """The request that scores what came of this one."""
    sampling = SamplingParams(max_tokens=1, temperature=1.0)
    tokens = [*request.prompt_ids, *completion.token_ids]
    return GenerateRequest(f"{request.id}.again", tokens, sampling, timeout_s=REQUEST_S, scores_prompt=True)


async def answers(engine: SupervisedEngine, asked: list[GenerateRequest]) -> list[Completion]:
    """All of them, at once."""
    return list(await asyncio.gather(*(engine.generate(request) for request in asked)))


def failures(found: list[Completion], vocabulary: int) -> list[str]:
    """What no request should come to."""
    told = [f"{each.id}: {each.error or 'aborted'}" for each in found if each.finish_reason == "abort"]
    for each in found:
        if any(not 0 <= token < vocabulary for token in each.token_ids):
            told.append(f"{each.id}: a token outside of the vocabulary")
        if each.finish_reason != "abort" and not all(map(math.isfinite, each.logprobs or [math.nan])):
            told.append(f"{each.id}: a log-probability that is no number")
    return told


def compared(pairs: list[tuple[Completion, Completion]]) -> dict[str, Any]:
    """How far two engines' answers to the same requests are apart."""
    apart: list[str] = []
    largest, num_equal, num_tokens, exact = 0.0, 0, 0, 0
    for one, other in pairs:
        num_tokens += len(one.token_ids)
        same = next(
            (i for i, (a, b) in enumerate(zip(one.token_ids, other.token_ids, strict=False)) if a != b),
            min(len(one.token_ids), len(other.token_ids)),
        )
        num_equal += same
        if one.token_ids != other.token_ids:
            apart.append(f"{one.id}: {len(one.token_ids)} and {len(other.token_ids)} tokens, from {same} on")
        differences = np.abs(np.subtract((one.logprobs or [])[:same], (other.logprobs or [])[:same]))
        largest = max(largest, float(differences.max(initial=0.0)))
        exact += int((differences == 0).sum())
    return {
        "tokens": num_tokens,
        "equal_tokens": num_equal,
        "equal_logprobs": exact,
        "sequences": len(pairs),
        "sequences_apart": len(apart),
        "largest_difference": largest,
        "apart": apart[:NUM_SHOWN],
    }


def rescored(asked: list[GenerateRequest], made: list[Completion], scored: list[Completion]) -> dict[str, Any]:
    """How far the log-probabilities with which tokens were drawn are from those that scoring gives them."""
    far: list[str] = []
    parts: list[Any] = []
    for request, one, other in zip(asked, made, scored, strict=True):
        second = (other.prompt_logprobs or [])[len(request.prompt_ids) :]
        differences = np.subtract(one.logprobs or [], second)
        parts.append(differences)
        for i in np.flatnonzero(~(np.abs(differences) <= FAR)).tolist():
            far.append(f"{one.id} token {i}: {one.token_ids[i]}, {one.logprobs[i]:.3f} and {second[i]:.3f}")
    whole = np.concatenate(parts)
    return {
        "tokens": len(whole),
        "far": len(far),
        "sum": float(whole.sum()),
        "sum_of_magnitudes": float(np.abs(whole).sum()),
        "largest_difference": float(np.abs(whole).max(initial=0.0)),
        "shown": far[:NUM_SHOWN],
    }


class Report:
    """A file with a row for each round."""

    def __init__(self, path: Path, **facts: Any) -> None:
        self.path, self.facts = path, facts
        self.rows: list[dict[str, Any]] = json.loads(path.read_text())["rounds"] if path.exists() else []

    @property
    def num_tokens(self) -> int:
        return sum(row["tokens"] for row in self.rows)

    def add(self, row: dict[str, Any]) -> None:
        """Write it with those before it."""
        self.rows.append(row)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps({**self.facts, "rounds": self.rows}, indent=1))
        os.replace(part, self.path)
        told = {key: value for key, value in row.items() if not isinstance(value, (list, dict))}
        print(self.path.stem, json.dumps(told), file=sys.stderr, flush=True)


class Clock:
    """Whether there is time for one more round."""

    def __init__(self, minutes: float) -> None:
        self._end, self._longest, self._began = time.monotonic() + 60 * minutes, 0.0, 0.0

    def has_time(self) -> bool:
        """Asked before each round, whose time it takes from here on."""
        now = time.monotonic()
        if self._began:
            self._longest = max(self._longest, now - self._began)
        self._began = now
        return now + self._longest < self._end


async def exact(options: argparse.Namespace, engines: dict[str, SupervisedEngine], facts: dict[str, Any]) -> bool:
    """Both engines, round by round."""
    report, clock = Report(options.out / "exact.json", **facts), Clock(options.minutes_left)
    while report.num_tokens < options.tokens and clock.has_time():
        asked, began = requests(options, len(report.rows)), time.monotonic()
        made = await asyncio.gather(*(answers(engine, asked) for engine in engines.values()))
        row = compared(list(zip(*made, strict=True)))
        problems = [told for each in made for told in failures(each, options.vocabulary)]
        report.add({**row, "failures": problems[:NUM_SHOWN], "seconds": round(time.monotonic() - began, 2)})
    print(
        "| tokens | equal | equal log-probabilities | sequences apart | largest difference | failures |\n" + "|---" * 6
    )
    total = {key: sum(row[key] for row in report.rows) for key in ("tokens", "equal_tokens", "equal_logprobs")}
    largest = max((row["largest_difference"] for row in report.rows), default=0.0)
    apart, failed = (sum(row["sequences_apart"] for row in report.rows), sum(len(r["failures"]) for r in report.rows))
    print(f"| {' | '.join(f'{value:,}' for value in total.values())} | {apart} | {largest:.3g} | {failed} |")
    return not apart and not failed and largest <= options.limit


async def score_rounds(options: argparse.Namespace, name: str, engine: SupervisedEngine, facts: dict[str, Any]) -> bool:
    """One engine, round by round."""
    report, clock = Report(options.out / f"scored-{name}.json", **facts), Clock(options.minutes_left)
    while report.num_tokens < options.tokens and clock.has_time():
        asked, began = requests(options, len(report.rows)), time.monotonic()
        made = await answers(engine, asked)
        between = time.monotonic()
        scored = await answers(engine, list(map(again, asked, made)))
        problems = [*failures(made, options.vocabulary), *(f"{c.id}: {c.error}" for c in scored if c.error)]
        times = {"making": round(between - began, 2), "scoring": round(time.monotonic() - between, 2)}
        ends = Counter(each.finish_reason for each in made)
        row = {"failures": problems[:NUM_SHOWN], "ends": ends, **times}
        pairs = [trio for trio in zip(asked, made, scored, strict=True) if not (trio[1].error or trio[2].error)]
        report.add({**rescored(*map(list, zip(*pairs, strict=True))), **row} if pairs else {"tokens": 0, **row})
    rows = [row for row in report.rows if row["tokens"]]
    total, far = report.num_tokens, sum(row["far"] for row in rows)
    failed = sum(len(row["failures"]) for row in report.rows)
    mean, magnitude = (sum(row[key] for row in rows) / max(1, total) for key in ("sum", "sum_of_magnitudes"))
    seconds = sum(row["making"] for row in report.rows)
    largest = max((row["largest_difference"] for row in rows), default=0.0)
    print(
        f"| {name} | {total:,} | {far:,} | {mean:+.2e} | {magnitude:.4f} | {largest:.3f} | {failed} | "
        f"{total / max(seconds, 1e-9):,.0f} |"
    )
    return not failed and not far


async def scored(options: argparse.Namespace, engines: dict[str, SupervisedEngine], facts: dict[str, Any]) -> bool:
    """All engines side by side."""
    heads = ("patches", "tokens", f"off by over {FAR:g} nats", "mean difference", "mean magnitude", "largest")
    print(f"| {' | '.join((*heads, 'failures', 'tokens/s'))} |\n" + "|---" * (len(heads) + 2) + "|", flush=True)
    each = (score_rounds(options, name, engine, facts[name]) for name, engine in engines.items())
    return all(await asyncio.gather(*each))


def settings(options: argparse.Namespace, model: Path, name: str, on_gpu: bool) -> EngineSettings:
    """How an engine is started, but for the patches as a run starts it."""
    return EngineSettings(
        model=str(model),
        dtype="bfloat16" if on_gpu else "float32",
        max_model_len=options.prompt + options.length + 1,
        max_num_seqs=options.sequences,
        enforce_eager=not on_gpu,
        kv_cache_bytes=int(options.kv_gib * 2**30),
        gpu_memory_utilization=0.42,
        own_process=True,
        threads=None if on_gpu else 1,
        patches=name,  # type: ignore[arg-type]
    )


async def run(options: argparse.Namespace, model: Path, on_gpu: bool) -> int:
    """Start the engines, measure, stop them."""
    began = time.monotonic()
    engines = {
        name: SupervisedEngine(
            settings(options, model, name, on_gpu),
            options.out / f"engine-{name}.log",
            start_timeout_s=START_S,
            max_restarts=0,
            on_event=lambda *_, **__: None,
        )
        for name in options.settings
    }
    try:
        for engine in engines.values():
            engine.launch()
        health = await asyncio.gather(*(engine.wait_ready() for engine in engines.values()))
        options.minutes_left = options.minutes - (time.monotonic() - began) / 60
        facts: dict[str, Any] = {
            name: {"vllm": each.vllm_version, "patches": each.patches, "left_out": each.patches_left_out}
            for name, each in zip(engines, health, strict=True)
        }
        print(json.dumps(facts), file=sys.stderr, flush=True)
        measure = exact if options.what == "exact" else scored
        return 0 if await measure(options, engines, facts) else 1
    finally:
        await asyncio.gather(*(engine.stop() for engine in engines.values()))


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["exact", "scored"])
    parser.add_argument("--settings", nargs="+", default=["all", "required"], choices=["all", "checked", "required"])
    parser.add_argument("--shape", default="1.5b", choices=["chars", "tiny", "0.5b", "1.5b"])
    parser.add_argument("--spread", type=float, default=3.0, help="standard deviation of the logits")
    parser.add_argument("--tokens", type=int, help="in all, by each engine; 1 million, `scored`: 10 million")
    parser.add_argument("--sequences", type=int, default=1024, help="in a round, all at once")
    parser.add_argument("--length", type=int, default=768, help="the longest completion")
    parser.add_argument("--prompt", type=int, default=200, help="the longest prompt")
    parser.add_argument("--kv-gib", type=float, default=40.0, help="of each engine")
    parser.add_argument("--limit", type=float, default=1e-5, help="of `exact`: of a log-probability's difference")
    parser.add_argument("--minutes", type=float, default=7.5, help="begin no round that may end later")
    parser.add_argument("--as-it-comes", action="store_true", help="of `exact`: without VLLM_BATCH_INVARIANT")
    parser.add_argument("--out", type=Path, default=Path("runs/patches"))
    options = parser.parse_args()
    import torch
    from shapes import shaped_model

    from slipstream.commands.small_models.tiny_qwen3 import new_model
    from slipstream.plan.measure import read_model

    if options.what == "exact" and len(options.settings) != 2:
        parser.error("exact compares two settings")
    options.tokens = options.tokens or (1_000_000 if options.what == "exact" else 10_000_000)
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    on_gpu = torch.cuda.is_available()
    if options.what == "exact" and on_gpu and not options.as_it_comes:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    model = options.out / f"model-{options.shape}"
    if not (model / "config.json").exists():
        if options.shape == "chars":
            new_model(model, hidden_size=64, num_layers=2, context_length=2048)
        else:
            shaped_model(model, options.shape, options.spread)
    options.vocabulary = read_model(str(model)).vocab_size
    return asyncio.run(run(options, model, on_gpu))


if __name__ == "__main__":
    sys.exit(main())
