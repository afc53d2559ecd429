"""The process beside a trainer that ends it where it stands still, with programs of a few lines in the trainer's
place."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from slipstream.errors import ConfigError, TrainerLost
from slipstream.launch.parts import watchdog
from slipstream.processes import stacks
from slipstream.processes.heartbeat import Heartbeat
from slipstream.processes.stalls import SILENT_POLLS, STOPPED_POLLS, Looks
from slipstream.runlog import RunLog, read_exit
from tests.waiting import until

TRAINER = """
import os, re, signal, subprocess, sys, time
from pathlib import Path
from slipstream.launch.parts.watchdog import watched
from slipstream.runlog import RunLog, writer
from slipstream.processes import launchers, stacks
from slipstream.processes.heartbeat import Beating

folder = Path(sys.argv[1])
writer.LEAST_LIMITS_S, writer.LIMIT_FACTOR = (60.0, 60.0, 60.0, 1.0), 0.0

class Quick(subprocess.Popen):
    def __init__(self, command, **options):
        text = "from slipstream.launch.parts import watchdog; stalls = watchdog.stalls; stalls.POLL_S = 0.1; "
        text += "stalls.STOPPED_POLLS = 10; "
        text += "stalls.SILENT_POLLS = 30; watchdog.stacks._ANSWER_S = 60; watchdog.main()"
        super().__init__([sys.executable, "-c", text, *command[4:]], **options)
        print(self.pid, flush=True)

launchers.popen = Quick

with RunLog.create(folder) as log, watched(folder, log.warning), Beating(log, 0.05), stacks.kept_in(folder):
    log.metrics(2, {{"loss/total": 1.0}})
    while not (folder / "heartbeat.json").exists():
        time.sleep(0.02)
{body}
print("over", flush=True)
"""
TRAINS = """
for number in range(4):
    with log.phase("train"):
        log.repeats("train")
        if number == 3:
            {hangs}
