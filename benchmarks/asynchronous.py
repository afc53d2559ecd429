"""Asynchronous GRPO against lock-step: completion lengths with a long tail, staleness 0 to 8, both orders.

    .venv/bin/python benchmarks/asynchronous.py [--cases 0 1-data 1-ready 2-ready] [--repeats 2] [--steps 14]
                                                [--bridge broadcast] [--model FOLDER] [--json FILE]
    python benchmarks/asynchronous.py --shape 1.5b --prompts 32 --scale 4       # two GPUs of one host

On a CPU the model, fitted by SFT to `long_tail.py`, and the task are those of `against_trl.py`. With `--shape` it is a
Qwen2 of that shape with random weights, whose completions have the lengths of `forced_lengths.py`; engine and trainer
have a GPU each. A case is `training.staleness` and, after a dash, `training.order`. The cases take turns, each run a
process of its own; the start and the first `--warm-up` steps are left out. Prints a Markdown table: steps and generated
tokens a second, also as a multiple of lock-step's; how long the trainer waited for a batch; tokens' ages; lengths. The
exit code is 1 where the fastest case of a staleness up to 2 is below `--limit` times lock-step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import against_trl

from slipstream.runlog import read_metrics

LOCK_STEP = "0"
RUN_FILE = """
evaluation = false
[model]
path = "{model}"
dtype = "{dtype}"
[environment]
name = "{task}:ForcedLengths"
num_train_tasks = 2000
[environment.settings]
scale = {scale}
[algorithm]
kind = "grpo"
group_size = 8
[sampling]
max_tokens = {max_tokens}
[training]
steps = {steps}
prompts_per_batch = {prompts}
learning_rate = 1e-6
[run]
placement = "{placement}"
checkpoint_every = 1000
"""


def prepare(work: Path, options: argparse.Namespace) -> Path:
    """The run file, and where needed the model."""
    if options.shape is None:
        return against_trl.prepare(work, options)[1]
    from forced_lengths import LONGEST
    from shapes import shaped_model

    model = options.model or work / f"model-{options.shape}"
    if not model.exists():
        shaped_model(model, options.shape)
    text = RUN_FILE.format(
        model=model,
        dtype="float32" if options.placement == "auto" else "bfloat16",
        task=against_trl.HERE / "forced_lengths.py",
        scale=options.scale,
        max_tokens=round(options.scale * LONGEST),
        steps=options.steps,
        prompts=options.prompts,
        placement=options.placement,
    )
    (work / "grpo.toml").write_text(text)
    return work / "grpo.toml"


def measure(work: Path, options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """All runs, by case."""
    run_file = prepare(work, options)
    found: dict[str, list[dict[str, Any]]] = {case: [] for case in options.cases}
    for repeat in range(options.repeats):
        for case in options.cases if repeat % 2 == 0 else reversed(options.cases):
            staleness, _, order = case.partition("-")
            folder = work / f"{case}-{repeat}"
            settings = ["--training.staleness", staleness, "--weights.bridge", options.bridge, *options.set]
            settings += ["--training.order", order] if order else []
            log = folder.with_suffix(".log")
            against_trl.slipstream(log, "train", "--plain", str(run_file), "--run.folder", str(folder), *settings)
            every = list(read_metrics(folder))
            rows = [row for row in every if row["step"] > options.warm_up]
            pairs = itertools.pairwise(every)
            seconds = [row["time"] - before["time"] for before, row in pairs if row["step"] > options.warm_up]
            tokens = sum(row["rollout/num"] * row["rollout/length"] for row in rows)
            found[case].append(
                {
                    "steps_s": len(seconds) / sum(seconds),
                    "tokens_s": tokens / sum(seconds),
                    "waits_s": statistics.median(row["time/batch_s"] for row in rows),
                    "trains_s": statistics.median(row["time/train_s"] for row in rows),
                    "age": statistics.fmean(row["staleness/mean"] for row in rows),
                    "oldest": max(row["staleness/max"] for row in rows),
                    "length": tokens / sum(row["rollout/num"] for row in rows),
                    "dropped": sum(v for row in rows for k, v in row.items() if k.startswith("dropped/")),
                    "ess": statistics.fmean(row.get("train/effective_sample_size", 1.0) for row in rows),
                }
            )
            told = found[case][-1]
            print(
                f"{case}: {told['steps_s']:.3f} steps/s, {told['tokens_s']:.0f} tokens/s", file=sys.stderr, flush=True
            )
    return found


def table(found: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """Print the table; returns the speed of each case by that of lock-step."""
    base = statistics.median(run["steps_s"] for run in found[LOCK_STEP])
    columns = ("steps/s", "of lock-step", "tokens/s", "trainer waits, s", "trains, s", "age of tokens: mean, oldest")
    columns += ("effective sample size", "mean length", "dropped")
    print("| staleness, order | " + " | ".join(columns) + " |\n|" + "---|" * (len(columns) + 1))
    ratios: dict[str, float] = {}
    for case, runs in found.items():
        middle = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        ratios[case] = middle["steps_s"] / base
        speeds = against_trl.spread([run["steps_s"] for run in runs], 3)
        print(
            f"| {case.replace('-', ', ')} | {speeds} | {ratios[case]:.2f} | {middle['tokens_s']:,.0f} | "
            f"{middle['waits_s']:.2f} | {middle['trains_s']:.2f} | {middle['age']:.2f}, {middle['oldest']:g} | "
            f"{middle['ess']:.3f} | {middle['length']:.1f} | {middle['dropped']:g} |"
        )
    return ratios


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=[LOCK_STEP, "1-data", "1-ready", "2-ready"])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--steps", type=int, default=14, help="of each run, the warm-up included")
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=16, help="in a batch, with 8 completions each")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--sft-steps", type=int, default=300)
    parser.add_argument("--model", type=Path, help="a folder fitted before, instead of a new model")
    parser.add_argument("--bridge", default="broadcast")
    parser.add_argument("--shape", choices=["tiny", "0.5b", "1.5b", "7b"], help="random weights and forced lengths")
    parser.add_argument("--scale", type=float, default=4.0, help="of these lengths: 1 has a median of 24, up to 384")
    parser.add_argument("--placement", default="separate", help="with --shape; auto for a CPU")
    parser.add_argument("--set", nargs="*", default=[], help="further arguments of the command, after --shape")
    parser.add_argument("--limit", type=float, default=1.5)
    parser.add_argument("--out", type=Path, help="keep the model and the runs here")
    parser.add_argument("--json", type=Path, help="also write what was measured there")
    options = parser.parse_args()
    if LOCK_STEP not in options.cases:
        parser.error(f"--cases must have {LOCK_STEP}, lock-step, to compare with")
    with tempfile.TemporaryDirectory(prefix="slipstream-asynchronous-") as scratch:
        work = options.out or Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        found = measure(work, options)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    ratios = table(found)
    return int(max(ratio for case, ratio in ratios.items() if int(case.partition("-")[0]) <= 2) < options.limit)


if __name__ == "__main__":
    sys.exit(main())
