"""What the plan says of models that are not the common kind."""

import dataclasses
import json
import re

import pytest
import torch
from safetensors.torch import save_file

from slipstream.config import ModelConfig, with_values
from slipstream.plan import make_plan
from slipstream.plan.measure import measure_adapter, read_model, with_scores

from .test_facts import SHAPE
from .test_plan import GRPO, LORA, SFT, SFT_DATA, facts, note, plan, reasons


def test_the_plan_says_which_of_two_sets_of_rotary_factors_is_trained():
    for length, says in ((256, "is within it.*short factors.*within it, too"), (257, "is above it.*long factors")):
        made = plan({"inference.max_model_len": length}, original_context=256)
        told = note(made, "original context")
        assert told.value == 256
        assert re.search(says, told.how)
    assert "original context" not in {each.name for each in plan().notes}


def test_under_sft_the_longest_conversation_decides_the_rotary_factors():
    for original, evaluation, length in ((85, None, 90), (85, SFT.evaluation, 96), (0, SFT.evaluation, 80)):
        measured = dataclasses.replace(facts(original_context=original), data=SFT_DATA)
        made = make_plan(SFT.model_copy(update={"evaluation": evaluation}), measured)
        assert made.config.inference.max_model_len == length
        assert not made.warnings
    measured = dataclasses.replace(facts(original_context=85), data=SFT_DATA)
    (warning,) = make_plan(with_values(SFT, {"inference.max_model_len": 85}), measured).warnings
    assert "conversations of up to 90 tokens" in warning


@pytest.mark.parametrize(
    ("rotary", "original"),
    [
        ({"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 64}, 64),
        ({"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 32}}, 32),
        ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}, "other": {"rope_type": "default"}}}, 512),
        ({"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 32}}, 0),
        ({"rope_scaling": None}, 0),
    ],
)
def test_the_original_context_and_the_rotary_kind_are_read(rotary, original, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | rotary))
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors")  # or they are counted in the network
    found = read_model(str(tmp_path))
    assert found.original_context == original
    kinds = ("su", "longrope", "yarn")
    assert found.rotary == next((kind for kind in kinds if f'"{kind}"' in json.dumps(rotary)), "default")


EXPERTS = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


def test_what_no_adapter_can_reach_is_counted_and_said(tmp_path):
    import transformers

    network = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**EXPERTS))
    network.save_pretrained(tmp_path)
    lora = LORA.model_copy(update={"model": ModelConfig(path=str(tmp_path))})
    adapter = measure_adapter(lora)
    of_experts = {name: p.numel() for name, p in network.named_parameters() if ".mlp." in name}
    assert adapter.num_unreached == sum(of_experts.values())
    assert adapter.target_modules == ("k_proj", "o_proj", "q_proj", "v_proj")
    model = read_model(str(tmp_path))
    made = make_plan(lora, dataclasses.replace(facts(), model=model, adapter=adapter))
    (warning,) = made.warnings
    left = r"leaves mlp\.experts\.down_proj, mlp\.experts\.gate_up_proj, mlp\.gate\.weight as they are"
    assert re.search(left, warning)
    assert f"{adapter.num_unreached:,} of the model's {model.num_parameters:,}" in warning
    assert note(made, "parameters that LoRA cannot reach").value == adapter.num_unreached
    assert "and so not mlp.experts.down_proj" in reasons(made)["lora.target_modules"]


@pytest.mark.parametrize(("cap", "packing", "scores"), [(50.0, False, "capped"), (50.0, True, ""), (None, False, "")])
def test_attention_that_makes_a_number_of_every_two_tokens_is_counted(cap, packing, scores, tmp_path):
    import transformers

    shape = SHAPE | {"attn_logit_softcapping": cap}
    transformers.Gemma2Config(**shape, architectures=["Gemma2ForCausalLM"]).save_pretrained(tmp_path)
    tokens = 512
    settings = {"training.packing": packing, "training.micro_batch_tokens": tokens}
    config = with_values(GRPO, {"model.path": str(tmp_path), **settings})
    measured = facts(max_prompt_tokens=400)
    model = with_scores(config, measured.model)
    assert model.scores == scores
    without, made = (make_plan(config, dataclasses.replace(measured, model=each)) for each in (measured.model, model))
    # Its probability and what is capped, in every layer, and a score and its gradient, all float32.
    each = made.config.inference.max_model_len * model.num_heads * (model.num_layers * 8 + 8)
    assert made.trainer_bytes - without.trainer_bytes == (tokens * each if scores else 0)
