"""The commands for an environment before a run: `env new`, `env test`, and `env push` and `env pull`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from slipstream.cli.commands import Overrides, Plain, RunFile
from slipstream.cli.output import Json, made_view, print_json, tell
from slipstream.config.sft import SFTConfig
from slipstream.errors import ConfigError, EnvironmentFault

if TYPE_CHECKING:
    from slipstream.algo.readiness import GroupStatistics, Judgement
    from slipstream.commands.environment_check import Checked
    from slipstream.config import Loaded
    from slipstream.progress import Progress

env_app = App(name="env", help="Write, check and keep an environment before training on it.")
_UNGRADED = {"mean_reward": None, "accuracy": None}
_SAMPLES = 8
"""Completions for each task, where training samples one."""
_STEPS = 1000
"""Of a run file that does not say yet how long to train: no answer depends on it."""


@dataclass(frozen=True)
class _Trial:
    """What the model made of the tasks."""

    found: GroupStatistics
    judgement: Judgement
    by_task: dict[str, tuple[GroupStatistics, Judgement]]
    """The same of each part of a mixture, and of each data source."""


@env_app.command(name="new")
def env_new(folder: Path, /, *, json: Json = False) -> int:
    """Write a working folder: environment.py, tasks.jsonl, a test, sft.toml, rl.toml, and AGENTS.md for a coding agent.

    The folder must be new or empty. Prints the commands to run next.

    Args:
        folder: New folder for the files.
    """
    from slipstream.cli.env_files import environment_files, next_commands
    from slipstream.cli.init_files import write_files

    files = environment_files()
    path = write_files(Path(folder), files)
    if json:
        print_json({"folder": str(path), "files": list(files)})
    else:
        tell(f"wrote {', '.join(files)}; next:\n\ncd {shlex.quote(str(path))}\n{next_commands()}", end="")
    return 0


@env_app.command(name="push")
def env_push(
    folder: Path,
    registry: str,
    /,
    *,
    name: str = "",
    json: Json = False,
) -> int:
    """Keep an environment in a folder or S3 bucket by its content's digest, and print the name for a run file.

    Hidden files, compiled Python, and the folders runs and models are left out and counted. Links are refused. A bucket
    needs the extra s3 (pip install 'slipstream[s3]'), and credentials where botocore looks for them.

    Args:
        folder: The environment's folder, with environment.py in it.
        registry: What keeps environments: a folder, made if it is not there, or s3://bucket/prefix.
        name: Its name there; default: the folder's.
    """
    from slipstream.config.parse.dump import toml_value
    from slipstream.envs.store.registry import push

    found = push(Path(folder), registry, name)
    if json:
        print_json(asdict(found))
    else:
        state = "pushed" if found.is_new else "was there already"
        tell(f"{state}: {found.num_files} files, {found.num_left_out} left out\n\n[environment]")
        tell(f'name = "{found.reference}"\nregistry = {toml_value(found.registry)}')
    return 0


@env_app.command(name="pull")
def env_pull(
    reference: str,
    registry: str,
    folder: Path,
    /,
    *,
    json: Json = False,
) -> int:
    """Copy an environment out of the folder or S3 bucket that keeps it, to work on it.

    Verifies it, and executes nothing.

    Args:
        reference: name@digest, as `slipstream env push` printed it.
        registry: The folder or bucket (s3://bucket/prefix) that it was pushed to.
        folder: New folder for the environment.
    """
    from slipstream.envs.store.registry import pull

    path = pull(reference, registry, Path(folder))
    print_json({"folder": str(path)}) if json else tell(f"pulled: {path}")
    return 0


@env_app.command(name="test")
def env_test(
    run_file: RunFile,
    /,
    *overrides: Overrides,
    num_tasks: int = 64,
    model: Annotated[bool, Parameter(negative="")] = False,
    samples: int | None = None,
    plain: Plain = False,
    json: Json = False,
) -> int:
    """Grade gold answers and deliberately wrong ones; fail if the rewards cannot tell them apart.

    Also fails if the model's tokenizer has no token for a character that the answers need; a missing model folder skips
    that check. Prints mean reward and accuracy for each kind of answer.

    With --model, vLLM samples completions of the run file's model as training does, which prints pass@1, pass@k, the
    groups with signal, and a verdict: ready for RL; ready, but slow; more SFT first; task too easy; or reward broken.

    Args:
        num_tasks: Training tasks to grade, of each part of a mixture.
        model: Also sample the run file's model, and judge whether RL can learn.
        samples: With --model: completions for each task; default: algorithm.group_size.
    """
    from slipstream.commands.environment_check import check_rewards
    from slipstream.config import load_config

    if samples is not None and (samples < 2 or not model):
        raise ConfigError(f"--samples {samples} {'is less than 2' if model else 'needs --model'}: see --help")
    loaded = load_config(Path(run_file), overrides, steps=_STEPS)
    if loaded.config.environment is None:
        raise ConfigError(f"{run_file} names no environment to test: add [environment] name = ...")
    checked = check_rewards(loaded.config, num_tasks)
    failures, notes = checked.failures, checked.notes
    if reason := checked.result.without_gold:
        # RL needs none. SFT imitates them, unless it has [data].
        needs_gold = isinstance(loaded.config.algorithm, SFTConfig) and loaded.config.data is None
        if not model and (needs_gold or not checked.result.results):
            failures = [*failures, reason]
        else:
            notes = [*notes, reason]
    if not json:
        _print_check(checked, notes, passed=not failures)
    tried = None
    if model and not failures:
        tried = _try_model(loaded, num_tasks, samples, checked, made_view(plain=plain, as_json=json))
    verdict = "reward broken" if failures else tried.judgement.verdict if tried else ""
    if json:
        _print_json(checked, failures, notes, tried, verdict if model else "")
    elif tried:
        _print_trial(tried, checked)
    if verdict == "reward broken":
        text = "; ".join(failures) or (tried.judgement.text if tried else "")
        what = "was not checked" if not checked.result.results else "cannot be trained on"
        raise EnvironmentFault(f"environment {checked.result.environment} {what}: {text}")
    return 0


def _try_model(loaded: Loaded, num_tasks: int, samples: int | None, checked: Checked, view: Progress) -> _Trial:
    """Sample the model on training tasks and judge what came."""
    from slipstream.algo.readiness import group_has_signal, group_statistics, judge, signal_rule
    from slipstream.commands.evaluate import sample_groups
    from slipstream.config.schema import RLConfig
    from slipstream.launch.prepare import prepare

    algorithm = loaded.config.algorithm
    group_size = algorithm.group_size if isinstance(algorithm, RLConfig) and algorithm.group_size > 1 else _SAMPLES
    assert loaded.config.environment is not None
    num_tasks *= max(1, len(loaded.config.environment.mixture))
    rollouts = sample_groups(prepare(loaded), view, num_tasks, samples or group_size)
    has_signal = signal_rule(algorithm) if isinstance(algorithm, RLConfig) else group_has_signal
    found = group_statistics(rollouts, checked.result.threshold, has_signal)
    if found is None:
        raise EnvironmentFault(f"all of {len(rollouts)} rollouts failed; the first: {rollouts[0].error}")
    by_task: dict[str, tuple[GroupStatistics, Judgement]] = {}
    for source in sorted({rollout.source for rollout in rollouts} - {""}):
        of_task = [rollout for rollout in rollouts if rollout.source == source]
        if own := group_statistics(of_task, checked.result.threshold, has_signal):
            part = source.partition("/")[0] if loaded.config.environment.mixture else ""
            by_task[source] = own, judge(own, checked.mean_reward(is_gold=True, part=part))
    judgement = judge(found, checked.mean_reward(is_gold=True))
    for task, (_, own) in by_task.items():
        if own.verdict == "reward broken":  # the others cannot make up for it
            judgement = replace(own, text=f"{task}: {own.text}")
            break
    return _Trial(found, judgement, by_task if len(by_task) > 1 else {})


def _print_check(checked: Checked, notes: Sequence[str], *, passed: bool) -> None:
    from rich.console import Console

    from slipstream.view import render_table

    rows = [
        ({"part": r.part} if r.part else {})
        | {"kind": r.kind, "answers graded": r.num_scored}
        | ({"mean reward": r.mean_reward, "right, %": 100 * r.accuracy} if r.num_scored else {})
        for r in checked.result.results
    ]
    if rows:
        columns = ["part"] if any("part" in row for row in rows) else []
        columns += ["kind", "mean reward", "right, %", "answers graded"]
        Console(emoji=False).print(render_table(rows, columns))
    for text in notes:
        tell(text)
    if passed and rows:
        found = "tell right answers from wrong ones" if checked.result.num_gold else "take no empty answer for right"
        tell(f"passed: the rewards of {checked.result.environment} {found}")


def _print_trial(trial: _Trial, checked: Checked) -> None:
    found = trial.found
    low, high = (100 * bound for bound in found.pass_at_1_interval)
    lines = [
        ("pass@1", f"{100 * found.pass_at_1:.1f} % (95 % interval {low:.1f} to {high:.1f})"),
        (f"pass@{found.group_size}", f"{100 * found.pass_at_k:.1f} % of {found.num_groups} tasks"),
        ("groups with signal", f"{100 * found.signal_fraction:.1f} % have better and worse completions"),
        ("mean reward", f"{found.mean_reward:.3g}{_between(checked)}"),
        (
            "length",
            f"{found.mean_length:.1f} tokens; {100 * (found.truncated_fraction - found.context_full_fraction):.1f} % "
            "cut at sampling.max_tokens",
        ),
        *([("context full", f"{100 * full:.1f} % of the episodes")] if (full := found.context_full_fraction) else []),
        ("different texts", f"{100 * found.distinct_fraction:.1f} % of a group's completions"),
    ]
    if found.majority_fraction > 0.0:
        text = f"{found.majority_answer!r} is right in {100 * found.majority_fraction:.1f} % of the tasks"
        lines.append(("majority answer", text))
    if found.num_failed:
        lines.append(("failed", f"{found.num_failed} rollouts"))
    for name, text in lines:
        tell(f"{name:<20}{text}")
    for task, (_, judgement) in trial.by_task.items():
        tell(f"{task}: {judgement.verdict}: {judgement.text}")
    tell(f"{trial.judgement.verdict}: {trial.judgement.text}")


def _between(checked: Checked) -> str:
    """The gold answers' reward and the junk's, as a scale."""
    gold, junk = checked.mean_reward(is_gold=True), checked.mean_reward(is_gold=False)
    return f" (gold answers {gold:.3g}, junk {junk:.3g})" if gold is not None and junk is not None else ""


def _print_json(
    checked: Checked,
    failures: Sequence[str],
    notes: Sequence[str],
    tried: _Trial | None,
    verdict: str,
) -> None:
    result = checked.result
    kinds = [
        ({"part": r.part} if r.part else {})
        | {"kind": r.kind, "num_scored": r.num_scored}
        | ({"mean_reward": r.mean_reward, "accuracy": r.accuracy} if r.num_scored else _UNGRADED)
        | {"num_failed": r.num_failed, "num_timeouts": r.num_timeouts, "first_failure": r.first_failure}
        for r in result.results
    ]
    summary: dict[str, Any] = {"environment": result.environment, "passed": not failures}
    summary |= {"failures": failures, "notes": notes, "num_tasks": result.num_tasks, "threshold": result.threshold}
    summary |= {"rewards_per_s": checked.rewards_per_s, "results": kinds}
    if verdict:
        summary["verdict"] = verdict
    if tried is not None:
        summary["model"] = {**asdict(tried.found), "text": tried.judgement.text}
        if tried.by_task:
            summary["model"]["by_task"] = {
                task: {**asdict(found), "verdict": judgement.verdict, "text": judgement.text}
                for task, (found, judgement) in tried.by_task.items()
            }
    print_json(summary)
