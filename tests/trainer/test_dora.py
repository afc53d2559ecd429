"""DoRA against PEFT's own code: values, gradients, exports, warm starts; and that the engine's weights are the same."""

import json

import peft
import pytest
import torch
from tests.refusals import refuses
from transformers import AutoModelForCausalLM

from slipstream import records
from slipstream.commands.export import export
from slipstream.trainer.checkpoints.checkpoint import CheckpointStore
from slipstream.trainer.learner import Learner, score
from slipstream.trainer.loss import SFTObjective
from slipstream.trainer.model.policy import PolicyModel
from slipstream.trainer.optim.base import MasterAdamW
from slipstream.trainer.packing import StepBatch
from slipstream.weights.adapter_folder import AdapterConfig, write_adapter_folder
from slipstream.weights.fingerprint import describe

TARGETS = ("q_proj", "v_proj", "down_proj")


@pytest.fixture
def make_dora(model_folder):
    def make(targets=TARGETS, *, dtype="float32", path=None, random=True, dora=True):
        torch.manual_seed(0)
        model = PolicyModel.load(model_folder, dtype)
        adapter = model.add_adapter(AdapterConfig(4, 12.0, targets, str(model_folder), dora=dora), path)
        if random and path is None:
            with torch.no_grad():
                for layer in adapter.layers.values():
                    layer.lora_B.normal_(std=0.1)
                    layer.lora_magnitude.mul_(1 + 0.2 * torch.randn_like(layer.lora_magnitude))
        return Learner(model, MasterAdamW(model.network.named_parameters()), micro_batch_tokens=512)

    return make


@pytest.fixture
def group():
    torch.manual_seed(1)
    prompt = list(range(3, 20))
    completions = [torch.randint(3, 90, (9,)).tolist() for _ in range(4)]
    return [records.Sequence(prompt + own, [False] * 17 + [True] * 9, [0.0] * 26) for own in completions]


def advance(learner, group):
    learner.forward_backward(StepBatch(group), SFTObjective())
    learner.optim_prepare(1e-2)
    learner.optim_commit()


def write(learner, folder):
    write_adapter_folder(folder, learner.model.adapter.named_weights(), learner.model.adapter.config)
    return folder


def logprobs_of(network, sequence):
    ids = torch.tensor([sequence.token_ids])
    found = network(ids).logits[0, :-1].float().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return found[torch.tensor(sequence.mask[1:])]


def test_values_and_gradients_are_those_of_peft(make_dora, model_folder, tmp_path, group, gradients_of):
    learner = make_dora()
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    theirs = peft.PeftModel.from_pretrained(base, write(learner, tmp_path / "a"), is_trainable=True)
    loss = torch.zeros(())
    for sequence, mine in zip(group, learner.forward(group).logprobs, strict=True):
        other = logprobs_of(theirs, sequence)
        assert (mine - other).abs().max() < 1e-5
        loss = loss - other.sum()
    (loss / sum(sequence.num_trainable for sequence in group)).backward()
    learner.forward_backward(StepBatch(group), SFTObjective())
    mine = gradients_of(learner)
    named = {name: p.grad for name, p in theirs.named_parameters() if p.requires_grad}
    assert len(named) == len(mine) == 3 * len(learner.model.adapter.layers)
    for name, gradient in mine.items():
        name = name.replace("lora_magnitude", "lora_magnitude_vector")
        other = named[f"base_model.model.{name}.default.weight"]
        assert (gradient - other).abs().max() < 1e-5 * max(1.0, other.abs().max().item())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_fresh_one_is_the_base_exactly_and_its_reference_always(make_dora, model_folder, group, dtype):
    learner = make_dora(("all-linear",), dtype=dtype, random=False)
    base = PolicyModel.load(model_folder, dtype)
    assert describe(learner.model.named_weights()) == describe(base.named_weights())
    wanted = score(base, group, micro_batch_tokens=512).logprobs
    assert all(map(torch.equal, learner.forward(group).logprobs, wanted))
    for _ in range(2):
        advance(learner, group)
    assert not torch.equal(learner.forward(group).logprobs[0], wanted[0])
    reference = score(learner.model.without_adapter(), group, micro_batch_tokens=512).logprobs
    assert all(map(torch.equal, reference, wanted))
    assert describe(learner.model.base_weights()) == describe(base.named_weights())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merged_it_computes_the_same(make_dora, model_folder, group, dtype):
    """What the engine gets: weights whose log-probabilities are the trainer's."""
    learner = make_dora(dtype=dtype)
    merged = PolicyModel.load(model_folder, dtype)
    merged.network.load_state_dict(dict(learner.model.named_weights()), strict=False)
    for mine, theirs in zip(
        learner.forward(group).logprobs, score(merged, group, micro_batch_tokens=512).logprobs, strict=True
    ):
        assert (mine - theirs).abs().mean() < (1e-5 if dtype == "float32" else 0.05)


def test_an_adapter_made_by_peft_is_continued_and_one_of_ours_merges_as_peft_merges(
    make_dora, model_folder, tmp_path, group
):
    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=list(TARGETS), use_dora=True, init_lora_weights=False)
    theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model_folder), config)
    theirs.save_pretrained(tmp_path / "theirs")
    learner = make_dora(path=tmp_path / "theirs")
    assert (logprobs_of(theirs, group[0]) - learner.forward(group[:1]).logprobs[0]).abs().max() < 1e-5
    advance(learner, group)
    path = CheckpointStore(tmp_path / "checkpoints").save(1, learner, learner.model.folder, {})
    export(path, tmp_path / "merged", merged=True)
    again = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_folder), path / "weights")
    own = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    for name, tensor in again.merge_and_unload().state_dict().items():
        torch.testing.assert_close(own[name], tensor, atol=1e-6, rtol=1e-5)


def test_a_resumed_one_goes_on_bit_for_bit(make_dora, tmp_path, group):
    learner, store = make_dora(), CheckpointStore(tmp_path / "checkpoints")
    advance(learner, group)
    path = store.save(1, learner, learner.model.folder, {})
    resumed = make_dora(random=False)
    store.load(path, resumed)
    for each in (learner, resumed):
        advance(each, group)
    assert describe(learner.model.adapter.named_weights()) == describe(resumed.model.adapter.named_weights())


@pytest.mark.parametrize("dora", [True, False])
def test_the_other_kind_is_refused_with_its_setting(make_dora, tmp_path, dora):
    folder = write(make_dora(dora=dora, random=False), tmp_path / "a")
    assert json.loads((folder / "adapter_config.json").read_text())["use_dora"] is dora
    with refuses("lora.dora"):
        make_dora(path=folder, dora=not dora)
