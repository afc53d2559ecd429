"""DoRA against PEFT's own code: exports and warm starts; and that the engine's weights are the same.

`test_lora` compares values and gradients."""

import json

import peft
import pytest
import torch
from tests.refusals import refuses
from tests.trainer.adapters import adapted, write
from tests.trainer.plain import logprobs_of
from tests.trainer.steps import advance
from transformers import AutoModelForCausalLM

from slipstream import records
from slipstream.commands.export import export
from slipstream.trainer.checkpoints.checkpoint import CheckpointStore
from slipstream.trainer.learner import score
from slipstream.trainer.model.policy import PolicyModel
from slipstream.trainer.packing import StepBatch
from slipstream.weights.fingerprint import describe

TARGETS = ("q_proj", "v_proj", "down_proj")


@pytest.fixture
def make_dora(model_folder):
    def make(targets=TARGETS, dora=True, **options):
        return adapted(model_folder, targets, dora=dora, **options)

    return make


@pytest.fixture
def group():
    torch.manual_seed(1)
    prompt = list(range(3, 20))
    completions = [torch.randint(3, 90, (9,)).tolist() for _ in range(4)]
    return [records.Sequence(prompt + own, [False] * 17 + [True] * 9, [0.0] * 26) for own in completions]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_fresh_one_is_the_base_exactly_and_its_reference_always(make_dora, model_folder, group, dtype):
    learner = make_dora(("all-linear",), dtype=dtype, random=False)
    base = PolicyModel.load(model_folder, dtype)
    assert describe(learner.model.named_weights()) == describe(base.named_weights())
    wanted = score(base, group, micro_batch_tokens=512).logprobs
    assert all(map(torch.equal, learner.forward(group).logprobs, wanted))
    for _ in range(2):
        advance(learner, StepBatch(group))
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
    advance(learner, StepBatch(group))
    path = CheckpointStore(tmp_path / "checkpoints").save(1, learner, learner.model.folder, {})
    export(path, tmp_path / "merged", merged=True)
    again = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_folder), path / "weights")
    own = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    for name, tensor in again.merge_and_unload().state_dict().items():
        torch.testing.assert_close(own[name], tensor, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dora", [True, False])
def test_the_other_kind_is_refused_with_its_setting(make_dora, tmp_path, dora):
    folder = write(make_dora(dora=dora, random=False), tmp_path / "a")
    assert json.loads((folder / "adapter_config.json").read_text())["use_dora"] is dora
    with refuses("lora.dora"):
        make_dora(path=folder, dora=not dora)
