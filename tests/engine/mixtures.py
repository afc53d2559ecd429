"""A small mixture of experts whose routers are often close to a tie, as those of large ones are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from slipstream.commands.small_models.tiny_qwen3 import new_tokenizer

KINDS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"norm_topk_prob": True},
    "Qwen2Moe": {"norm_topk_prob": False, "shared_expert_intermediate_size": 48},
}


def close_choices(folder: Path, kind: str = "Qwen3Moe", *, num_layers: int = 4, num_experts: int = 32) -> Path:
    """Many experts, which compute very different things: a rounded router logit changes what a token is told."""
    torch.manual_seed(0)
    tokenizer = new_tokenizer("char")
    experts = {"num_experts": num_experts, "num_experts_per_tok": 4, "moe_intermediate_size": 32}
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": num_layers}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 512}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    made = getattr(transformers, f"{kind}Config")(
        vocab_size=len(tokenizer), tie_word_embeddings=False, **experts, **shape, **heads, **ends, **KINDS[kind]
    )
    network = getattr(transformers, f"{kind}ForCausalLM")(made)
    for name, parameter in network.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.3 if "experts.down_proj" in name else 0.12)
    network.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
