"""A signal to every process of a run, as systemd and Slurm send it: the trainer alone answers it, maybe last. And a
run that stands still as a whole, as after Ctrl-Z or while a laptop sleeps."""

import contextlib
import os
import signal
import time

import pytest

from slipstream.runlog import read_events, read_exit, read_metrics
from slipstream.runlog.ledger import balance
from slipstream.trainer.checkpoints.checkpoint import CheckpointStore

from .test_real_runs import ENDLESS, num_steps

pytestmark = pytest.mark.engine
TERM, USR1 = signal.SIGTERM, signal.SIGUSR1
SLOW = ("--environment.settings", "{coin = true, pause = 0.05}", "--evaluation", "false")
"""The trainer waits for rollouts nearly all the time."""


def signal_all(run, number):
    """Signal each process of the run, first all but trainer and supervisor; returns how many they are."""
    firsts = {run.process.pid, *(each.pid for each in run.running("slipstream.cli"))}
    others = {run.process.pid, *run.children()} - firsts
    for pids, pause_s in ((others, 1.5), (firsts, 0.0)):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(pause_s)
    return len(others)


@pytest.mark.full
@pytest.mark.parametrize(
    ("streams", "number", "options"),
    [
        ("files", TERM, ()),
        ("memory", TERM, ("--weights.bridge", "single_copy")),
        ("files", USR1, ("--run.orchestrators", "2")),
        ("memory", USR1, ("--weights.bridge", "disk")),
        ("memory", TERM, ("--training.ranks", "2")),
    ],
)
def test_the_last_step_is_saved_and_the_run_resumes(command, run_file, tmp_path, streams, number, options):
    folder = tmp_path / "run"
    settings = ("--run.streams", streams, "--run.checkpoint_every", "100000", *options, "--run.folder", folder)
    run = command("train", run_file, *SLOW, *ENDLESS, *settings)
    run.until(lambda: num_steps(folder) >= 2)
    assert signal_all(run, number) >= 3, "engine, guard and worker"
    last = check_saved(run, folder)
    again = command("train", run_file, *SLOW, *settings, "--training.steps", last + 2, "--resume")
    again.ok()
    assert read_exit(folder).step == last + 2
    assert [row["step"] for row in read_metrics(folder)] == list(range(last + 3))
    assert balance(folder).num_open == 0
    assert again.left_behind() == []


STANDS_S = 75.0
"""Longer than every bound within which one stopped process among running ones is found (docs/runs.md)."""


@pytest.mark.full
@pytest.mark.parametrize("options", [(), ("--run.streams", "files")])
def test_while_a_whole_run_stands_still_nobody_is_blamed(command, run_file, tmp_path, options):
    folder = tmp_path / "run"
    settings = (*options, "--run.checkpoint_every", "100000", "--run.folder", folder)
    run = command("train", run_file, *SLOW, *ENDLESS, *settings)
    run.until(lambda: num_steps(folder) >= 2)
    pids = [run.process.pid, *run.children()]
    for number, pause_s in ((signal.SIGSTOP, STANDS_S), (signal.SIGCONT, 0.0)):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(pause_s)
    reached = num_steps(folder)
    run.until(lambda: num_steps(folder) >= reached + 3)
    run.process.send_signal(signal.SIGINT)
    check_saved(run, folder)
    assert {"restart", "engine_restart", "stacks"}.isdisjoint(event["kind"] for event in read_events(folder))
    rows = read_metrics(folder)
    lost = {name: row[name] for row in rows for name in row if name.startswith(("dropped/", "retry/"))}
    assert lost == {}


def check_saved(run, folder):
    """The run was stopped, and nothing of it is lost; returns its last step."""
    code, _, err = run.wait()
    assert code == 130, err
    report = read_exit(folder)
    assert report.status == "interrupted"
    assert [event for event in read_events(folder) if event["kind"] in ("restart", "engine_restart")] == []
    last = read_metrics(folder)[-1]["step"]
    assert CheckpointStore(folder / "checkpoints").latest().name == f"step-{last:06d}"
    assert report.step == last
    assert run.left_behind() == []
    return last
