"""Every recipe through the whole loop, with a scripted engine: several updates, staleness, KL, a function of one's
own."""

import pytest
import torch

from slipstream.config import load_config
from slipstream.config.recipes import RECIPES
from slipstream.errors import ConfigError
from slipstream.launch.prepare import prepare
from slipstream.trainer.model.policy import PolicyModel

SHORT = ("--evaluation", "false", "--training.steps", "2", "--run.save_samples", "1")
TWO_UPDATES = ("--training.updates_per_batch", "2")
OWN = """
def loss(inputs):
    return -inputs.advantages_N * inputs.logprobs_N
def advantage(rewards_S, group_ids_S):
    return 2 * rewards_S - 1
"""


def weights_of(folder):
    return dict(PolicyModel.load(folder, "float32").named_weights())


# Who distills has a teacher: see test_distill.
@pytest.mark.parametrize("kind", [kind for kind in RECIPES if kind != "distill"])
def test_recipes_train(kind, scripted, model):
    scripted.finish(2, *SHORT, *TWO_UPDATES, "--algorithm.kind", kind, "--algorithm.kl_coef", "0.01")
    rows = scripted.metrics[1:]
    for row in rows:
        assert row["train/grad_norm"] > 0
        assert 0 < row["train/effective_sample_size"] <= 1
        assert row["train/ratio_p01"] <= 1 <= row["train/ratio_p99"]
        assert row["mismatch/kl"] < 1e-6
        assert {"train/clip_fraction_low", "train/clip_fraction_high", "train/entropy"} <= row.keys()
    assert all(abs(row["train/kl_reference"]) < 1 for row in rows)
    before, after = weights_of(model), weights_of(scripted.folder / "checkpoints" / "step-000002" / "weights")
    assert any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.quick("sequence*", "gspo*")
@pytest.mark.parametrize(
    "settings",
    [
        ("--algorithm.loss", "policy_gradient", "--algorithm.old_policy", "engine"),
        ("--algorithm.importance_sampling", "sequence_masked", "--algorithm.arguments.clip_dual", "3.0"),
        ("--algorithm.loss", "gspo_token", "--algorithm.entropy_coef", "0.01", "--training.staleness", "1"),
        (
            *("--algorithm.arguments.best_of", "2", "--algorithm.arguments.reward_threshold", "1.0"),
            *("--algorithm.arguments.length_penalty", "0.1"),
        ),
        ("--algorithm.scale_rewards", "batch", "--algorithm.importance_sampling", "masked"),
    ],
    ids=["engine ratio", "sequence mask, dual clip", "gspo token, entropy, stale", "best of, length", "batch, IcePop"],
)
def test_fields_of_their_own_train(settings, scripted):
    report = scripted.run(*SHORT, *TWO_UPDATES, *settings)
    assert (report.status, report.step) == ("finished", 2), scripted.error
    assert all(row["train/grad_norm"] > 0 for row in scripted.metrics[1:])


def test_functions_of_ones_own_train(scripted, run_file):
    run_file.with_name("own.py").write_text(OWN)
    # Paths in a run file are looked for beside it.
    run_file.write_text(
        run_file.read_text().replace(
            'kind = "grpo"', 'kind = "grpo"\nloss = "own.py:loss"\nadvantage = "own.py:advantage"'
        )
    )
    report = scripted.run(*SHORT)
    assert (report.status, report.step) == ("finished", 2), scripted.error
    assert "train/clip_fraction_low" not in scripted.metrics[1]


def test_one_that_does_not_work_is_told_before_anything_starts(scripted, run_file):
    run_file.with_name("own.py").write_text("def loss(inputs):\n    return inputs.rewards_N\n")
    with pytest.raises(ConfigError, match=r"algorithm.loss: .*own.py:loss raised AttributeError"):
        prepare(load_config(run_file, ["--algorithm.loss", str(run_file.with_name("own.py")) + ":loss"]))
