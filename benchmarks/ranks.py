"""The learner on one, two and four ranks: tokens a second, part of the cards' peak, and memory; on GPUs (NCCL) or on a
CPU (gloo).

    python benchmarks/ranks.py [--shape 1.5b] [--ranks 1 2 4] [--compile] [--rows 8] [--row 8192] [--steps 4]
                               [--reshard step|layer] [--optimizer adamw|adamw_bf16] [--lora RANK]
                               [--set KEY=VALUE ...] [--model FOLDER] [--profile]

Each case is a process of its own that trains by SFT on random tokens, with the random weights of a Qwen2 of the named
shape: `--rows` rows of `--row` tokens for every rank, so that the work grows with the ranks (weak scaling), in each the
segments of `benchmarks/learner.py`. One rank is the ordinary learner of one process under the same settings. Over ranks
weights and gradients stay whole through a step, as a plan has them where there is room. A step is
a forward and backward pass over all of it, the update and its commit; the first two are not counted. Prints a Markdown
table: median and range of the seconds a step, tokens a second, what part that is of so many times the first case, the
part of the cards' peak (as in `benchmarks/learner.py`), and the most memory that rank 0 had. `--model`: a model folder
that is made if it is not there, and left. `--profile`: one more step of rank 0 by kind of kernel; kernels run side by
side there, so that their times may add up to more than the step. On a GPU the exit code is 1 when four ranks are below
92 % of four times one, where both were measured.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from learner import PEAK_FLOPS, flops, num_parameters, profile_of, profile_table, segment_lengths

WARM_UP = 2
TARGET = 0.92


def make_config(options: argparse.Namespace, model: Path, ranks: int) -> Any:
    """The run, as far as the learner sees it."""
    from slipstream.config import RunConfig

    training: dict[str, Any] = {
        "steps": 1,
        "ranks": ranks,
        "micro_batch_tokens": options.row,
        "optimizer": options.optimizer,
        "gradient_checkpointing": options.checkpointing,
        "compile": options.compile,
        "reshard": options.reshard,
    }
    for setting in options.set:
        key, _, value = setting.partition("=")
        training[key] = json.loads(value)
    sections: dict[str, Any] = {"lora": {"rank": options.lora}} if options.lora else {}
    return RunConfig.model_validate(
        {
            "model": {"path": str(model), "dtype": "bfloat16"},
            "data": {"path": "none"},
            "algorithm": {"kind": "sft"},
            "training": training,
            "evaluation": None,
            "run": {"threads": options.threads},
            **sections,
        }
    )


def measure(options: argparse.Namespace, model: Path, ranks: int) -> dict[str, Any]:
    """One case, in this process and its ranks."""
    import torch

    from slipstream.launch.build import build, build_objective, build_sharded
    from slipstream.launch.ranks.processes import RankProcesses
    from slipstream.records import SamplingParams, Sequence
    from slipstream.trainer import garbage_collection
    from slipstream.trainer.packing import StepBatch

    config, sampling = make_config(options, model, ranks), SamplingParams(max_tokens=1)
    torch.manual_seed(0)
    draw = random.Random(0)
    segments = segment_lengths(options.row) * options.rows * ranks
    sequences = [
        Sequence([draw.randrange(100, 100_000) for _ in range(length + 1)], [False] + [True] * length)
        for length in segments
    ]
    batch, objective = StepBatch(sequences), build_objective(config, sampling)
    crew = RankProcesses(config, sampling, model.parent / f"logs-{ranks}") if ranks > 1 else None
    on_gpu = torch.cuda.is_available()
    try:
        begun = time.monotonic()
        learner = (build(config, None, 0) if crew is None else build_sharded(config, sampling, crew, 0)).learner
        loaded_s = time.monotonic() - begun
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        metrics: dict[str, float] = {}

        def step() -> None:
            metrics.update(learner.forward_backward(batch, objective))
            learner.optim_prepare(1e-6)
            learner.optim_commit()

        seconds: list[float] = []
        for number in range(WARM_UP + options.steps):
            if number == 1:
                garbage_collection.freeze()  # as a run does after its first step
            begun = time.monotonic()
            step()
            if on_gpu:
                torch.cuda.synchronize()
            seconds.append(time.monotonic() - begun)
        peak = torch.cuda.max_memory_allocated() if on_gpu else 0
        profile = profile_of(step, on_gpu) if options.profile else None
    finally:
        if crew is not None:
            crew.close()
    counted, config = seconds[WARM_UP:], learner.model.config
    middle = statistics.median(counted)
    return {
        "ranks": ranks,
        "seconds": [middle, min(counted), max(counted)],
        "tokens_per_s": sum(segments) / middle,
        "peak_part": flops(config, num_parameters(config), segments) / middle / ranks / PEAK_FLOPS,
        "peak_gib": peak / 2**30,
        "loaded_s": loaded_s,
        "first_steps_s": seconds[:WARM_UP],
        "loss": metrics["loss"],
        "row_tokens": metrics["num_row_tokens"],
        "profile": profile,
    }


def table(results: list[dict[str, Any]]) -> str:
    """The results in Markdown."""
    lines = [
        "| ranks | s a step | tokens/s | of ranks x the first | of the peak | peak GiB, rank 0 | s to load, compile |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        median, low, high = result["seconds"]
        lines.append(
            f"| {result['ranks']} | {median:.3f} ({low:.3f} to {high:.3f}) | {result['tokens_per_s']:,.0f} | "
            f"{100 * part_of_first(results, result):.1f} % | {100 * result['peak_part']:.1f} % | "
            f"{result['peak_gib']:.1f} | {result['loaded_s'] + sum(result['first_steps_s']):.0f} |"
        )
    for result in results:
        if result["profile"] is not None:
            lines += profile_table(f"{result['ranks']} ranks", *result["profile"])
    return "\n".join(lines)


def part_of_first(results: list[dict[str, Any]], result: dict[str, Any]) -> float:
    """Tokens a second, as a part of so many times the first case's."""
    first = results[0]
    return result["tokens_per_s"] / first["tokens_per_s"] * first["ranks"] / result["ranks"]


