"""Runs that are killed (SIGKILL) at random moments and resumed, compared with a run that nobody killed.

    python benchmarks/kill_resume.py [--kills 10] [--kind sft|grpo|dapo|ppo] [--seed 0]

`sft`: after all the kills the weights must be the same bits as those of the undisturbed run. `grpo` (real vLLM), `dapo`
with its dynamic sampling and `ppo` with its critic: the held-out accuracies are printed side by side with their
intervals, and only told whether their bits agree. A third of the kills falls at a random moment while the processes
start, the others after random steps of the training, a random part of a few steps later.
Prints a Markdown table; the exit code is 1 when a run does not end, a process outlives a kill, a kill came too late,
or bits differ.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from slipstream.commands.small_models.tiny_qwen3 import new_model
from slipstream.config import load_config
from slipstream.runlog import read_exit, read_metrics

RUN_FILES = {
    "sft": """
[model]
path = "{model}"
[environment]
name = "reasoning_gym/spell_backward"
settings = {{ min_word_len = 3, max_word_len = 6 }}
num_train_tasks = 1000
[algorithm]
kind = "sft"
[training]
steps = {steps}
prompts_per_batch = 32
learning_rate = 2e-3
schedule = "linear"
warmup_steps = 5
[run]
checkpoint_every = {every}
threads = 1
""",
    "grpo": """
[model]
path = "{model}"
[environment]
name = "reasoning_gym/spell_backward"
settings = {{ min_word_len = 3, max_word_len = 4 }}
[algorithm]
kind = "grpo"
[training]
steps = {steps}
prompts_per_batch = 16
learning_rate = 1e-3
[evaluation]
num_tasks = 200
[run]
checkpoint_every = {every}
""",
}
RUN_FILES |= {kind: RUN_FILES["grpo"].replace('"grpo"', f'"{kind}"') for kind in ("dapo", "ppo")}
SFT_BEFORE_GRPO = """
[model]
path = "{model}"
[environment]
name = "reasoning_gym/spell_backward"
settings = {{ min_word_len = 3, max_word_len = 4 }}
[algorithm]
kind = "sft"
[training]
steps = 300
learning_rate = 4e-3
schedule = "linear"
warmup_steps = 20
"""
TIMEOUT_S = 900.0
TRIES = 3
"""How often the killed run is made where a kill came too late, as where the machine stood still."""


@dataclass
class Undisturbed:
    """What a run takes when it is left alone."""

    start_s: float
    """From the command to the first line of metrics."""
    step_s: float
    """One step, on average."""


@dataclass
class Kills:
    """How many fell where."""

    at_start: int = 0
    in_training: int = 0


def command(run_file: Path, folder: Path, *more: str) -> list[str]:
    """The real command."""
    return [
        sys.executable,
        "-m",
        "slipstream.cli",
        "train",
        str(run_file),
        "--run.folder",
        str(folder),
        "--json",
        *more,
    ]


def start(arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Begin to run it; its words go to `log`."""
    with log.open("ab") as output:
        return subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=output, stderr=output)


def num_rows(folder: Path) -> int:
    """Lines of metrics, of all lineages."""
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def last_step(folder: Path) -> int:
    """Of the newest whole line of metrics; -1 when there is none."""
    lines = (folder / "metrics.jsonl").read_bytes().split(b"\n")
    return json.loads(lines[-2])["step"] if len(lines) > 1 else -1


def run_undisturbed(run_file: Path, folder: Path, log: Path) -> Undisturbed:
    """Run to the end and time it."""
    began = time.monotonic()
    process = start(command(run_file, folder), log)
    while process.poll() is None and not num_rows(folder):
        time.sleep(0.01)
    first = time.monotonic()
    if process.wait(TIMEOUT_S) != 0:
        raise SystemExit(f"the undisturbed run failed:\n{log.read_text()[-2000:]}")
    return Undisturbed(first - began, (time.monotonic() - first) / num_rows(folder))


def run_killed(run_file: Path, folder: Path, log: Path, kills: int, times: Undisturbed, rng: random.Random) -> Kills:
    """Run, kill, resume, `kills` times, then to the end."""
    counts = Kills()
    moments = kill_moments(run_file, kills, rng)
    for step in moments:
        before = num_rows(folder)
        process = start(command(run_file, folder, *resuming(folder)), log)
        if step is None:
            time.sleep(rng.uniform(0.0, times.start_s))
            children = children_of(process.pid)
        else:
            deadline = time.monotonic() + TIMEOUT_S
            while process.poll() is None and (num_rows(folder) == before or last_step(folder) < step):
                if time.monotonic() > deadline:
                    process.kill()
                    raise SystemExit(f"step {step} did not come within {TIMEOUT_S:g} s:\n{log.read_text()[-2000:]}")
                time.sleep(0.002)
            children = children_of(process.pid)
            time.sleep(rng.uniform(0.0, 3.0 * times.step_s))
        if process.poll() is not None:
            break  # ended before it could be killed: the table says how many kills there were
        process.kill()
        process.wait()
        counts.in_training += num_rows(folder) > before
        counts.at_start += num_rows(folder) == before
        _, alive = psutil.wait_procs(children, timeout=15)
        if alive:
            raise SystemExit(f"{len(alive)} processes outlived a kill: {alive}")
    if not folder.exists() or read_exit(folder) is None:
        code = start(command(run_file, folder, *resuming(folder)), log).wait(TIMEOUT_S)
        if code != 0:
            raise SystemExit(f"the killed run did not end, exit code {code}:\n{log.read_text()[-2000:]}")
    return counts


