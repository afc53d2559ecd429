"""Whether the recipes learn alike: the same SFT model, several recipes and seeds, two tasks, curves in one figure.

For each task a small model is made from scratch and imitates demonstrations of which four in ten have a mistake (as
in the quickstart, which explains why). From that one model every recipe is trained with every seed, over the same
tasks with the same settings but for what SETTINGS says, and graded on 500 held-out tasks every ten steps.

    .venv/bin/python benchmarks/learning.py [--tasks ...] [--recipes ...] [--seeds 0 1 2] [--figure docs/learning.svg]

What is already finished in the folder is not made again, so an interrupted comparison goes on where it stopped; a run
that was cut off is resumed. Prints a Markdown table; the exit code is 1 when a run failed, or a recipe's mean over the
seeds ended more than five points below the best.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.config.schema import EnvironmentConfig
from slipstream.envs.registry import load_environment
from slipstream.runlog import read_exit, read_metrics

HERE = Path(__file__).resolve().parent
QUICKSTART = HERE.parent / "examples" / "quickstart"
NUM_DEMONSTRATIONS, CARELESS = 20_000, 0.4
POINTS = 5.0


@dataclass(frozen=True)
class Task:
    """A reasoning-gym task, and how long its SFT goes on."""

    name: str
    settings: dict[str, int]
    sft_steps: int


TASKS = {
    "spell_backward": Task("reasoning_gym/spell_backward", {"min_word_len": 3, "max_word_len": 6}, 330),
    "spell_long": Task("reasoning_gym/spell_backward", {"min_word_len": 5, "max_word_len": 10}, 400),
}
SETTINGS: dict[str, dict[str, object]] = {
    "grpo": {"algorithm.kind": "grpo"},
    "gspo": {"algorithm.kind": "gspo"},
    "rloo": {"algorithm.kind": "rloo"},
    "ppo": {"algorithm.kind": "ppo"},
    "grpo_lora": {"algorithm.kind": "grpo", "lora.rank": 16, "training.learning-rate": 1e-2},
}
RECIPES = list(SETTINGS)
DEFAULTS = {
    "algorithm.kind": "grpo",
    "training.prompts-per-batch": 32,
    "training.updates-per-batch": 1,
    "training.learning-rate": "auto",
    "training.schedule": "constant",
    "training.warmup-steps": 0,
}
"""What a run file that sets none of these has."""
SETTINGS |= {
    "defaults": DEFAULTS,
    "linear": {**DEFAULTS, "training.schedule": "linear"},
    "two_updates": {**DEFAULTS, "training.updates-per-batch": 2},
    "linear_two_updates": {**DEFAULTS, "training.schedule": "linear", "training.updates-per-batch": 2},
}


def slipstream(log: Path, *arguments: object) -> bool:
    """Run a command, its output into `log`; whether it went well."""
    command = [sys.executable, "-m", "slipstream.cli", *map(str, arguments)]
    with log.open("a") as file:
        return subprocess.run(command, stdout=file, stderr=file, check=False).returncode == 0


def finished(folder: Path) -> bool:
    """Whether a run in `folder` came to its end."""
    end = read_exit(folder) if folder.exists() else None
    return end is not None and end.exit_code == 0


def run(folder: Path, *arguments: object) -> bool:
    """A run in `folder`: left alone when it is finished, resumed when it was cut off."""
    if finished(folder):
        return True
    if (folder / "checkpoints").exists():
        arguments = (*arguments, "--resume")
    log = folder.with_name(f"{folder.name}.log")
    return slipstream(log, *arguments, "--run.folder", folder, "--plain")


def write_demonstrations(path: Path, task: Task) -> None:
    """Answers to training tasks, some with two neighbouring letters swapped."""
    environment = load_environment(EnvironmentConfig(name=task.name, settings=task.settings))
    draws = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for problem in environment.tasks("train", NUM_DEMONSTRATIONS):
            letters = list(environment.gold(problem) or "")
            if draws.random() < CARELESS:
                i = draws.randrange(len(letters) - 1)
                letters[i], letters[i + 1] = letters[i + 1], letters[i]
            row = {"prompt": problem.prompt[-1].content, "completion": "".join(letters)}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def start_model(folder: Path, task: Task) -> Path | None:
    """The SFT model that every recipe begins with, or None when it could not be made."""
    folder.mkdir(parents=True, exist_ok=True)
    demonstrations, model = folder / "demonstrations.jsonl", folder / "model"
    if not demonstrations.exists():
        write_demonstrations(demonstrations, task)
    made = model.exists() or slipstream(folder / "model.log", "model", "new", model, "--context-length", 256)
    where = ["--model.path", model, "--data.path", demonstrations, *environment(task)]
    command = ["sft", QUICKSTART / "sft.toml", *where, "--training.steps", task.sft_steps]
    if not made or not run(folder / "sft", *command):
        return None
    return max((folder / "sft" / "checkpoints").glob("step-*/weights"))


def environment(task: Task) -> list[object]:
    """The task as settings of a run."""
    settings = ", ".join(f"{name} = {value}" for name, value in task.settings.items())
    return ["--environment.name", task.name, "--environment.settings", f"{{ {settings} }}"]


def train(folder: Path, model: Path, task: Task, recipe: str, seed: int, steps: int) -> bool:
    """One run of a recipe."""
    settings = {"evaluation.every": 10, "run.seed": seed, "training.steps": steps, **SETTINGS[recipe]}
    given = [part for name, value in settings.items() for part in (f"--{name}", value)]
    return run(folder, "train", QUICKSTART / "grpo.toml", "--model.path", model, *environment(task), *given)


def curve(folder: Path) -> dict[int, float]:
    """Held-out accuracy by step, in per cent."""
    rows = read_metrics(folder) if folder.exists() else []
    return {int(row["step"]): 100 * row["eval/accuracy"] for row in rows if row.get("eval/accuracy") is not None}


def table(ends: dict[str, dict[str, list[float]]], start: dict[str, float]) -> list[str]:
    """Markdown: a row for each task and recipe."""
    lines = ["| task | recipe | before | after: mean | each seed |", "|---|---|---|---|---|"]
    for task, recipes in ends.items():
        for recipe, values in recipes.items():
            each = ", ".join(f"{value:.1f}" for value in values)
            lines.append(f"| {task} | {recipe} | {start[task]:.1f} % | {statistics.mean(values):.1f} % | {each} |")
    return lines


def draw(path: Path, curves: dict[str, dict[str, list[dict[int, float]]]], legend_in: int = -1) -> None:
    """One panel a task: the mean over seeds of each recipe, and from its lowest to its highest seed. `legend_in`: the
    panel that has room for the names."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "slipstream"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(curves), figsize=(5.2 * len(curves), 3.8), sharey=True, squeeze=False)
    for axis, (task, recipes) in zip(axes[0], curves.items(), strict=True):
        for recipe, runs in recipes.items():
            steps = sorted(set.intersection(*(set(found) for found in runs)))
            values = [[found[step] for found in runs] for step in steps]
            (line,) = axis.plot(steps, [statistics.mean(v) for v in values], marker="o", markersize=3, label=recipe)
            low, high = [min(v) for v in values], [max(v) for v in values]
            axis.fill_between(steps, low, high, alpha=0.12, color=line.get_color(), linewidth=0)
        axis.set_title(task)
        axis.set_xlabel("step")
        axis.grid(alpha=0.25)
    axes[0][0].set_ylabel("accuracy on 500 held-out tasks, %")
    axes[0][legend_in].legend(loc="lower right", frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main(arguments: Sequence[str] | None = None) -> int:
    """Make what is not there yet, then say how it ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--recipes", nargs="+", choices=SETTINGS, default=RECIPES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("runs/learning"))
    parser.add_argument("--figure", type=Path, help="where to draw the curves (SVG)")
    options = parser.parse_args(arguments)
    curves: dict[str, dict[str, list[dict[int, float]]]] = {}
    failed = False
    models = {name: start_model(options.out / name, TASKS[name]) for name in options.tasks}
    for seed in options.seeds:  # every recipe has its first seed before one has its second
        for name in options.tasks:
            for recipe in options.recipes:
                folder, model = options.out / name / f"{recipe}-{seed}", models[name]
                if model is None or not train(folder, model, TASKS[name], recipe, seed, options.steps):
                    failed = True
                    print(f"failed: {folder}", file=sys.stderr)
                    continue
                found = curve(folder)
                print(f"{folder}: {found[min(found)]:.1f} -> {found[max(found)]:.1f} %", file=sys.stderr, flush=True)
                curves.setdefault(name, {}).setdefault(recipe, []).append(found)
    ends = {t: {r: [c[max(c)] for c in runs] for r, runs in recipes.items()} for t, recipes in curves.items()}
    start = {task: next(iter(recipes.values()))[0][0] for task, recipes in curves.items()}
    print("\n".join(table(ends, start)))
    if options.figure is not None and curves:
        draw(options.figure, curves)
    for task, recipes in ends.items():
        means = {recipe: statistics.mean(values) for recipe, values in recipes.items()}
        behind = [recipe for recipe, mean in means.items() if mean < max(means.values()) - POINTS]
        if behind:
            failed = True
            print(f"{task}: more than {POINTS:g} points behind the best: {', '.join(behind)}", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
