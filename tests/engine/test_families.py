"""Families of models of which trainer and engine could easily compute something else: their log-probabilities are the
same in float32, packed and unpacked, beyond the original context too."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.records import SamplingParams
from slipstream.trainer.model.policy import PolicyModel

from .architectures import _text
from .conftest import differences, start, stop
from .test_lora import start_lora

SAMPLING = SamplingParams(max_tokens=24)
PROMPTS = [[(7 * i + 3 * j) % 90 + 1 for j in range(n)] for i, n in enumerate((8, 12, 90, 200))]
"""With and beyond the 64 tokens of an original context."""
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "short_factor": [1.0 + 0.05 * place for place in range(16)],
    "long_factor": [1.0 + 0.5 * place for place in range(16)],
}


def longrope(original):
    own = {"original_max_position_embeddings": original}
    return _text("Phi3", hidden_size=128, **own, rope_parameters=LONGROPE | own, tie_word_embeddings=False)


SCALED = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 8.0, "original_max_position_embeddings": 64}
FAMILIES = {
    "longrope-long": longrope(64),
    "longrope-short": longrope(256),
    "dynamic": _text("Llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 4.0}),
    "soft-capping": _text("Gemma2", attn_logit_softcapping=1.0, query_pre_attn_scalar=32, sliding_window=32),
    "scaled-by-position": _text("Ministral3", rope_parameters=SCALED | {"llama_4_scaling_beta": 0.5}),
}
UNPACKED = {"soft-capping"}
"""Whose attention packing does not do."""


@pytest.mark.engine
@pytest.mark.full
@pytest.mark.parametrize("name", FAMILIES)
def test_trainer_and_engine_say_the_same_of_a_token(name, tmp_path):
    folder = FAMILIES[name](tmp_path / "model", "float32")
    with start(folder, tmp_path / "engine") as live:
        for packing in (False,) if name in UNPACKED else (False, True):
            model = PolicyModel.load(folder, packing=packing, max_model_len=256)
            assert differences(live, model, SAMPLING, PROMPTS).max() < 1e-3


@pytest.mark.full
@pytest.mark.engine
@pytest.mark.parametrize("num_files", [1, 2])
def test_the_engine_computes_with_the_files_that_the_trainer_reads(num_files, tmp_path):
    """Mistral's own weights, here others than those of transformers, lie beside them."""
    folder = _text("Mistral", sliding_window=None)(tmp_path / "model", "float32")
    weights = load_file(folder / "model.safetensors")
    if num_files == 2:
        (folder / "model.safetensors").unlink()
        parts = {f"model-{n + 1}-of-2.safetensors": dict(list(weights.items())[n::2]) for n in range(2)}
        for name, part in parts.items():
            save_file(part, folder / name, {"format": "pt"})
        index = {"metadata": {}, "weight_map": {weight: name for name, part in parts.items() for weight in part}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    others = {name.removeprefix("model."): 0.5 * weight for name, weight in weights.items()}
    save_file(others, folder / "consolidated.safetensors", {"format": "pt"})
    (folder / "params.json").write_text(json.dumps({"dim": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 98}))
    with start(folder, tmp_path / "engine") as live:
        assert differences(live, PolicyModel.load(folder, max_model_len=256), SAMPLING, PROMPTS).max() < 1e-3


@pytest.mark.engine
@pytest.mark.full
def test_the_same_of_experts_beside_an_adapter(tmp_path):
    build = _text("Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)
    folder = build(tmp_path / "model", "float32")
    lora = start_lora(folder, tmp_path, "float32", 8, 16.0, ("all-linear",))
    try:
        before = differences(lora.live, lora.policy, SAMPLING, PROMPTS)
        lora.update(1)
        assert max(before.max(), differences(lora.live, lora.policy, SAMPLING, PROMPTS).max()) < 1e-3
        unpacked = PolicyModel.load(folder, packing=False)
        adapter = unpacked.add_adapter(lora.policy.adapter.config)
        with torch.no_grad():
            for (_, own), (_, trained) in zip(
                adapter.named_weights(), lora.policy.adapter.named_weights(), strict=True
            ):
                own.copy_(trained)
        assert differences(lora.live, unpacked, SAMPLING, PROMPTS).max() < 1e-3
        assert differences(lora.live, unpacked.without_adapter(), SAMPLING, PROMPTS).max() > 1e-2
    finally:
        lora.bridge.publisher.close()
        stop(lora.live)
