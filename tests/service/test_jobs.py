"""What follows the end of a cluster's job."""

import msgspec
import pytest

from slipstream.service.cluster import Seen
from slipstream.service.policy import decide_stopped
from slipstream.service.records import Attempt, Job
from slipstream.service.slurm import Slurm
from slipstream.service.slurm_job import SlurmSupervisor

from .made import record

JOB = Job("a-1", 1, 100.0, "7")
OF_JOB = (Attempt(1, 110.0, kind="infrastructure"),)
STOPPED = (Attempt(1, 110.0, kind="stopped"),)
EARLIER = (Attempt(1, 90.0, kind="infrastructure"),)


@pytest.mark.parametrize(
    ("attempts", "seen", "state", "is_over", "words"),
    [
        ((), None, "failed", False, "Slurm no longer knows job 7"),
        (EARLIER, None, "failed", False, "Slurm no longer knows job 7"),
        ((), Seen("7", "FAILED", True), "failed", False, "job 7 ended (FAILED) before it started the run"),
        ((), Seen("7", "NODE_FAIL", True, was_lost=True), "queued", True, ""),
        ((), Seen("7", "CANCELLED", True, was_cancelled=True), "cancelled", False, "cancelled"),
        (OF_JOB, Seen("7", "CANCELLED", True, was_cancelled=True), "cancelled", False, "cancelled"),
        (OF_JOB, Seen("7", "FAILED", True), "queued", True, ""),
        (OF_JOB, None, "queued", True, ""),
        (STOPPED, None, "cancelled", False, "cancelled"),
        (STOPPED, Seen("7", "COMPLETED", True), "queued", True, ""),
    ],
)
def test_a_queued_run_after_the_end_of_its_job(attempts, seen, state, is_over, words):
    old = record(job=JOB, attempts=attempts)
    found = msgspec.structs.replace(Slurm()._judged(old, "a-1", seen))
    if found.cancel_requested:
        found = msgspec.structs.replace(found, state="cancelled", reason="cancelled")  # as `records.step` does
    assert (found.state, found.job.is_over) == (state, is_over)
    assert words in found.reason
    assert Slurm()._judged(old, "a-0", seen) == old


def test_a_job_without_progress_is_not_started_for_ever():
    assert decide_stopped(0, []).retries
    assert decide_stopped(6, [5]).retries
    assert not decide_stopped(5, [3, 5]).retries


def test_an_earlier_start_leaves_the_run_to_the_later_one(tmp_path, monkeypatch):
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "0", "SLIPSTREAM_RESTARTED_BY": "slurm"}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "service").mkdir()
    supervisor = SlurmSupervisor(tmp_path, "a-1")
    for text, has_time in (("7.0\n", True), ("7.1\n", False)):
        (tmp_path / "service/start").write_text(text)
        assert supervisor._has_time(record()) == has_time
