"""Whole runs with `weights.delta`, through the real command with real vLLM."""

import pytest

from slipstream.commands.verify import verify
from slipstream.runlog import read_events, read_exit, read_metrics
from slipstream.weights.fingerprint import describe, digest
from slipstream.weights.model_files import read_model_folder

pytestmark = pytest.mark.engine

WITHOUT_EVALUATION = ("--evaluation", "false", "--model.dtype", "bfloat16")
COIN = ("--environment.settings", "{coin = true}", *WITHOUT_EVALUATION)
SLOWLY = ("--weights.delta", "true", "--training.learning_rate", 1e-5)


@pytest.mark.full
@pytest.mark.parametrize(("bridge", "staleness"), [("disk", 0), ("broadcast", 1)])
def test_grpo(command, run_file, tmp_path, bridge, staleness):
    folder = tmp_path / "run"
    options = ("--weights.bridge", bridge, "--training.staleness", staleness, "--training.steps", 4)
    run = command("train", run_file, *COIN, *SLOWLY, *options, "--run.folder", folder)
    run.ok()
    assert check_run(folder, steps=4) == [0]
    left = [event["problem"] for event in read_events(folder) if event["kind"] == "weight_group_left"]
    assert left == [""] * (bridge == "broadcast"), "the engine left before the trainer ended the group"
    assert run.left_behind() == []
    assert [verdict for verdict in verify(folder) if verdict.problems] == []
    # Resumed, another engine has to be given everything first.
    more = ("--training.steps", 6, "--resume", "--run.folder", folder)
    command("train", run_file, *COIN, *SLOWLY, *options[:4], *more).ok()
    published = [event for event in read_events(folder) if event["kind"] == "publish"]
    assert [(e["version"], e.get("delta_of")) for e in published[5:]] == [("1.4", None), ("1.5", "1.4"), ("1.6", "1.5")]


def check_run(folder, steps):
    """Every version was proved, and the checkpoint is the one proved last. The steps whose versions came whole."""
    assert read_exit(folder).status == "finished"
    rows, events = read_metrics(folder), read_events(folder)
    assert [row["step"] for row in rows] == list(range(steps + 1))
    assert max(row["probe/abs_logprob_diff"] for row in rows) <= 0.02
    published, applied = ([e for e in events if e["kind"] == kind] for kind in ("publish", "apply"))
    assert [(e["version"], e["digest"]) for e in applied] == [(e["version"], e["digest"]) for e in published]
    assert all(e.get("delta_of") in (None, f"0.{step - 1}") for step, e in enumerate(published))
    whole = [step for step, event in enumerate(published) if "delta_of" not in event]
    deltas = [row for row in rows if row["step"] not in whole]
    assert 0 < max(row["update/bytes"] for row in deltas) < rows[0]["update/bytes"] / 2
    assert all(0 < row["update/changed_fraction"] < 1 / 3 for row in deltas)
    weights = folder / "checkpoints" / f"step-{steps:06d}" / "weights"
    assert digest(describe(read_model_folder(weights))) == applied[-1]["digest"]
    return whole
