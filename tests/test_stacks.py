"""Stacks of a run's processes: who is asked, who is not, and what is said of those that give none."""

import asyncio
import contextlib
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from slipstream.errors import DeadlineError, EngineError, RankDeadlineError
from slipstream.inference.engine_process import EngineProcess
from slipstream.inference.settings import EngineSettings
from slipstream.processes import guard, stacks
from slipstream.processes.child import LocalChild
from slipstream.processes.heartbeat import Heartbeat, ProcessHeartbeat

from .waiting import until

PROGRAM = """
import signal, sys, threading, time
from pathlib import Path
from slipstream.processes import stacks

def the_main_thread_is_here():
    print("ready", flush=True)
    time.sleep(600)

def another_is_here():
    time.sleep(600)

if sys.argv[1] == "blocked":
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
threading.Thread(target=another_is_here, daemon=True).start()
stacks.register(Path(sys.argv[2]))
the_main_thread_is_here()
"""


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Who answers is waited for, however busy the machine is."""
    monkeypatch.setattr(stacks, "_ANSWER_S", 60.0)


@pytest.fixture
def start(tmp_path):
    """Starts processes that answer for their stacks, in `folder`."""
    with contextlib.ExitStack() as ends:

        def start(role, how="usual"):
            command = [sys.executable, "-c", PROGRAM, how, str(tmp_path / "stacks" / role)]
            process = ends.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True))
            ends.callback(process.kill)
            assert process.stdout.readline() == b"ready\n"
            return process

        yield start


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "stacks"


def test_all_threads_are_written_again_and_again_for_the_user_only(start, folder):
    process = start("engine-0")
    path = folder / f"engine-0-{process.pid}.txt"
    assert path.read_text() == ""
    for count in (1, 2):
        assert stacks.ask(folder) == [stacks.Answer(path.stem)]
        for name in ("the_main_thread_is_here", "another_is_here"):  # it may stand still between two threads
            until(lambda name=name, count=count: path.read_text().count(name) == count)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert process.poll() is None


def test_a_file_that_is_long_is_begun_again(start, folder, monkeypatch):
    process = start("rank-1")
    path = folder / f"rank-1-{process.pid}.txt"
    for number in (1, 2):
        assert stacks.ask(folder) == [stacks.Answer(path.stem)]
        until(lambda number=number: path.read_text().count("Current thread") == number)
    monkeypatch.setattr(stacks, "MAX_BYTES", 1)
    for _ in range(3):
        assert stacks.ask(folder) == [stacks.Answer(path.stem)]
        until(lambda: path.read_text().count("Current thread") == 1)


def test_a_process_that_did_not_register_is_not_asked(folder):
    """Nor one that has got the number of another, which was killed; nor one that holds the file without a handler."""
    folder.mkdir()
    (folder / "engine-999999999.txt").touch()
    (folder / "notes.txt").touch()
    program = "import sys, time; file = open(sys.argv[1], 'a'); print(1, flush=True); time.sleep(60)"
    with (
        subprocess.Popen(["sleep", "60"]) as other,
        subprocess.Popen([sys.executable, "-c", program, folder / "file"], stdout=subprocess.PIPE) as holder,
    ):
        (folder / f"engine-{other.pid}.txt").write_text("old\n")
        holder.stdout.readline()
        (folder / "file").rename(folder / f"run-{holder.pid}.txt")
        assert stacks.ask(folder) == []
        time.sleep(0.2)
        assert (other.poll(), holder.poll()) == (None, None)
        other.kill()
        holder.kill()


def test_one_that_is_stopped_and_one_that_does_not_answer_are_named_with_their_states(start, folder, monkeypatch):
    monkeypatch.setattr(stacks, "_ANSWER_S", 1.0)
    well, stopped, deaf = start("a"), start("b"), start("c", "blocked")
    os.kill(stopped.pid, signal.SIGSTOP)
    until(lambda: "State:\tT" in Path(f"/proc/{stopped.pid}/status").read_text())

    def answers_in_time():
        began = time.monotonic()
        answers = stacks.ask(folder)
        seconds = time.monotonic() - began
        missing = {answer.name.partition("-")[0]: answer.missing for answer in answers}
        found = missing == {"a": "", "b": "is stopped (state T)", "c": "does not answer (state S)"}
        return answers if found and seconds < 3.0 else None

    answers = until(answers_in_time)  # on a busy machine one that is well may be late
    assert stacks.sentence(folder, answers) == (
        f"a-{well.pid} wrote the stacks of all threads into {folder}; b-{stopped.pid} is stopped (state T); "
        f"c-{deaf.pid} does not answer (state S)"
    )
    os.kill(stopped.pid, signal.SIGCONT)
    assert stopped.poll() is None
    monkeypatch.setattr(stacks, "_ANSWER_S", 60.0)
    assert stacks.ask(folder, only_group=well.pid) == [stacks.Answer(f"a-{well.pid}")]


def test_the_runs_process_answers_while_it_runs_and_leaves_no_empty_file(tmp_path):
    before = signal.getsignal(signal.SIGUSR2)
    folder = stacks.folder_of(tmp_path)
    folder.mkdir(parents=True)
    (folder / "engine-999999999.txt").touch()
    (folder / "engine-999999998.txt").write_text("stacks\n")
    with stacks.kept_in(tmp_path):
        assert sorted(path.name for path in folder.iterdir()) == ["engine-999999998.txt", f"run-{os.getpid()}.txt"]
    assert [path.name for path in folder.iterdir()] == ["engine-999999998.txt"]
    with stacks.kept_in(tmp_path):
        (folder / "engine-999999998.txt").unlink()
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGUSR2) == before


def test_old_files_are_few(tmp_path, monkeypatch):
    monkeypatch.setattr(stacks, "_MAX_FILES", 2)
    folder = stacks.folder_of(tmp_path)
    folder.mkdir(parents=True)
    for number in range(5):
        path = folder / f"reward-{999999990 + number}.txt"
        path.write_text("stacks\n")
        os.utime(path, (number, number))
    with stacks.kept_in(tmp_path):
        pass
    assert sorted(path.name for path in folder.iterdir()) == ["reward-999999993.txt", "reward-999999994.txt"]


class Told:
    """A run's log that only remembers."""

    def __init__(self, folder):
        self.folder = folder
        self.events = []

    def event(self, kind, **fields):
        self.events.append((kind, fields))


