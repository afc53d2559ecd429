"""Runs whose rollouts are generated in a process of their own: the same numbers, and what the death of a part does."""

import contextlib
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from slipstream.config import PlannedConfig, RunConfig, load_config
from slipstream.errors import ConfigError, DataError, OrchestratorError, StartsAgain
from slipstream.launch.parts import child, process
from slipstream.launch.prepare import prepare
from slipstream.launch.recovery import retry_policy
from slipstream.launch.startup.stages import Stage
from slipstream.orchestrator.control import remote
from slipstream.processes.child import LocalChild
from slipstream.runlog import read_events, read_exit, read_metrics
from slipstream.runlog.ledger import balance
from slipstream.transport import TransportLost

from ..redis_server import VARIABLE, Server, keys_at
from .conftest import Held
from .test_real_runs import COIN, ENDLESS, check_run, num_steps

FILES = ("--run.streams", "files")
OPTIONS = ("--training.steps", "5", "--run.checkpoint_every", "2", "--weights.bridge", "disk")
_TIMES = ("time/", "throughput/", "idle/", "update/stall", "memory/")


@pytest.fixture
def beside(monkeypatch, scripted):
    """The orchestrator in a thread of this process, with a scripted engine; what stands for its process can be
    killed."""
    began = Began()

    def launch(self):
        sleeping = subprocess.Popen(["sleep", "600"], start_new_session=True)
        sleeper = LocalChild(sleeping, socket.socket(), has_session=True)
        run = self._run
        settings = process.Settings(
            run.prepared.loaded.config.model_dump_json(),
            run.config.model_dump_json(),
            process.tasks_of(run.prepared),
            str(run.folder.absolute()),
            run.log.lineage,
            run.stages.began,
            self._number,
        )

        def serve():
            try:
                with contextlib.suppress(TransportLost):  # as the run finds by itself; or of one that was killed
                    child.carry_out(settings, run.prepared, run.make_engine)
            finally:
                sleeper.send_signal(signal.SIGTERM)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        began.append((sleeper, thread))
        return sleeper

    monkeypatch.setattr(process.OrchestratorProcess, "_launch", launch)
    yield began
    began.is_over.set()
    for sleeper, thread in began:
        sleeper.kill()
        sleeper.wait(20)
        thread.join(60)


class Began(list):
    """What was begun: what stands for an orchestrator's process, and its thread."""

    def __init__(self):
        super().__init__()
        self.is_over = threading.Event()


def killing(beside, number):
    """Kills an orchestrator at step 3, and it does no more."""

    def change(engine):
        made_by = threading.current_thread()

        def on_request(request):
            if engine.version is None or engine.version.step != 3:
                return
            process, thread = beside[number]
            if thread is made_by:
                process.kill()
                beside.is_over.wait(120)

        engine.on_request = on_request

    return change


def numbers(rows):
    return [
        {name: value for name, value in row.items() if not name.startswith(_TIMES) and name != "time"} for row in rows
    ]


TWO = ("--run.orchestrators", "2")


@pytest.mark.full
@pytest.mark.parametrize("options", [(), ("--algorithm.max_refills", "2")], ids=["lock-step", "refills"])
@pytest.mark.parametrize("several", [(), TWO], ids=["one", "two"])
def test_the_numbers_are_those_of_one_process(scripted, beside, several, options, tmp_path):
    first = scripted.run(*OPTIONS, *options)
    alone = numbers(scripted.metrics)
    assert (first.status, scripted.error) == ("finished", None)
    scripted.folder = tmp_path / "apart"
    run_apart(scripted, beside, *several, *options)
    apart = numbers(scripted.metrics)
    if several:  # each has a probe of its own
        apart, alone = (
            [{k: v for k, v in row.items() if k[:6] != "probe/"} for row in rows] for rows in (apart, alone)
        )
    assert apart == alone or (several and options), "two parts fill their gaps one by one"
    assert (scripted.folder / "ledger-1.sqlite").exists() == bool(several)
    assert [each["digest"] for each in scripted.events("apply")]


@pytest.mark.parametrize("order", [pytest.param("data", marks=pytest.mark.full), "ready"])
def test_with_staleness_none_is_too_old(scripted, beside, order):
    run_apart(scripted, beside, "--training.staleness", "2", "--training.order", order)
    assert max(row.get("staleness/max", 0) for row in scripted.metrics) <= 2
    assert balance(scripted.folder).num("trained") == 20


