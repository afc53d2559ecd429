"""The batch script, and starts of its job."""

import subprocess
from pathlib import Path

import pytest

from slipstream.clusters.batch_script import Request, batch_script, seconds_of
from slipstream.clusters.slurm import JobState, NodeShape, _lost_nodes, _shape, _state
from slipstream.clusters.starts import Start, own_start
from slipstream.errors import ConfigError

COMMAND = ("python", "-m", "supervisor", "/shared/it's a%1")


def request(**changes):
    return Request("a-1", COMMAND, Path("/shared/my runs/a%1/log"), 2, 30.0, **changes)


def test_the_script_asks_for_what_the_run_needs():
    options = ["--qos=high", "--comment", "two words", "--exclusive"]
    script = batch_script(request(time="1:00:00", gpus_per_node=8, cpus_per_task=64, options=options))
    asked = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]
    assert asked == [
        *("--job-name=a-1", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8", "--cpus-per-task=64"),
        *("--time=1:00:00", "--signal=B:USR1@90", "--open-mode=append"),
        *("--output='/shared/my runs/a%%1/log'", "--requeue"),
        *("--qos=high", "--comment 'two words'", "--exclusive"),
    ]
    assert """exec python -m supervisor '/shared/it'"'"'s a%1'\n""" in script
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


@pytest.mark.parametrize(
    ("state", "restarts", "is_lost"),
    [
        *(("RUNNING", 1, False), ("SUSPENDED", 1, False), ("RUNNING", 2, True)),
        *(("COMPLETING", 1, True), ("PENDING", 1, True), ("NODE_FAIL", 1, True)),
    ],
)
def test_a_start_has_its_nodes_while_slurm_says_so(state, restarts, is_lost):
    answer = (
        f"JobId=7 JobName=a-1 UserId=me(1) JobState={state} Reason=None Dependency=(null) Restarts={restarts} Comment=a"
    )
    assert _lost_nodes(answer, 1) == is_lost
    assert not _lost_nodes("", 1)


@pytest.mark.parametrize(
    ("text", "is_over"),
    [(None, False), ("", False), ("7.1\n", False), ("7.2\n", True), ("7.0\n", False), ("8.2\n", False)],
)
def test_a_start_is_over_once_its_job_has_started_again(tmp_path, text, is_over):
    start = own_start({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1", "SLIPSTREAM_RESTARTED_BY": "slurm"})
    assert start == Start(7, 1)
    assert own_start({"SLURM_JOB_ID": "7"}) is None
    (tmp_path / "service").mkdir()
    if text is not None:
        (tmp_path / "service/start").write_text(text)
    assert start.is_over(tmp_path) == is_over


def test_what_slurm_says_is_read():
    state = _state("7|RUNNING|None|1:02|10:00|gpu[1-2]")
    assert state == JobState("7", "RUNNING", "", "1:02", "10:00", "gpu[1-2]")
    assert not state.has_ended
    assert _state("7|CANCELLED by 1000|None|0:10|10:00|n1").has_ended
    assert _shape("64|gpu:h100:8(S:0-1),nvme:1") == NodeShape(64, 8, "h100")
    assert _shape("2|(null)") == NodeShape(2, 0)
