"""`slipstream models`: a row is a family of models. A small one of it, with random weights, is trained here."""

import re
from pathlib import Path

import pytest
import torch
import transformers
from tests.trainer import conftest as small
from tests.trainer.steps import learner_of

from slipstream import records
from slipstream.data.images.families import FAMILIES as IMAGE_FAMILIES
from slipstream.plan.derive import CLOSER, NOT_IN_FLOAT16, REPLAYED, SHARED
from slipstream.plan.families import FAMILIES
from slipstream.trainer.loss import SFTObjective
from slipstream.trainer.model.loading import packing_obstacle
from slipstream.trainer.model.lora import blank_adapter
from slipstream.trainer.model.policy import PolicyModel
from slipstream.trainer.model.vision_towers import read_config
from slipstream.trainer.packing import StepBatch
from slipstream.weights.adapter_folder import AdapterConfig

ROOT = Path(__file__).parents[2]
SMALL = small.SMALL | {"intermediate_size": 64, "head_dim": 8}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
CHANGES = {
    "Qwen3MoeForCausalLM": EXPERTS | {"num_experts": 4},
    "Qwen2MoeForCausalLM": EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 16},
    "Qwen3_5ForCausalLM": LINEAR,
    "Qwen3NextForCausalLM": LINEAR | EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 16},
    "GptOssForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": None},
    "DeepseekV3ForCausalLM": EXPERTS
    | LATENT
    | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4},
    "Glm4MoeForCausalLM": EXPERTS | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "Gemma4ForCausalLM": {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    "BambaForCausalLM": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "attn_layer_indices": [1]},
}
CONFIGS = {"Gemma3ForCausalLM": "Gemma3TextConfig", "Gemma4ForCausalLM": "Gemma4TextConfig",
           "Qwen3_5ForCausalLM": "Qwen3_5TextConfig"}  # fmt: skip


TABLE = {each.architecture: each.columns() for each in FAMILIES}
"""Rows by the name of their class."""


def save(name, folder):
    torch.manual_seed(0)
    kind = CONFIGS.get(name, name.removesuffix("ForCausalLM") + "Config")
    network = getattr(transformers, name)(getattr(transformers, kind)(**SMALL | CHANGES.get(name, {})))
    network.save_pretrained(folder)
    return folder


USUAL = ("LlamaForCausalLM", "Qwen3_5ForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM")


@pytest.mark.parametrize(
    "name", [name if name in USUAL else pytest.param(name, marks=pytest.mark.full) for name in TABLE]
)
def test_a_step_of_sft_of_every_family(name, tmp_path):
    save(name, tmp_path)
    obstacle, row = packing_obstacle(read_config(str(tmp_path), False)), TABLE[name]
    assert (row["rows"] == "packed") == (not obstacle), obstacle
    model = PolicyModel.load(tmp_path, packing=not obstacle)
    sequences = [records.Sequence([(7 * j) % 60 for j in range(n)], [j > 0 for j in range(n)]) for n in (9, 5)]
    learner = learner_of(model, 64)
    loss = learner.forward_backward(StepBatch(sequences), SFTObjective())["loss"]
    assert learner.optim_prepare(1e-3).grad_norm > 0
    learner.optim_commit()
    assert learner.forward_backward(StepBatch(sequences), SFTObjective())["loss"] < loss
    adapter = blank_adapter(str(tmp_path), AdapterConfig(4, 8.0, ("all-linear",), "base"))
    assert (row["LoRA"] == "but experts") == any("experts" in left for left in adapter.unreached)


def test_the_other_columns_are_those_of_the_code_and_of_tests():
    engines = "".join(file.read_text() for file in (ROOT / "tests" / "engine").glob("*.py"))
    kinds = re.findall(r"_text\(\"(\w+)\"", engines) + re.findall(r"\"(Gemma3)\"", engines)
    tested = {f"{kind}ForCausalLM" for kind in kinds}
    for name, row in TABLE.items():
        assert (row["engine on a CPU"] == "tested") == (name in tested), name
        assert (row["float32 head and residual"] == "yes") == (name in CLOSER), name
        assert (row["same bits"] == "yes") == (name in SHARED), name
        assert row["a step of SFT"] == "tested"
    assert {*TABLE} >= REPLAYED | CLOSER | SHARED


def test_the_page_names_what_the_code_knows():
    page = (ROOT / "docs" / "models.md").read_text()
    rows = [row | {"class": f"`{row['class']}`"} for row in TABLE.values()]
    lines = [f"| {' | '.join(cells)} |" for cells in ([*rows[0]], *([*row.values()] for row in rows))]
    assert [line for line in page.splitlines() if line.startswith("| ")] == lines
    assert all(f"`{kind}`" in page for kind in IMAGE_FAMILIES)
    assert all(re.sub(r"(\d)", r" \1", name) in page.split("Not in float16")[1] for name in ("Gemma2", "Gemma3"))
    assert {*NOT_IN_FLOAT16} == {"Gemma2", "Gemma3", "Glm4"}
