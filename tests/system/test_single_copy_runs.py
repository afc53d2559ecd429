"""Whole runs in which trainer and engine have one copy of the weights, through the real command with real vLLM."""

import json
import os
import re
from pathlib import Path

import pytest

from slipstream.runlog import read_events, read_exit, read_metrics
from slipstream.weights.fingerprint import describe, digest
from slipstream.weights.model_files import read_model_folder

from ..mapped import maps_of
from .conftest import Held
from .test_real_runs import COIN

pytestmark = pytest.mark.engine

BRIDGE = ("--weights.bridge", "single_copy")
PARITY = "parity = true"
"""Rewards that differ, and follow from what was said alone."""


@pytest.mark.full
@pytest.mark.parametrize("staleness", [0, 1])
def test_grpo(command, run_file, tmp_path, staleness):
    folder = tmp_path / "run"
    steps = ("--training.staleness", staleness, "--training.updates_per_batch", 2, "--training.steps", 4)
    run = command("train", run_file, *BRIDGE, *COIN, *steps, "--run.folder", folder)
    run.ok()
    check_run(folder, steps=[0, 1, 2, 3, 4])
    assert run.left_behind() == []


@pytest.mark.full
def test_grpo_over_two_ranks_and_workers(command, run_file, tmp_path):
    folder = tmp_path / "run"
    shape = ("--hidden-size", 64, "--num-layers", 1, "--num-heads", 2, "--num-kv-heads", 1, "--context-length", 64)
    assert command("model", "new", tmp_path / "model", *shape).wait()[0] == 0
    both = ("--training.ranks", 2, "--inference.tensor_parallel_size", 2, "--model.path", tmp_path / "model")
    options = (*BRIDGE, *COIN, *both, "--training.staleness", 1, "--run.folder", folder)
    run = command("train", run_file, *options, "--training.steps", 3)
    run.ok(400)
    check_run(folder, steps=[0, 1, 2, 3])
    assert run.left_behind() == []
    again = command("train", run_file, *options, "--training.steps", 500, "--resume")
    again.until(lambda: read_metrics(folder)[-1]["step"] > 4)
    family = {again.process.pid, *again.children()}
    shared = [inode for pid, inodes in everybody().items() if pid in family for inode in inodes]
    assert sorted(map(shared.count, set(shared))) == [2, 2], "each worker's memory is also one rank's"
    again.process.kill()
    again.wait()
    assert again.left_behind() == []
    assert not {inode for found in everybody().values() for inode in found} & set(shared)
    assert all(row["probe/abs_logprob_diff"] < 0.001 for row in read_metrics(folder))


@pytest.mark.full
def test_sft_whose_engine_stands_still_between_two_evaluations(command, run_file, tmp_path):
    folder = tmp_path / "run"
    options = ("--training.steps", 5, "--evaluation.every", 2, "--run.folder", folder)
    command("sft", run_file.with_name("sft.toml"), *BRIDGE, *options).ok()
    check_run(folder, steps=[0, 2, 4, 5])
    assert [row["step"] for row in read_metrics(folder) if "eval/accuracy" in row] == [0, 2, 4, 5]


@pytest.mark.real_start
@pytest.mark.full
def test_killed_at_any_moment_it_leaves_nothing_and_can_be_resumed(command, run_file, tmp_path):
    folder = tmp_path / "run"
    options = (*BRIDGE, *COIN, "--training.staleness", 1, "--run.checkpoint_every", 1, "--run.folder", folder)
    run = command("train", run_file, *options, "--training.steps", 500)
    run.until(lambda: (folder / "metrics.jsonl").exists() and len(read_metrics(folder)) > 3)
    maps = mappings(run)
    assert len(maps) == 2
    assert len(set(maps.values())) == 1
    named = named_by({run.process.pid, *run.children()})
    run.process.kill()
    run.wait()
    assert run.left_behind() == []
    assert not named & set(os.listdir("/dev/shm"))
    assert not {inode for found in everybody().values() for inode in found} & set(maps.values())
    reached = read_metrics(folder)[-1]["step"]
    command("train", run_file, *options, "--training.steps", reached + 3, "--resume").ok()
    assert read_metrics(folder)[-1]["step"] == reached + 3
    assert all(row["probe/abs_logprob_diff"] < 0.001 for row in read_metrics(folder))


