"""What a user gets who sets nothing, beside what was set by hand: a GRPO step, checkpoints, and the start.

    python benchmarks/derived.py [--cases by-hand derived checkpoints lora killed memory] [--shape 1.5b] [--steps 40]
                                 [--tokens 512] [--limit 1.1] [--out FOLDER]

Each case is `slipstream train` in a process of its own, one after the other on one machine: a Qwen2 of that shape with
random weights, 32 prompts of about 110 tokens, 8 completions of up to 512 tokens each.

- `by-hand`: `weights.bridge` and `training.compile` set as BENCHMARKS.md has found them fastest, no checkpoint; eight
  steps are measured;
- `derived`: a run file with nothing but model, environment, algorithm, `max_tokens`, batch and steps;
- `checkpoints`: the same with `run.checkpoint_every = 10`; its start is the second one on this machine;
- `lora`: the same with an empty [lora], 8 steps;
- `killed`: the same with `run.checkpoint_every = 4`; the engine's server gets SIGKILL at step 6;
- `memory`: rows so long that the trainer runs out of memory, and then `--resume`.

A step lasts from row to row of the metrics, by the clock, less what an evaluation in between took; what passes before
the first is made counts from the beginning of the command. Prints Markdown: the steps after the first two, those in
which a snapshot was taken, what was derived, and the stages of each start. The exit code is 1 when a run failed, the
derived median is above `--limit` times that by hand, or a step with a snapshot is above 1.3 times its run's median.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from pathlib import Path
from typing import Any

from gpu import ENVIRONMENT, WARM_UP, PeakMemory, run_file

SNAPSHOT_LIMIT = 1.3
CASES = ("by-hand", "derived", "checkpoints", "lora", "killed", "memory")
TOLD = ("weights.bridge", "training.compile", "run.checkpoint_every", "run.async_checkpoints", "training.learning_rate")


def minimal(model: Path, environment: Path, steps: int, options: argparse.Namespace) -> str:
    """The run file of somebody who has read half a page."""
    return f"""\
[model]
path = "{model}"
[environment]
name = "{environment}"
num_train_tasks = 2000
[algorithm]
kind = "grpo"
group_size = 8
[sampling]
max_tokens = {options.tokens}
[training]
prompts_per_batch = {options.prompts}
steps = {steps}
"""


def settings_of(case: str, model: Path, environment: Path, options: argparse.Namespace) -> tuple[str, list[str]]:
    """The run file of a case, and what its command sets besides."""
    if case == "by-hand":
        size = {"steps": 8 + WARM_UP, "tokens": options.tokens}
        text = run_file(model, environment, lora=False, placement="shared", evaluates=False, **size)
        bridge = "disk" if options.device == "cpu" else "single_copy"
        text = text.replace("prompts_per_batch = 32", f"prompts_per_batch = {options.prompts}")
        return text, [f"weights.bridge={bridge}", *options.by_hand]
    steps = {"lora": 8 + WARM_UP, "killed": 10, "memory": 6}.get(case, options.steps)
    text = minimal(model, environment, steps, options) + ("[lora]\n" if case == "lora" else "")
    more = {
        "checkpoints": ["run.checkpoint_every=10"],
        "killed": ["run.checkpoint_every=4"],
        "memory": [f"training.micro_batch_tokens={options.too_long}", "training.gradient_checkpointing=false"],
    }
    return text, more.get(case, [])


def measure(number: int, case: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run one case and read its run folder."""
    model = folder / "model"
    if not model.exists():
        from shapes import shaped_model

        shaped_model(model, options.shape)
    environment = folder / "environment.py"
    environment.write_text(ENVIRONMENT)
    file, run = folder / f"{case}.toml", folder / f"run-{number}-{case}"
    text, more = settings_of(case, model, environment, options)
    file.write_text(text)
    command = [sys.executable, "-m", "slipstream.cli", "train", "--json", str(file), "--run.folder", str(run)]
    command += [word for setting in options.set for word in as_option(setting)]
    asked = [word for setting in more for word in as_option(setting)]
    killer = threading.Thread(target=kill_server, args=(run, options), daemon=True)
    if case == "killed":
        killer.start()
    with PeakMemory() as memory:
        result = told([*command, *asked], run, options)
    result |= {"case": case, "peaks_mib": memory.peaks}
    if case == "memory":
        first = {name: result[name] for name in ("code", "error")}
        result = told([*command, "--resume"], run, options) | {"case": case, "first": first}
        result["peaks_mib"] = memory.peaks
    return result


def as_option(setting: str) -> list[str]:
    """KEY=VALUE as the command has it."""
    key, _, value = setting.partition("=")
    return [f"--{key}", value]


