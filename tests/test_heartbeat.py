"""A run's heartbeat: life and progress, apart."""

import os
import signal
import subprocess
import sys
import time

from slipstream import runlog
from slipstream.runlog import RunLog
from slipstream.runlog.heartbeat import FILE, SILENT_S, Beating, Heartbeat, read_heartbeat


def until(condition, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def test_it_beats_while_the_run_lives_and_tells_progress_apart(tmp_path):
    with RunLog.create(tmp_path / "run") as log, Beating(log, 0.05):
        first = until(lambda: read_heartbeat(log.folder))
        assert (first.pid, first.lineage, first.step, first.phases) == (os.getpid(), 0, 0, [])
        later = until(lambda: (beat := read_heartbeat(log.folder)) and beat.time > first.time + 0.2 and beat)
        assert later.progress_at == first.progress_at, "it lives, and nothing is done"
        with log.phase("train"), log.phase("backward"):
            log.metrics(3, {"train/loss": 1.0})
            busy = until(lambda: (beat := read_heartbeat(log.folder)) and beat.step == 3 and beat)
            assert busy.phases == ["train", "backward"]
            assert busy.progress_at > first.progress_at
        until(lambda: read_heartbeat(log.folder).phases == [])
    assert not (log.folder / FILE).exists()
    assert read_heartbeat(log.folder) is None


def test_how_long_a_repeated_phase_may_take(tmp_path, monkeypatch):
    monkeypatch.setattr("slipstream.runlog.writer.LEAST_LIMIT_S", 1.0)
    with RunLog.create(tmp_path / "run") as log:
        for number in range(5):
            with log.phase("batch"):
                assert log.limit_s == 0.0
            with log.phase("train"):  # one that has nothing to do says nothing
                assert log.limit_s == (1.0 if number > 2 else 0.0)
            with log.phase("train"), log.phase("forward"):
                assert log.limit_s == (1.0 if number > 2 else 0.0)
                log.repeats("train")
                time.sleep(0.1 if number == 4 else 0.0)
        with log.phase("train"):
            assert 2.0 <= log.limit_s < 10.0
        assert log.num_phases == 16


PROGRAM = """
import sys, time
from pathlib import Path
from slipstream.runlog import RunLog
from slipstream.runlog.heartbeat import Beating
with RunLog.create(Path(sys.argv[1])) as log, Beating(log, 0.05), log.phase("batch"):
    log.metrics(7, {})
    print("begun", flush=True)
    time.sleep(60)
"""


def test_a_process_that_is_stopped_is_named_in_the_list_of_runs(tmp_path, monkeypatch):
    monkeypatch.setattr("slipstream.runlog.heartbeat.SILENT_S", 0.5)
    folder = tmp_path / "runs" / "one"
    folder.parent.mkdir()
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(folder)], stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        until(lambda: (beat := read_heartbeat(folder)) and beat.step == 7)
        assert runlog.summarize(folder).message == ""
        process.send_signal(signal.SIGSTOP)
        said = until(lambda: runlog.summarize(folder).message)
        assert f"of process {process.pid} on " in said
        assert said.endswith("which was at step 7 in batch")
        assert runlog.summarize(folder).status == "running"
        process.send_signal(signal.SIGCONT)
        until(lambda: runlog.summarize(folder).message == "")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert runlog.summarize(folder).status == "killed"
    assert runlog.summarize(folder).message == ""


def test_what_is_torn_or_of_another_kind_is_no_heartbeat(tmp_path):
    (tmp_path / FILE).write_bytes(b'{"time": 1')
    assert read_heartbeat(tmp_path) is None
    beat = Heartbeat(100.0, 1, "host", 0, 0, [], 90.0)
    assert beat.silence(100.0 + SILENT_S) == ""
    assert beat.silence(101.0 + SILENT_S) == "no heartbeat for 16 s of process 1 on host, which was at step 0"
