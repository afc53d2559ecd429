"""Updates under load: new versions reach a running vLLM while long generations go on.

    python benchmarks/in_flight.py [--bridge broadcast|disk|single_copy] [--updates 100] [--requests 64] [--tokens 200]
                                   [--in-flight recompute|keep|drain] [--every 0.05] [--model 0.5b]

Keeps `--requests` generations running and applies `--updates` versions of new random weights, the next one `--every`
seconds after the last was verified. Every update's fingerprints are verified. Afterwards every request must have been
answered exactly once, with versions that only rise, and every token's log-probability is compared with the trainer's
own under the version that the completion names; under `keep`, tokens after an update have a column of their own, as
their context is older than they are. Prints a Markdown table; the exit code is 1 when anything of that does not hold.

On a CPU all is in float32, and the largest mean difference that passes is 1e-4; on a GPU in bfloat16, and it is 0.02.
With two GPUs `broadcast` goes from the first to the second over NCCL; otherwise both sides are on one. `--model` names
a shape with random weights, for GPUs; without it the model has 0.8 M parameters.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from shapes import SHAPES, shaped_model

from benchmarks.bridges import create_bridge
from benchmarks.event_loop import call
from slipstream.commands.small_models.tiny_qwen3 import new_model
from slipstream.inference.engine import SupervisedEngine
from slipstream.inference.settings import EngineSettings
from slipstream.orchestrator.thread import EventLoopThread
from slipstream.records import ApplyReport, Completion, GenerateRequest, SamplingParams, Sequence, Ticket
from slipstream.trainer.learner import score
from slipstream.trainer.model.policy import PolicyModel
from slipstream.weights import check_report
from slipstream.weights.bridges.single_copy import open_weights
from slipstream.weights.model_files import read_model_folder, stored_parameters

PROMPT_TOKENS, LINEAGE, TIMEOUT_S = 40, 0, 240.0
LIMITS = {"float32": 1e-4, "bfloat16": 0.02}


def main() -> int:
    """Run it and print what held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bridge", choices=["broadcast", "disk", "single_copy"], default="broadcast")
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--in-flight", choices=["recompute", "keep", "drain"], default="recompute")
    parser.add_argument("--every", type=float, default=0.05, help="seconds between updates: an optimizer step")
    parser.add_argument("--noise", type=float, default=0.02, help="how far each version is from the first model")
    parser.add_argument("--model", choices=tuple(SHAPES), help="a shape; 0.8 M parameters without it")
    options = parser.parse_args()
    options.device = "cuda" if torch.cuda.is_available() else "cpu"
    options.dtype = "float32" if options.device == "cpu" else "bfloat16"
    options.length = max(512, PROMPT_TOKENS + options.tokens)
    with tempfile.TemporaryDirectory() as folder:
        return _run(options, Path(folder))


def _run(options: argparse.Namespace, folder: Path) -> int:
    on_gpu, folder_of_model = options.device == "cuda", folder / "model"
    if options.model is None:
        model = new_model(folder_of_model, context_length=options.length, dtype=options.dtype)
    else:
        model = shaped_model(folder_of_model, options.model)
    dtype = getattr(torch, options.dtype)
    original = {name: weight.to(options.device, dtype) for name, weight in read_model_folder(model)}
    thread = EventLoopThread(lambda: False)
    is_apart = on_gpu and torch.cuda.device_count() > 1 and options.bridge == "broadcast"
    settings = EngineSettings(
        model=str(model),
        dtype=options.dtype,
        max_model_len=options.length,
        max_num_seqs=options.requests,
        kv_cache_bytes=1 << (35 if on_gpu else 29),
        threads=None if on_gpu else 2,
        enforce_eager=not on_gpu,
        gpus=(os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[1],) if is_apart else (),
        in_flight=options.in_flight,
    )

    async def start() -> SupervisedEngine:
        engine = SupervisedEngine(
            settings, folder / "engine.log", start_timeout_s=300, max_restarts=0, on_event=lambda *_, **__: None
        )
        engine.launch()
        await engine.wait_ready()
        return engine

    engine = call(thread, start(), 300, "the engine")
    bridge = create_bridge(
        options.bridge,
        folder=folder / "weights",
        source=model,
        engine=engine,
        timeout_s=TIMEOUT_S,
        between_gpus=is_apart,
        go_on=lambda version: call(thread, engine.go_on(version, TIMEOUT_S), TIMEOUT_S, "the engine to go on"),
    )
    live: dict[str, torch.Tensor] = {}
    if options.bridge == "single_copy":
        parameters = stored_parameters(model, options.dtype)
        (shared,) = call(thread, engine.share(parameters, TIMEOUT_S), 300, "the engine")
        live = open_weights(shared)
    answers: dict[str, list[Completion]] = {}
    prompts: dict[str, list[int]] = {}
    is_over = False

    async def keep_generating(worker: int) -> None:
        number = 0
        while not is_over:
            name = f"{worker}-{number}"
            prompts[name] = [(worker * 31 + number * 7 + i * i) % 90 + 1 for i in range(PROMPT_TOKENS)]
            request = GenerateRequest(
                name, prompts[name], SamplingParams(max_tokens=options.tokens), seed=worker, timeout_s=TIMEOUT_S
            )
            answers.setdefault(name, []).append(await engine.generate(request))
            number += 1

    async def keep_all_generating() -> None:
        await asyncio.gather(*(keep_generating(worker) for worker in range(options.requests)))

    versions: list[dict[str, torch.Tensor]] = []
    seconds: list[float] = []
    reports: list[ApplyReport] = []

    def update(step: int) -> None:
        draw = {"generator": torch.Generator(options.device).manual_seed(step), "device": options.device}
        weights = {k: w + options.noise * torch.randn(w.shape, dtype=w.dtype, **draw) for k, w in original.items()}
        versions.append(weights)
        under_way = []
        began = time.monotonic()
        if bridge.fence is not None:
            call(thread, engine.fence(TIMEOUT_S), 300, "the engine")
            for name, weight in weights.items():
                live[name].copy_(weight)
            if on_gpu:
                torch.cuda.synchronize()
        ticket: Ticket = bridge.publisher.publish(
            weights.items(),
            step,
            LINEAGE,
            lambda ticket: under_way.append(thread.submit(bridge.receiver.apply(ticket, TIMEOUT_S))),
        )
        report = under_way[0].result(TIMEOUT_S)
        check_report(report, ticket)
        seconds.append(time.monotonic() - began)
        reports.append(report)

    update(0)
    load = thread.submit(keep_all_generating())
    for step in range(1, options.updates + 1):
        time.sleep(options.every)
        update(step)
    is_over = True
    load.result(10 * TIMEOUT_S)
    bridge.publisher.close()
    thread.stop(engine.stop())
    return _judge(options, model, versions, answers, prompts, seconds, reports)


