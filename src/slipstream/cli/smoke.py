"""The commands `smoke`, a few steps of a run with a verdict, and `models`, the families with tests."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from slipstream.cli.commands import Overrides, RunFile
from slipstream.cli.output import Json, print_json, print_table, tell
from slipstream.errors import ConfigError, TrainingError
from slipstream_matching.smoke import B_RATIOS, Channels, Health, Limits, across, health_of

if TYPE_CHECKING:
    from slipstream.commands.smoke import Trial

_ALL: tuple[Channels, ...] = ("a_only", "b_only", "ab")


def smoke(
    run_file: RunFile,
    /,
    *overrides: Overrides,
    channels: Annotated[tuple[Channels, ...], Parameter(consume_multiple=True)] = (),
    steps: int = 4,
    max_invalid: float = 0.1,
    max_truncated: float = 0.3,
    timeout_s: float = 1800.0,
    folder: Path | None = None,
    json: Json = False,
) -> int:
    """Try a run file: a few steps, and a verdict on their health.

    Healthy is a run that finishes, with finite losses and a gradient; the run itself ends if engine and trainer
    disagree. With [matching] there is a run for each channel: healthy are runs whose rollouts are valid and whole but
    for the given shares and match a true object now and then, and whose channels have losses of one order. Prints a
    table; if anything speaks against a run, the exit code is 7. Runs are made without evaluation, each in a process
    of its own; they keep their folders.

    Args:
        channels: With [matching], which runs are made: channel A alone, B alone, both in turn; default: all three.
        steps: Steps of each run.
        max_invalid: Largest healthy share of invalid rollouts.
        max_truncated: Largest healthy share of truncated rollouts.
        timeout_s: Longest time of each run, in seconds.
        folder: Folder of the runs; default: a new one in runs/.
    """
    from slipstream.commands.smoke import run_steps, run_trial
    from slipstream.config import load_config
    from slipstream.launch.start import new_run_folder

    run_file = Path(run_file)
    command: Literal["sft", "train"] = "sft"
    try:
        config = load_config(run_file, overrides, algorithm="sft").config
    except ConfigError:  # of another kind, or wrong
        command, config = "train", load_config(run_file, overrides).config
    matches = "matching" in config.methods
    if channels and not matches:
        raise ConfigError(f"{run_file} has no [matching], whose channels --channels names: leave it out")
    if steps < 2:
        raise ConfigError(f"--steps {steps} leaves one of the channels without a step: use at least 2")
    own = Path(folder) if folder is not None else new_run_folder(f"smoke-{run_file.stem}")
    if not matches:
        trial = run_trial(command, run_file, own / "run", steps=steps, overrides=overrides, timeout_s=timeout_s)
        return _show(own, {"run": trial}, list(trial.problems), as_json=json)
    limits, found = Limits(max_invalid, max_truncated), dict[str, Health]()
    for name in channels or _ALL:
        given = [*overrides, "--matching.b_ratio", str(B_RATIOS[name])]
        rows, error = run_steps("sft", run_file, own / name, steps, given, timeout_s)
        found[name] = health_of(name, rows, limits, error)
    problems = [f"{each.channels}: {text}" for each in found.values() for text in each.problems]
    return _show(own, found, problems + across([*found.values()]), as_json=json)


def _show(folder: Path, runs: Mapping[str, Health | Trial], problems: list[str], *, as_json: bool) -> int:
    """Print the runs, and raise TrainingError for their problems."""
    rows = {name: dataclasses.asdict(each) for name, each in runs.items()}
    if as_json:
        print_json({"folder": str(folder), "runs": [*rows.values()], "healthy": not problems})
    else:
        print_table(
            [
                {"run": name}
                | {_TITLES.get(key, key): value for key, value in row.items() if key not in ("channels", "problems")}
                | {"verdict": "unhealthy" if row["problems"] else "healthy"}
                for name, row in rows.items()
            ]
        )
        tell(f"run folders: {folder}")
    if problems:
        raise TrainingError(f"the runs are not healthy: {'; '.join(problems)}")
    return 0


_TITLES = {
    "num_steps": "steps",
    "loss_a": "loss A",
    "loss_b": "loss B",
    "invalid_rate": "invalid",
    "truncated_rate": "truncated",
    "any_match_rate": "any match",
    "grad_norm": "gradient",
}


def models(
    model: Annotated[str | None, Parameter(help="Folder or hub id; default: all families.")] = None,
    /,
    *,
    json: Json = False,
) -> int:
    """List the families of models with tests: trained here, and compared with vLLM.

    Other models run, too. First make a few steps with `slipstream smoke RUN.toml`. The columns are explained in
    docs/models.md.
    """
    from slipstream.plan.families import FAMILIES, Family, family_of

    found, architecture = list(FAMILIES), ""
    if model is not None:
        from slipstream.plan.measure import read_model
        from slipstream.plan.preflight.model_folder import check_there

        check_there(model)
        architecture = read_model(model).architecture or "a class of its own"
        family = family_of(architecture)
        found = [family or Family("-", architecture, "not tried", "not tried", sft_step="not tried")]
    if json:
        print_json([each.columns() | {"tested": each.sft_step == "tested"} for each in found])
    else:
        print_table([each.columns() for each in found])
    if found[0].sft_step != "tested":
        tell(f"{architecture} has no test here: try it with slipstream smoke RUN.toml", file=sys.stderr)
    return 0
