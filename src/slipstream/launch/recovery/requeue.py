"""Decides whether the job of a run that has ended is requeued; the batch script runs it. Exit code 0: yes.

Slurm alone starts a run over several nodes again: before the time limit, and after a failure if the run asks for it
(`run.max_restarts`). After the failure of a node Slurm requeues the job by itself. A run is not requeued if anybody
else has stopped it, or if it saved no further checkpoint in its time.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.runlog import ExitReport, checkpoints_of, holds_run, read_events, read_exit


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
    resumed = [event["step"] for event in events if event["kind"] == "resume" and event["lineage"] == report.lineage]
    if saved <= max(resumed, default=0):
        return ""
    return f"the job's time is over at step {report.step}, and step {saved} is saved"


def main() -> int:
    """See the module. Arguments: the run folder, the time of the job's start, and `yes` after a signal."""
    folder, began, warned = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3] == "yes"
    if not holds_run(folder):
        return 1
    report, checkpoints = read_exit(folder), checkpoints_of(folder)
    saved = int(checkpoints[-1].name.removeprefix("step-")) if checkpoints else 0
    reason = verdict(report, read_events(folder), saved, began, warned)
    if reason:
        print(f"the job is requeued: {reason}", flush=True)
    elif warned and report is not None and report.failure_class == "stopped":
        print(
            "the job is not requeued, as it saved no further checkpoint: submit it again with --resume and more --time",
            flush=True,
        )
    return 0 if reason else 1


if __name__ == "__main__":
    sys.exit(main())
