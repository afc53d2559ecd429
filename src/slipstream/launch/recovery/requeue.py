"""Decides whether the job of a run that has ended is requeued; the batch script runs it. Exit code 0: yes.

Slurm alone starts a run over several nodes again: before the time limit, and after a failure or a kill if the run
allows it (`run.max_restarts`). After the failure of a node Slurm requeues the job by itself. A run is not requeued if
anybody else has stopped it, or if two starts in a row saved no further checkpoint.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.clusters.starts import own_start
from slipstream.errors import ConfigError
from slipstream.launch.recovery.retry_policy import Restart, earlier_attempts, next_restart, progress_of
from slipstream.runlog import (
    ExitReport,
    append_event,
    checkpoints_of,
    holds_run,
    read_events,
    read_exit,
    read_metrics,
    read_settings,
)

_ASK_TO_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_BY_SIGNAL = 128


def verdict(
    report: ExitReport | None, events: Sequence[dict[str, Any]], saved: int, began: float, was_warned: bool
) -> str:
    """Why the job is requeued; empty if it is not. `saved`: the newest checkpoint's step. `began`: when this start of
    the job did."""
    last = events[-1] if events else {}
    if report is None:
        asks = last.get("kind") == "restart" and last["time"] >= began
        return f"restart {last['number']} of the run, after: {last['reason']}" if asks else ""
    if not was_warned or report.failure_class != "stopped" or report.time < began:
        return ""
    before = [event["step"] for event in events if event["kind"] == "resume" and event["lineage"] == report.lineage - 1]
    if report.lineage and saved <= max(before, default=0):
        return ""
    return f"the job's time is over at step {report.step}, and step {saved} is saved"


def after_kill(
    report: ExitReport | None, events: Sequence[dict[str, Any]], began: float, code: int, max_restarts: int
) -> Restart | str | None:
    """The restart, if a signal killed the run in this start of the job, or the reason against it. None: it was not
    killed. `code`: the step's exit code."""
    last = events[-1] if events else {}
    opened = [event["lineage"] for event in events if event["kind"] == "opened" and event["time"] >= began]
    is_killed = code > _BY_SIGNAL and code - _BY_SIGNAL not in _ASK_TO_STOP
    if not is_killed or not opened or report is not None or last.get("kind") == "restart":
        return None
    return next_restart(None, earlier_attempts(events, opened[-1]), max_restarts)


def _note_kill(folder: Path, events: Sequence[dict[str, Any]], restart: Restart, code: int) -> None:
    """Write the restart into the run folder."""
    lineage, saved = int(events[-1]["lineage"]), checkpoints_of(folder)
    append_event(
        folder,
        lineage,
        "restart",
        number=restart.number,
        checkpoint=saved[-1].name if saved else None,
        wait_s=0.0,
        outside=True,
        reason=f"the run was ended by {_name(code)}",
        **progress_of(read_metrics(folder), lineage, earlier_attempts(events, lineage)),
    )


def _name(code: int) -> str:
    number = code - _BY_SIGNAL
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def main() -> int:
    """See the module. Arguments: the run folder, the time of the job's start, `yes` after a signal, and the step's exit
    code."""
    folder, began, warned, code = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3] == "yes", int(sys.argv[4])
    start = own_start(os.environ)
    if not holds_run(folder) or (start is not None and start.is_over(folder)):
        return 1
    report, events, checkpoints = read_exit(folder), read_events(folder), checkpoints_of(folder)
    max_restarts = int(read_settings(folder).get("run.max_restarts", 0))
    restart = after_kill(report, events, began, code, max_restarts)
    if isinstance(restart, Restart):
        try:
            _note_kill(folder, events, restart, code)
        except ConfigError as error:  # somebody else resumes the run
            restart = str(error)
        events = read_events(folder)
    saved = int(checkpoints[-1].name.removeprefix("step-")) if checkpoints else 0
    reason = verdict(report, events, saved, began, warned)
    if reason:
        print(f"the job is requeued: {reason}", flush=True)
    elif isinstance(restart, str):
        print(f"the run was ended by {_name(code)}, and the job is not requeued: {restart}", flush=True)
    elif warned and report is not None and report.failure_class == "stopped":
        print(
            "the job is not requeued, as two starts saved no further checkpoint: submit it again with --resume and "
            "more --time",
            flush=True,
        )
    return 0 if reason else 1


if __name__ == "__main__":
    sys.exit(main())
