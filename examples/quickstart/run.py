"""The quickstart: SFT on demonstrations with mistakes, then GRPO, and the held-out accuracy of each.

    python examples/quickstart/run.py [--seed N] [--folder runs/quickstart]

The task is to spell a word backward. The demonstrations are right answers to the training set; in four of ten, two
neighbouring letters are swapped. SFT imitates these mistakes too, however long it trains, as the control run shows.
GRPO sees no demonstrations, only whether its own completions are right.

sft.toml and grpo.toml have the same settings, for the commands `slipstream sft` and `slipstream train`.
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

import slipstream
from slipstream.config import EnvironmentConfig
from slipstream.envs.registry import load_environment

TASK = "reasoning_gym/spell_backward"
WORDS = {"min_word_len": 3, "max_word_len": 6}
NUM_DEMONSTRATIONS = 20_000
CARELESS = 0.4
FEWEST_POINTS, LOWEST_ACCURACY = 25.0, 85.0


def main() -> None:
    """Make a model, train it in the two stages and the control, and show the accuracies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the model, the demonstrations and the runs")
    parser.add_argument("--folder", type=Path, default=Path("runs/quickstart"))
    options = parser.parse_args()
    folder, started = options.folder, time.monotonic()
    if folder.exists():
        folder.rename(folder.with_name(f"{folder.name}-before-{time.strftime('%Y%m%d-%H%M%S')}"))

    data = write_demonstrations(folder / "demonstrations.jsonl", options.seed)
    model = slipstream.new_model(folder / "model", context_length=256, seed=options.seed)
    common = {"tasks": TASK, "environment": {"settings": WORDS}, "seed": options.seed}
    imitation = {"prompts_per_batch": 64, "learning_rate": 4e-3, "warmup_steps": 20}

    print(f"\nSFT of a new model on {NUM_DEMONSTRATIONS:,} demonstrations, {CARELESS:.0%} of them with a mistake")
    sft = slipstream.sft(
        model,
        data,
        steps=330,
        training=imitation,
        evaluation={"num_tasks": 500},
        folder=folder / "sft",
        **common,
    )
    go_on_after(sft)

    print("\nGRPO from there: 8 completions for each word, and whether they are right")
    grpo = slipstream.train(
        sft.weights,
        steps=60,
        # This task gives partial credit; train on right or wrong.
        algorithm={"kind": "grpo", "group_size": 8, "arguments": {"reward_threshold": 1.0}},
        training={
            "prompts_per_batch": 96,
            "updates_per_batch": 2,
            "learning_rate": 2e-3,
            "schedule": "linear",
            "warmup_steps": 10,
        },
        evaluation={"num_tasks": 500},
        folder=folder / "grpo",
        **common,
    )
    go_on_after(grpo)

    seconds = round(training_seconds(grpo))
    print(f"\nControl: SFT going on from there instead, for the same {seconds} s")
    control = slipstream.sft(
        sft.weights,
        data,
        steps=100_000,
        training={**imitation, "max_seconds": seconds},
        evaluation={"num_tasks": 500, "at_start": False},
        folder=folder / "control",
        **common,
    )
    go_on_after(control)

    table = Table("model", "accuracy on 500 held-out tasks (95 % interval)", "training, s")
    table.add_row("from scratch", accuracies(sft)[0], "")
    table.add_row("after SFT", accuracies(sft)[-1], f"{training_seconds(sft):.0f}")
    table.add_row("after GRPO from there", f"[bold]{accuracies(grpo)[-1]}[/]", f"{seconds}")
    table.add_row("control: SFT going on instead", accuracies(control)[-1], f"{training_seconds(control):.0f}")
    gain = 100 * (grpo.accuracy - sft.accuracy)
    worst_probe = max(row.get("probe/abs_logprob_diff", 0.0) for run in (sft, grpo, control) for row in run.rows)
    console = Console()
    console.print()
    console.print(table)
    console.print(
        f"GRPO added {gain:+.1f} points; engine and trainer differed by at most {worst_probe:.1e} nats a token "
        f"on average after an update; {time.monotonic() - started:.0f} s in all.\n"
        f"Curves, completions and settings: {grpo.report(folder / 'report.html')}",
        soft_wrap=True,
    )
    if gain < FEWEST_POINTS or 100 * grpo.accuracy < LOWEST_ACCURACY:
        sys.exit(f"expected at least {FEWEST_POINTS:g} points more and {LOWEST_ACCURACY:g} %: look into {grpo.folder}")


def write_demonstrations(path: Path, seed: int) -> Path:
    """Write answers to the training set's questions, some with two neighbouring letters swapped."""
    environment = load_environment(EnvironmentConfig(name=TASK, settings=WORDS))
    random_numbers = random.Random(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for task in environment.tasks("train", NUM_DEMONSTRATIONS):
            letters = list(environment.gold(task))
            if random_numbers.random() < CARELESS:
                i = random_numbers.randrange(len(letters) - 1)
                letters[i], letters[i + 1] = letters[i + 1], letters[i]
            row = {"prompt": task.prompt[-1].content, "completion": "".join(letters)}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return path


def go_on_after(run: slipstream.Run) -> None:
    """Show a run that has ended. Ctrl-C ends a run with a checkpoint; here it ends this program as well."""
    print(run)
    if run.status != "finished":
        sys.exit(f"{run.status} at step {run.step}: {run.folder}")


def accuracies(run: slipstream.Run) -> list[str]:
    """Held-out accuracy of every evaluation, with its interval."""
    names = ("eval/accuracy", "eval/accuracy_low", "eval/accuracy_high")
    rows = [row for row in run.rows if row.get("eval/accuracy") is not None]
    return ["{:.1f} % ({:.1f} to {:.1f})".format(*(100 * row[name] for name in names)) for row in rows]


def training_seconds(run: slipstream.Run) -> float:
    """Time of a run's steps, without start, evaluations and checkpoints."""
    steps = [row for row in run.rows if row["step"] > 0]
    return sum(row.get(f"time/{part}_s") or 0.0 for row in steps for part in ("batch", "train", "update", "probe"))


if __name__ == "__main__":
    main()
