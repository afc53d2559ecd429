"""GRPO on GPUs: seconds a step, where they go, and how far engine and trainer are apart.

    python benchmarks/gpu.py [--cases 0.5b-full 0.5b-lora 1.5b-full 1.5b-lora] [--placement auto|shared|separate]
                             [--steps 20] [--tokens 512] [--spread STD] [--set KEY=VALUE ...] [--out FOLDER]

Each case is `slipstream train` on a run file, in a process of its own: a Qwen2 of the named shape with the random
weights that transformers gives it, 32 prompts of about 110 tokens, 8 completions of 512 tokens each, one update a step.
Prints a Markdown table: medians and ranges over all steps but the first two. The exit code is 1 when a run failed or a
probe was above `--limit`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WARM_UP = 2
ENDLESS = 1_000_000
"""Steps of a run that `run_until` ends."""
ENVIRONMENT = '''\
"""Prompts of a fixed length; the reward is the part of the completion's words that end with a 7."""
import random


def tasks(split, num_tasks, seed, num_tokens=128):
    draw = random.Random(f"{split}-{seed}")
    letters = "abcdefghijklmnopqrstuvwxyz"
    return [{"prompt": "".join(draw.choices(letters, k=num_tokens - 33))} for _ in range(num_tasks)]


def reward(task, completion):
    words = completion.split()
    return sum(word.endswith("7") for word in words) / max(1, len(words))
