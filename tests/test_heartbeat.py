"""A run's heartbeat: life and progress, apart."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from slipstream import runlog
from slipstream.processes import heartbeat, stacks
from slipstream.processes.heartbeat import FILE, SILENT_S, Beating, Heartbeat, read_heartbeat, read_processes
from slipstream.runlog import RunLog, writer

from .waiting import until


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
    until(lambda: not (log.folder / FILE).exists())
    assert read_heartbeat(log.folder) is None


def test_a_thread_that_is_late_at_the_end_leaves_nothing(tmp_path, monkeypatch):
    write, begun, may_go_on = heartbeat.write_whole, threading.Event(), threading.Event()

    def slow(path, data, *, durable=True):
        begun.set()
        assert may_go_on.wait(60)
        write(path, data, durable=durable)

    monkeypatch.setattr(heartbeat, "write_whole", slow)
    monkeypatch.setattr(heartbeat, "_END_S", 0.01)
    before = set(threading.enumerate())
    with RunLog.create(tmp_path / "run") as log, Beating(log, 0.05):
        assert begun.wait(60)
    begun.clear()
    heartbeat.begin(tmp_path / "beats", "engine")
    assert begun.wait(60)
    heartbeat.end()
    may_go_on.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
    assert not (log.folder / FILE).exists()
    assert list((tmp_path / "beats").iterdir()) == []


def test_how_long_a_repeated_phase_may_take(tmp_path, monkeypatch):
    now = 100.0
    monkeypatch.setattr(writer, "time", SimpleNamespace(monotonic=lambda: now, time=time.time))
    monkeypatch.setattr(writer, "LEAST_LIMITS_S", (9.0, 5.0, 5.0, 1.0))
    with RunLog.create(tmp_path / "run") as log:
        for number in range(5):
            with log.phase("batch"):
                assert log.limit_s == 0.0
            with log.phase("train"):  # one that has nothing to do says nothing
                assert log.limit_s == (9.0, 5.0, 5.0, 1.0, 1.0)[number]
            with log.phase("train"), log.phase("forward"):
                assert log.limit_s == (9.0, 5.0, 5.0, 1.0, 1.0)[number]
                log.repeats("train")
                now += 0.1 if number == 4 else 0.0
        with log.phase("train"):
            assert log.limit_s == pytest.approx(2.0)
        assert log.num_phases == 16


PROGRAM = """
import sys, time
from pathlib import Path
from slipstream.runlog import RunLog
from slipstream.processes.heartbeat import Beating
with RunLog.create(Path(sys.argv[1])) as log, Beating(log, 0.05), log.phase("batch"):
    log.metrics(7, {})
    print("begun", flush=True)
    time.sleep(600)
"""


def test_a_process_that_is_stopped_is_named_in_the_list_of_runs(tmp_path, monkeypatch):
    monkeypatch.setattr("slipstream.processes.heartbeat.SILENT_S", 0.5)
    folder = tmp_path / "runs" / "one"
    folder.parent.mkdir()
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(folder)], stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        until(lambda: (beat := read_heartbeat(folder)) and beat.step == 7)
        until(lambda: runlog.summarize(folder).message == "")
        silent = heartbeat.ProcessHeartbeat(
            time.time() - 90, process.pid, "elsewhere", "rank-1", "loading its shard", 0.0
        )
        file = heartbeat.folder_of(folder) / f"{silent.name}.json"
        file.parent.mkdir(parents=True)
        file.write_bytes(msgspec.json.encode(silent))
        seconds = r"(9|1\d)\d"
        told = f"no heartbeat for {seconds} s of rank-1, process {process.pid} on elsewhere \\(loading its shard\\)"
        until(lambda: re.fullmatch(told, runlog.summarize(folder).message))
        file.unlink()
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


CHILD = """
import os, sys, time
from slipstream.processes import heartbeat, stacks

