"""Whole runs in which trainer and engine have one copy of the weights, through the real command with real vLLM."""

import pytest

from slipstream.runlog import read_events, read_metrics

pytestmark = [pytest.mark.engine, pytest.mark.slow]

OPTIONS = ("--weights.bridge", "single_copy", "--environment.settings", "{coin = true}", "--evaluation", "false")


@pytest.mark.parametrize("staleness", [0, 1])
def test_grpo(command, run_file, tmp_path, staleness):
    folder = tmp_path / "run"
    steps = ("--training.staleness", staleness, "--training.updates_per_batch", 2, "--training.steps", 4)
    run = command("train", run_file, *OPTIONS, *steps, "--run.folder", folder)
    code, _, err = run.wait()
    assert code == 0, err
    rows, events = read_metrics(folder), read_events(folder)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert all(row["probe/abs_logprob_diff"] < 0.001 for row in rows)
    published = [event["digest"] for event in events if event["kind"] == "publish"]
    assert [event["digest"] for event in events if event["kind"] == "apply"] == published
    assert len(set(published)) == 5
    assert all(event["num_bytes"] == 0 for event in events if event["kind"] == "apply")
    assert not (folder / "weights").exists()
    assert run.left_behind() == []