def kill_moments(run_file: Path, kills: int, rng: random.Random) -> list[int | None]:
    """For each kill the step after which it comes, in rising order; None among them: while the processes start."""
    steps = load_config(run_file).config.training.steps
    num_at_start = kills // 3
    moments: list[int | None] = [*sorted(rng.randrange(1, max(2, steps * 3 // 4)) for _ in range(kills - num_at_start))]
    for _ in range(num_at_start):
        moments.insert(rng.randrange(len(moments) + 1), None)
    return moments


def resuming(folder: Path) -> list[str]:
    """A kill may come before there is anything to resume."""
    return ["--resume"] if (folder / "events.jsonl").exists() else []


def children_of(pid: int) -> list[psutil.Process]:
    """All processes below it."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def weights_digest(folder: Path) -> str:
    """Of the last checkpoint's weights file."""
    path = sorted((folder / "checkpoints").glob("step-*/weights/model.safetensors"))[-1]
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def accuracy(folder: Path) -> str:
    """Of the last evaluation, with its 95 % interval."""
    row = [row for row in read_metrics(folder) if "eval/accuracy" in row][-1]
    value, low, high = (100 * row[f"eval/accuracy{part}"] for part in ("", "_low", "_high"))
    return f"{value:.1f} % ({low:.1f} to {high:.1f})"


def make_model(work: Path, kind: str, log: Path) -> Path:
    """A fresh model; for reinforcement learning one that knows part of the task."""
    model = new_model(work / "model", hidden_size=64 if kind == "sft" else 128, num_layers=2)
    if kind == "sft":
        return model
    (work / "warm.toml").write_text(SFT_BEFORE_GRPO.format(model=model))
    warm = start([*command(work / "warm.toml", work / "warm"), "--evaluation", "false"], log)
    if warm.wait(TIMEOUT_S) != 0:
        raise SystemExit(f"the warm-up failed:\n{log.read_text()[-2000:]}")
    return sorted((work / "warm" / "checkpoints").glob("step-*/weights"))[-1]


def compare(kind: str, kills: int, seed: int, steps: int, every: int, work: Path) -> bool:
    """Print the table; whether all is as it must be."""
    log, run_file = work / "output.log", work / "run.toml"
    text = RUN_FILES[kind].format(model=make_model(work, kind, log), steps=steps, every=every)
    run_file.write_text(f"evaluation = false\n{text}" if kind == "sft" else text)
    times = run_undisturbed(run_file, work / "undisturbed", log)
    counts = Kills()
    for number in range(TRIES):
        shutil.rmtree(work / "killed", ignore_errors=True)
        counts = run_killed(run_file, work / "killed", log, kills, times, random.Random(seed + number))
        if counts.at_start + counts.in_training == kills:
            break
    print("| run | steps | kills at start-up | kills in training | weights (SHA-256) | held-out accuracy |")
    print("|---|---|---|---|---|---|")
    for name in ("undisturbed", "killed"):
        folder, where = work / name, counts if name == "killed" else Kills()
        report = read_exit(folder)
        assert report is not None
        assert report.status == "finished", report
        shown = "-" if kind == "sft" else accuracy(folder)
        print(
            f"| {name} | {report.step} | {where.at_start} | {where.in_training} | {weights_digest(folder)} | {shown} |"
        )
    if counts.at_start + counts.in_training < kills:
        print(f"only {counts.at_start + counts.in_training} of {kills} kills came in time", file=sys.stderr)
        return False
    return kind != "sft" or weights_digest(work / "undisturbed") == weights_digest(work / "killed")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--kind", choices=sorted(RUN_FILES), default="sft")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="by default 400 of sft, 20 of the others")
    arguments = parser.parse_args()
    steps = arguments.steps or (400 if arguments.kind == "sft" else 20)
    with tempfile.TemporaryDirectory(prefix="kill-resume-") as work:
        every = max(1, steps // 40)
        if not compare(arguments.kind, arguments.kills, arguments.seed, steps, every, Path(work)):
            raise SystemExit(1)


if __name__ == "__main__":
    main()