def _judge(
    options: argparse.Namespace,
    model: Path,
    versions: list[dict[str, torch.Tensor]],
    answers: dict[str, list[Completion]],
    prompts: dict[str, list[int]],
    seconds: list[float],
    reports: list[ApplyReport],
) -> int:
    completions = {name: found[0] for name, found in answers.items()}
    stalls = sorted(report.stall_s for report in reports)
    print(f"updates, s: {sorted(seconds)}; stalls, s: {stalls}; now every token is scored", file=sys.stderr, flush=True)
    lost = len(prompts) - len(completions) + sum(c.finish_reason == "abort" for c in completions.values())
    twice = sum(len(found) - 1 for found in answers.values())
    falling = 0
    by_version: dict[int, list[tuple[str, int, int]]] = {}
    for name, completion in completions.items():
        numbers = [int(span.version.split(".")[1]) for span in completion.versions]
        falling += numbers != sorted(set(numbers))
        ends = [span.start for span in completion.versions[1:]] + [len(completion.token_ids)]
        for number, span, end in zip(numbers, completion.versions, ends, strict=True):
            by_version.setdefault(number, []).append((name, span.start, end))
    policy = PolicyModel.load(model, options.dtype, options.device)
    differences, gaps = [], []
    for number, spans in by_version.items():
        policy.network.load_state_dict(versions[number], strict=False)
        sequences = [
            Sequence(
                [*prompts[name], *completions[name].token_ids[:end]],
                [False] * (PROMPT_TOKENS + start) + [True] * (end - start),
            )
            for name, start, end in spans
        ]
        scores = score(policy, sequences, micro_batch_tokens=8192).logprobs
        for (name, start, end), ours in zip(spans, scores, strict=True):
            has_old_context = options.in_flight == "keep" and start > 0
            (gaps if has_old_context else differences).append(
                (ours - torch.tensor(completions[name].logprobs[start:end])).abs()
            )
    difference = torch.cat(differences)
    spans = sum(len(found) for found in by_version.values())
    transfer = statistics.median(report.transfer_s for report in reports)
    gap = torch.cat(gaps) if gaps else None
    stalls = statistics.median(report.stall_s for report in reports[1:])
    row = {
        "bridge": options.bridge,
        "in flight": options.in_flight,
        "updates": options.updates,
        "requests": f"{len(completions):,}",
        "lost": lost,
        "twice": twice,
        "falling": falling,
        "spans": f"{spans:,}",
        "tokens": f"{len(difference):,}",
        "mean difference, largest": f"{difference.mean():.1e}, {difference.max():.1e}",
        "on kept context: tokens, mean difference": "" if gap is None else f"{len(gap):,}, {gap.mean():.2g}",
        "stall, ms": f"{1000 * stalls:.0f}",
    }
    print("| " + " | ".join(row) + " |")
    print("|" + "---|" * len(row))
    print("| " + " | ".join(map(str, row.values())) + " |")
    print(
        f"\nAn update from announcement to verified: median {1000 * statistics.median(seconds):.0f} ms "
        f"({1000 * min(seconds):.0f} to {1000 * max(seconds):.0f}), of which transfer {1000 * transfer:.0f} ms."
    )
    return int(bool(lost or twice or falling or difference.mean() > LIMITS[options.dtype]))


if __name__ == "__main__":
    sys.exit(main())
