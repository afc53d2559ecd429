"""The output head and the residual stream in float32 on both sides: engine and trainer come nearer to one another."""

import pytest
import torch
import transformers

from slipstream.commands.small_models.tiny_qwen3 import new_model, new_tokenizer
from slipstream.inference.plugin.arguments import checked_head, engine_arguments
from slipstream.plan.derive import CLOSER
from slipstream.records import SamplingParams
from slipstream.trainer.model.policy import PolicyModel
from slipstream.weights.model_files import read_model_folder, write_model_folder

from .conftest import differences, settings_for, start

SAMPLING = SamplingParams(max_tokens=32, temperature=1.0)


def compared(model, folder, settings, *, dtype="bfloat16", patch="", **options):
    """Means and maxima of the differences between engine and trainer, without and with these settings on both sides."""
    found = []
    for is_on in (False, True):
        chosen = options | dict.fromkeys(settings, is_on)
        policy = PolicyModel.load(model, dtype, **chosen)
        with start(model, folder / f"engine-{is_on}", dtype, **chosen) as live:
            assert (patch in live.call(live.engine.wait_ready()).patches) is is_on
            values = differences(live, policy, SAMPLING)
        found.append((values.mean().item(), values.max().item()))
    print(found)
    return found


@pytest.mark.engine
@pytest.mark.full
def test_the_difference_falls(tmp_path):
    """In a model made for it: one hidden channel is large and the same for every token, so that it is in each logit,
    where it costs bfloat16 its precision, and in no log-probability."""
    folder = new_model(tmp_path / "new", hidden_size=64, num_layers=1, seed=3)
    weights = dict(read_model_folder(folder))
    for name, tensor in weights.items():
        if "embed_tokens" in name or "lm_head" in name:
            tensor[:, 0] = 1.0
    write_model_folder(tmp_path / "model", weights.items(), folder)
    without, with_it = compared(tmp_path / "model", tmp_path, ["fp32_head"], patch="fp32_head")
    assert all(one < 0.5 * other for one, other in zip(with_it, without, strict=True))


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
SUMS = {"Qwen3": {}, "Llama": {}, "Mistral": {}, "Qwen2": {}, "Gemma3": {}, "Qwen3Moe": EXPERTS}
SUMS["Qwen2Moe"] = EXPERTS | {"shared_expert_intermediate_size": 48}


def rounding_sums(folder, kind):
    """A model of many layers that add little to the embeddings, so that the sums are what rounds."""
    torch.manual_seed(0)
    tokenizer = new_tokenizer("char")
    config = transformers.Gemma3TextConfig if kind == "Gemma3" else getattr(transformers, f"{kind}Config")
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "max_position_embeddings": 512}
    tied = {} if kind == "Gemma3" else {"tie_word_embeddings": False}
    made = config(vocab_size=len(tokenizer), **shape, **heads, **ends, **tied, **SUMS[kind])
    network = getattr(transformers, f"{kind}ForCausalLM")(made)
    for name, parameter in network.named_parameters():
        if "norm" not in name:
            adds = "o_proj" in name or "down_proj" in name
            embeds = "embed" in name and kind != "Gemma3"  # which multiplies them by 8
            torch.nn.init.normal_(parameter, std=0.02 if adds else 1.0 if embeds else 0.12)
        elif kind == "Gemma3" and name.endswith(
            ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")
        ):
            torch.nn.init.constant_(parameter, -0.97)  # scales by 0.03 what a layer adds
    network.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_the_architectures_of_the_default_are_those_that_are_tested():
    assert {f"{kind}ForCausalLM" for kind in SUMS} == CLOSER


@pytest.mark.full
@pytest.mark.engine
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.full] if kind != "Qwen3" else []) for kind in SUMS]
)
def test_layers_add_up_in_float32_on_both_sides(tmp_path, kind):
    folder = rounding_sums(tmp_path / "model", kind)
    without, with_it = compared(folder, tmp_path, ["fp32_residual"], patch="fp32_residual", fp32_head=True)
    assert with_it[0] < 0.75 * without[0]


@pytest.mark.engine
@pytest.mark.full
def test_float16_brings_them_closer_than_bfloat16(tmp_path):
    found, folder = {}, new_model(tmp_path / "model", hidden_size=64, num_layers=4, seed=3)
    for dtype in ("bfloat16", "float16"):
        with start(folder, tmp_path / f"engine-{dtype}", dtype) as live:
            found[dtype] = differences(live, PolicyModel.load(folder, dtype), SAMPLING)
    print({dtype: values.mean().item() for dtype, values in found.items()})
    assert found["float16"].mean() < 0.25 * found["bfloat16"].mean()


def test_an_engine_that_computes_it_otherwise_does_not_start():
    assert checked_head([["float32"], ["float32"]]) == "fp32_head"
    for found in ([["bfloat16"]], [["float32"], ["?"]], [[]]):
        with pytest.raises(RuntimeError, match=r"model\.fp32_head = true asks for logits in float32.*set it to false"):
            checked_head(found)


def test_overrides_of_the_users_stay(tmp_path):
    settings = settings_for(tmp_path, fp32_head=True, options={"hf_overrides": {"rope_theta": 1.0}})
    assert engine_arguments(settings)["hf_overrides"] == {"rope_theta": 1.0, "head_dtype": "float32"}
    assert "hf_overrides" not in engine_arguments(settings_for(tmp_path))


def test_compiled_code_of_another_residual_stream_is_not_taken(tmp_path):
    settings = settings_for(tmp_path, fp32_residual=True, options={"additional_config": {"own": 1}})
    assert engine_arguments(settings)["additional_config"] == {"own": 1, "slipstream_fp32_residual": True}
    assert "additional_config" not in engine_arguments(settings_for(tmp_path))
