"""What vLLM's loader makes of an adapter's file that was read at once, without an engine: on a CPU none reads so."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch

from slipstream.inference.plugin.patches import adapters, patch_table
from slipstream.weights.adapter_folder import AdapterConfig, adapter_parameter, write_adapter_folder

pytestmark = pytest.mark.engine
MODULES = [f"model.layers.{layer}.{name}" for layer in range(2) for name in ("self_attn.q_proj", "mlp.down_proj")]
WITH_ADAPTERS = SimpleNamespace(lora_manager=object())
CONFIG = AdapterConfig(4, 4.0, ("q_proj", "down_proj"), "base")


@pytest.fixture
def lora_model(monkeypatch):
    """vLLM's module, as it was again afterwards."""
    from vllm.lora import lora_model

    monkeypatch.setattr(lora_model, "safetensors", lora_model.safetensors)
    return lora_model


def loaded(lora_model, folder, expected=("q_proj", "down_proj")):
    from vllm.lora.peft_helper import PEFTHelper

    helper = PEFTHelper.from_local_dir(str(folder), 128)
    lora = lora_model.LoRAModel.from_local_checkpoint(
        str(folder), set(expected), helper, lora_model_id=1, device="cpu", dtype=torch.bfloat16
    )
    halves = {name: (layer.lora_a, layer.lora_b) for name, layer in lora.loras.items()}
    return {f"{name} {half}": tensor for name, pair in halves.items() for half, tensor in zip("AB", pair, strict=True)}


def write(folder, config=CONFIG, dtype=torch.bfloat16):
    tensors = {}
    for module in MODULES:
        tensors[adapter_parameter(module, "A")] = torch.randn(4, 6).to(dtype)
        tensors[adapter_parameter(module, "B")] = torch.randn(5, 4).to(dtype)
    write_adapter_folder(folder, tensors.items(), config)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_loader_gets_the_same_numbers_in_one_stretch_of_memory(tmp_path, lora_model, dtype):
    write(tmp_path / "a", dtype=dtype)
    wanted = loaded(lora_model, tmp_path / "a")
    adapters.read_at_once(WITH_ADAPTERS)
    found = loaded(lora_model, tmp_path / "a")
    assert found.keys() == wanted.keys()
    assert len(found) == 2 * len(MODULES)
    assert all(torch.equal(found[name], wanted[name]) for name in found)
    storages = {tensor.untyped_storage().data_ptr() for tensor in found.values()}
    assert len(storages) == (1 if dtype == torch.bfloat16 else len(found)), "what the engine converts is a copy"


def test_the_loader_refuses_what_it_refused(tmp_path, lora_model):
    write(tmp_path / "a", dataclasses.replace(CONFIG, target_modules=("q_proj",)))
    adapters.read_at_once(WITH_ADAPTERS)
    with pytest.raises(ValueError, match="expected target modules"):
        loaded(lora_model, tmp_path / "a", expected=["q_proj"])


def test_other_types_are_left_to_vllm_and_another_vllm_is_left_alone(tmp_path, lora_model):
    adapters.read_at_once(WITH_ADAPTERS)
    path = tmp_path / "t.safetensors"
    safetensors.torch.save_file({"n": torch.arange(3)}, path)
    with lora_model.safetensors.safe_open(path, framework="pt") as file:
        assert list(file.keys()) == ["n"]
        assert torch.equal(file.get_tensor("n"), torch.arange(3))
    with pytest.raises(patch_table.Absent, match="safetensors"):  # it is one already
        adapters.read_at_once(WITH_ADAPTERS)
    with pytest.raises(patch_table.NotNeeded, match="adapters"):
        adapters.read_at_once(SimpleNamespace(lora_manager=None))
