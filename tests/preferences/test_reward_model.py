"""A reward model: loss and gradients against TRL and transformers in float64, its folder, and its scores as rewards."""

import collections
import json
import types

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from slipstream.commands.small_models.tiny_qwen3 import new_model
from slipstream.config import load_config
from slipstream.data.chat_template import ChatTokenizer
from slipstream.data.conversations import Columns
from slipstream.data.readers import Row
from slipstream.envs.rewards import named
from slipstream.errors import ConfigError
from slipstream.records import Message, Task
from slipstream.trainer.critic import RewardModel
from slipstream.trainer.learner import add_gradients, predicted, write_deployable
from slipstream.trainer.model.policy import PolicyModel
from slipstream.trainer.packing import StepBatch, micro_batches
from slipstream_preferences.method import Preferences
from slipstream_preferences.scorer import ModelReward
from slipstream_preferences.settings import PreferencesConfig

PAIRS = [("12+3=", "15", "16"), ("1+1=", "2", "11"), ("7*8=", "56", "5656565656")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return new_model(tmp_path_factory.mktemp("models") / "tiny", hidden_size=48, num_layers=2, intermediate_size=96)


@pytest.fixture
def method():
    return Preferences(PreferencesConfig(loss="reward"))


def sequences(method, folder):
    """Tokens of the pairs, the chosen one first."""
    tokenizer, found = ChatTokenizer(folder), []
    for number, (prompt, chosen, rejected) in enumerate(PAIRS):
        row = Row(f"row {number}", {"prompt": prompt, "chosen": chosen, "rejected": rejected}, folder)
        judged, _ = method.conversation(row, Columns())
        found += [method.tokens(each, tokenizer, "all") for each in (judged, *judged.others)]
    return found


def reward_model(folder):
    """In float64, for which the folder's numbers are exact."""
    torch.manual_seed(0)
    policy = PolicyModel.load(folder, "float32")
    policy.network.double()
    return RewardModel(policy, None)


class Scored:
    """A learner whose model computes without an optimizer."""

    def __init__(self, model):
        self.model = model

    def values(self, given):
        return predicted(self.model, given, None, 64)[0]


@pytest.mark.parametrize("room", [24, 400], ids=["apart", "together"])
def test_loss_and_gradients_are_those_of_trl(room, method, folder, tmp_path):
    reward_trainer = pytest.importorskip("trl.trainer.reward_trainer")
    model, step = reward_model(folder), StepBatch(sequences(method, folder), [1.0, 0.0] * len(PAIRS))
    write_deployable(tmp_path / "reward", model.named_weights(), model.form, folder)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward", dtype=torch.float64)
    assert type(theirs).__name__ == "Qwen3ForSequenceClassification"

    found = method.before_update(step, Scored(model), None)
    objective = method.objective(None)
    add_gradients(model, micro_batches(step, room), objective, objective.counts(step))

    made = object.__new__(reward_trainer.RewardTrainer)
    made.model = made.args = types.SimpleNamespace(training=False, center_rewards_coefficient=None)
    made.accelerator = types.SimpleNamespace(gather=lambda value: value, gather_for_metrics=lambda value: value)
    made._metrics, made._total_train_tokens = {"eval": collections.defaultdict(list)}, 0
    made.aux_loss_enabled = False
    own = [torch.tensor([each.token_ids[:-1]]) for each in step.sequences]
    logits = torch.cat([theirs(ids).logits for ids in (*own[0::2], *own[1::2])])
    inputs = {"attention_mask": torch.ones(len(own), 2)}
    loss = made.compute_loss(lambda **_: types.SimpleNamespace(logits=logits), inputs)
    loss.backward()
    assert found["loss"] == pytest.approx(loss.item(), rel=1e-5)
    # Streams of weights are float32.
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in model.network.named_parameters():
        scale = gradients[name].abs().max()
        torch.testing.assert_close(parameter.grad / scale, gradients[name] / scale, rtol=1e-5, atol=1e-6)


def test_a_reward_is_the_score_of_the_folder(method, folder, tmp_path):
    model, (sequence, *_) = reward_model(folder), sequences(method, folder)
    path = tmp_path / "run/checkpoints/step-000002/weights"
    write_deployable(path, [(name, weight.float()) for name, weight in model.named_weights()], model.form, folder)
    ((score,),) = predicted(model, [sequence], None, 64)
    prompt, chosen, _ = PAIRS[0]
    reward = named([{"reward": f"model:{tmp_path / 'run'}", "weight": 2.0}])
    reward.setup_scoring()
    found = reward(Task("0", (Message("user", prompt),), answer=""), chosen)
    assert found.reward == pytest.approx(2.0 * score.item(), rel=1e-4)
    assert found.metrics == {"reward_model": pytest.approx(score.item(), rel=1e-4)}


@pytest.mark.parametrize(("what", "says"), [("", "no model"), ("tiny", "with 2 labels, and a reward model has one")])
def test_another_model_is_no_reward(what, says, folder, tmp_path):
    with pytest.raises(ConfigError, match=says):
        named(f"model:{folder if what else tmp_path}")


def test_paths_stand_beside_the_run_file(tmp_path):
    (tmp_path / "reward").mkdir()
    (tmp_path / "run.toml").write_text(
        '[model]\npath = "m"\n[environment]\nname = "rows"\n[environment.settings]\npath = "rows.jsonl"\n'
        'reward = ["model:reward", "model:org/name"]\n[algorithm]\nkind = "grpo"\n[training]\nsteps = 1\n'
    )
    found = load_config(tmp_path / "run.toml").config.environment.settings["reward"]
    assert [part["reward"] for part in found] == [f"model:{tmp_path / 'reward'}", "model:org/name"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--preferences.beta", "0.2"), "preferences.beta has no effect under"),
        (("--data.too_long", "truncate"), "cuts the last token"),
        (("--environment.name", "letters.py"), "without answers to evaluate"),
        (("--lora.rank", "4", "--training.ranks", "2"), "training.ranks = 2 cannot save"),
    ],
)
def test_settings_that_do_not_fit(options, says, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        '[model]\npath = "m"\n[data]\npath = "rows.jsonl"\n[algorithm]\nkind = "sft"\n[preferences]\nloss = "reward"\n'
        "[training]\nsteps = 1\n"
    )
    with pytest.raises(ConfigError, match=says):
        load_config(path, options)


