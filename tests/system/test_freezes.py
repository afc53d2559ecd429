"""Processes that are stopped (SIGSTOP): an engine that does not go on is handled as one that died, whatever the bridge;
and nobody is blamed for the time for which the run itself was stopped."""

import os
import re
import signal
import time

import pytest

from slipstream.processes import heartbeat, stacks
from slipstream.runlog import read_events, read_exit

from .conftest import Held, kinds
from .test_real_runs import check_run, num_steps

pytestmark = [pytest.mark.engine, pytest.mark.real_start, pytest.mark.full]

SHORT_DEADLINES = ("--inference.request_timeout_s", "5", "--weights.apply_timeout_s", "20")
SILENCE_S = 10.0
"""What they leave to an engine: the first of them and 5 s. The second is longer, as it is by default: an engine that is
frozen while it takes weights is found by its silence."""
MARGIN_S = 60.0
"""For a busy machine."""


def freeze(run, held):
    """Stop the engine for good."""
    engine = run.engines()[0]
    os.kill(engine.pid, signal.SIGSTOP)
    held.go()
    return time.monotonic()


def started(command, run_file, folder, *options, rows):
    """A run that has made two steps, and is held until `freeze` once it has so many rows."""
    held = Held(folder, rows)
    options = (*held.settings, "--evaluation", "false", *SHORT_DEADLINES, *options)
    run = command("train", run_file, *options, "--run.folder", folder)
    run.until(lambda: num_steps(folder) >= 2)
    return run, held


def test_a_run_that_was_stopped_blames_nobody_and_outlives_an_engine_that_is(command, run_file, tmp_path, monkeypatch):
    monkeypatch.setattr(stacks, "_ANSWER_S", MARGIN_S)
    folder = tmp_path / "run"
    run, held = started(command, run_file, folder, "--training.steps", "40", "--training.staleness", "1", rows=20)
    os.kill(run.process.pid, signal.SIGSTOP)
    time.sleep(SILENCE_S + 4)
    os.kill(run.process.pid, signal.SIGCONT)
    reached = num_steps(folder)
    run.until(lambda: num_steps(folder) >= reached + 3)
    assert "engine_restart" not in kinds(folder)
    answers = stacks.ask(stacks.folder_of(folder))
    roles = sorted(answer.name.rpartition("-")[0] for answer in answers)
    assert (roles, {answer.missing for answer in answers}) == (["engine", "reward", "reward-guard", "run"], {""})
    began = freeze(run, held)
    run.until(lambda: "engine_restart" in kinds(folder))
    assert time.monotonic() - began < SILENCE_S + MARGIN_S
    run.ok()
    (restart,) = [event for event in read_events(folder) if event["kind"] == "engine_restart"]
    assert "was killed, as it said nothing" in restart["reason"]
    assert "is stopped (state T)" in restart["reason"]
    # What it did when it was stopped: an update may have been under way.
    doing = r"((computing|waiting for) requests|in the state \w+)"
    assert re.search(rf"; engine-\d+: {doing}, no progress for \d+ s", restart["reason"])
    assert not heartbeat.folder_of(folder).exists()
    assert all(path.stat().st_size for path in stacks.folder_of(folder).iterdir())
    check_run(folder, steps=40)
    assert run.left_behind() == []


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        (("--weights.bridge", "disk"), 30),
        (("--lora.rank", "4"), 30),
        (("--weights.bridge", "restart"), 6),
        (("--inference.replicas", "2"), 40),
    ],
    ids=["disk", "lora", "restart", "one of two"],
)
def test_a_frozen_engine_is_outlived_where_a_dead_one_is(command, run_file, tmp_path, options, steps):
    folder = tmp_path / "run"
    run, held = started(command, run_file, folder, *options, "--training.steps", str(steps), rows=steps // 3 + 2)
    run.until(lambda: run.engines())
    freeze(run, held)
    run.ok()
    assert num_steps(folder) == steps
    # Where it is started anew for each version, it may have been in the middle of that.
    assert kinds(folder).count("engine_restart") == 1 or "restart" in options
    assert run.left_behind() == []


@pytest.mark.parametrize("bridge", ["broadcast", "single_copy"])
def test_a_frozen_engine_ends_the_run_as_a_dead_one_does_where_no_file_has_its_weights(
    command, run_file, tmp_path, bridge
):
    folder = tmp_path / "run"
    once = ("--run.max_restarts", "0")
    options = ("--weights.bridge", bridge, "--training.steps", "500", *once)
    run, held = started(command, run_file, folder, *options, rows=100)
    freeze(run, held)
    code, _, err = run.wait()
    report = read_exit(folder)
    assert (code, report.error) == (5, "EngineError"), err
    assert f"no file holds the weights that it had by {bridge}" in err
    assert "was killed, as it said nothing" in err
    assert run.left_behind() == []
