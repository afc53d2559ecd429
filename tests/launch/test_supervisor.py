"""The supervisor of `slipstream train`, with programs of a few lines in the trainer's place."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from slipstream.launch.parts import supervisor
from slipstream.launch.recovery import retry_policy
from slipstream.processes import launchers
from slipstream.runlog import read_events, read_exit
from tests import fork_server
from tests.launch import supervisor_process

TRAINER = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from slipstream.launch.parts.supervised import SupervisorWatch
from slipstream.runlog import RunLog
from slipstream.processes.heartbeat import Beating

folder, calls, resume = Path({folder!r}), Path({calls!r}), "--resume=auto" in sys.argv
watch = SupervisorWatch()
number = len(calls.read_text().splitlines()) if calls.exists() else 0
with calls.open("a") as file:
    file.write(json.dumps([os.getpid(), sys.argv[1:]]) + "\\n")
{before}
with RunLog.create(folder, resume=resume and folder.exists()) as log, Beating(log, 0.1):
    log.metrics(1, {{"loss/total": 1.0}})
    log.metrics(2 + number, {{"loss/total": 1.0}})
    watch.warn = log.warning
{body}
"""

QUICKLY = "supervisor._ORPHANS_S, end = 0.5, supervisor.end_descendants; supervisor.end_descendants = lambda _: end(60)"
"""Orphans have little time to end by themselves, and all they need to die."""
REGISTER = 'from slipstream.processes import stacks; stacks.register(stacks.folder_of(folder) / "run")'


class Supervised:
    """A supervisor in a process of its own, which is a fork, and the programs that it has started."""

    def __init__(self, tmp_path, body, before="", max_restarts=3, resume=(), options=""):
        self.folder, self.calls = tmp_path / "run", tmp_path / "calls"
        program = tmp_path / "trainer.py"
        body = textwrap.indent(textwrap.dedent(body), "    ")
        program.write_text(TRAINER.format(folder=str(self.folder), calls=str(self.calls), before=before, body=body))
        start = f"""
            import subprocess, sys
            from pathlib import Path
            from slipstream.processes import launchers
            from slipstream.launch.parts import supervisor
            from slipstream.launch.recovery import retry_policy
            from slipstream.processes import stalls
            def popen(command, **options):
                return subprocess.Popen([sys.executable, {str(program)!r}, *command[4:]], **options)
            launchers.popen, retry_policy.FIRST_WAIT_S, stalls.POLL_S = popen, 0.01, 0.1
            {options}
            say = lambda text: print(text, file=sys.stderr, flush=True)
            made = supervisor.Supervisor(["trainer", "run.toml"], Path({str(self.folder)!r}),
                                         max_restarts={max_restarts}, say=say)
            code = made.run({resume!r})
            say(f"{{type(made.error).__name__}}: {{made.error}}") if made.error else None
            sys.exit(code)
        """
        self.process = launchers.popen(
            [sys.executable, "-m", supervisor_process.__name__, textwrap.dedent(start)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": fork_server.NUM_THREADS},
        )

    @property
    def attempts(self):
        return [json.loads(line) for line in self.calls.read_text().splitlines()] if self.calls.exists() else []

    def until(self, condition, timeout_s=60.0):
        until = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < until
            assert self.process.poll() is None, self.process.stderr.read()
            time.sleep(0.02)

    def has_begun(self, number=1):
        return lambda: len(self.attempts) == number and (self.folder / "heartbeat.json").exists()

    def kinds(self, kind):
        return [event for event in read_events(self.folder) if event["kind"] == kind]

    def until_stopped(self, pid):
        self.until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)

    def wait(self):
        _, err = self.process.communicate(timeout=120)
        return self.process.returncode, err

    def ok(self):
        code, err = self.wait()
        assert code == 0, err
        return err


