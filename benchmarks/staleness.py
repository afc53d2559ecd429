"""What staleness costs in learning: GRPO with `training.staleness` 0 to 8, with and without importance weights.

One SFT model (the quickstart's task, as in `learning.py`) is trained with every staleness and seed, over the same tasks
with the same settings, and graded on 500 held-out tasks every ten steps.

    .venv/bin/python benchmarks/staleness.py [--staleness 0 1 2 4 8] [--seeds 0 1 2] [--figure docs/staleness.svg]

`without` sets `algorithm.importance_sampling = "none"`: tokens of older versions are trained on as if the current one
had sampled them. What is already finished in the folder is not made again. Prints a Markdown table: accuracy of each
seed, of all together with its 95 % interval (Wilson), age of tokens and effective sample size. The exit code is 1 when
a run failed, or with importance weights and a staleness up to 2 the accuracy of all seeds together lies below the
interval of staleness 0.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from learning import QUICKSTART, TASKS, curve, draw, environment, run, start_model

from slipstream.algo.statistics import wilson_interval
from slipstream.runlog import read_metrics

TASK = TASKS["spell_backward"]
NUM_HELD_OUT = 500
CORRECTIONS: dict[str, list[str]] = {"with": [], "without": ["--algorithm.importance_sampling", "none"]}
COLUMNS = "| importance weights | staleness | accuracy, % of each seed | all: % (95 % interval) | age of tokens | ESS |"


def train(folder: Path, model: Path, staleness: int, correction: str, seed: int, steps: int) -> bool:
    """One run."""
    given = ["--evaluation.every", 10, "--run.seed", seed, "--training.steps", steps]
    given += ["--training.staleness", staleness, *CORRECTIONS[correction]]
    return run(folder, "train", QUICKSTART / "grpo.toml", "--model.path", model, *environment(TASK), *given)


def mean_of(folder: Path, metric: str, default: float) -> float:
    """Over the run's training steps."""
    return statistics.fmean(row.get(metric, default) for row in read_metrics(folder) if row["step"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Make what is not there yet, then say how it ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--staleness", nargs="+", type=int, default=[0, 1, 2, 4, 8])
    parser.add_argument("--corrections", nargs="+", choices=CORRECTIONS, default=list(CORRECTIONS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("runs/staleness"))
    parser.add_argument("--figure", type=Path, help="where to draw the curves (SVG)")
    options = parser.parse_args(arguments)
    model = start_model(options.out, TASK)
    if model is None:
        print(f"failed: the SFT model in {options.out}", file=sys.stderr)
        return 1
    folders: dict[tuple[str, int], list[Path]] = {}
    failed = False
    for seed in options.seeds:  # every case has its first seed before one has its second
        for staleness in options.staleness:
            for correction in options.corrections:
                folder = options.out / f"{correction}-{staleness}-{seed}"
                if not train(folder, model, staleness, correction, seed, options.steps):
                    failed = True
                    print(f"failed: {folder}", file=sys.stderr)
                    continue
                folders.setdefault((correction, staleness), []).append(folder)
                found = curve(folder)
                print(f"{folder}: {found[max(found)]:.1f} %", file=sys.stderr, flush=True)
    print(f"{COLUMNS}\n|{'---|' * COLUMNS.count(' |')}")
    intervals: dict[tuple[str, int], tuple[float, float, float]] = {}
    for (correction, staleness), runs in sorted(folders.items()):
        ends = [found[max(found)] for found in map(curve, runs)]
        correct = round(sum(ends) / 100 * NUM_HELD_OUT)
        low, high = (100 * bound for bound in wilson_interval(correct, NUM_HELD_OUT * len(ends)))
        intervals[correction, staleness] = (low, statistics.fmean(ends), high)
        each = ", ".join(f"{end:.1f}" for end in ends)
        age = statistics.fmean(mean_of(folder, "staleness/mean", 0.0) for folder in runs)
        sample = statistics.fmean(mean_of(folder, "train/effective_sample_size", 1.0) for folder in runs)
        whole = f"{statistics.fmean(ends):.1f} ({low:.1f} to {high:.1f})"
        print(f"| {correction} | {staleness} | {each} | {whole} | {age:.2f} | {sample:.3f} |")
    if options.figure is not None and folders:
        panels: dict[str, dict[str, list[dict[int, float]]]] = {}
        for (correction, staleness), runs in sorted(folders.items()):
            panel = panels.setdefault(f"{correction} importance weights", {})
            panel[f"staleness {staleness}"] = [curve(folder) for folder in runs]
        draw(options.figure, panels, legend_in=0)
    if ("with", 0) in intervals:
        least = intervals["with", 0][0]
        behind = [s for (c, s), (_, mean, _) in intervals.items() if c == "with" and s <= 2 and mean < least]
        if behind:
            failed = True
            print(f"below the interval of staleness 0: {', '.join(map(str, behind))}", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
