"""The end of an attempt, by the files of its run folder, and the decision on the next one, stored in the record.

Guarantees: files of an earlier attempt do not count. The result is the same from the attempt's supervisor
and, after its death, from a later pass over the queue.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import msgspec

from slipstream.artifacts.facts import read_facts
from slipstream.errors import SlipstreamError
from slipstream.processes.heartbeat import Heartbeat, read_heartbeat
from slipstream.runlog import ExitReport, checkpoints_of, holds_run, read_events, read_exit
from slipstream.service.figures import NO_PEAKS, Peaks, measured
from slipstream.service.policy import decide, decide_stopped, kind_of
from slipstream.service.records import ACTIVE, Attempt, Record
from slipstream.service.store import update

_ROUNDING_S = 0.01
"""Times in the run folder are rounded."""


def exit_since(folder: Path, started: float) -> ExitReport | None:
    """`exit.json`, if written since `started`."""
    report = read_exit(folder)
    return report if report is not None and report.time >= started - _ROUNDING_S else None


def confirmed(folder: Path, exit_code: int | None) -> int | None:
    """The exit code, but None for a 0 without a finished run in `exit.json`: srun's own after the failure of a node."""
    with contextlib.suppress(SlipstreamError):  # a damaged file says nothing
        report = read_exit(folder)
        return None if exit_code == 0 and (report is None or report.status != "finished") else exit_code
    return exit_code


def heartbeat_since(folder: Path, started: float) -> Heartbeat | None:
    """The heartbeat, if written since `started`."""
    beat = read_heartbeat(folder)
    return beat if beat is not None and beat.time >= started - _ROUNDING_S else None


def ended_attempt(folder: Path, attempt: Attempt, exit_code: int | None, now: float) -> Attempt:
    """The attempt with how it ended."""
    report: ExitReport | None = None
    message = ""
    with contextlib.suppress(SlipstreamError):  # a damaged file says nothing
        report = exit_since(folder, attempt.started)
    if report is not None and report.status == "finished":
        exit_code, message = 0, ""
    elif report is not None:
        exit_code, message = report.exit_code, report.message
    failure_class = report.failure_class if report is not None else ""
    ran_out = report is None and exit_code != 0 and _was_oom_killed(folder, attempt.started)
    kind = kind_of(exit_code, failure_class, retriable=report is not None and report.retriable, ran_out=ran_out)
    if report is None and exit_code != 0:
        message = _asked_again(folder, attempt.started)
    saved = 0
    with contextlib.suppress(SlipstreamError, OSError):
        saved = max((int(path.name.removeprefix("step-")) for path in checkpoints_of(folder)), default=0)
    return msgspec.structs.replace(
        attempt, ended=now, exit_code=exit_code, kind=kind, failure_class=failure_class, message=message, saved=saved
    )


def conclude(folder: Path, launch: int, exit_code: int | None, peaks: Peaks = NO_PEAKS, *, stopped: str = "") -> Record:
    """Store the end of supervisor number `launch`'s attempt, and the next state: done, failed, cancelled or queued.
    `exit_code` is None if nobody has waited for its process; `stopped`: why the cluster ended it."""

    def begin(record: Record) -> Record:
        is_its = record.launches == launch and record.state in ACTIVE and record.handle is not None
        return msgspec.structs.replace(record, state="finalising") if is_its else record

    record = update(folder, begin)
    if record.launches != launch or record.state != "finalising":
        return record
    now = time.time()
    last = ended_attempt(folder, record.attempts[-1], exit_code, now)
    if stopped and last.failure_class == "stopped":
        last = msgspec.structs.replace(last, kind="stopped", message=stopped)
    if record.store:
        last = with_uploads(folder, last)
    actual = measured(folder, record, (*record.attempts[:-1], last), peaks)

    def end(record: Record) -> Record:
        assert last.kind is not None
        earlier = record.attempts[:-1]
        if record.cancel_requested:
            attempt = msgspec.structs.replace(last, decision="cancelled")
            change = msgspec.structs.replace(record, state="cancelled", reason="cancelled")
        elif last.kind == "finished":
            attempt = msgspec.structs.replace(last, decision="finished")
            change = msgspec.structs.replace(record, state="done", reason="")
        else:
            if last.kind == "stopped":
                decision = decide_stopped(last.saved, [each.saved for each in earlier])
            else:
                decision = decide(last.kind, [each.kind for each in earlier])
            attempt = msgspec.structs.replace(last, decision=decision.why)
            how = "it was killed" if last.exit_code is None else f"exit code {last.exit_code}"
            change = msgspec.structs.replace(
                record,
                state="queued" if decision.retries else "failed",
                reason=last.message or how,
                not_before=now + decision.wait_s if decision.retries else 0.0,
            )
        return msgspec.structs.replace(change, attempts=(*earlier, attempt), actual=actual)

    return update(folder, end)


def with_uploads(folder: Path, attempt: Attempt) -> Attempt:
    """The attempt of a run with a store: finished only after its uploads, and over if another folder has its run."""
    try:
        facts = read_facts(folder)
    except SlipstreamError as error:
        return msgspec.structs.replace(attempt, kind="user", message=str(error))
    if facts.is_taken_over:
        return msgspec.structs.replace(attempt, kind="user", message=facts.error)
    if attempt.kind == "infrastructure" and attempt.exit_code is None and facts.error:
        return msgspec.structs.replace(attempt, message=facts.error)
    if attempt.kind != "finished" or facts.is_done:
        return attempt
    what = facts.error or "it was killed before"
    message = f"the run is complete, but not its uploads ({what}): slipstream submit --resume continues them"
    return msgspec.structs.replace(attempt, kind="infrastructure", message=message)


def _asked_again(folder: Path, started: float) -> str:
    """Why the run itself asks for another start; empty if it does not."""
    with contextlib.suppress(SlipstreamError, OSError):
        if holds_run(folder):
            last = read_events(folder)[-1:]
            return "".join(str(e["reason"]) for e in last if e["kind"] == "restart" and e["time"] >= started)
    return ""


def _was_oom_killed(folder: Path, started: float) -> bool:
    """Whether the kernel's OOM killer ended the attempt, by its count at the start and now."""
    from slipstream.plan.memory.shortages import find_shortages, run_name

    with contextlib.suppress(SlipstreamError, OSError):
        if holds_run(folder):
            last = read_events(folder, kinds=("start",))[-1:]
            names = [run_name(folder, event["lineage"]) for event in last if event["time"] >= started - _ROUNDING_S]
            return any(shortage.run in names for shortage in find_shortages(folder)[0])
    return False
