"""The command `smoke`: a few steps of rollout matching, with a verdict."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from slipstream.cli.commands import Overrides, RunFile
from slipstream.cli.output import Json, print_json, print_table, tell
from slipstream.errors import ConfigError, TrainingError


def smoke(
    run_file: RunFile,
    /,
    *overrides: Overrides,
    channels: Annotated[tuple[Literal["a_only", "b_only", "ab"], ...], Parameter(consume_multiple=True)] = (
        "a_only",
        "b_only",
        "ab",
    ),
    steps: int = 4,
    max_invalid: float = 0.1,
    max_truncated: float = 0.3,
    timeout_s: float = 1800.0,
    folder: Path | None = None,
    json: Json = False,
) -> int:
    """Try a run file with [matching]: a few steps of each channel, and a verdict on their health.

    Healthy are runs that finish, whose rollouts are valid and whole but for the given shares and match a true object
    now and then, and whose channels have losses of one order. Prints a table; if anything speaks against a run, the
    exit code is 7. Runs are made without evaluation, each in a process of its own; they keep their folders.

    Args:
        channels: Which runs are made: channel A alone, channel B alone, both in turn.
        steps: Steps of each run.
        max_invalid: Largest healthy share of invalid rollouts.
        max_truncated: Largest healthy share of truncated rollouts.
        timeout_s: Longest time of each run, in seconds.
        folder: Folder of the runs; default: a new one in runs/.
    """
    from slipstream.commands.smoke import Limits, across, run_channels
    from slipstream.config import load_config
    from slipstream.launch.start import new_run_folder

    run_file = Path(run_file)
    if load_config(run_file, overrides, algorithm="sft").config.matching is None:
        raise ConfigError(f"{run_file} has no [matching], which smoke tries: add it")
    if steps < 2:
        raise ConfigError(f"--steps {steps} leaves one of the channels without a step: use at least 2")
    own = Path(folder) if folder is not None else new_run_folder(f"smoke-{run_file.stem}")
    limits = Limits(max_invalid, max_truncated)
    found = [
        run_channels(run_file, name, own / name, steps=steps, overrides=overrides, timeout_s=timeout_s, limits=limits)
        for name in channels
    ]
    problems = [f"{each.channels}: {text}" for each in found for text in each.problems] + across(found)
    if json:
        print_json({"folder": str(own), "runs": [dataclasses.asdict(each) for each in found], "healthy": not problems})
    else:
        print_table(
            [
                {
                    "run": each.channels,
                    "steps": each.num_steps,
                    "loss A": each.loss_a,
                    "loss B": each.loss_b,
                    "invalid": each.invalid_rate,
                    "truncated": each.truncated_rate,
                    "any match": each.any_match_rate,
                    "verdict": "unhealthy" if each.problems else "healthy",
                }
                for each in found
            ]
        )
        tell(f"run folders: {own}")
    if problems:
        raise TrainingError(f"the runs are not healthy: {'; '.join(problems)}")
    return 0
