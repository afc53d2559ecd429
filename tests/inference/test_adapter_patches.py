"""Which layers have room for an adapter, and how its file is read; without vLLM."""

from types import SimpleNamespace

import pytest
import safetensors.torch
import torch

from slipstream.inference.plugin.patches import adapters
from slipstream.inference.plugin.patches.patch_table import Absent, NotNeeded

from .fakes import put

RUNNER = SimpleNamespace(lora_manager="theirs")


class WithAdapter(torch.nn.Module):
    """As vLLM's, around a layer that has room already."""


def layer(**fields):
    made = torch.nn.Module()
    vars(made).update(fields)
    return made


def test_a_name_selects_what_has_weights_that_can_be_quantized(monkeypatch):
    manager = type("LoRAModelManager", (), {"_match_target_modules": lambda self, name: name.startswith("proj")})
    put(monkeypatch, lora__layers={"BaseLayerWithLoRA": WithAdapter}, lora__model_manager={"LoRAModelManager": manager})
    adapters.of_linear_layers()
    made = manager()
    made.model = torch.nn.ModuleDict(
        {
            "proj_linear": layer(quant_method=1),
            "proj_experts": layer(_quant_method=None),
            "proj_wrapped": WithAdapter(),
            "proj_patches": layer(),
            "other": layer(quant_method=1),
        }
    )
    found = {name: made._match_target_modules(name) for name in made.model}
    assert [name for name in found if found[name] is True] == ["proj_linear", "proj_experts", "proj_wrapped"]
    assert [found["proj_patches"], found["other"]] == [False, False]
    del manager._match_target_modules
    with pytest.raises(Absent, match="_match_target_modules"):
        adapters.of_linear_layers()


def loader(monkeypatch, **fields):
    put(monkeypatch, lora={"lora_model": (module := SimpleNamespace(**fields))})
    return module


@pytest.mark.parametrize("fields", [{"PIN_MEMORY": 1}, {"PIN_MEMORY": False}, {}])
def test_an_adapters_file_is_read_at_once_into_memory_like_vllms_own(fields, monkeypatch):
    asked = []

    def read(path, *, pinned=None):
        asked.append((str(path), pinned))
        return {"b": 2, "a": 1}

    monkeypatch.setattr(adapters, "read_tensors", read)
    module = loader(monkeypatch, safetensors=safetensors, **fields)
    adapters.read_at_once(RUNNER)
    with module.safetensors.safe_open("/adapter/file", framework="pt") as file:
        assert (list(file.keys()), file.get_tensor("a")) == (["b", "a"], 1)
    assert asked == [("/adapter/file", fields.get("PIN_MEMORY") == 1)]
    assert asked[0][1] in (True, False)


def test_a_file_of_another_form_is_read_as_vllm_asks(monkeypatch, tmp_path):
    monkeypatch.setattr(adapters, "read_tensors", lambda path, pinned: None)
    module = loader(monkeypatch, safetensors=safetensors)
    adapters.read_at_once(RUNNER)
    path = str(tmp_path / "t")
    safetensors.torch.save_file({"n": torch.arange(3)}, path)
    with module.safetensors.safe_open(path, framework="np") as file:
        assert file.get_tensor("n").tolist() == [0, 1, 2]
        assert not isinstance(file.get_tensor("n"), torch.Tensor)


def test_a_vllm_without_adapters_or_with_another_reader_is_left_alone(monkeypatch):
    module = loader(monkeypatch, safetensors="another")
    for runner in (SimpleNamespace(), SimpleNamespace(lora_manager=None)):
        with pytest.raises(NotNeeded):
            adapters.read_at_once(runner)
    with pytest.raises(Absent, match=r"lora_model\.safetensors"):
        adapters.read_at_once(RUNNER)
    del module.safetensors
    with pytest.raises(Absent, match=r"lora_model\.safetensors"):
        adapters.read_at_once(RUNNER)
