"""vLLM's arguments, prompts and sampling parameters, by value; without vLLM."""

import dataclasses
import json
from types import SimpleNamespace
from typing import Literal

import msgspec
import pytest

from slipstream.inference.plugin.arguments import engine_arguments
from slipstream.inference.settings import EngineSettings

from .fakes import put

BASE = EngineSettings("m", "bfloat16", 64, 8)
TOWER, EXPERTS, PIXELS = "enable_tower_connector_lora", "enable_return_routed_experts", "mm_device_do_normalize"


@pytest.fixture(autouse=True)
def vllm(monkeypatch):
    state = SimpleNamespace(is_cpu=True, sizes=[SimpleNamespace(base=64), 32, 128], arguments=[TOWER, EXPERTS, PIXELS])
    put(
        monkeypatch,
        platforms={"current_platform": SimpleNamespace(is_cpu=lambda: state.is_cpu)},
        config__lora={"MaxLoRARanks": Literal[1, 8, 16, 32, 64]},
        engine__arg_utils={},
        v1__attention__backends__cpu_attn={
            "CPUAttentionBackend": SimpleNamespace(get_supported_kernel_block_sizes=lambda: state.sizes)
        },
        sampling_params={"RequestOutputKind": SimpleNamespace(FINAL_ONLY="at the end")},
    ).SamplingParams = dict
    import vllm.engine.arg_utils as module

    def known(names):
        module.EngineArgs = dataclasses.make_dataclass("EngineArgs", names)

    known(state.arguments)
    state.known = known
    return state


def made(**settings):
    return engine_arguments(msgspec.structs.replace(BASE, **settings))


def test_blocks_are_the_smallest_that_a_cpu_takes_and_vllms_own_elsewhere(vllm):
    vllm.sizes = []
    assert "block_size" not in made()
    vllm.sizes, vllm.is_cpu = [16], False
    assert "block_size" not in made()


@pytest.mark.parametrize(("rank", "room"), [(1, 1), (2, 8), (8, 8), (9, 16), (64, 64)])
def test_adapters_have_room_for_their_rank_and_for_the_version_before(rank, room):
    found = made(lora_rank=rank, lora_target_modules=("q_proj", "o_proj"))
    assert (found["enable_lora"], found["max_loras"], found["max_lora_rank"]) == (True, 2, room)
    assert (found["lora_target_modules"], TOWER in found) == (["q_proj", "o_proj"], False)
    assert "enable_lora" not in made()


def test_adapters_of_a_tower_need_a_vllm_that_has_them(vllm):
    assert made(lora_rank=8, lora_tower=True)[TOWER] is True
    vllm.known([EXPERTS])
    with pytest.raises(RuntimeError, match=f"needs vLLM's {TOWER}, which this one lacks"):
        made(lora_rank=8, lora_tower=True)


def test_experts_are_returned_by_vllm_on_a_gpu_and_by_a_patch_on_a_cpu(vllm):
    assert EXPERTS not in made(replay_experts=True)
    vllm.is_cpu = False
    assert made(replay_experts=True)[EXPERTS] is True
    assert EXPERTS not in made()
    vllm.known([TOWER])
    with pytest.raises(RuntimeError, match=f"replay_experts = true needs vLLM's {EXPERTS}"):
        made(replay_experts=True)


def test_shared_kernels_have_their_attention_and_no_compiler_and_users_may_say_otherwise():
    found = made(shared_kernels=True)
    assert (found["attention_backend"], found["disable_cascade_attn"]) == ("FLASH_ATTN", True)
    assert found["compilation_config"] == {"mode": 0, "cudagraph_mode": "FULL", "custom_ops": ["all"]}
    assert made(shared_kernels=True, options={"attention_backend": "X"})["attention_backend"] == "X"
    assert "attention_backend" not in made()


ROTARY = {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16}
SCALING = {"llama_4_scaling": {"original_max_position_embeddings": 16, "beta": 0.1}}


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"rope_parameters": ROTARY}, SCALING),
        ({"text_config": {"rope_parameters": ROTARY}}, {"text_config": SCALING}),
        ({"rope_parameters": ROTARY, "llama_4_scaling": {}}, None),
        ({"rope_parameters": {"rope_theta": 1}}, None),
        ({"rope_parameters": None}, None),
        ({}, None),
    ],
)
def test_scaling_by_position_is_where_vllm_reads_it(config, found, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert made(model=str(tmp_path)).get("hf_overrides") == found


@pytest.mark.parametrize(
    ("config", "is_one"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 64}, True),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 63}, False),
        ({"text_config": {"sliding_window": 512, "sliding_window_pattern": 6}}, True),  # Gemma 3 before transformers 5
        ({"layer_types": ["full_attention"] * 2, "sliding_window": 512}, False),
        ({"layer_types": ["linear_attention", "sliding_attention", "full_attention"], "sliding_window": 64}, False),
        ({}, False),
    ],
)
def test_caches_of_one_kind_need_contexts_within_the_window(config, is_one, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert made(model=str(tmp_path)).get("disable_hybrid_kv_cache_manager", False) is is_one


def test_pixels_are_normalized_as_in_the_trainer_where_there_are_any(vllm, tmp_path):
    assert PIXELS not in made(model=str(tmp_path))
    (tmp_path / "config.json").write_text('{"text_config": {}}')
    assert PIXELS not in made(model=str(tmp_path))
    (tmp_path / "config.json").write_text('{"vision_config": {}}')
    assert made(model=str(tmp_path))[PIXELS] is False
    vllm.known([TOWER])
    assert PIXELS not in made(model=str(tmp_path))
