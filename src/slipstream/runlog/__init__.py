"""The run folder: all records of a run, written by one process and read by any other.

| file | holds |
|---|---|
| `events.jsonl` | events: `time`, `kind`, `lineage` and the event's own fields |
| `metrics.jsonl` | one flat object for a step: `step`, `lineage`, `time` and `group/name` numbers |
| `samples.jsonl` | rollouts kept for reading, of training and (`split` is `eval`) of held-out tasks |
| `resolved.toml` | every setting of the run, without secrets |
| `provenance.json` | what each attempt was made with, as digests: `launch.provenance` |
| `exit.json` | how the run ended; absent while it runs and after `kill -9` |
| `ledger.sqlite` | under reinforcement learning, where every group of rollouts has ended: `ledger.py` |
| `tickets/` | the parameters' fingerprints of the newest published versions |
| `run.lock` | held by the writer for as long as it lives; contains its pid and host |

There is one writer at a time; folder and files are private to the user. A line is passed to the operating system as a
whole before the call returns, so `kill -9` loses at most the line being written, which readers ignore and a resume cuts
off; `exit.json` and `resolved.toml` are replaced atomically. Text under keys that look like secrets is replaced. A
number that is not finite is written as null and named in a warning event. Nothing here imports torch.
"""

from typing import TYPE_CHECKING

from slipstream.exports import exported

if TYPE_CHECKING:
    from slipstream.runlog.files import is_running
    from slipstream.runlog.reader import (
        ACCURACY,
        COUNTS,
        REWARD,
        ROLLOUT_COUNTS,
        ROLLOUT_FLAGS,
        ExitReport,
        ExitStatus,
        RunStatus,
        RunSummary,
        checkpoints_of,
        find_runs,
        holds_run,
        read_events,
        read_exit,
        read_metrics,
        read_samples,
        read_settings,
        summarize,
    )
    from slipstream.runlog.record import RunRecord, Setting, read_run, samples_with_tokens
    from slipstream.runlog.redaction import REDACTED
    from slipstream.runlog.samples import read_tickets, sample_of
    from slipstream.runlog.writer import EventLog, RunLog, append_event, exit_code_of, refuse_used, versions

__all__ = [
    "ACCURACY",
    "COUNTS",
    "REDACTED",
    "REWARD",
    "ROLLOUT_COUNTS",
    "ROLLOUT_FLAGS",
    "EventLog",
    "ExitReport",
    "ExitStatus",
    "RunLog",
    "RunRecord",
    "RunStatus",
    "RunSummary",
    "Setting",
    "append_event",
    "checkpoints_of",
    "exit_code_of",
    "find_runs",
    "holds_run",
    "is_running",
    "read_events",
    "read_exit",
    "read_metrics",
    "read_run",
    "read_samples",
    "read_settings",
    "read_tickets",
    "refuse_used",
    "sample_of",
    "samples_with_tokens",
    "summarize",
    "versions",
]
__getattr__ = exported(
    __name__,
    {
        "files": "is_running",
        "reader": (
            "ACCURACY COUNTS REWARD ROLLOUT_COUNTS ROLLOUT_FLAGS ExitReport ExitStatus RunStatus RunSummary "
            "checkpoints_of find_runs holds_run read_events read_exit read_metrics read_samples "
            "read_settings summarize"
        ),
        "record": "RunRecord Setting read_run samples_with_tokens",
        "redaction": "REDACTED",
        "samples": "read_tickets sample_of",
        "writer": "EventLog RunLog append_event exit_code_of refuse_used versions",
    },
)