def main() -> int:
    """Measure all cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1.5b", help="tiny, 0.5b, 1.5b or 7b")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--rows", type=int, default=8, help="of every rank in a step")
    parser.add_argument("--row", type=int, default=8192, help="tokens of a row; a multiple of 32")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--reshard", default="step", help="step or layer")
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--lora", type=int)
    parser.add_argument("--threads", type=int, default=8, help="of all ranks together")
    parser.add_argument("--set", action="append", default=[], help="further settings of [training]: KEY=JSON")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds for a case")
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help="a folder, made if it is not there")
    options = parser.parse_args()
    if options.case is not None:
        print(json.dumps(measure(options, options.model, options.case)))
        return 0
    from shapes import shaped_model

    with tempfile.TemporaryDirectory() as scratch:
        model = options.model or Path(scratch) / "model"
        if not model.exists():
            shaped_model(model, options.shape)
        results: list[dict[str, Any]] = []
        for ranks in options.ranks:
            arguments = [*sys.argv[1:], "--model", str(model), "--case", str(ranks)]
            try:
                done = subprocess.run(
                    [sys.executable, __file__, *arguments], stdout=subprocess.PIPE, timeout=options.timeout, check=False
                )
            except subprocess.TimeoutExpired:
                done = None
                print(f"{ranks} ranks were not done after {options.timeout:g} s", file=sys.stderr)
            if done is None or done.returncode != 0:
                for log in sorted(model.parent.glob(f"logs-{ranks}/*")):
                    print(f"{log}:\n{log.read_text()[-4000:]}", file=sys.stderr)
                return 1
            results.append(json.loads(done.stdout.splitlines()[-1]))
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    print(table(results))
    is_judged = results[0]["peak_gib"] > 0 and results[0]["ranks"] == 1
    return int(is_judged and any(part_of_first(results, r) < TARGET for r in results if r["ranks"] == 4))


if __name__ == "__main__":
    sys.exit(main())
