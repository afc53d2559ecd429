"""Writes models of well-known sizes with random weights, for measurements that do not depend on what a model learned.

    python benchmarks/shapes.py FOLDER tiny|0.5b|1.5b|7b

The model is a Qwen2 that Transformers and vLLM load, with the biases and the grouped-query attention of the real one.
Its tokenizer has a token for every id of the vocabulary. The same shape gives the same weights on the same device.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

VOCABULARY = 151_936
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128},
    "0.5b": {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "intermediate_size": 4864},
    "1.5b": {"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "intermediate_size": 8960},
    "7b": {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "intermediate_size": 18_944},
}
"""The sizes of Qwen2.5, and `tiny`, which fits on any machine."""
_KV_HEADS = {"tiny": 2, "0.5b": 2, "1.5b": 2, "7b": 4}


def shape_config(shape: str, **changes: Any) -> Any:
    """Return the Qwen2 configuration of `shape`, with `changes` applied."""
    from transformers import Qwen2Config

    given: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "num_key_value_heads": _KV_HEADS[shape],
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": shape != "7b",
        "bos_token_id": None,
        **SHAPES[shape],
    }
    return Qwen2Config(**given | changes)


def word_tokenizer(template: str, special: Sequence[str] = (), added: Sequence[str] = ()) -> Any:
    """A tokenizer with a token for every id of the vocabulary, `special` and `added` ones last."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from slipstream.commands.small_models.tiny_qwen3 import DEFAULT_ALPHABET, END, PAD, START, UNKNOWN

    special = (PAD, START, END, *special)
    symbols = list(dict.fromkeys([UNKNOWN, *DEFAULT_ALPHABET]))
    symbols += [f" w{number}" for number in range(VOCABULARY - len(special) - len(added) - len(symbols))]
    words = Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(symbols)}, unk_token=UNKNOWN))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    words.decoder = decoders.Fuse()
    words.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    words.add_tokens([AddedToken(token, special=False, normalized=False) for token in added])
    return PreTrainedTokenizerFast(
        tokenizer_object=words, chat_template=template, pad_token=PAD, eos_token=END, unk_token=UNKNOWN
    )


def random_network(kind: Any, config: Any) -> Any:
    """A network of the class `kind` in bfloat16, with the random weights that transformers gives it; made on the GPU
    where there is one, always the same there."""
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.random.fork_rng(), torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            torch.manual_seed(0)
            return kind(config)
    finally:
        torch.set_default_dtype(before)


def shaped_model(folder: Path, shape: str, spread: float | None = None) -> Path:
    """Write a bfloat16 model of `shape` into `folder` and return the folder.

    `spread` is the standard deviation of the logits; None keeps the LM head as Transformers initialises it, which
    gives 0.6 to 0.8.
    """
    import torch
    from transformers import GenerationConfig, Qwen2ForCausalLM

    from slipstream.commands.small_models.tiny_qwen3 import CHAT_TEMPLATE
    from slipstream.trainer.model.loading import hide_progress_bars

    hide_progress_bars()
    tokenizer = word_tokenizer(CHAT_TEMPLATE)
    config = shape_config(shape, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    network = random_network(Qwen2ForCausalLM, config)
    if spread is not None:
        torch.nn.init.normal_(network.lm_head.weight, std=spread / SHAPES[shape]["hidden_size"] ** 0.5)
    network.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, do_sample=True)
    network.to("cpu").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    shaped_model(Path(sys.argv[1]), sys.argv[2])
