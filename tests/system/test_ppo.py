"""PPO with a critic through the whole loop: with a scripted engine, and with vLLM that shares the policy's weights."""

import pytest
import torch
from safetensors.torch import load_file

from slipstream.config import load_config
from slipstream.errors import ConfigError
from slipstream.launch.prepare import prepare
from slipstream.launch.run import train
from slipstream.runlog import read_events, read_metrics
from slipstream.trainer.model.policy import PolicyModel
from slipstream.view import make_view
from slipstream.weights.fingerprint import describe
from slipstream.weights.model_files import read_model_folder

from .conftest import learned

PPO = ("--algorithm.kind", "ppo", "--evaluation", "false")
CHECKPOINT = "checkpoints/step-000004"


def state_of(folder):
    return load_file(folder / CHECKPOINT / "state" / "critic" / "learner.safetensors")


@pytest.mark.parametrize(
    "more",
    [(), pytest.param(("--lora.rank", "4", "--weights.bridge", "disk"), marks=pytest.mark.full)],
    ids=["full", "lora"],
)
def test_a_resumed_run_is_bit_for_bit_that_of_nobodys_interruption(more, scripted, tmp_path):
    options = (*PPO, *more, "--algorithm.kl_coef", "0.01", "--training.updates_per_batch", "2")
    undisturbed = scripted.folder
    assert scripted.run(*options, "--training.steps", "4").status == "finished"
    scripted.folder = tmp_path / "again"
    scripted.run(*options, "--training.steps", "2")
    scripted.run(*options, "--training.steps", "4", "--run.folder", str(scripted.folder), resume=True)
    ours, theirs = state_of(undisturbed), state_of(scripted.folder)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    name = "adapter_model.safetensors" if more else "model.safetensors"
    ends = [load_file(folder / CHECKPOINT / "weights" / name) for folder in (undisturbed, scripted.folder)]
    assert describe(ends[0].items()) == describe(ends[1].items())
    assert learned(undisturbed)[3:] == learned(scripted.folder)[3:]
    assert all(row["value/loss"] > 0 and row["train/grad_norm"] > 0 for row in scripted.metrics[1:])
    assert not list((undisturbed / CHECKPOINT / "weights").glob("*value*"))


def test_a_checkpoint_without_a_critic_is_refused_before_anything_starts(scripted, run_file):
    scripted.run("--training.steps", "1")
    before = read_events(scripted.folder)
    prepared = prepare(load_config(run_file, (*PPO, "--training.steps", "2")))
    with pytest.raises(ConfigError, match="has no critic, and this run's advantages need one"):
        train(prepared, scripted.folder, make_view("none"), resume=True)
    assert read_events(scripted.folder) == before


def test_in_its_warm_up_the_policy_stays_as_it_is(scripted, model):
    report = scripted.run(*PPO, "--training.steps", "4", "--critic.warmup_steps", "2", "--run.checkpoint_every", "1",
                          "--run.keep_checkpoints", "4", "--training.staleness", "1")  # fmt: skip
    assert (report.status, report.step) == ("finished", 4), scripted.error
    warm, trained = scripted.metrics[1:3], scripted.metrics[3:]
    assert all("train/grad_norm" not in row and row["value/warmup"] == 1.0 for row in warm)
    assert all(row["train/grad_norm"] > 0 and "value/warmup" not in row for row in trained)
    assert all(row["value/loss"] > 0 for row in scripted.metrics[1:])
    start = dict(PolicyModel.load(model, "float32").named_weights())
    ends = [dict(read_model_folder(scripted.folder / f"checkpoints/step-00000{step}/weights")) for step in (2, 4)]
    assert all(torch.equal(start[name], ends[0][name]) for name in start)
    assert any(not torch.equal(start[name], ends[1][name]) for name in start)


@pytest.mark.full
def test_the_critic_learns_what_the_letters_are_worth(scripted):
    options = ("--training.steps", "30", "--critic.learning_rate", "0.01", "--training.learning_rate", "1e-6")
    assert scripted.run(*PPO, *options, "--critic.gae_lambda", "1.0").status == "finished"
    # "a" is right: before the letter half of the reward is to come, after it all or nothing.
    rows = scripted.metrics[1:]
    assert rows[0]["value/mean"] == 0.0
    assert max(row["value/explained_variance"] for row in rows[-5:]) > 0.3


@pytest.mark.engine
@pytest.mark.full
def test_the_critic_has_weights_of_its_own_where_the_policy_shares_the_engines(command, run_file, tmp_path):
    coin = ("--environment.settings", "{coin = true}", "--run.folder", tmp_path / "run")
    more = ("--weights.bridge", "single_copy", "--training.staleness", 1, "--critic.warmup_steps", 1)
    command("train", run_file, *PPO, *coin, *more).ok()
    rows = read_metrics(tmp_path / "run")
    assert all(row["probe/abs_logprob_diff"] < 0.001 for row in rows)
    assert all(row["value/loss"] > 0 for row in rows[1:])
