"""The quickstart: SFT on demonstrations with mistakes, then GRPO, and the held-out accuracy of each.

    python examples/quickstart/run.py [--seed N] [--folder runs/quickstart] [-- further settings of every run]

The demonstrations are gold answers of the task's training set; in four of ten, two neighbouring letters are swapped.
SFT imitates these mistakes too, however long it trains, as the control run shows. GRPO sees no demonstrations, only
whether its own completions are right.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from slipstream.config import load_config
from slipstream.envs.registry import load_environment
from slipstream.runlog import read_metrics

HERE = Path(__file__).resolve().parent
NUM_DEMONSTRATIONS = 20_000
CARELESS = 0.4
FEWEST_POINTS, LOWEST_ACCURACY = 25.0, 85.0


def slipstream(*arguments: str | Path) -> None:
    """Run a command as a user would, and end with its exit code if it fails."""
    print(f"\n$ slipstream {shlex.join(map(str, arguments))}", flush=True)
    process = subprocess.Popen([str(Path(sys.executable).parent / "slipstream"), *map(str, arguments)])
    while True:
        try:
            code = process.wait()
        except KeyboardInterrupt:
            continue  # the command got it too, and needs a moment to write its checkpoint
        break
    if code:
        sys.exit(code)


def write_demonstrations(path: Path, seed: int) -> None:
    """Answers to the training set's questions, some with two neighbouring letters swapped."""
    config = load_config(HERE / "grpo.toml").config
    assert config.environment is not None
    environment = load_environment(config.environment)
    random_numbers = random.Random(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for task in environment.tasks("train", NUM_DEMONSTRATIONS):
            letters = list(environment.gold(task) or "")
            if random_numbers.random() < CARELESS:
                i = random_numbers.randrange(len(letters) - 1)
                letters[i], letters[i + 1] = letters[i + 1], letters[i]
            row = {"prompt": task.prompt[-1].content, "completion": "".join(letters)}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def accuracies(folder: Path) -> list[tuple[float, str]]:
    """Held-out accuracy before and after a run, in per cent, with its interval."""
    rows = [row for row in read_metrics(folder) if row.get("eval/accuracy") is not None]
    return [
        (
            100 * row["eval/accuracy"],
            f"{100 * row['eval/accuracy']:.1f} % ({100 * row['eval/accuracy_low']:.1f} to "
            f"{100 * row['eval/accuracy_high']:.1f})",
        )
        for row in rows
    ]


def training_seconds(folder: Path) -> float:
    """Time of a run's steps, without start, evaluations and checkpoints."""
    steps = [row for row in read_metrics(folder) if row["step"] > 0]
    return sum(row.get(f"time/{part}_s") or 0.0 for row in steps for part in ("batch", "train", "update", "probe"))


def worst_probe(*folders: Path) -> float:
    """The largest difference between engine and trainer that any probe saw: mean over a probe's tokens, in nats."""
    rows = [row for folder in folders for row in read_metrics(folder)]
    return max(row["probe/abs_logprob_diff"] for row in rows if "probe/abs_logprob_diff" in row)


def main() -> None:
    """Make a model, train it in the two stages and the control, and show the accuracies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the model, the demonstrations and the runs")
    parser.add_argument("--folder", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("settings", nargs="*", help="further settings of every run, after --")
    options = parser.parse_args()
    started = time.monotonic()
    folder, seed = options.folder, str(options.seed)
    if folder.exists():
        folder.rename(folder.with_name(f"{folder.name}-before-{time.strftime('%Y%m%d-%H%M%S')}"))
    write_demonstrations(folder / "demonstrations.jsonl", options.seed)
    slipstream("model", "new", folder / "model", "--context-length", "256", "--seed", seed)

    common = ["--run.seed", seed, *options.settings]
    data = ["--data.path", folder / "demonstrations.jsonl"]
    sft, grpo, control = folder / "sft", folder / "grpo", folder / "control"
    slipstream("sft", HERE / "sft.toml", "--run.folder", sft, "--model.path", folder / "model", *data, *common)
    weights = max((sft / "checkpoints").glob("step-*/weights"))
    slipstream("train", HERE / "grpo.toml", "--run.folder", grpo, "--model.path", weights, *common)
    seconds = training_seconds(grpo)
    go_on = ["--training.steps", "100000", "--training.max-seconds", f"{seconds:.0f}", "--evaluation.at-start", "false"]
    slipstream("sft", HERE / "sft.toml", "--run.folder", control, "--model.path", weights, *data, *common, *go_on)

    (_, before_text), *_, (after_sft, sft_text) = accuracies(sft)
    after_rl, rl_text = accuracies(grpo)[-1]
    _, control_text = accuracies(control)[-1]
    table = Table("model", "accuracy on 500 held-out tasks (95 % interval)", "training, s")
    table.add_row("from scratch", before_text, "")
    table.add_row("after SFT", sft_text, f"{training_seconds(sft):.0f}")
    table.add_row("after GRPO from there", f"[bold]{rl_text}[/]", f"{seconds:.0f}")
    table.add_row("control: SFT going on instead", control_text, f"{training_seconds(control):.0f}")
    console = Console()
    console.print()
    console.print(table)
    console.print(
        f"GRPO added {after_rl - after_sft:+.1f} points; engine and trainer differed by at most "
        f"{worst_probe(sft, grpo, control):.1e} nats a token on average after an update; "
        f"{time.monotonic() - started:.0f} s in all."
    )
    slipstream("report", grpo, "--out", folder / "report.html")
    if after_rl - after_sft < FEWEST_POINTS or after_rl < LOWEST_ACCURACY:
        sys.exit(f"expected at least {FEWEST_POINTS:g} points more and {LOWEST_ACCURACY:g} %: look into {grpo}")


if __name__ == "__main__":
    main()