def test_models_without_a_class_for_scores_are_refused(method, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nothing"}))
    with pytest.raises(ConfigError, match="a model of type nothing has no class"):
        method.check_tokenizer(types.SimpleNamespace(path=tmp_path))


@pytest.fixture
def saved(method, folder, tmp_path):
    model = reward_model(folder)
    write_deployable(
        tmp_path / "model", [(n, weight.float()) for n, weight in model.named_weights()], model.form, folder
    )
    return tmp_path / "model"


def test_a_damaged_reward_model_is_named_in_the_plan(saved):
    weights = saved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(ConfigError, match=r"model.safetensors is damaged \(.*\): copy it again"):
        ModelReward(str(saved), "environment.reward")


@pytest.mark.parametrize(("shape", "says"), [(None, r"lacks score\.weight: copy"), ((3, 48), "cannot be loaded")])
def test_a_reward_model_computes_with_no_random_weights(shape, says, saved):
    weights = load_file(saved / "model.safetensors")
    del weights["score.weight"]
    save_file(weights if shape is None else weights | {"score.weight": torch.ones(shape)}, saved / "model.safetensors")
    with pytest.raises(ConfigError, match=says):
        ModelReward(str(saved), "environment.reward").setup_scoring()


def test_a_missing_reward_model_is_named_without_asking_the_hub(tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    for name, problem in (("nope", "does not exist"), ("run", "has no checkpoint yet")):
        with pytest.raises(ConfigError, match=f'{name}" {problem}: correct it, or train one first'):
            ModelReward(str(tmp_path / name), "environment.reward")