def test_two_orchestrators_use_each_draw_once_and_resume(scripted, beside, monkeypatch):
    monkeypatch.setattr(retry_policy, "FIRST_WAIT_S", 0.01)
    options = (*OPTIONS, *FILES, "--training.staleness", "2", "--training.order", "ready")

    with pytest.raises(StartsAgain):
        scripted.run(*options, *TWO, change=killing(beside, 1))
    (told,) = scripted.events("restart")
    assert "orchestrator 1 ended with code -9" in told["reason"]
    scripted.finish(5, *options, *TWO, resume=True)
    assert balance(scripted.folder).num_open == 0
    assert max(row.get("staleness/max", 0) for row in scripted.metrics) <= 2
    drawn = []
    for path in sorted(scripted.folder.glob("ledger*.sqlite")):
        with sqlite3.connect(path) as data:
            drawn += data.execute("SELECT id, step FROM groups WHERE state = 'trained'").fetchall()
    final = [group for group, step in drawn]
    assert len(set(final)) == len(final) == 20
    assert {int(group.split(".")[1]) // 2 for group in final} == {0, 1}
    # With one again, what the second had left is nobody's, and goes.
    (scripted.folder / "streams" / "0" / "batches-1").mkdir(parents=True)
    with sqlite3.connect(scripted.folder / "ledger-1.sqlite") as data:
        data.execute("INSERT INTO groups (id, lineage, state) VALUES ('99.3', 1, 'running')")
    assert balance(scripted.folder).num_open == 1
    scripted.finish(6, *options, "--training.steps", "6", resume=True)
    assert balance(scripted.folder).num_open == 0
    assert not (scripted.folder / "streams").exists()


def run_apart(scripted, beside, *options):
    report = scripted.run(*OPTIONS, *options, *FILES)
    assert (report.status, scripted.error) == ("finished", None)
    assert len(beside) == 1 + ("--run.orchestrators" in options)
    assert [row["step"] for row in scripted.metrics] == list(range(6))
    assert balance(scripted.folder).num_open == 0
    assert not (scripted.folder / "streams").exists()
    assert not any(thread.is_alive() for _, thread in beside)


def test_its_failures_are_the_runs(scripted, beside):
    def on_request(engine, request):
        if engine.version is not None and engine.version.step == 2 and not request.id.startswith("probe"):
            engine.is_alive = False

    report = scripted.run(*OPTIONS, *FILES, "--inference.max_restarts", "0", on_request=on_request)
    assert (report.status, report.error, report.exit_code) == ("failed", "EngineError", 5)
    assert "inference.max_restarts = 0" in report.message
    assert not (scripted.folder / "streams").exists()


@pytest.mark.full
def test_its_death_begins_the_run_again_from_the_last_checkpoint(scripted, beside, monkeypatch):
    monkeypatch.setattr(retry_policy, "FIRST_WAIT_S", 0.01)

    with pytest.raises(StartsAgain):
        scripted.run(*OPTIONS, *FILES, change=killing(beside, 0))
    (told,) = scripted.events("restart")
    assert told["checkpoint"] == "step-000002"
    assert "the orchestrator ended with code -9" in told["reason"]
    (scripted.folder / "streams" / "0" / "batches").mkdir(parents=True)  # as an attempt that was killed leaves it
    report = scripted.run(*OPTIONS, *FILES, resume=True)
    assert (report.status, report.step, report.restarts) == ("finished", 5, 1)
    assert not (scripted.folder / "streams").exists()
    assert [row["step"] for row in scripted.metrics] == list(range(6))
    assert balance(scripted.folder).num_open == 0
    assert OrchestratorError.is_retriable


@pytest.mark.parametrize(
    ("code", "expected"), [(2, ConfigError), (3, DataError), (1, OrchestratorError), (-9, OrchestratorError)]
)
def test_what_it_would_end_with_again_is_not_tried_again(tmp_path, code, expected):
    made = object.__new__(process.OrchestratorProcess)
    made._process, made._log = SimpleNamespace(poll=lambda: code), tmp_path / "orchestrator.log"
    made._name = "the orchestrator"
    made._log.write_text("starting\nerror: reward is no function\n")
    error = made._ended()
    assert type(error) is expected
    assert f"the orchestrator ended with code {code} (error: reward is no function)" in str(error)


@pytest.mark.parametrize("is_stopped", [True, False])
def test_one_that_was_stopped_says_nothing_of_the_step(tmp_path, is_stopped):
    """Its silence may come twice at one step, where a second one that hangs by itself ends the run."""
    made = object.__new__(process.OrchestratorProcess)
    made._process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    made._name, made._run = "the orchestrator", SimpleNamespace(folder=tmp_path)
    made.kill = made._process.kill
    if is_stopped:
        made._process.send_signal(signal.SIGSTOP)
        os.waitpid(made._process.pid, os.WUNTRACED)
    error = made._silent(60.0)
    assert (error.was_killed, "(state T)" in str(error)) == (is_stopped, is_stopped)
    assert made._process.wait(20) == -signal.SIGKILL


def test_what_it_tells_is_written_and_shown():
    told = []

    def tells(name):
        return lambda *values, **fields: told.append((name, *values, *fields.items()))

    log = SimpleNamespace(event=tells("event"), warning=tells("warning"), count=tells("count"))
    made = object.__new__(process.OrchestratorProcess)
    made._number = 0
    made._run = SimpleNamespace(
        config=SimpleNamespace(run=SimpleNamespace(orchestrators=1)),
        log=log,
        progress=SimpleNamespace(phase=tells("phase")),
        stages=SimpleNamespace(ended_elsewhere=tells("stage")),
    )
    stage = {"name": "start vLLM", "began_s": 1.0, "seconds": 2.5}
    for notice in (
        remote.Counted({"retry/late": 1.0}),
        remote.Event("warning", {"message": "look"}),
        remote.Event("stage", stage),
        remote.Progressed("phase", ["generate", 8]),
    ):
        made._on_notice(notice)
    assert told == [
        ("count", {"retry/late": 1.0}),
        ("warning", ("message", "look")),
        ("event", "stage", *stage.items()),
        ("stage", Stage(**stage)),
        ("phase", "generate", 8),
    ]
    with pytest.raises(ValueError, match="nothing to show"):
        made._on_notice(remote.Progressed("start", []))


def test_a_redis_url_with_a_password_is_refused_before_it_is_written(scripted):
    with pytest.raises(ConfigError, match="password"):
        scripted.run(*OPTIONS, "--run.streams", "redis", "--redis.url", "redis://127.0.0.1/0?password=hunter2secret")
    assert not scripted.folder.exists()


def test_another_plan_is_refused(scripted, run_file):
    prepared = prepare(load_config(run_file))
    config = RunConfig.model_validate_json(prepared.loaded.config.model_dump_json())
    planned = PlannedConfig.model_validate_json(prepared.config.model_dump_json())
    tasks = process.tasks_of(prepared)
    assert child.plan_again(config, planned, tasks).config == prepared.config
    other = planned.model_copy(update={"sampling": planned.sampling.model_copy(update={"temperature": 0.5})})
    with pytest.raises(ConfigError, match=r"other settings than the trainer in \[sampling\]"):
        child.plan_again(config, other, tasks)
    turned = replace(prepared, train_tasks=prepared.train_tasks[::-1])
    with pytest.raises(ConfigError, match="other tasks, or another order"):
        child.plan_again(config, planned, process.tasks_of(turned))


@pytest.mark.engine
@pytest.mark.real_start
@pytest.mark.full
def test_with_real_vllm_its_death_and_the_end(command, run_file, tmp_path):
    folder = tmp_path / "run"
    held = Held(folder, rows=8)
    often = ("--run.checkpoint_every", "3", "--training.staleness", "1", "--training.steps", "20")
    options = (*held.settings, "--evaluation", "false", *FILES, *often)
    run = command("train", run_file, *options, "--run.folder", folder, "--json")
    run.until(lambda: num_steps(folder) >= 5)
    (orchestrator,) = run.running("slipstream.launch.parts.child")
    engines = run.engines()
    assert engines
    orchestrator.kill()
    held.go()
    out = run.ok()
    assert json.loads(out.splitlines()[-1])["steps"] == 20
    assert [row["step"] for row in read_metrics(folder)] == list(range(21))
    assert sum(event["kind"] == "restart" for event in read_events(folder)) == 1
    found = balance(folder)
    assert found.num_open == 0
    assert found.num("trained") >= 20 * 4
    assert run.left_behind() == []
    assert not (folder / "streams").exists()
    assert not any("slipstream-orchestrator" in path.name for path in tmp_path.parent.iterdir())
    stages = [event["name"] for event in read_events(folder) if event["kind"] == "stage"]
    assert "start vLLM: import vLLM" in stages
    assert "wait for vLLM" in stages


@pytest.mark.engine
@pytest.mark.real_start
@pytest.mark.full
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_however_the_trainer_ends_nothing_outlives_it(command, run_file, tmp_path, ending):
    folder = tmp_path / "run"
    run = command("train", run_file, *COIN, *FILES, *ENDLESS, "--run.folder", folder)
    run.until(lambda: num_steps(folder) >= 3)
    run.children()
    run.process.send_signal(ending)
    run.wait()
    assert run.left_behind() == []
    if ending == signal.SIGINT:
        assert read_exit(folder).status == "interrupted"
        assert balance(folder).num("running") == 0
        return
    again = ("--training.steps", num_steps(folder) + 2, "--run.folder", folder, "--resume=auto")
    again = command("train", run_file, *COIN, *FILES, *again)
    again.ok()
    assert again.left_behind() == []
    assert not (folder / "streams").exists(), "what the killed attempt has left is gone, too"


@pytest.mark.engine
@pytest.mark.full
@pytest.mark.parametrize("how", [("disk", "1"), ("broadcast", "2")], ids="-".join)
def test_two_orchestrators_with_real_engines(command, run_file, tmp_path, how):
    folder, (bridge, replicas) = tmp_path / "run", how
    held = Held(folder, rows=3)
    several = (*TWO, "--inference.replicas", replicas, "--weights.bridge", bridge, "--training.staleness", "1")
    options = (*held.settings, "--evaluation", "false", *FILES, "--training.steps", "6", *several)
    run = command("train", run_file, *options, "--run.folder", folder)
    run.until(lambda: num_steps(folder) >= 1)
    assert len(run.engines()) == 2 * int(replicas)
    held.go()
    run.ok()
    check_run(folder, steps=6)
    assert balance(folder).num_open == 0
    assert balance(folder).ended == "at step 6: all 6 steps are made"
    left = [event["problem"] for event in read_events(folder) if event["kind"] == "weight_group_left"]
    assert left == [""] * (bridge == "broadcast")
    assert run.left_behind() == []


@pytest.mark.engine
@pytest.mark.full
@pytest.mark.parametrize("bridge", ["broadcast", "single_copy", "lora", "restart"])
def test_every_bridge(command, run_file, tmp_path, bridge):
    folder = tmp_path / "run"
    how = ("--lora.rank", "4") if bridge == "lora" else ("--weights.bridge", bridge)
    run = command("train", run_file, *COIN, *FILES, "--training.steps", "3", *how, "--run.folder", folder)
    run.ok()
    if bridge == "lora":  # the checkpoint's weights are an adapter's
        assert [row["step"] for row in read_metrics(folder)] == [0, 1, 2, 3]
    else:
        check_run(folder, steps=3)
    assert all(row["probe/abs_logprob_diff"] < 1e-3 for row in read_metrics(folder))
    assert run.left_behind() == []


@pytest.mark.parametrize("comes_back", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_redis_server_that_is_killed(scripted, beside, tmp_path, monkeypatch, comes_back):
    """Empty when it is back: what it held is made again, and counted once."""
    monkeypatch.setattr(retry_policy, "FIRST_WAIT_S", 0.01)
    usual_s = remote._SILENCE_S
    (tmp_path / "redis").mkdir()
    server = Server(tmp_path / "redis")
    died = []

    def on_request(engine, request):
        if engine.version is not None and engine.version.step == 3 and not died:
            died.append(True)
            server.end()
            if comes_back:
                server.start()
            else:
                monkeypatch.setattr(remote, "_SILENCE_S", 3.0)

    redis = ("--run.streams", "redis", "--redis.url", server.url, "--redis.password_variable", VARIABLE)
    try:
        with pytest.raises(StartsAgain):
            scripted.run(*OPTIONS, *redis, on_request=on_request)
        (told,) = scripted.events("restart")
        assert ("lost" if comes_back else "127.0.0.1") in told["reason"]
        if not comes_back:
            monkeypatch.setattr(remote, "_SILENCE_S", usual_s)
            server.start()
        scripted.finish(5, *OPTIONS, *redis, resume=True)
        assert [row["step"] for row in scripted.metrics] == list(range(6))
        assert balance(scripted.folder).num_open == 0
        assert keys_at(server) == []
    finally:
        server.end()


@pytest.mark.engine
@pytest.mark.full
def test_with_real_vllm_over_redis(command, run_file, tmp_path):
    (tmp_path / "redis").mkdir()
    server, folder = Server(tmp_path / "redis"), tmp_path / "run"
    redis = ("--run.streams", "redis", "--redis.url", server.url, "--redis.password_variable", VARIABLE)
    redis = (*redis, "--training.staleness", "2")
    run = command("train", run_file, *COIN, *redis, "--training.steps", "8", "--run.folder", folder)
    code, _, err = run.wait()
    server.end()
    assert code == 0, err
    check_run(folder, steps=8)
    assert balance(folder).num_open == 0
    assert run.left_behind() == []