@pytest.mark.parametrize("kind", [DeadlineError, RankDeadlineError])
def test_a_wait_that_runs_out_names_the_folder(tmp_path, kind):
    log = Told(tmp_path)
    at_phase = Heartbeat(time.time(), os.getpid(), "host", 0, 7, ["batch", "generate"], time.time() - 90)
    (tmp_path / "heartbeat.json").write_bytes(msgspec.json.encode(at_phase))
    with (
        stacks.kept_in(tmp_path),
        pytest.raises(kind, match=r"^it took too long \(run-\d+ wrote the stacks of all threads into ") as raised,
        stacks.asked_at_deadlines(log),
    ):
        raise kind("it took too long")
    name = f"run-{os.getpid()}"
    folder = stacks.folder_of(tmp_path)
    ((kind, fields),) = log.events
    state = fields.pop("states")[name]
    assert re.fullmatch(r"step 7 in generate, no progress for (9|1\d)\d s", state)
    assert (kind, fields) == ("stacks", {"folder": str(folder), "asked": [name], "missing": {}})
    assert str(raised.value).endswith(f"into {folder}; {name}: {state})")
    assert "test_a_wait_that_runs_out_names_the_folder" in (folder / f"{name}.txt").read_text()


def test_at_the_end_nothing_is_left_of_the_heartbeats_of_killed_processes(tmp_path):
    beats = tmp_path / "logs" / "heartbeats"
    with stacks.kept_in(tmp_path):
        beats.mkdir()
        with subprocess.Popen(["true"]) as ended:
            ended.wait()
        beat = ProcessHeartbeat(time.time(), ended.pid, socket.gethostname(), "engine", "", 0.0)
        (beats / f"{beat.name}.json").write_bytes(msgspec.json.encode(beat))
        (beats / f"{beat.name}.json.partial").touch()
    assert not beats.exists()


@pytest.mark.parametrize("error", [EngineError("it died"), DeadlineError("nobody is registered")])
def test_other_errors_and_runs_without_stacks_stay_as_they_are(tmp_path, error):
    log = Told(tmp_path)
    with pytest.raises(EngineError) as raised, stacks.asked_at_deadlines(log):
        raise error
    assert raised.value is error
    assert log.events == []


def test_without_a_place_or_a_disk_nothing_is_registered(tmp_path, monkeypatch):
    monkeypatch.delenv(stacks.VARIABLE, raising=False)
    before = signal.getsignal(signal.SIGUSR2)
    stacks.register()
    (tmp_path / "file").touch()
    stacks.register(tmp_path / "file" / "run")
    assert signal.getsignal(signal.SIGUSR2) == before
    assert stacks._own is None


@pytest.mark.parametrize(
    ("log", "prefix"),
    [
        ("logs/engine.log", "logs/stacks/engine"),
        ("logs/rank-1.log", "logs/stacks/rank-1"),
        ("logs/teacher/engine.log", "logs/stacks/teacher-engine"),
        ("slipstream-eval-x/engine.log", "slipstream-eval-x/stacks/engine"),
    ],
)
def test_the_file_beside_a_childs_log(tmp_path, log, prefix):
    assert stacks.prefix_of(tmp_path / log) == tmp_path / prefix


def test_the_guard_reads_the_same_variable():
    assert guard.STACKS == stacks.VARIABLE


def test_what_a_silent_engine_said_is_kept_however_many_calls_gave_it_up(start, tmp_path, monkeypatch):
    settings = EngineSettings("m", "float32", max_model_len=8, max_num_seqs=1)
    engine = EngineProcess(settings, tmp_path / "engine.log", start_timeout_s=1)
    engine.process = LocalChild(start("engine"), socket.socket(), has_session=True)
    engine.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, engine.process.pid, os.WSTOPPED)
    ask, num_asked = stacks.ask, []

    def ask_late(folder, group):
        num_asked.append(group)
        while len(num_asked) > 1 and engine.process.poll() is None:
            time.sleep(0.01)
        return ask(folder, group)

    monkeypatch.setattr(stacks, "ask", ask_late)

    async def give_up():
        await asyncio.gather(*(engine._give_up() for _ in range(3)))

    asyncio.run(give_up())
    assert "was killed, as it said nothing" in engine.describe()
    assert "is stopped (state T)" in engine.describe()
    assert num_asked == [engine.process.pid]
    engine.remove_files()