"""
HOLDS_THE_INTERPRETER = 're.match("(a+)+$", 64 * "a" + "b")'
UNTIL = 'while not (folder / "go").exists(): time.sleep(0.02)'


class Watched:
    """A program that is watched, in a process group of this session, as a shell starts one."""

    def __init__(self, folder, body):
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-c", TRAINER.format(body=textwrap.indent(body, "    ")), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        self.watchdog = psutil.Process(int(self.process.stdout.readline()))

    def wait(self):
        out, err = self.process.communicate(timeout=120)
        self.watchdog.wait(60)
        return self.process.returncode, out, err


@pytest.fixture
def watched(tmp_path):
    started = []

    def start(body):
        started.append(Watched(tmp_path / "run", body))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.communicate(timeout=60)
        each.watchdog.wait(60)


def beat(time=0.0, num_phases=0, limit_s=0.0):
    return Heartbeat(time, 1, "here", 0, 3, ["train"], 0.0, num_phases, limit_s)


LONG = 2 * SILENT_POLLS
TRAINING = [("S", beat(time, 1, 600.0)) for time in range(LONG)]
STANDS_STILL = {
    "stopped": ([("T", beat())] * STOPPED_POLLS, "is stopped"),
    "stopped before it has beaten": ([("T", None)] * STOPPED_POLLS, "is stopped"),
    "silent": ([("R", beat())] * (SILENT_POLLS + 1), "gives no sign of life"),
    "in one step": (TRAINING[:601], "does not get on at step 3 in train"),
    "stopped for a while, and in one step": (
        [*TRAINING[:300], *[("T", beat(299, 1, 600.0))] * 20, *TRAINING[300:601]],
        "does not get on",
    ),
}
GETS_ON = {
    "not yet": [("S", None)] * LONG,
    "stopped for a while": [*[("T", beat())] * (STOPPED_POLLS - 1), ("S", beat(1.0))] * 3,
    "in a phase without a limit": [("S", beat(time, 1)) for time in range(LONG)],
    "steps": [("S", beat(time, time // 500, 600.0)) for time in range(LONG)],
    "a debugger has stopped it": [("t", beat(1.0, 1, 600.0))] * LONG,
    "in Python's debugger, and on": [*TRAINING[:599], ("S", beat(599.0, 1)), *TRAINING[:599]],
}


@pytest.mark.parametrize("case", STANDS_STILL)
def test_who_stands_still_is_found_with_the_last_look(case):
    looks, found = Looks(), STANDS_STILL[case]
    said = [looks.add(*each) for each in found[0]]
    assert [*filter(None, said)] == said[-1:]
    assert said[-1].startswith(found[1])


@pytest.mark.parametrize("case", GETS_ON)
def test_nobody_is_blamed_who_gets_on(case):
    looks = Looks()
    assert not [said for each in GETS_ON[case] if (said := looks.add(*each))]


@pytest.mark.quick("stopped", "hangs")
@pytest.mark.parametrize(
    ("body", "why"),
    [
        pytest.param("os.kill(os.getpid(), signal.SIGSTOP)", "is stopped (state T) for", id="stopped"),
        pytest.param(HOLDS_THE_INTERPRETER, "gives no sign of life (state", id="holds the interpreter"),
        pytest.param(TRAINS.format(hangs="time.sleep(1000)"), "does not get on at step 2 in train", id="hangs"),
    ],
)
def test_a_trainer_that_stands_still_is_killed_and_the_run_says_why(watched, body, why):
    run = watched(body)
    code, out, err = run.wait()
    assert (code, out) == (-signal.SIGKILL, ""), err
    report = read_exit(run.folder)
    assert (report.error, report.status, report.step, report.lineage) == ("TrainerLost", "failed", 2, 0)
    assert (report.exit_code, report.failure_class, report.retriable) == (128 + signal.SIGKILL, "trainer", True)
    assert why in report.message
    assert report.message in err
    (file,) = stacks.folder_of(run.folder).glob("run-*.txt")
    assert (why.startswith("is stopped")) != ("most recent call first" in file.read_text())


def test_nobody_is_blamed_while_all_of_a_group_are_stopped(watched):
    run = watched(UNTIL)
    os.killpg(run.process.pid, signal.SIGTSTP)
    both = (psutil.Process(run.process.pid), run.watchdog)
    until(lambda: {each.status() for each in both} == {psutil.STATUS_STOPPED})
    time.sleep(2.0)  # twice as long as a trainer may be stopped alone
    os.killpg(run.process.pid, signal.SIGCONT)
    (run.folder / "go").touch()
    code, out, err = run.wait()
    assert (code, out, err) == (0, "over\n", "")
    assert read_exit(run.folder).status == "finished"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_all_of_a_group_is_the_trainers(watched, number):
    notes = f"got = []; signal.signal({int(number)}, lambda *_: got.append(1)); (folder / 'set').touch()"
    run = watched(f"{notes}\n{UNTIL}")
    until((run.folder / "set").exists)
    os.killpg(run.process.pid, number)
    assert run.watchdog.is_running()
    (run.folder / "go").touch()
    code, out, err = run.wait()
    assert (code, out, err) == (0, "over\n", "")


def test_a_trainer_that_somebody_else_kills_is_no_matter_of_the_watchdog(watched):
    run = watched("time.sleep(1000)")
    run.process.kill()
    assert run.wait()[0] == -signal.SIGKILL
    assert read_exit(run.folder) is None


def test_a_watchdog_that_dies_is_missed(watched):
    run = watched(UNTIL)
    run.watchdog.kill()
    events = run.folder / "events.jsonl"
    until(lambda: "the watchdog ended" in events.read_text())
    (run.folder / "go").touch()
    assert run.wait()[0] == 0


def test_the_end_is_told_before_the_trainer_is_killed(tmp_path, monkeypatch):
    log, told = RunLog.create(tmp_path / "run"), []
    log.metrics(3, {"loss/total": 1.0})

    def end(trainer, error):
        told.append(read_exit(log.folder))
        log.close()

    monkeypatch.setattr(watchdog, "_PASSED", ())
    monkeypatch.setattr(watchdog, "watch", lambda trainer, folder: "hangs")
    monkeypatch.setattr(watchdog, "beat_of", lambda trainer, folder: beat())
    monkeypatch.setattr(watchdog, "end", end)
    monkeypatch.setattr(sys, "argv", ["watchdog", "7", str(log.folder)])
    watchdog.main()
    for report in (*told, read_exit(log.folder)):
        assert (report.error, report.exit_code, report.step, report.lineage) == ("TrainerLost", 137, 3, 0)


def test_a_lock_that_is_held_a_little_longer_keeps_no_end_from_the_run(tmp_path, monkeypatch):
    RunLog.create(tmp_path / "run").close()
    create, held = RunLog.create, [True, True]

    def later(folder, **options):
        if held:
            held.pop()
            raise ConfigError("in use")
        return create(folder, **options)

    monkeypatch.setattr(watchdog, "_PAUSE_S", 0.0)
    monkeypatch.setattr(watchdog.RunLog, "create", later)
    watchdog.write_end(tmp_path / "run", TrainerLost("it hangs", exit_code=137))
    assert read_exit(tmp_path / "run").error == "TrainerLost"
