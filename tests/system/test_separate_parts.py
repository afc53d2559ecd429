"""Runs whose orchestrator and engine are commands of their own (`run.elsewhere`), with real vLLM."""

import os
import signal

import pytest

from slipstream.inference.launchers import ORDERS, Orders
from slipstream.runlog import read_events, read_exit, read_metrics
from slipstream.runlog.ledger import balance

from .conftest import Held
from .test_real_runs import COIN, check_run

pytestmark = pytest.mark.engine
ELSEWHERE = ("--run.streams", "files", "--run.elsewhere", '["orchestrator", "engine"]', "--weights.bridge", "disk")


def pid_of(folder, name):
    state = Orders(folder / ORDERS, name).read_state()
    assert state is not None
    assert state.pid > 0
    return state.pid


def test_three_commands_are_one_run(run_file, command, tmp_path):
    folder = tmp_path / "run"
    parts = [command(kind, folder) for kind in ("engine", "orchestrator")]  # before there is a run
    run = command("train", run_file, *COIN, *ELSEWHERE, "--training.steps", "3", "--run.folder", folder)
    code, _, err = run.wait()
    assert code == 0, err
    check_run(folder, steps=3)
    for part in parts:
        code, _, said = part.wait(60)
        assert (code, said.count("is process"), said.count("ended with code 0")) == (0, 1, 1)
    for each in (run, *parts):
        assert each.left_behind() == []
    orders = [path.read_text() for path in (folder / ORDERS).glob("*.order")]
    assert len(orders) == 2
    assert not any(os.environ["PATH"] in order for order in orders), "the command has its own environment"


@pytest.mark.full
def test_the_commands_go_on_whatever_is_killed(run_file, command, tmp_path):
    folder = tmp_path / "run"
    engine, orchestrator = command("engine", folder), command("orchestrator", folder)
    held = Held(folder, rows=30)
    settings = ("--training.steps", "60", "--run.checkpoint_every", "2", "--inference.max_restarts", "3")
    options = (*held.settings, "--evaluation", "false", *ELSEWHERE, *settings)
    run = command("train", run_file, *options, "--run.folder", folder)

    def steps():
        return len(read_metrics(folder)) if folder.exists() else 0

    run.until(lambda: steps() > 3)
    os.kill(pid_of(folder, "engine-0"), signal.SIGKILL)
    run.until(lambda: any(event["kind"] == "engine_restart" for event in read_events(folder)))
    run.running("slipstream.cli trainer")[0].kill()
    run.until(lambda: any(event["lineage"] == 1 and event["kind"] == "apply" for event in read_events(folder)))
    orchestrator.process.kill()
    held.go()
    run.until(lambda: any(event["lineage"] == 2 for event in read_events(folder)))
    again = command("orchestrator", folder)
    code, _, err = run.wait()
    assert code == 0, err
    assert [part.wait(60)[0] for part in (engine, again)] == [0, 0]
    assert read_exit(folder).step == 60
    assert balance(folder).num_open == 0
    for each in (run, engine, orchestrator, again):
        assert each.left_behind() == []
