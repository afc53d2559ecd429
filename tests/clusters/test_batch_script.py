"""The batch script, and whether a job is requeued."""

import subprocess
from pathlib import Path

import pytest

from slipstream.clusters.batch_script import Request, batch_script, seconds_of
from slipstream.clusters.slurm import JobState, NodeShape, _shape, _state
from slipstream.clusters.starts import Start, own_start
from slipstream.errors import ConfigError, Interrupted, RankError
from slipstream.launch.recovery.requeue import after_kill, verdict
from slipstream.launch.recovery.retry_policy import Restart
from slipstream.runlog.writer import report_of

COMMAND = ("train", "/a b/run.toml", "--data.path", "it's", "--resume=auto")


def request(**changes):
    return Request(COMMAND, Path("/shared/my runs/a%1"), 2, 30.0, **changes)


def test_the_script_asks_for_what_the_run_needs():
    options = ["--qos=high", "--comment", "two words", "--exclusive"]
    script = batch_script(request(time="1:00:00", gpus_per_node=8, cpus_per_task=64, options=options))
    asked = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]
    assert asked == [
        *("--job-name=a-1", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8", "--cpus-per-task=64"),
        *("--time=1:00:00", "--signal=B:USR1@90", "--open-mode=append"),
        *("--output='/shared/my runs/a%%1/slurm/output.log'", "--requeue"),
        *("--qos=high", "--comment 'two words'", "--exclusive"),
    ]
    assert "srun --kill-on-bad-exit=1 --export=ALL --cpus-per-task=64" in script
    assert """slipstream.cli train '/a b/run.toml' --data.path 'it'"'"'s' --resume=auto &""" in script
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


def test_the_script_asks_for_nothing_else():
    script = batch_script(request())
    assert not any(f"--{name}" in script for name in ("gpus-per-node", "cpus-per-task", "time"))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("90", 5400), ("1:30", 90), ("1:30:00", 5400), ("2-12", 216_000), ("2-12:30", 217_800), ("0-0:0:5", 5)),
        *(("INFINITE", -1), ("UNLIMITED", -1)),
    ],
)
def test_time_limits(text, seconds):
    assert seconds_of(text) == seconds


@pytest.mark.parametrize(("time", "words"), [("soon", "soon is no time limit"), ("1:30", "last 90 s of it are kept")])
def test_a_time_limit_without_time_to_train_is_refused(time, words):
    with pytest.raises(ConfigError, match=words):
        batch_script(request(time=time))


def report(error):
    return report_of(error, (1, 1.0, 0), 7)


STOPPED = report(Interrupted("stopped"))
EVENTS = [
    {"kind": "resume", "lineage": 0, "step": 5, "time": 1e9},
    {"kind": "restart", "lineage": 1, "number": 1, "reason": "node-1 is lost", "time": 2e9},
]


@pytest.mark.parametrize(
    ("ended", "events", "saved", "began", "was_warned", "words"),
    [
        (STOPPED, EVENTS[:1], 6, 0, True, "the job's time is over at step 7, and step 6 is saved"),
        (STOPPED, [], 6, 0, True, "the job's time is over at step 7, and step 6 is saved"),
        (STOPPED, EVENTS[:1], 6, 0, False, ""),  # scancel
        (STOPPED, EVENTS[:1], 6, 9e9, True, ""),  # an earlier start's
        (STOPPED, EVENTS[:1], 5, 0, True, ""),  # it resumed from step 5
        (STOPPED, [], 0, 0, True, ""),
        (report(RankError("lost")), EVENTS[:1], 6, 0, True, ""),  # no restart is left
        (report(None), EVENTS[:1], 6, 0, True, ""),
        (None, EVENTS, 0, 1.5e9, False, "restart 1 of the run, after: node-1 is lost"),
        (None, EVENTS, 0, 3e9, False, ""),
        (None, EVENTS[:1], 6, 0, False, ""),  # killed
        (None, [], 0, 0, True, ""),
    ],
)
def test_the_end_of_a_run_decides_whether_its_job_is_requeued(ended, events, saved, began, was_warned, words):
    assert verdict(ended, events, saved, began, was_warned) == words


def test_a_first_start_is_requeued_without_a_checkpoint():
    first = report_of(Interrupted("stopped"), (0, 1.0, 0), 0)
    assert verdict(first, [], 0, 0, True) == "the job's time is over at step 0, and step 0 is saved"


KILLED = [{"kind": "opened", "lineage": 1, "time": 2e9}, {"kind": "train", "lineage": 1, "time": 2e9}]


@pytest.mark.parametrize(
    ("ended", "events", "began", "code", "max_restarts", "found"),
    [
        (None, KILLED, 1e9, 137, 3, Restart(1, 2.0)),
        (None, [{"kind": "restart", "lineage": 0, "time": 1, "step": 7}, *KILLED], 1e9, 137, 3, Restart(2, 4.0)),
        (None, KILLED, 1e9, 139, 0, "run.max_restarts = 0 allows no restart"),
        (None, KILLED, 3e9, 137, 3, None),  # before this start had opened the folder
        (STOPPED, KILLED, 1e9, 137, 3, None),
        (None, KILLED, 1e9, 143, 3, None),  # SIGTERM
        (None, KILLED, 1e9, 75, 3, None),
        (None, EVENTS, 0, 137, 3, None),
    ],
)
def test_a_killed_run_starts_again_as_often_as_it_may(ended, events, began, code, max_restarts, found):
    assert after_kill(ended, events, began, code, max_restarts) == found


@pytest.mark.parametrize(
    ("text", "is_over"),
    [(None, False), ("", False), ("7.1\n", False), ("7.2\n", True), ("7.0\n", False), ("8.2\n", False)],
)
def test_a_start_is_over_once_its_job_has_started_again(tmp_path, text, is_over):
    start = own_start({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1", "SLIPSTREAM_RESTARTED_BY": "slurm"})
    assert start == Start(7, 1)
    assert own_start({"SLURM_JOB_ID": "7"}) is None
    (tmp_path / "slurm").mkdir()
    if text is not None:
        (tmp_path / "slurm/start").write_text(text)
    assert start.is_over(tmp_path) == is_over


def test_what_slurm_says_is_read():
    state = _state("RUNNING|None|1:02|10:00|gpu[1-2]")
    assert state == JobState("RUNNING", "", "1:02", "10:00", "gpu[1-2]")
    assert not state.has_ended
    assert _state("CANCELLED by 1000|None|0:10|10:00|n1").has_ended
    assert _shape("64|gpu:h100:8(S:0-1),nvme:1") == NodeShape(64, 8)
    assert _shape("2|(null)") == NodeShape(2, 0)