@pytest.fixture
def supervised(tmp_path, monkeypatch):
    monkeypatch.setitem(fork_server.KINDS, supervisor_process.__name__, "trainer")
    started = []

    def start(*arguments, **options):
        started.append(Supervised(tmp_path, *arguments, **options))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait(60)
        for pid, _ in each.attempts:
            with_pid = Path(f"/proc/{pid}")
            until = time.monotonic() + 60
            while with_pid.exists() and time.monotonic() < until:
                time.sleep(0.02)
            assert not with_pid.exists(), "a trainer ends with its supervisor"


def test_the_trainers_end_is_the_runs(supervised):
    run = supervised("sys.exit(7)", resume=("--resume",))
    assert run.wait()[0] == 7
    assert run.kinds("restart") == []
    ((_, arguments),) = run.attempts
    assert arguments[:3] == ["trainer", "run.toml", "--resume"]


def test_a_trainer_that_is_killed_is_started_again_and_the_last_attempt_counts(supervised):
    left = 'subprocess.Popen(["sleep", "1000"], start_new_session=True) if number == 0 else None\n'
    kills = "os.kill(os.getpid(), signal.SIGSEGV if number else signal.SIGKILL) if number < 2 else 0"
    run = supervised(left + kills, options=QUICKLY)
    run.process.send_signal(signal.SIGCONT)
    err = run.ok()
    assert [arguments[2:-1] for _, arguments in run.attempts] == [[], ["--resume=auto"], ["--resume=auto"]]
    first, second = run.kinds("restart")
    assert (first["number"], first["lineage"], first["step"], first["signal"]) == (1, 0, 2, "SIGKILL")
    assert (second["number"], second["lineage"], second["step"], second["signal"]) == (2, 1, 3, "SIGSEGV")
    assert second["trained_s"] >= first["trained_s"] >= 0
    assert [event["previous"] for event in run.kinds("opened")] == ["none", "restart", "restart"]
    assert "ended by SIGKILL, as the kernel does when memory is short; the run starts again from the beginning" in err


def test_what_it_had_started_has_ended_before_the_next_attempt(supervised, tmp_path):
    pids = tmp_path / "pids"
    body = f"""
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        with open({str(pids)!r}, "a") as file:
            print(child.pid, os.path.exists("/proc/" + str(number)), file=file)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    run = supervised(body, max_restarts=1, options=QUICKLY)
    code, err = run.wait()
    assert code == 128 + signal.SIGKILL
    assert "run.max_restarts = 1 allows no further restart" in err
    report = read_exit(run.folder)
    assert (report.status, report.exit_code, report.error, report.step) == ("failed", code, "TrainerLost", 3)
    assert (report.failure_class, report.retriable) == ("trainer", True)
    assert "the trainer was ended by SIGKILL" in report.message
    assert len(run.attempts) == 2
    for line in pids.read_text().splitlines():
        assert not psutil.pid_exists(int(line.split()[0]))


@pytest.mark.full
def test_killed_before_it_has_opened_the_run(supervised):
    kills = "os.kill(os.getpid(), signal.SIGKILL) if number < 2 else None"
    run = supervised("sys.exit(0)", before=kills, max_restarts=2)
    err = run.ok()
    assert len(run.attempts) == 3
    assert "restart 2 of run.max_restarts = 2" in err
    run = supervised("sys.exit(0)", before="os.kill(os.getpid(), signal.SIGKILL)", max_restarts=1)
    run.calls.unlink()
    assert run.wait()[0] == 128 + signal.SIGKILL


def test_the_step_of_a_run_whose_last_attempt_made_none(supervised):
    kill = "os.kill(os.getpid(), signal.SIGKILL)"
    run = supervised(kill, before=f"{kill} if number else None", max_restarts=1)
    assert run.wait()[0] == 128 + signal.SIGKILL
    assert (read_exit(run.folder).error, read_exit(run.folder).step, len(run.attempts)) == ("TrainerLost", 2, 2)


def test_a_restart_that_the_trainer_has_written_itself(supervised):
    run = supervised(
        """
        if number == 0:
            log.event("restart", number=1, step=2, trained_s=4.0)
            log.has_exit = True
            sys.exit(75)
        """
    )
    assert supervisor.AGAIN == 75
    assert run.wait()[0] == 0
    assert len(run.attempts) == 2
    assert len(run.kinds("restart")) == 1


@pytest.mark.quick("15")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_signals_are_passed_on_and_nothing_is_started_again(supervised, number):
    body = f"""
        got = []
        signal.signal({int(number)}, lambda *_: got.append(1))
        (folder / "ready").touch()
        while not got:
            time.sleep(0.01)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL) if got == [1] else sys.exit(9)
    """
    run = supervised(body)
    run.until((run.folder / "ready").exists)
    run.process.send_signal(number)
    code, err = run.wait()
    assert (code, len(run.attempts)) == (130, 1)
    assert "stopped, but the trainer was ended by SIGKILL: continue with --resume" in err
    assert (read_exit(run.folder).status, read_exit(run.folder).step) == ("interrupted", 2)


STOPS = """
    from slipstream.processes.signals import StopRequest
    with StopRequest(num_passed_on=watch.num_passed_on) as stop:
        (folder / "ready").touch()
        while not stop():
            time.sleep(0.01)
        (folder / "stopping").touch()
        while not {ended}:
            time.sleep(0.01)
    sys.exit(30)
