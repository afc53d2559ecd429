"""A few steps of a run file in a process of its own, and a verdict by their metrics."""

from __future__ import annotations

import math
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slipstream.processes.launchers import LOCAL
from slipstream.runlog import read_exit, read_metrics

_GRACE_S = 30.0
Row = Mapping[str, float | None]


def _values(rows: Iterable[Row], name: str) -> list[float]:
    return [value for row in rows if (value := row.get(name)) is not None]


@dataclass(frozen=True)
class Trial:
    """A short run."""

    num_steps: int
    loss: float | None
    """Of the last trained step."""
    grad_norm: float | None
    """The largest."""
    probe: float | None
    """The largest mean difference of log-probabilities between engine and trainer; None without an engine."""
    problems: tuple[str, ...] = ()


def trial_of(rows: Iterable[Row], error: str = "") -> Trial:
    """The verdict on a short run by its metrics; `error`: its failure."""
    rows = list(rows)
    steps = [row for row in rows if row.get("train/loss") is not None or row.get("train/skipped") is not None]
    trained = [row for row in steps if not row.get("train/skipped")]
    losses, norms = [row.get("train/loss") for row in trained], _values(trained, "train/grad_norm")
    problems = [f"it ended with: {error}"] if error else []
    if not trained and not error:
        problems.append("no step was trained: rewards agree in all groups, so take an easier or a harder task")
    if any(loss is None or not math.isfinite(loss) for loss in losses):
        problems.append("a loss is missing or not finite")
    if trained and not max(norms, default=0.0) > 0:
        problems.append("no step has a gradient")
    return Trial(
        len(steps),
        losses[-1] if losses else None,
        max(norms, default=None),
        max(_values(rows, "probe/abs_logprob_diff"), default=None),
        tuple(problems),
    )


def run_trial(
    command: Literal["sft", "train"],
    run_file: Path,
    folder: Path,
    *,
    steps: int,
    overrides: Sequence[str],
    timeout_s: float,
) -> Trial:
    """Run so many steps in a process of their own, and judge them; its output is kept beside `folder`."""
    return trial_of(*run_steps(command, run_file, folder, steps, overrides, timeout_s))


def run_steps(
    command: str, run_file: Path, folder: Path, steps: int, overrides: Sequence[str], timeout_s: float
) -> tuple[Sequence[Row], str]:
    """Rows of metrics of a run in a separate process, and its error."""
    arguments = [command, str(run_file), *overrides, "--no-evaluation", "--plain"]
    arguments += ["--training.steps", str(steps), "--training.warmup_steps", "0", "--run.folder", str(folder)]
    folder.with_suffix(".log").unlink(missing_ok=True)
    child = LOCAL.launch("slipstream.cli", arguments, output=folder.with_suffix(".log"))
    try:
        code: int | None = child.wait(timeout_s)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        child.end(_GRACE_S + 30.0, signal.SIGTERM)
    error = ""
    if code is None:
        error = f"it took longer than {timeout_s:g} s"
    elif code:
        lines = folder.with_suffix(".log").read_text(errors="replace").strip().splitlines()
        error = lines[-1].removeprefix("error: ") if lines else f"exit code {code}"
    elif read_exit(folder) is None:
        error = "it left no exit record"
    return read_metrics(folder) if (folder / "metrics.jsonl").exists() else [], error
