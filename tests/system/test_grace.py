"""A scheduler's signal while a step or a checkpoint takes longer than `run.grace_s`."""

import json
import signal
import subprocess
import sys
import time

import pytest

from slipstream.errors import Interrupted
from slipstream.launch.recovery.grace import GraceEnd
from slipstream.processes.heartbeat import FILE as HEARTBEAT
from slipstream.processes.heartbeat import Beating
from slipstream.runlog import RunLog, is_running, read_events, read_exit, read_metrics
from slipstream.trainer.checkpoints.checkpoint import CheckpointStore
from slipstream.view import make_view

GRACE_S = 4.0
MARGIN_S = 60.0
"""For a busy machine; what it interrupts takes longer still."""


def ended(command, run_file, tmp_path, what, number, *settings):
    """How `what` ended after the signal: (folder, seconds, standard output, standard error)."""
    folder, mark = tmp_path / "run", tmp_path / "mark"
    options = ("--evaluation", "false", "--run.folder", folder, "--run.grace_s", GRACE_S, "--json", *settings)
    run = command("sft", run_file.with_name("sft.toml"), *options, module=("tests.system.slow_end", what, mark))
    run.until(mark.exists)
    run.process.send_signal(number)
    began = time.monotonic()
    code, out, err = run.wait()
    seconds = time.monotonic() - began
    assert code == 130, err
    assert run.left_behind() == []
    return folder, seconds, out, err


@pytest.mark.parametrize(
    ("what", "number", "words"),
    [
        ("step", signal.SIGUSR1, "SIGUSR1 at step 1, of which step-000001 is a whole checkpoint, in phase train"),
        pytest.param("write", signal.SIGTERM, "SIGTERM at step 2, in phase checkpoint: no", marks=pytest.mark.full),
    ],
)
def test_the_process_ends_by_itself_on_the_last_whole_checkpoint(command, run_file, tmp_path, what, number, words):
    every = ("--run.checkpoint_every", "1", "--run.async_checkpoints", "false", "--training.steps", "9")
    folder, seconds, out, err = ended(command, run_file, tmp_path, what, number, *every)
    assert seconds < GRACE_S + MARGIN_S, "within the time that was given"
    report = read_exit(folder)
    assert (report.status, report.exit_code, report.error) == ("interrupted", 130, "Interrupted")
    assert (report.failure_class, report.retriable) == ("stopped", True)
    assert f"stopped by {words}" in report.message
    last = CheckpointStore(folder / "checkpoints").latest()
    assert last.name == "step-000001"
    assert last.name in report.message
    unfinished = list((folder / "checkpoints").glob(".unfinished-*"))
    assert len(unfinished) == (what == "write")
    assert read_events(folder)[-1]["message"] == report.message
    assert report.message in " ".join(err.split())
    assert json.loads(out) == {"error": "Interrupted", "message": report.message, "exit_code": 130}
    assert not is_running(folder)
    assert not (folder / HEARTBEAT).exists()
    command("sft", run_file.with_name("sft.toml"), "--evaluation", "false", "--run.folder", folder, "--resume").ok()
    assert [row["step"] for row in read_metrics(folder)] == [1, 2, 3]


def test_a_part_of_the_time_is_kept_for_the_end_itself():
    seconds = [GraceEnd(grace_s, make_view("none"), lambda error: None).seconds for grace_s in (GRACE_S, 60.0)]
    assert seconds == [3.0, 58.0]


WORKS = """
import os, time
from slipstream.launch.recovery.grace import _within

def work():
    print("begun", flush=True)
    for _ in range(20):
        time.sleep(0.02)
    print("done", flush=True)

_within(2.0, work)
os._exit(0)
"""


def test_while_the_process_stands_still_the_time_for_its_last_words_does_not_pass():
    with subprocess.Popen([sys.executable, "-c", WORKS], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(2.5)
        process.send_signal(signal.SIGCONT)
        assert process.stdout.read() == "done\n"


@pytest.mark.full
def test_without_a_checkpoint_it_says_so(command, run_file, tmp_path):
    folder, seconds, _, err = ended(command, run_file, tmp_path, "step", signal.SIGTERM)
    assert seconds < GRACE_S + MARGIN_S
    assert "there is none yet, and the run begins again: continue with --resume" in " ".join(err.split())
    assert read_exit(folder).retriable


def test_no_heartbeat_is_written_after_the_end(tmp_path):
    grace = GraceEnd(GRACE_S, make_view("plain"), lambda error: None)
    with RunLog.create(tmp_path / "run") as log, Beating(log, interval_s=0.0005) as beating:
        grace.log, grace.beating = log, beating
        while not (log.folder / HEARTBEAT).exists():
            time.sleep(0.001)
        grace._report(Interrupted("stopped"))
        for _ in range(50):
            assert not (log.folder / HEARTBEAT).exists()
            time.sleep(0.001)
