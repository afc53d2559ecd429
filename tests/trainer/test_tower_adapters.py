"""LoRA on a vision tower and its projector, against PEFT's own code on transformers' own model."""

import peft
import pytest
import torch
from tests.trainer.adapters import adapted as with_adapter
from tests.trainer.adapters import write
from tests.trainer.test_image_rows import FAMILIES, own_loss, save, sequences
from tests.trainer.test_vision_towers import plain

from slipstream.commands.evaluation_target import _targets
from slipstream.commands.export import export
from slipstream.config import RunConfig
from slipstream.errors import ConfigError
from slipstream.launch.build import _rate_of
from slipstream.plan.deployable import Deployable, adapter_config_of, adapts_tower
from slipstream.plan.measure import measure_adapter
from slipstream.trainer.critic import ValueModel
from slipstream.trainer.learner import score
from slipstream.trainer.loss import SFTObjective
from slipstream.trainer.model.policy import PolicyModel
from slipstream.trainer.packing import StepBatch, micro_batches
from slipstream.weights.adapter_folder import AdapterConfig, write_adapter_folder

TOWERS = ("visual", "vision_tower", "multi_modal_projector")
ALL = ("all-linear",)
MERGERS = {"qwen2-vl": "visual.merger.mlp.0", "qwen3-vl": "visual.merger.linear_fc1"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {family: save(tmp_path_factory.mktemp("models") / family, family) for family in FAMILIES}


def adapted(folder, targets=ALL, **options):
    return with_adapter(folder, targets, alpha=8.0, tower=True, **options)


def as_peft(learner, folder, path, **options):
    return peft.PeftModel.from_pretrained(plain(folder), write(learner, path), **options)


def advance(learner, batch):
    loss = learner.forward_backward(StepBatch(batch), SFTObjective())["loss"]
    learner.optim_prepare(1e-2)
    learner.optim_commit()
    return loss


def is_of_tower(name):
    return any(part in name for part in TOWERS)


def settings(folder, targets="all-linear", **training):
    return RunConfig.model_validate(
        {
            "model": {"path": str(folder), "dtype": "float32", "train_tower": True},
            "data": {"path": "none"},
            "algorithm": {"kind": "sft"},
            "lora": {"rank": 4, "target_modules": targets, "plus_ratio": 4.0},
            "training": {"steps": 1, "learning_rate": 1e-3, **training},
        }
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_peft(family, folders, tmp_path, gradients_of):
    folder, batch = folders[family], sequences(folders[family])
    learner = adapted(folder)
    theirs = as_peft(learner, folder, tmp_path / "adapter", is_trainable=True)
    expected = own_loss(theirs, folder, batch)
    expected.backward()
    loss = learner.forward_backward(StepBatch(batch), SFTObjective())["loss"]
    assert loss == pytest.approx(expected.item(), abs=1e-5)
    mine = gradients_of(learner)
    named = {name: p.grad for name, p in theirs.named_parameters() if p.requires_grad}
    assert len(named) == len(mine) == 2 * len(learner.model.adapter.layers)
    assert learner.model.adapter.of_tower == {name for name in learner.model.adapter.layers if is_of_tower(name)}
    assert any(is_of_tower(name) and gradient.abs().max() > 0 for name, gradient in mine.items())
    for name, gradient in mine.items():
        other = named[f"base_model.model.{name}.default.weight"]
        assert (gradient - other).abs().max() < 2e-5 * max(1.0, other.abs().max().item()), name


@pytest.mark.parametrize(("family", "dora"), [*((family, False) for family in FAMILIES), ("qwen3-vl", True)])
def test_what_is_exported_is_what_peft_merges_and_the_loss_falls(family, dora, folders, tmp_path):
    folder, batch = folders[family], sequences(folders[family])
    learner = adapted(folder, random=False, dora=dora)
    losses = [advance(learner, batch) for _ in range(4)]
    assert losses[-1] < losses[0]
    before = dict(learner.model.base_weights())
    moved = {name for name, weight in learner.model.named_weights() if not weight.equal(before[name])}
    assert len(moved) == len(learner.model.adapter.layers)
    assert any(map(is_of_tower, moved))
    theirs = as_peft(learner, folder, tmp_path / "adapter")
    merged = plain(export(tmp_path / "adapter", tmp_path / "merged", merged=True)).state_dict()
    for key, tensor in theirs.merge_and_unload().state_dict().items():
        torch.testing.assert_close(merged[key], tensor, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("family", ["qwen3-vl", "gemma3"])
def test_the_reference_is_the_model_without_the_towers_adapter(family, folders):
    """Also where the features of the same images were computed with the adapter before, and the other way round."""
    folder, batch = folders[family], sequences(folders[family])
    base = score(PolicyModel.load(folder), batch, micro_batch_tokens=512).logprobs
    # Only the tower has an adapter, so that nothing else makes a difference.
    learner = adapted(folder, ("visual.merger.linear_fc2",) if family == "qwen3-vl" else ("fc1", "fc2"))
    reference, plain_model = learner.model.without_adapter(), PolicyModel.load(folder)
    (row,) = micro_batches(StepBatch(batch), 512)
    assert reference.embed(row).embeds_TD.equal(plain_model.embed(row).embeds_TD)
    assert not learner.model.embed(row).embeds_TD.equal(plain_model.embed(row).embeds_TD)
    for _ in range(2):
        ours = learner.forward(batch).logprobs
        without = score(reference, batch, micro_batch_tokens=512).logprobs
        advance(learner, batch)
        for sequence, mine, theirs, expected in zip(batch, ours, without, base, strict=True):
            assert theirs.equal(expected)
            assert mine.equal(expected) == (not sequence.media)


@pytest.mark.parametrize("family", MERGERS)
def test_chosen_layers(family, folders):
    learner = adapted(folders[family], ("q_proj", MERGERS[family]))
    layers = learner.model.adapter.layers
    assert len([name for name in layers if name.endswith("q_proj")]) == 2
    assert [name for name in layers if is_of_tower(name)] == [f"model.{MERGERS[family]}"]
    assert learner.model.adapter.of_tower == {f"model.{MERGERS[family]}"}


@pytest.mark.parametrize("targets", [ALL, ("proj", "0")])
def test_targets_are_spelled_out_where_others_have_the_names(folders, targets):
    """The patch embedding is called `proj` too, and a layer of the merger `0`, as the first decoder layer."""
    adapter = adapted(folders["qwen2-vl"], targets).model.adapter
    assert {"attn.proj", "mlp.0"} <= set(adapter.config.target_modules)
    assert not {"proj", "0"} & set(adapter.config.target_modules)
    again = adapted(folders["qwen2-vl"], adapter.config.target_modules).model.adapter
    assert again.layers.keys() == adapter.layers.keys()
    assert again.config == adapter.config


@pytest.mark.parametrize("family", FAMILIES)
def test_the_plan_counts_what_is_trained(family, folders):
    layers = adapted(folders[family]).model.adapter.layers
    facts = measure_adapter(settings(folders[family]))
    assert facts.num_parameters == sum(layer.lora_A.numel() + layer.lora_B.numel() for layer in layers.values())
    decoding = [layer for name, layer in layers.items() if not is_of_tower(name)]
    assert facts.num_outputs == sum(4 + layer.out_features for layer in (each.base_layer for each in decoding))


def test_a_tower_of_which_no_layer_is_named_is_refused(folders):
    with pytest.raises(ConfigError, match="names no layer of a vision tower"):
        measure_adapter(settings(folders["qwen3-vl"], ["q_proj", "v_proj"]))
    with pytest.raises(ConfigError, match="no linear layer of Qwen3VLForConditionalGeneration that is trained has"):
        measure_adapter(settings(folders["qwen3-vl"], ["patch_embed"]))


def test_whether_an_adapter_reaches_into_a_tower(folders, model_folder):
    layers = list(adapted(folders["gemma3"]).model.adapter.layers)
    assert adapts_tower(str(folders["gemma3"]), layers)
    assert not adapts_tower(str(folders["gemma3"]), [name for name in layers if not is_of_tower(name)])
    assert not adapts_tower(str(model_folder), layers)


def test_a_tower_that_vllm_does_not_find_is_served_merged(folders, tmp_path):
    for family in ("gemma3", "qwen3-vl"):
        adapter = adapted(folders[family]).model.adapter
        write_adapter_folder(tmp_path / family, adapter.named_weights(), adapter.config)
    found = [Deployable(kind, str(folders[kind]), tmp_path / kind) for kind in ("qwen3-vl", "gemma3")]
    assert adapter_config_of(found[0]).with_tower
    with pytest.raises(ConfigError, match="vision tower of Gemma3ForConditionalGeneration, for which vLLM has other"):
        adapter_config_of(found[1])


@pytest.mark.parametrize("with_tower", [True, False])
def test_an_adapter_to_start_from_says_whether_the_tower_is_trained(with_tower, folders, tmp_path):
    folder = folders["qwen3-vl"]
    model = PolicyModel.load(folder, train_tower=with_tower)
    adapter = model.add_adapter(AdapterConfig(4, 32.0, ALL, str(folder), with_tower=with_tower))
    write_adapter_folder(tmp_path / "a", adapter.named_weights(), adapter.config)
    config = settings(folder)
    config = config.model_copy(update={"lora": config.lora.model_copy(update={"path": str(tmp_path / "a")})})
    for trained in (True, False):
        asked = config.model_copy(update={"model": config.model.model_copy(update={"train_tower": trained})})
        if trained == with_tower:
            assert measure_adapter(asked).num_parameters == adapter.num_parameters
        else:
            said = "has layers of a .* model.train_tower = true" if with_tower else "has no layers .* = false"
            with pytest.raises(ConfigError, match=said):
                measure_adapter(asked)


def test_a_layer_of_a_frozen_tower_is_told(folders):
    config = settings(folders["qwen2-vl"], ["q_proj", "attn.qkv"])
    frozen = config.model_copy(update={"model": config.model.model_copy(update={"train_tower": False})})
    with pytest.raises(ConfigError, match=r'"attn.qkv", a layer of the vision tower, which is frozen: set'):
        measure_adapter(frozen)


def test_names_of_peft_that_only_excluded_layers_have_are_left_out():
    assert _targets(("fc1", "q_proj"), ("model.layers.0.self_attn.q_proj",)) == ("q_proj",)
    assert _targets(("a", "mlp.0"), ("visual.mlp.0", "x.a")) == ("a", "mlp.0")
    assert _targets((".*q_proj",), ("model.layers.0.self_attn.q_proj",)) == ("q_proj",)


def test_rates_of_tower_and_second_matrix_multiply(folders):
    learner = adapted(folders["qwen3-vl"])
    rate_of = _rate_of(settings(folders["qwen3-vl"], tower_learning_rate=5e-4), learner.model.network)
    rates = {(is_of_tower(name), name[-1]): rate_of(name) for name in learner.optimizer.masters()}
    assert rates == {(False, "A"): 1.0, (False, "B"): 4.0, (True, "A"): 0.5, (True, "B"): 2.0}
    critic = ValueModel(PolicyModel.load(folders["qwen3-vl"], train_tower=True))
    of_critic = _rate_of(settings(folders["qwen3-vl"], tower_learning_rate=5e-4), critic.network)
    assert (of_critic("value_head.weight"), of_critic("model.visual.merger.norm.weight")) == (1.0, 0.5)
