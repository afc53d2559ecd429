"""Does rollout matching teach a detector more than as many steps of SFT? With real vLLM, on a CPU or a GPU.

    python benchmarks/detection.py [--seeds 0 1 2] [--at-once 1] [--threads N] [--num-eval 2000]
                                   [--set KEY=VALUE] [--out FOLDER] [--json FILE]

`examples/detection` with models of several seeds: drawn pictures with up to four rectangles, SFT at a constant rate
(`sft.toml`), and from its weights 60 steps each of: channels A and B in turn (`ab.toml`), channel A alone (`a.toml`),
and more SFT at the same rate. Each is `slipstream sft` in a process of its own. Prints a Markdown table: F1 on the same
held-out pictures, with an interval, by the trained model's own greedy answers; how many of these, and at most of a
step's rollouts, were invalid; minutes.

The interval is Wilson's, of as many trials as there are pictures: boxes of one picture are not independent, so that
taking each for a trial would make it too narrow. The exit code is 1 when a run failed. vLLM needs torchvision for these
models.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "detection"
MORE_SFT = ("--training.steps", "60", "--training.warmup_steps", "0", "--training.learning_rate", "3e-4")
MORE_SFT += ("--training.schedule", "linear")
STAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "SFT": ("sft.toml", ()),
    "then A and B": ("ab.toml", ()),
    "then A alone": ("a.toml", ()),
    "then more SFT": ("sft.toml", MORE_SFT),
}
FIRST_HELD_OUT = 1_000_000
"""The number of the first held-out picture: no other is drawn from it."""


def command(*words: object) -> list[str]:
    """A command of ours."""
    return [sys.executable, "-m", "slipstream.cli", *map(str, words)]


def train(seed: int, stage: str, options: argparse.Namespace) -> dict[str, Any]:
    """One stage of one seed: what its last evaluation found."""
    from slipstream.algo.statistics import wilson_interval
    from slipstream.runlog import read_metrics

    file, more = STAGES[stage]
    folder: Path = options.out / f"{stage.replace(' ', '-')}-{seed}"
    started = options.out / f"SFT-{seed}" / "checkpoints"
    model = options.out / f"model-{seed}" if stage == "SFT" else max(started.glob("step-*")) / "weights"
    rows = {name: str(options.out / name / "rows.jsonl") for name in ("train", "held-out")}
    data = f'{{path = "{rows["train"]}", eval_path = "{rows["held-out"]}", prompt = "Detect."}}'
    words = ["sft", "--plain", EXAMPLES / file, "--model.path", model, "--run.folder", folder, "--run.seed", seed]
    words += ["--environment.settings", data, "--evaluation.num_tasks", options.num_eval]
    words += ["--evaluation.at_start", "false", *more]
    for setting in options.set:
        key, _, value = setting.partition("=")
        words += [f"--{key}", value]
    environment = os.environ | ({"OMP_NUM_THREADS": str(options.threads)} if options.threads else {})
    begun = time.monotonic()
    with (options.out / f"{folder.name}.log").open("w") as log:
        try:
            limits: dict[str, Any] = {"env": environment, "timeout": options.timeout, "check": False}
            code = subprocess.run(command(*words), stdout=log, stderr=log, **limits).returncode
        except subprocess.TimeoutExpired:
            code = -1  # the other seeds go on
    result: dict[str, Any] = {"seed": seed, "stage": stage, "code": code, "minutes": (time.monotonic() - begun) / 60}
    if code:
        return result
    last = [row for row in read_metrics(folder) if "eval/f1" in row][-1]
    found = {name: last[f"eval/{name}"] for name in ("f1", "precision", "recall", "invalid_rate")}
    num_trials = int(last["eval/num_tasks"])
    low, high = wilson_interval(round(found["f1"] * num_trials), num_trials)
    steps = [row for row in read_metrics(folder) if row.get("rollout/num_samples")]
    invalid = max((row["stage2/invalid_rollout"] / row["rollout/num_samples"] for row in steps), default=None)
    return result | found | {"iou": last["eval/matched_maskiou_mean"], "low": low, "high": high, "invalid": invalid}


def of_seed(seed: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All stages of a seed, one after the other."""
    model = options.out / f"model-{seed}"
    if not model.exists():  # with --out, stages may be run apart
        new = command("model", "new", model, "--vision", "--coordinates", "--num-layers", 2, "--seed", seed)
        subprocess.run(new, stdout=subprocess.DEVNULL, timeout=options.timeout, check=True)
    results = []
    for stage in options.stages:
        results.append(train(seed, stage, options))
        print(json.dumps(results[-1]), file=sys.stderr, flush=True)
        if results[-1]["code"]:
            break
    return results


def table(results: list[dict[str, Any]]) -> str:
    """The results in Markdown."""
    lines = [
        "| seed | trained by | F1 (95 % interval) | precision, recall | mean IoU | invalid answers, rollouts | min |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in sorted(results, key=lambda r: (r["seed"], list(STAGES).index(r["stage"]))):
        if r["code"]:
            lines.append(f"| {r['seed']} | {r['stage']} | failed with code {r['code']} |")
            continue
        f1 = f"{r['f1']:.3f} ({r['low']:.3f} to {r['high']:.3f})"
        figures = f"{r['precision']:.3f}, {r['recall']:.3f} | {r['iou']:.3f} | {100 * r['invalid_rate']:.1f} %"
        rollouts = "" if r["invalid"] is None else f", {100 * r['invalid']:.1f} %"
        lines.append(f"| {r['seed']} | {r['stage']} | {f1} | {figures}{rollouts} | {r['minutes']:.0f} |")
    return "\n".join(lines)


def main() -> int:
    """Train all, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--stages", nargs="+", choices=list(STAGES), default=list(STAGES))
    parser.add_argument("--at-once", type=int, default=1, help="seeds side by side")
    parser.add_argument("--threads", type=int, help="of each run, on a CPU")
    parser.add_argument("--num-train", type=int, default=8000, help="pictures to train on")
    parser.add_argument("--num-eval", type=int, default=2000, help="held-out pictures")
    parser.add_argument("--set", action="append", default=[], help="a further setting of the runs, KEY=VALUE")
    parser.add_argument("--timeout", type=float, default=7200.0, help="seconds for a run")
    parser.add_argument("--out", type=Path, help="keep everything here")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="slipstream-detection-") as temporary:
        options.out = (options.out or Path(temporary)).absolute()
        write = runpy.run_path(str(EXAMPLES / "rectangles.py"))["write"]
        write(options.out / "train", options.num_train)
        write(options.out / "held-out", options.num_eval, FIRST_HELD_OUT)
        with ThreadPoolExecutor(options.at_once) as pool:
            results = [r for each in pool.map(lambda seed: of_seed(seed, options), options.seeds) for r in each]
        if options.json:
            options.json.write_text(json.dumps(results))
    print(table(results))
    return int(any(r["code"] for r in results))


if __name__ == "__main__":
    sys.exit(main())