'''
ORPHAN_S = 10.0
"""An engine whose run was killed ends itself within so many seconds, and frees its memory."""
PHASES = ("batch", "train", "wake", "update", "probe", "sleep", "checkpoint")


def run_file(
    model: Path, environment: Path, *, lora: bool, placement: str, steps: int, tokens: int, evaluates: bool = True
) -> str:
    """The run: a dozen settings."""
    evaluation = "[evaluation]\nnum_tasks = 32\nat_start = false\n"
    return f"""\
{"" if evaluates else "evaluation = false"}
[model]
path = "{model}"
dtype = "bfloat16"
[environment]
name = "{environment}"
num_train_tasks = 2000
{"[lora]" if lora else ""}
[algorithm]
kind = "grpo"
group_size = 8
[sampling]
max_tokens = {tokens}
[training]
steps = {steps}
prompts_per_batch = 32
learning_rate = {"1e-4" if lora else "1e-6"}
{evaluation if evaluates else ""}[run]
placement = "{placement}"
checkpoint_every = 1000
"""


class PeakMemory:
    """The most memory in use on each GPU while something ran, as nvidia-smi sees it."""

    def __enter__(self) -> PeakMemory:
        self.peaks: list[int] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while not self._ended.wait(0.5):
            try:
                text = subprocess.run(query, capture_output=True, text=True, check=True, timeout=10).stdout
            except (OSError, subprocess.SubprocessError):
                return
            used = [int(line) for line in text.split()]
            self.peaks = [max(pair) for pair in zip(used, self.peaks or used, strict=True)]


def run_until(command: list[str], timeout: float, *, run: Path | None = None, steps: int = 0) -> tuple[str, str]:
    """Run a command to its end, or, where its run folder `run` is given, until that has made `steps` steps: the
    checkpoint of a run's end is many times its weights. Returns what went wrong, if anything, and what was printed."""
    from slipstream.runlog import read_metrics

    deadline, is_made = time.monotonic() + timeout, False
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        while process.poll() is None and not is_made and time.monotonic() < deadline:
            time.sleep(0.5)
            if run is not None and (run / "metrics.jsonl").exists():
                is_made = sum(row["step"] > 0 for row in read_metrics(run)) >= steps
        is_late = process.poll() is None and not is_made
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        output.seek(0)
        printed = output.read()
    if is_made:
        time.sleep(ORPHAN_S)
    if is_made or code == 0:
        return "", printed
    return f"not done after {timeout:.0f} s" if is_late else f"code {code}", printed


def measure(case: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run one case and read its run folder."""
    from shapes import shaped_model

    from slipstream.runlog import read_metrics

    shape, _, kind = case.partition("-")
    model = folder / f"model-{shape}"
    if not model.exists():
        shaped_model(model, shape, options.spread)
    (folder / "environment.py").write_text(ENVIRONMENT)
    name = f"{case}{options.label}"
    file, run = folder / f"{case}.toml", folder / f"run-{name}"
    file.write_text(
        run_file(
            model,
            folder / "environment.py",
            lora=kind == "lora",
            placement=options.placement,
            steps=options.steps,
            tokens=options.tokens,
        )
    )
    command = [sys.executable, "-m", "slipstream.cli", "train", "--plain", str(file), "--run.folder", str(run)]
    for setting in options.set:
        key, _, value = setting.partition("=")
        command += [f"--{key}", value]
    begun = time.monotonic()
    with PeakMemory() as memory:
        try:
            code = subprocess.run(command, stdout=sys.stderr, timeout=options.timeout, check=False).returncode
        except subprocess.TimeoutExpired:
            code = -1
    rows = [row for row in read_metrics(run) if row["step"] > WARM_UP] if code == 0 else []
    result: dict[str, Any] = {
        "case": name,
        "code": code,
        "seconds": time.monotonic() - begun,
        "peaks_mib": memory.peaks,
    }
    if not rows:
        logs = sorted((run / "logs").glob("*.log"))
        return result | {"logs": {log.name: log.read_text(errors="replace")[-4000:] for log in logs}}
    result |= {phase: spread([row.get(f"time/{phase}_s", 0.0) for row in rows]) for phase in PHASES}
    whole = [sum(row.get(f"time/{phase}_s", 0.0) for phase in PHASES) for row in rows]
    tokens = [row["rollout/num"] * row["rollout/length"] for row in rows]
    result["step"] = spread(whole)
    result["tokens_per_s"] = spread([count / seconds for count, seconds in zip(tokens, whole, strict=True)])
    result["generated_per_s"] = spread([n / row["time/batch_s"] for n, row in zip(tokens, rows, strict=True)])
    result["probe_diff"] = spread([row["probe/abs_logprob_diff"] for row in rows])
    # Of every step, the first ones included: what `run.exact` promises has no warm-up.
    result["token_diff"] = spread([row["mismatch/abs_logprob_diff"] for row in read_metrics(run) if row["step"] > 0])
    result["entropy"] = spread([row["train/entropy"] for row in rows if "train/entropy" in row])
    result["reward"] = [rows[0]["reward/mean"], rows[-1]["reward/mean"]]
    return result


def spread(values: list[float]) -> tuple[float, float, float]:
    """Median, smallest, largest."""
    return (statistics.median(values), min(values), max(values)) if values else (0.0, 0.0, 0.0)


def figures(rows: list[dict[str, float]]) -> dict[str, Any]:
    """Seconds of a run's phases and steps, and its probes, each as `spread`."""
    found: dict[str, Any] = {phase: spread([row.get(f"time/{phase}_s", 0.0) for row in rows]) for phase in PHASES}
    found["step"] = spread([sum(row.get(f"time/{phase}_s", 0.0) for phase in PHASES) for row in rows])
    return found | {"probe": spread([row.get("probe/abs_logprob_diff", 0.0) for row in rows])}


def small_table(results: list[dict[str, Any]], more: str, cell: Callable[[dict[str, Any]], str]) -> str:
    """The results of `figures` in Markdown, with a further column `more`."""
    heads = ("case", "s a step", "generate", "train", "update", "largest probe", more)
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for result in results:
        if "step" not in result:
            lines.append(f"| {result['case']} | failed with code {result['code']} | | | | | |")
            continue
        middle, low, high = result["step"]
        parts = " | ".join(f"{result[phase][0]:.3f}" for phase in ("batch", "train", "update"))
        step, probe = f"{middle:.3f} ({low:.3f} to {high:.3f})", f"{result['probe'][2]:.5f}"
        lines.append(f"| {result['case']} | {step} | {parts} | {probe} | {cell(result)} |")
    return "\n".join(lines)


def table(results: list[dict[str, Any]]) -> str:
    """The results in Markdown."""
    lines = [
        "| case | s a step | generate | train | update | probe | wake + sleep | tokens/s | mean abs. logprob "
        "difference of the probe: median, largest step | that of the trained tokens | peak GiB |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        if "step" not in r:
            lines.append(f"| {r['case']} | failed with code {r['code']} |")
            continue
        seconds, low, high = r["step"]
        parts = " | ".join(f"{r[phase][0]:.2f}" for phase in ("batch", "train", "update", "probe"))
        turns = r["wake"][0] + r["sleep"][0]
        peaks = ", ".join(f"{mib / 1024:.0f}" for mib in r["peaks_mib"])
        lines.append(
            f"| {r['case']} | {seconds:.2f} ({low:.2f} to {high:.2f}) | {parts} | {turns:.2f} | "
            f"{r['tokens_per_s'][0]:,.0f} | {r['probe_diff'][0]:.4f}, {r['probe_diff'][2]:.4f} | "
            f"{r['token_diff'][0]:.4f}, {r['token_diff'][2]:.2g} | {peaks} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Measure all cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["0.5b-full", "0.5b-lora", "1.5b-full", "1.5b-lora"])
    parser.add_argument("--placement", choices=["auto", "shared", "separate"], default="auto")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--set", action="append", default=[], help="further settings of the run")
    parser.add_argument("--label", default="", help="added to the names of the cases")
    parser.add_argument("--spread", type=float, help="standard deviation of the logits; 0.6 to 0.8 as they come")
    parser.add_argument("--limit", type=float, default=0.02, help="largest mean difference of a probe")
    parser.add_argument("--timeout", type=float, default=600.0)
    parser.add_argument("--out", type=Path, help="keep the models and runs here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.out or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        results = []
        for case in options.cases:
            results.append(measure(case, options, folder))
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    print(table(results))
    bad = [r for r in results if "step" not in r or r["probe_diff"][2] > options.limit]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
