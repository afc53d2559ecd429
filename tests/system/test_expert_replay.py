"""A whole run of a mixture: the engine's choices of experts reach the trainer, the kept batches and their replay."""

import json

import pytest

from slipstream.config import load_config
from slipstream.runlog import read_metrics
from slipstream.runlog.batches import read_batch

from ..engine.mixtures import close_choices

STEPS = ("--training.steps", "3", "--training.staleness", "1", "--run.streams", "files", "--sampling.max_tokens", "16")


@pytest.mark.full
@pytest.mark.engine
def test_a_run_trains_on_the_engines_choices(command, run_file, tmp_path):
    model, folder = close_choices(tmp_path / "mixture"), tmp_path / "run"
    # A new model never says the letter: rewards that alternate give it something to learn from.
    coin = ("--environment.settings", "{coin = true}", "--model.path", model, "--model.dtype", "bfloat16")
    kept = ("--run.keep_batches", "3", "--evaluation", "false", "--training.learning_rate", "1e-5")
    command("train", run_file, *coin, *kept, *STEPS, "--run.folder", folder).ok()
    assert load_config(folder / "resolved.toml").config.model.replay_experts is True, "by default"
    rows = read_metrics(folder)
    assert all(0.0 < row["mismatch/experts_differ"] < 0.15 for row in rows[1:])
    batch, _ = read_batch(folder, 2)
    for rollout in batch.rollouts:
        (sequence,) = rollout.sequences
        assert len(sequence.experts) == len(sequence) - 1
    out = command("replay", folder, 2, "--json").ok()
    found = json.loads(out)
    assert found["is_exact"]
    assert found["metrics"]["mismatch/experts_differ"]["replayed"] == rows[3]["mismatch/experts_differ"]
