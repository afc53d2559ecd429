"""A quantized checkpoint is not taken for a 16-bit one: refused where weights are trained or verified."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.commands.small_models.tiny_qwen3 import new_model
from slipstream.config import ModelConfig
from slipstream.errors import ConfigError
from slipstream.plan.deployable import find_deployable
from slipstream.plan.preflight.model_folder import check_model

CONFIGS = (
    {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}},
    {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}},
    *({"quantization_config": {"quant_method": method}} for method in ("fp8", "gptq", "awq", "mxfp4")),
    {"quantization_config": {"quant_method": "compressed-tensors"}},
    {"compression_config": {"format": "int-quantized"}},
    {"text_config": {"quantization_config": {"quant_method": "fp8"}}},
)
KEY = "model.layers.0.mlp.down_proj"
TENSORS = {
    "nf4": {f"{KEY}.weight": torch.zeros(8, 1, dtype=torch.uint8)},
    "int8": {f"{KEY}.weight": torch.zeros(8, 8, dtype=torch.int8)},
    "fp8": {f"{KEY}.weight": torch.zeros(8, 8, dtype=torch.float8_e4m3fn)},
    "gptq": {f"{KEY}.qweight": torch.zeros(8, 8, dtype=torch.int32)},
    "mxfp4": {"model.layers.0.mlp.experts.gate_up_proj_blocks": torch.zeros(8, 8, dtype=torch.uint8)},
    "packed": {f"{KEY}.weight_packed": torch.zeros(8, 8, dtype=torch.int32)},
}


@pytest.fixture
def model(tmp_path):
    return new_model(tmp_path / "model", hidden_size=16, num_layers=1, num_heads=1, num_kv_heads=1, context_length=64)


def checked(model):
    check_model(ModelConfig(path=str(model)), packing=False)


@pytest.mark.parametrize("given", CONFIGS, ids=str)
def test_a_config_that_says_so_is_refused_with_the_method(model, given):
    checked(model)
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | given))
    (section,) = given.values()
    with pytest.raises(ConfigError, match=r"model\.path .* is quantized") as raised:
        checked(model)
    method = section.get("quant_method") or section.get("format") or "fp8"
    assert method in str(raised.value)
    assert "remove quantization_config" in str(raised.value), "these weights are not"


@pytest.mark.parametrize("kind", TENSORS)
def test_quantized_tensors_are_refused_without_the_key(model, kind):
    file = model / "model.safetensors"
    whole = load_file(file)
    # Buffers of these types are in many models.
    whole |= {"model.layers.0.attn.position_ids": torch.arange(8), "model.layers.0.attn.bias": torch.zeros(8, 8).bool()}
    save_file(whole, file)
    checked(model)
    save_file(whole | TENSORS[kind], file)
    with pytest.raises(ConfigError, match="is quantized") as raised:
        checked(model)
    assert next(iter(TENSORS[kind])) in str(raised.value)
    assert find_deployable(str(model), quantized=True).model == str(model), "vLLM's own server may serve it"
    with pytest.raises(ConfigError, match="is quantized"):
        find_deployable(str(model))


def test_an_architecture_of_another_model_type_is_said_to_be_one(model):
    file = model / "config.json"
    names = {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5"}
    file.write_text(json.dumps(json.loads(file.read_text()) | names))
    with pytest.raises(ConfigError, match=r"Qwen3_5ForCausalLM for .* 'qwen3_5'.* has Qwen3_5ForConditional"):
        checked(model)