heartbeat.doing("nothing that is told before it beats")
heartbeat.INTERVAL_S = 600.0
heartbeat._END_S = 60.0
stacks.register()
print("begun", flush=True)
for line in sys.stdin:
    order, _, what = line.strip().partition(" ")
    if order == "fork":
        if os.fork() == 0:
            heartbeat.doing("what a fork does")
            heartbeat.progress()
            stacks.register()
            sys.exit()
        os.wait()
    if order == "interval":
        heartbeat.INTERVAL_S = float(what)
    {"doing": heartbeat.doing, "progress": lambda _: heartbeat.progress()}.get(order, str)(what)
    print("done", flush=True)
"""


@dataclass
class Child:
    """A process of a run that says what it is told to."""

    process: subprocess.Popen

    def say(self, text):
        self.process.stdin.write(f"{text}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline()


@pytest.fixture
def child(tmp_path):
    prefix = stacks.prefix_of(tmp_path / "run" / "logs" / "engine.log")
    environment = {**os.environ, stacks.VARIABLE: str(prefix)}
    command = [sys.executable, "-c", CHILD]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as process:
        assert process.stdout.readline() == "begun\n"
        yield Child(process)
        process.kill()


def test_further_processes_beat_and_say_what_they_are_at(child, tmp_path, monkeypatch):
    run, name = tmp_path / "run", f"engine-{child.process.pid}"
    (first,) = until(lambda: read_processes(run))
    assert (first.name, first.doing, first.state(first.time)) == (name, "", "")
    child.say("doing loading weights")
    (busy,) = until(lambda: [beat for beat in read_processes(run) if beat.doing])  # at once, not at the next beat
    assert busy.state(busy.progress_at + 312.2) == "loading weights, no progress for 312 s"
    child.say("interval 0.05")
    child.say("doing serving requests")
    (begun,) = until(lambda: [beat for beat in read_processes(run) if beat.doing == "serving requests"])
    (alive,) = until(lambda: [beat for beat in read_processes(run) if beat.time > begun.time + 0.3])
    assert alive.progress_at == begun.progress_at > busy.progress_at, "it lives, and does not get on"
    child.say("progress")
    until(lambda: read_processes(run)[0].progress_at > begun.progress_at)
    assert Path(run / "logs" / "heartbeats").stat().st_mode & 0o77 == 0

    # What is silent is named, and what was at which place stands beside its stacks.
    monkeypatch.setattr("slipstream.processes.heartbeat.SILENT_S", 0.5)
    child.process.send_signal(signal.SIGSTOP)
    (silence,) = until(lambda: [text for beat in read_processes(run) if (text := beat.silence(time.time()))])
    assert f"of engine, process {child.process.pid} on " in silence
    assert silence.endswith(" (serving requests)")
    folder = stacks.folder_of(run)
    until(lambda: stacks.ask(folder)[0].missing == "is stopped (state T)")
    said = stacks.sentence(folder, stacks.ask(folder))
    assert f"{name} is stopped (state T); {name}: serving requests, no progress for " in said
    child.process.send_signal(signal.SIGCONT)
    child.process.stdin.close()
    child.process.wait(60)
    assert not list((run / "logs" / "heartbeats").iterdir())


def test_forks_and_killed_processes_leave_no_heartbeat(child, tmp_path):
    run = tmp_path / "run"
    until(lambda: read_processes(run))
    child.say("doing waiting")
    assert child.say("fork") == "done\n"
    assert child.process.pid in {beat.pid for beat in read_processes(run)}
    assert all(beat.doing in ("waiting", "") for beat in read_processes(run)), "a fork says nothing in another's name"
    child.process.kill()
    until(lambda: not read_processes(run))  # before anybody has waited for its end
    assert child.process.returncode is None
    (left,) = (run / "logs" / "heartbeats").glob(f"*-{child.process.pid}.json")
    child.process.wait()
    heartbeat.begin(run / "logs" / "heartbeats", "engine")
    try:
        assert not left.exists(), "the next of its role has removed it"
        (ours,) = until(lambda: read_processes(run))
        assert ours.pid == os.getpid()
    finally:
        heartbeat.end()
    until(lambda: read_processes(run) == [])


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path):
    (tmp_path / "file").touch()
    heartbeat.begin(tmp_path / "file" / "heartbeats", "engine")
    heartbeat.doing("nothing")
    heartbeat.progress()
    heartbeat.end()