"""


def test_a_sigterm_to_all_processes_is_one_however_late_the_supervisor_passes_it_on(supervised):
    run = supervised(STOPS.format(ended="stop._num_terms == 2"))
    run.until((run.folder / "ready").exists)
    ((trainer, _),) = run.attempts
    run.process.send_signal(signal.SIGSTOP)
    run.until_stopped(run.process.pid)
    os.kill(trainer, signal.SIGTERM)
    run.process.send_signal(signal.SIGTERM)
    run.until((run.folder / "stopping").exists)
    time.sleep(1.5)
    run.process.send_signal(signal.SIGCONT)
    assert run.wait()[0] == 30


@pytest.mark.full
def test_a_second_sigterm_to_the_supervisor_ends_the_trainer_at_once(supervised):
    run = supervised(STOPS.format(ended="False"))
    run.until((run.folder / "ready").exists)
    run.process.send_signal(signal.SIGTERM)
    run.until((run.folder / "stopping").exists)
    time.sleep(1.1)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait()[0] == 128 + signal.SIGTERM


def test_stacks_are_those_of_the_supervisor_and_of_a_trainer_that_can(supervised, tmp_path):
    said, looked = tmp_path / "said", tmp_path / "looked"
    body = f"""
        (folder / "ready").touch()
        while not (folder / "asked").exists():
            time.sleep(0.01)
        {REGISTER}
        (folder / "registered").touch()
        time.sleep(1000)
    """
    tells = f"sys.stderr = open({str(said)!r}, 'a', buffering=1)"
    run = supervised(body, options=f"{tells}; supervisor._reap_orphans = lambda pid: Path({str(looked)!r}).touch()")
    run.until(lambda: (run.folder / "ready").exists() and looked.exists())
    run.process.send_signal(signal.SIGUSR2)  # the trainer cannot answer yet
    run.until(lambda: "in _watch" in said.read_text())
    time.sleep(0.5)
    (run.folder / "asked").touch()
    run.until((run.folder / "registered").exists)
    run.process.send_signal(signal.SIGUSR2)
    file = run.folder / "logs" / "stacks" / f"run-{run.attempts[0][0]}.txt"
    run.until(lambda: "trainer.py" in file.read_text())
    run.process.send_signal(signal.SIGTERM)
    assert (run.wait()[0], len(run.attempts)) == (130, 1)
    assert said.read_text().count("in _watch") == 2


def test_a_stopped_trainer_is_named_killed_and_started_again(supervised):
    run = supervised("time.sleep(1000) if number == 0 else None", options="stalls.STOPPED_POLLS = 10")
    run.until(run.has_begun())
    os.kill(run.attempts[0][0], signal.SIGSTOP)
    err = run.ok()
    assert f"the trainer, process {run.attempts[0][0]}, is stopped (state T) for 1 s: it is killed" in err
    assert len(run.attempts) == 2


@pytest.mark.full
def test_a_trainer_that_does_not_get_on(supervised):
    body = """
        from slipstream.runlog import writer
        writer.LEAST_LIMITS_S, writer.LIMIT_FACTOR = (60.0, 60.0, 60.0, 60.0 if number else 1.2), 0.0
        REGISTER
        for _ in range(4):
            with log.phase("batch"):
                time.sleep(0.1)
            with log.phase("train"):
                log.repeats("train")
        with log.phase("train"):
            time.sleep(0.4)
        if number == 0:
            with log.phase("batch"):
                time.sleep(2.0)
            with log.phase("train"):
                time.sleep(1000)
    """.replace("REGISTER", REGISTER)
    run = supervised(body, options="supervisor.stacks._ANSWER_S = 60")
    code, err = run.wait()
    assert (code, len(run.attempts)) == (0, 2), err
    (told,) = run.kinds("restart")
    assert "does not get on at step 2 in train (state S) for 1 s and was killed" in told["reason"]
    assert "trainer.py" in (run.folder / "logs" / "stacks" / f"run-{run.attempts[0][0]}.txt").read_text()


@pytest.mark.full
def test_all_go_on_after_a_stop_by_the_terminal(supervised):
    body = """
        while not (folder / "seen").exists():
            time.sleep(0.01)
    """
    run = supervised(body)
    run.until(run.has_begun())
    run.process.send_signal(signal.SIGTSTP)
    for pid in (run.process.pid, run.attempts[0][0]):
        run.until_stopped(pid)
    run.process.send_signal(signal.SIGCONT)
    (run.folder / "seen").touch()
    code, err = run.wait()
    assert (code, len(run.attempts)) == (0, 1), err


def test_a_stopped_supervisor_is_named_by_the_trainer(supervised):
    body = """
        while not (folder / "ready").exists():
            time.sleep(0.01)
    """
    short = "import slipstream.launch.parts.supervised as each; each.SILENT_POLLS, each.POLL_S = 10, 0.2"
    run = supervised(body, before=short)
    run.until(run.has_begun())
    num_before = len(run.kinds("warning"))  # a machine may have stopped it, too
    run.process.send_signal(signal.SIGSTOP)
    run.until(lambda: len(run.kinds("warning")) > num_before)
    (warning,) = run.kinds("warning")[num_before:]
    assert f"the supervisor, process {run.process.pid}, has said nothing for 2 s" in warning["message"]
    (run.folder / "ready").touch()
    run.process.send_signal(signal.SIGCONT)
    assert run.wait()[0] == 0


def test_a_stop_while_it_waits_for_the_next_attempt_ends_the_run_as_any_stop(supervised):
    run = supervised("os.kill(os.getpid(), signal.SIGKILL)", options="retry_policy.FIRST_WAIT_S = 60")
    run.until(lambda: run.folder.exists() and run.kinds("restart"))
    run.process.send_signal(signal.SIGINT)
    code, err = run.wait()
    assert code == 130
    assert "Interrupted: stopped before the run was started again: continue with --resume" in err
    report = read_exit(run.folder)
    assert (report.status, report.step, len(run.attempts)) == ("interrupted", 2, 1)
    assert retry_policy.earlier_attempts(read_events(run.folder), 2) == [], "a resume begins to count anew"


@pytest.mark.quick("True")
@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_trainer_ends_with_its_supervisor_and_terminal(supervised, is_stopped):
    run = supervised("time.sleep(1000)")
    run.until(run.has_begun())
    trainer = psutil.Process(run.attempts[0][0])
    if is_stopped:
        run.process.send_signal(signal.SIGTSTP)
        run.until_stopped(trainer.pid)
    run.process.stderr.close()  # nobody reads what it says
    run.process.kill()
    trainer.wait(60)
