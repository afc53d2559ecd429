"""The commands. Each docstring is what `--help` shows."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from slipstream.errors import ConfigError, EnvironmentFault

Overrides = Annotated[
    str,
    Parameter(
        allow_leading_hyphen=True,
        show=True,
        help="Settings that replace those of the run file: --section.key value",
    ),
]
RunFile = Annotated[Path, Parameter(help="The run file, TOML.")]
Json = Annotated[bool, Parameter(name="--json", negative="", help="Print one JSON object and nothing else.")]
Plain = Annotated[bool, Parameter(name="--plain", negative="", help="Plain lines instead of the live view.")]
Resume = Annotated[
    bool, Parameter(name="--resume", negative="", help="Continue the run in run.folder after its last checkpoint.")
]

env_app = App(name="env", help="Check environments.")
model_app = App(name="model", help="Make small models.")


def train(
    run_file: RunFile, /, *overrides: Overrides, resume: Resume = False, plain: Plain = False, json: Json = False
) -> int:
    """Train as the run file says, with SFT or GRPO, and leave everything in the run folder."""
    return _train(run_file, overrides, None, resume=resume, plain=plain, as_json=json)


def sft(
    run_file: RunFile,
    /,
    *overrides: Overrides,
    data: Annotated[str | None, Parameter(help="JSONL file of conversations to imitate; sets data.path.")] = None,
    resume: Resume = False,
    plain: Plain = False,
    json: Json = False,
) -> int:
    """Supervised fine-tuning on an environment's gold answers, or on the conversations of a file."""
    extra = ("--data.path", data) if data else ()
    return _train(run_file, (*overrides, *extra), "sft", resume=resume, plain=plain, as_json=json)


def _train(
    run_file: Path, overrides: tuple[str, ...], algorithm: str | None, *, resume: bool, plain: bool, as_json: bool
) -> int:
    from slipstream.config import load_config

    loaded = load_config(run_file, overrides, algorithm=algorithm)
    if resume and loaded.config.run.folder is None:
        raise ConfigError("--resume needs the folder of the run to continue: add --run.folder FOLDER")
    from slipstream.launch.local import run_folder_of, train
    from slipstream.launch.prepare import prepare
    from slipstream.view import make_view

    prepared = prepare(loaded)
    folder = run_folder_of(prepared, run_file.stem)
    view = make_view("none" if as_json else "plain" if plain else "auto")
    result = train(prepared, folder, view, resume=resume)
    summary: dict[str, Any] = {"folder": str(result.folder), "steps": result.steps}
    if result.checkpoint is not None:
        summary["weights"] = str(result.checkpoint)
    if result.evaluation is not None:
        summary |= result.evaluation.metrics()
    if as_json:
        print(json.dumps(summary))
    else:
        print(f"run folder: {result.folder}")
        if result.checkpoint is not None:
            print(f"weights:    {result.checkpoint}")
        if result.evaluation is not None:
            print(_accuracy_line(summary))
    return 0


def _accuracy_line(metrics: dict[str, Any]) -> str:
    return (
        f"accuracy:   {100 * metrics['eval/accuracy']:.1f} % of {metrics['eval/num_tasks']:.0f} held-out tasks "
        f"(95 % interval {100 * metrics['eval/accuracy_low']:.1f} to {100 * metrics['eval/accuracy_high']:.1f})"
    )


def evaluate(
    run_file: RunFile,
    /,
    *overrides: Overrides,
    model: Annotated[str | None, Parameter(help="Model folder to evaluate instead of the run file's.")] = None,
    plain: Plain = False,
    json: Json = False,
) -> int:
    """Held-out accuracy of a model, with its 95 % confidence interval."""
    from slipstream.config import load_config

    extra = ("--model.path", model) if model else ()
    loaded = load_config(run_file, (*overrides, *extra))
    from slipstream.launch.evaluate import evaluate_model
    from slipstream.launch.prepare import prepare
    from slipstream.view import make_view

    prepared = prepare(loaded)
    evaluation = evaluate_model(prepared, make_view("none" if json else "plain" if plain else "auto"))
    metrics = evaluation.metrics()
    if json:
        _print_json(metrics)
    else:
        print(_accuracy_line(metrics))
    return 0


def plan(run_file: RunFile, /, *overrides: Overrides, json: Json = False) -> int:
    """Show every setting that is derived from the run file, and why; start nothing."""
    from slipstream.config import load_config

    loaded = load_config(run_file, overrides)
    from rich.console import Console

    from slipstream.launch.prepare import prepare
    from slipstream.launch.render import plan_as_json, render_plan

    prepared = prepare(loaded)
    if json:
        print(plan_as_json(prepared.plan))
    else:
        Console().print(render_plan(prepared.plan))
        for reason, count in prepared.dropped.items():
            print(f"left out: {count} ({reason})")
    return 0


def runs(
    root: Annotated[Path, Parameter(help="Folder that holds run folders.")] = Path("runs"), *, json: Json = False
) -> int:
    """List the runs below a folder, with their state and last numbers."""
    from slipstream.runlog import list_runs
    from slipstream.view import render_runs

    found = list_runs(root)
    if json:
        _print_json([dataclasses.asdict(run) for run in found])
    else:
        from rich.console import Console

        Console().print(render_runs(found))
    return 0


@env_app.command(name="test")
def env_test(
    run_file: RunFile,
    /,
    *overrides: Overrides,
    num_tasks: Annotated[int, Parameter(help="How many tasks to play.")] = 64,
    json: Json = False,
) -> int:
    """Play gold answers against deliberate junk; fails when the rewards cannot tell them apart."""
    import asyncio

    from slipstream.config import load_config

    config = load_config(run_file, overrides).config
    if config.environment is None:
        raise ConfigError(f"{run_file} names no environment to test: add [environment] name = ...")
    from slipstream.envs.check import check_environment
    from slipstream.envs.registry import load_environment
    from slipstream.envs.scorer import ScorerPool

    section = config.environment
    environment = load_environment(section)

    async def check() -> Any:
        async with ScorerPool(section, timeout_s=section.reward_timeout_s) as scorer:
            return await check_environment(environment, scorer, num_tasks)

    result = asyncio.run(check())
    if json:
        _print_json(dataclasses.asdict(result))
    else:
        from rich.console import Console

        from slipstream.view import render_table

        rows = [
            [r.kind, f"{r.mean_reward:.3f}", f"{100 * r.accuracy:.1f} %", str(r.num_scored)] for r in result.results
        ]
        Console().print(render_table(rows, ["answers", "mean reward", "right", "graded"]))
    if not result.passed:
        raise EnvironmentFault(f"environment {environment.name} cannot be trained on: {'; '.join(result.failures)}")
    return 0


@model_app.command(name="new")
def model_new(
    folder: Annotated[Path, Parameter(help="New folder for the model.")],
    /,
    *,
    tokenizer: Literal["byte", "char"] = "char",
    hidden_size: int = 128,
    num_layers: int = 4,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    intermediate_size: int | None = None,
    context_length: int = 512,
    seed: int = 0,
    dtype: Literal["float32", "bfloat16"] = "float32",
    json: Json = False,
) -> int:
    """Make a small model from scratch: Qwen3 architecture, byte- or character-level tokenizer, chat template."""
    from slipstream.trainer.new_model import new_model

    path = new_model(
        folder,
        tokenizer=tokenizer,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate_size,
        context_length=context_length,
        seed=seed,
        dtype=dtype,
    )
    _print_json({"folder": str(path)}) if json else print(f"new model: {path}")
    return 0


def _print_json(value: Any) -> None:
    json.dump(value, sys.stdout, default=str)
    print()