@pytest.mark.full
@pytest.mark.real_start
def test_a_run_whose_engine_is_killed_goes_on_by_itself_and_makes_the_same_steps_again(command, run_file, tmp_path):
    folder = tmp_path / "run"
    # Held in step 5 at the latest, and so killed one or two steps after the checkpoint of step 3.
    held = Held(folder, rows=5, more=PARITY)
    task = (*held.settings, "--evaluation", "false", "--plain")
    every = ("--run.checkpoint_every", 3, "--training.steps", 8)
    run = command("train", run_file, *BRIDGE, *task, *every, "--run.folder", folder)
    run.until(lambda: (folder / "metrics.jsonl").exists() and last_step(folder) >= 4)
    run.until((folder / "checkpoints/step-000003").exists)  # it is written beside training
    run.engines()[0].kill()
    held.go()
    code, out, err = run.wait()
    assert code == 0, err
    report, (restart,) = read_exit(folder), [each for each in read_events(folder) if each["kind"] == "restart"]
    assert (report.status, report.step, report.restarts) == ("finished", 8, 1)
    assert (restart["number"], restart["checkpoint"]) == (1, f"step-{restart['step'] // 3 * 3:06d}")
    assert "the run starts again from checkpoint" in out + err
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    before, after = ({row["step"]: row for row in rows if row["lineage"] == lineage} for lineage in (0, 1))
    both = sorted(before.keys() & after.keys())
    assert both[0] == restart["step"] // 3 * 3
    assert len(both) > 1
    for step in both[1:]:
        for name in ("train/loss", "train/grad_norm", "reward/mean"):
            assert after[step][name] == before[step][name], (step, name)
    digests = {each["version"]: each["digest"] for each in read_events(folder) if each["kind"] == "publish"}
    assert all(digests[f"1.{step}"] == digests[f"0.{step}"] for step in both)
    assert run.left_behind() == []


def last_step(folder):
    return max((row["step"] for row in read_metrics(folder)), default=0)


def mappings(run):
    """The shared weights that the command and its engine have mapped, by process id."""
    family = {run.process.pid, *(engine.pid for engine in run.engines())}
    return {pid: inodes.pop() for pid, inodes in everybody().items() if pid in family}


def named_by(family):
    """Names in shared memory that these processes have mapped."""
    return set(re.findall(r"/dev/shm/(\S+)$", maps_of(family), re.MULTILINE))


def everybody():
    """Inodes of shared weights by the id of each process that maps some."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/maps"):
        try:
            text = path.read_text()
        except OSError:
            continue
        inodes = set(re.findall(r" (\d+) +/memfd:slipstream-weights", text))
        if inodes:
            found[int(path.parent.name)] = inodes
    return found


def check_run(folder, steps):
    """Every version was proved where it is, nothing was copied, and the checkpoint is the version proved last."""
    assert read_exit(folder).status == "finished"
    rows, events = read_metrics(folder), read_events(folder)
    assert [row["step"] for row in rows if "probe/abs_logprob_diff" in row] == steps
    assert all(row.get("probe/abs_logprob_diff", 0) < 0.001 for row in rows)
    published, applied = ([e["digest"] for e in events if e["kind"] == kind] for kind in ("publish", "apply"))
    assert applied == published
    assert len(set(applied)) == len(steps)
    assert all(event["num_bytes"] == 0 for event in events if event["kind"] == "apply")
    assert not (folder / "weights").exists()
    weights = folder / "checkpoints" / f"step-{steps[-1]:06d}" / "weights"
    assert digest(describe(read_model_folder(weights))) == applied[-1]
