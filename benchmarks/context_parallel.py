"""One long row on one GPU and on two that hold it together: seconds, and the longest row.

    python benchmarks/context_parallel.py [--shape 1.5b] [--ranks 2] [--row 32768] [--steps 4] [--compile]
                                          [--checkpointing true|false|selective] [--longest TOKENS] [--no-longest]
                                          [--json FILE]

Each case is a separate process. It trains by SFT on random tokens, one sequence a step, with the random weights of a
Qwen2 of the named shape in bfloat16: `one` rank; `fsdp`, `--ranks` with the weights of all and the row of one; and
`context`, `--ranks` with the row of all (`training.context_parallel`). A step is a forward and
backward pass, the update and its commit; two are left out first. Efficiency: seconds of one GPU over seconds of all
times their number, for one row of `--row` tokens. The longest row: what a row takes is measured, and rows around the
length that should fill the card are tried, each 5 % longer than the one before, until one does not fit. Prints a
Markdown table, and the results as JSON on the last line. Exit code 1: an efficiency below 80 %, or a longest row below
1.8 times that of one GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WARM_UP = 2
EFFICIENCY, LONGER = 0.8, 1.8
CASES = ("one", "fsdp", "context")
FINER = 1.05
"""Each tried row is so many times the one before."""
ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
"""Rows of growing lengths would fragment the memory."""


def make_config(options: argparse.Namespace, model: Path, case: str) -> Any:
    """The run, as far as the learner sees it."""
    from slipstream.config import RunConfig
    from slipstream.plan.decided import planned_config

    ranks = 1 if case == "one" else options.ranks
    training: dict[str, Any] = {
        "steps": 1,
        "ranks": ranks,
        "context_parallel": ranks if case == "context" else 1,
        "micro_batch_tokens": options.row,
        "gradient_checkpointing": json.loads(options.checkpointing)
        if options.checkpointing in ("true", "false")
        else options.checkpointing,
        "compile": options.compile,
        "reshard": "layer",
        "rank_timeout_s": 120.0,
    }
    sections = {"model": {"path": str(model), "dtype": "bfloat16"}, "data": {"path": "none"}}
    run = {"threads": options.threads}
    config = {**sections, "algorithm": {"kind": "sft"}, "training": training, "evaluation": None, "run": run}
    return planned_config(RunConfig.model_validate(config))


def one_row(tokens: int) -> Any:
    """A batch of one sequence, all but its first token trained on."""
    from slipstream.records import Sequence
    from slipstream.trainer.packing import StepBatch

    draw = random.Random(tokens)
    return StepBatch([Sequence([draw.randrange(100, 100_000) for _ in range(tokens + 1)], [False] + [True] * tokens)])


def measure(options: argparse.Namespace, model: Path, case: str) -> dict[str, Any]:
    """One case, in this process and its ranks."""
    import torch

    from slipstream.launch.build import build, build_objective, build_sharded
    from slipstream.launch.ranks.processes import RankProcesses
    from slipstream.records import SamplingParams
    from slipstream.trainer import garbage_collection

    config, sampling = make_config(options, model, case), SamplingParams(max_tokens=1)
    ranks, on_gpu = config.training.ranks, torch.cuda.is_available()
    torch.manual_seed(0)
    objective = build_objective(config, sampling)
    crew = RankProcesses(config, sampling, model.parent / f"logs-{case}") if ranks > 1 else None
    try:
        learner = (build(config, [], 0) if crew is None else build_sharded(config, sampling, crew, 0)).learner

        def step(tokens: int) -> tuple[float, float]:
            """Seconds, and the most GiB of rank 0."""
            batch = one_row(tokens)
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            begun = time.monotonic()
            metrics = learner.forward_backward(batch, objective)
            learner.optim_prepare(1e-6)
            learner.optim_commit()
            if on_gpu:
                torch.cuda.synchronize()
            seconds = time.monotonic() - begun
            losses.append(metrics["loss"])
            return seconds, torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0

        losses: list[float] = []
        found: list[tuple[float, float]] = []
        for number in range(WARM_UP + options.steps):
            if number == 1:
                garbage_collection.freeze()  # as a run does after its first step
            found.append(step(options.row))
        seconds = [each for each, _ in found[WARM_UP:]]
        result: dict[str, Any] = {
            "case": case,
            "ranks": ranks,
            "row": options.row,
            "seconds": [statistics.median(seconds), min(seconds), max(seconds)],
            "peak_gib": max(peak for _, peak in found[1:]),
            "losses": losses,
            "card": torch.cuda.get_device_name() if on_gpu else "cpu",
        }
        print(json.dumps(result), flush=True)
        if on_gpu and not options.no_longest:
            small, large = step(options.row // 2)[1], result["peak_gib"]
            each = (large - small) / (options.row - options.row // 2)
            room = torch.cuda.mem_get_info()[1] / 2**30 - large
            tokens = options.longest or int(0.8 * (options.row + room / each)) // 1024 * 1024
            result["longest"] = options.row
            while True:
                # The last one printed fits: an error ends this process.
                result["longest_s"], result["longest_gib"] = step(tokens)
                result["longest"] = tokens
                print(json.dumps(result), flush=True)
                tokens = max(tokens + 1024, int(tokens * FINER) // 1024 * 1024)
    finally:
        if crew is not None:
            crew.close()
    return result


def table(results: list[dict[str, Any]]) -> str:
    """The results in Markdown."""
    one = results[0]
    lines = [
        "| case | GPUs | s for a row | tokens/s | efficiency | peak GiB, rank 0 | longest row | of one GPU's | its s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        median, low, high = result["seconds"]
        longest = result.get("longest", 0)
        times = f"{longest / one['longest']:.2f}" if longest and one.get("longest") else "-"
        lines.append(
            f"| {result['case']} | {result['ranks']} | {median:.3f} ({low:.3f} to {high:.3f}) | "
            f"{result['row'] / median:,.0f} | {100 * efficiency(one, result):.1f} % | {result['peak_gib']:.1f} | "
            f"{longest:,} | {times} | {result.get('longest_s', 0.0):.1f} |"
        )
    return "\n".join(lines)


def efficiency(one: dict[str, Any], result: dict[str, Any]) -> float:
    """For a row of equal length: seconds of one GPU over those of all, times their number."""
    return one["seconds"][0] / result["seconds"][0] / result["ranks"]


def run_case(options: argparse.Namespace, model: Path, case: str) -> dict[str, Any] | None:
    """The last result that the case printed; None where it printed none."""
    arguments = [sys.executable, __file__, *sys.argv[1:], "--model", str(model), "--case", case]
    with tempfile.TemporaryFile("w+") as output:
        try:
            code = subprocess.run(
                arguments, stdout=output, env={**os.environ, **ALLOCATOR}, timeout=options.timeout, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
        output.seek(0)
        lines = output.read().splitlines()
    print(f"{case}: ended with code {code}", file=sys.stderr, flush=True)
    if not lines:
        for log in sorted(model.parent.glob(f"logs-{case}/*.log")):
            print(f"{log}:\n{log.read_text()[-4000:]}", file=sys.stderr)
        return None
    print(lines[-1], file=sys.stderr, flush=True)
    return json.loads(lines[-1])


def main() -> int:
    """Measure all cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1.5b", help="tiny, 0.5b, 1.5b or 7b")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--row", type=int, default=32_768, help="tokens of the row that is timed")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--checkpointing", default="true", help="true, false or selective")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--longest", type=int, help="tokens of the first row to try for the longest")
    parser.add_argument("--no-longest", action="store_true", help="without the longest rows")
    parser.add_argument("--threads", type=int, default=8, help="of all ranks together")
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds for a case")
    parser.add_argument("--json", type=Path, help="write the results here, too")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help="a folder, made if it is not there")
    options = parser.parse_args()
    if options.case is not None:
        measure(options, options.model, options.case)
        return 0
    from shapes import shaped_model

    with tempfile.TemporaryDirectory() as scratch:
        model = options.model or Path(scratch) / "model"
        if not model.exists():
            shaped_model(model, options.shape)
        results = [result for case in options.cases if (result := run_case(options, model, case)) is not None]
    if len(results) < len(options.cases):
        return 1
    print(table(results))
    print(json.dumps(results))
    if options.json is not None:
        options.json.write_text(json.dumps(results))
    one, last = results[0], results[-1]
    if one["card"] == "cpu" or (one["case"], last["case"]) != ("one", "context"):
        return 0
    is_long = options.no_longest or last.get("longest", 0) >= LONGER * one.get("longest", sys.maxsize)
    return int(not is_long or efficiency(one, last) < EFFICIENCY)


if __name__ == "__main__":
    sys.exit(main())