def told(command: list[str], run: Path, options: argparse.Namespace) -> dict[str, Any]:
    """What the command and its run folder tell."""
    from slipstream.runlog import read_events, read_metrics

    begun, began_at = time.monotonic(), time.time()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=options.timeout, check=False)
        code, output, errors = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired:
        code, output, errors = -1, "", f"not done after {options.timeout:.0f} s"
    result: dict[str, Any] = {"code": code, "whole_s": time.monotonic() - begun, "error": errors[-1500:]}
    (options.json or run).with_suffix(f".{run.name}.txt").write_text(errors)
    result["startup"] = json.loads(output).get("startup") if code == 0 else None
    rows, events = (list(read_metrics(run)), list(read_events(run))) if run.exists() else ([], [])
    result["first_step_s"] = next((row["time"] - began_at for row in rows if row["step"] >= 1), 0.0)
    pairs = [(a, b) for a, b in itertools.pairwise(rows) if b["step"] == a["step"] + 1 and b["step"] > WARM_UP]
    result["seconds"] = {
        int(row["step"]): row["time"] - before["time"] - row.get("time/evaluate_s", 0.0) for before, row in pairs
    }
    result["phases"] = {
        name: statistics.median(row.get(name, 0.0) for _, row in pairs)
        for name in sorted({name for _, row in pairs for name in row if name.startswith("time/")})
    }
    slowest = max(pairs, key=lambda pair: pair[1]["time"] - pair[0]["time"], default=None)
    result["slowest"] = {name: value for name, value in slowest[1].items() if "time" in name} if slowest else {}
    result["saved"] = {
        int(row["step"]): row["time/checkpoint_s"] for row in rows if row.get("time/checkpoint_s", 0.0) > 0.0
    }
    kinds = ("checkpoint", "restart", "warning", "exit")
    result["events"] = [event for event in events if event["kind"] in kinds]
    resolved = run / "resolved.toml"
    result["settings"] = resolved.read_text() if resolved.exists() else ""
    result["logs"] = {log.name: log.read_text(errors="replace")[-2500:] for log in sorted((run / "logs").glob("*"))}
    if code == 0:
        result["logs"] = {}
    return result


def kill_server(run: Path, options: argparse.Namespace) -> None:
    """SIGKILL for the process of the engine that listens, once step 6 is made."""
    from slipstream.runlog import read_metrics

    until = time.monotonic() + options.timeout
    while time.monotonic() < until:
        time.sleep(0.2)
        if run.exists() and any(row["step"] >= 6 for row in read_metrics(run)):
            break
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if entry.name.isdigit() and any(b"slipstream.inference" in word for word in words):
            os.kill(int(entry.name), signal.SIGKILL)
            print(f"killed {entry.name}: {b' '.join(words)[:200]!r}", file=sys.stderr, flush=True)
            return


def spread(values: list[float]) -> str:
    """Median and range."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})" if values else ""


def steps_of(result: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Seconds of the steps without a snapshot and of those with one; the last step, whose checkpoint is written while
    nothing is trained, is in neither."""
    last = max(result["seconds"], default=0)
    plain = [s for step, s in result["seconds"].items() if step not in result["saved"] and step != last]
    return plain, [s for step, s in result["seconds"].items() if step in result["saved"] and step != last]


def tables(results: list[dict[str, Any]]) -> str:
    """The results in Markdown."""
    lines = [
        "| case | exit code | s a step | steps with a snapshot, s | of it checkpoints, s | first step after, s | "
        "whole, s | peak GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        plain, snapshots = steps_of(r)
        last = max(r["seconds"], default=0)
        cost = ", ".join(f"{s:.2f}" for step, s in r["saved"].items() if step != last)
        peaks = ", ".join(f"{mib / 1024:.0f}" for mib in r["peaks_mib"])
        lines.append(
            f"| {r['case']} | {r['code']} | {spread(plain)} | {spread(snapshots)} | {cost} | {r['first_step_s']:.1f} | "
            f"{r['whole_s']:.0f} | {peaks} |"
        )
    for r in results:
        if r["settings"]:
            sections = tomllib.loads(r["settings"])
            values = (f"{name} = {sections[name.partition('.')[0]][name.partition('.')[2]]}" for name in TOLD)
            lines.append(f"\n{r['case']}: {', '.join(values)}")
        if r["startup"]:
            stages = ", ".join(
                f"{stage['name']} {stage['began_s']:.1f} + {stage['seconds']:.1f}" for stage in r["startup"]["stages"]
            )
            lines.append(f"\n{r['case']}, stages (began + seconds): {stages}")
    return "\n".join(lines)


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES[:3]))
    parser.add_argument("--shape", default="1.5b")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--prompts", type=int, default=32, help="in a batch, with 8 completions each")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--by-hand", nargs="*", default=["training.compile=true"], help="settings of `by-hand`")
    parser.add_argument("--set", nargs="*", default=[], help="settings of every case")
    parser.add_argument("--too-long", type=int, default=200_000, help="tokens of a row under `memory`")
    parser.add_argument("--limit", type=float, default=1.1)
    parser.add_argument("--timeout", type=float, default=500.0, help="seconds for a run")
    parser.add_argument("--json", type=Path, help="all that was measured")
    parser.add_argument("--out", type=Path, help="keep the model and the runs here")
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="slipstream-derived-") as scratch:
        folder = options.out or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for number, case in enumerate(options.cases):
            results.append(measure(number, case, options, folder))
            if options.json:
                options.json.write_text(json.dumps(results, indent=1))
    print(tables(results))
    bad = [r["case"] for r in results if r["code"] or (r["case"] == "memory" and r["first"]["code"] != 9)]
    medians = {}
    for r in results:
        plain, snapshots = steps_of(r)
        if plain:
            medians[r["case"]] = statistics.median(plain)
            if max(snapshots, default=0.0) > SNAPSHOT_LIMIT * medians[r["case"]]:
                bad.append(f"{r['case']}: a step with a snapshot")
    by_hand = medians.get("by-hand")
    for case in ("derived", "checkpoints"):
        if by_hand and medians.get(case, 0.0) > options.limit * by_hand:
            bad.append(f"{case}: {medians[case] / by_hand:.2f} times by-hand")
    print("bad:", ", ".join(bad) if bad else "nothing")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
