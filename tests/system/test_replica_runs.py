"""Whole runs with two engines, through the real command with real vLLM: each bridge, and one engine that is killed."""

import json
import signal

import pytest

from slipstream.runlog import read_events, read_metrics, read_samples

from .conftest import kinds
from .test_real_runs import COIN, ENDLESS, check_interrupted, num_steps

pytestmark = pytest.mark.engine

TWO = ("--inference.replicas", "2", "--run.threads", "2", "--run.save_samples", "16")


def train(command, run_file, folder, *options):
    run = command("train", run_file, *COIN, *TWO, *options, "--run.folder", folder)
    run.ok(400)
    assert run.left_behind() == []


def check_versions(folder, staleness=0):
    """Within a rollout versions only rise, and none is older than allowed."""
    for sample in read_samples(folder):
        for sequence in sample["sequences"]:
            steps = [int(name.split(".")[1]) for _, name in sequence["versions"]]
            assert steps == sorted(steps)
            assert sample["step"] - staleness <= steps[0]
            assert steps[-1] <= sample["step"]


@pytest.mark.full
def test_divided_over_two_workers_each_with_deltas_over_one_group(command, run_file, tmp_path):
    options = ("--inference.tensor_parallel_size", 2, "--weights.bridge", "broadcast", "--weights.delta", "true")
    shape = ("--hidden-size", 64, "--num-layers", 1, "--num-heads", 2, "--num-kv-heads", 2, "--context-length", 64)
    assert command("model", "new", tmp_path / "model", *shape).wait()[0] == 0
    folder, slowly = tmp_path / "run", ("--model.dtype", "bfloat16", "--training.learning_rate", 1e-5)
    train(command, run_file, folder, "--training.steps", 2, *options, *slowly, "--model.path", tmp_path / "model")
    published = [event for event in read_events(folder) if event["kind"] == "publish"]
    assert [event.get("delta_of") for event in published] == [None, "0.0", "0.1"]
    check_versions(folder)


DELTA = ("--weights.delta", "true", "--model.dtype", "bfloat16", "--training.learning_rate", 1e-5)
MANY = ("--evaluation.num_tasks", 64, "--evaluation.samples_per_task", 16, "--evaluation.every", 4)


@pytest.mark.full
@pytest.mark.parametrize("bridge", [(), DELTA, ("--lora.rank", 4)], ids=["disk", "delta", "lora"])
def test_one_of_two_evaluates_while_steps_are_made(command, run_file, tmp_path, bridge):
    folder = tmp_path / "run"
    options = ("--environment.settings", "{coin = true}", "--training.steps", 8, "--training.staleness", 1, *MANY)
    run = command("train", run_file, *TWO, *options, *bridge, "--run.folder", folder)
    run.ok(400)
    assert run.left_behind() == []
    check_versions(folder, staleness=1)
    published = [event.get("delta_of") for event in read_events(folder) if event["kind"] == "publish"]
    assert any(published) == (bridge is DELTA)
    later = {row["step"]: row.get("eval/steps_later") for row in read_metrics(folder) if "eval/accuracy" in row}
    assert (later.keys(), later[8]) == ({0, 4, 8}, None)
    assert max(later[0], later[4]) >= 1, "the trainer went on"
    for sample in read_samples(folder):
        if sample.get("split") == "eval":
            labels = {name for sequence in sample["sequences"] for _, name in sequence["versions"]}
            assert labels == {f"0.{sample['step']}"}


@pytest.mark.real_start
@pytest.mark.full
@pytest.mark.parametrize("bridge", ["disk", "broadcast"])
def test_one_of_two_is_killed(command, run_file, tmp_path, bridge):
    folder = tmp_path / "run"
    run = command("train", run_file, *COIN, *TWO, *ENDLESS, "--weights.bridge", bridge, "--run.folder", folder)
    run.until(lambda: num_steps(folder) >= 2)
    out = command("verify", folder, "--json").ok()
    live = [verdict["what"] for verdict in json.loads(out) if verdict["what"].startswith("live engine")]
    assert live == ["live engine 0", "live engine 1"]
    before = num_steps(folder)
    run.engines()[0].kill()
    run.until(lambda: kinds(folder).count("engine_restart") == 1)
    again = num_steps(folder)
    run.until(lambda: read_metrics(folder)[-1].get("replica_0/requests", 0) > 0 and num_steps(folder) > again + 2)
    run.process.send_signal(signal.SIGINT)
    check_interrupted(run, folder)
    rows = read_metrics(folder)
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert len(rows) > before
    assert {row["rollout/num"] for row in rows[1:]} == {16.0}
    # An update may be the first to find it dead.
    assert kinds(folder).count("replica_lost") <= 1
    check_versions(folder)
