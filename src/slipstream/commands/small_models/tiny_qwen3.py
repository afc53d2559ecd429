"""A small Qwen3 model from scratch, with a tokenizer made for it: the policy of every run that fits a laptop.

Guarantees: the folder loads through AutoTokenizer and AutoModelForCausalLM, in transformers and in vLLM; text
of the tokenizer's alphabet decodes to itself, blanks at either end included; the same seed gives the same
bytes.
"""

from __future__ import annotations

import math
import string
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from slipstream.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, START, END, UNKNOWN = "<|pad|>", "<|im_start|>", "<|im_end|>", "<unk>"
DEFAULT_ALPHABET = string.digits + string.ascii_letters + string.punctuation + " \n"
CHAT_TEMPLATE = (
    "{% macro list_tools() %}Tools: {% for tool in tools %}{% set tool = tool.function or tool %}"
    "{{ tool.name }}({{ ((tool.parameters or {}).properties or {}) | join(', ') }})"
    "{% if not loop.last %}, {% endif %}{% endfor %}{% endmacro %}"
    "{% macro write(call) %}{% set call = call.function or call %}"
    '<tool_call>{{ \'{"name":"\' + call.name + \'","arguments":\' }}'
    "{{ call.arguments if call.arguments is string else call.arguments | tojson(separators=(',', ':')) }}"
    "{{ '}' }}</tool_call>{% endmacro %}"
    "{% if tools and (not messages or messages[0]['role'] != 'system') %}"
    "{{ '<|im_start|>system\\n' + list_tools() + '<|im_end|>' + '\\n' }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}"
    "{% if tools and loop.first and message['role'] == 'system' %}{{ '\\n' + list_tools() }}{% endif %}"
    "{% for call in message['tool_calls'] or [] %}{{ write(call) }}{% endfor %}"
    "{{ '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML. Tools are one line of the system message, since a token is a character here; calls are Qwen's (Hermes),
without spaces. Without tools and calls the text is the same as in earlier versions."""


def new_model(
    folder: Path,
    *,
    tokenizer: Literal["byte", "char"] = "char",
    hidden_size: int = 128,
    num_layers: int = 4,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    intermediate_size: int | None = None,
    context_length: int = 512,
    rope_theta: float | None = None,
    seed: int = 0,
    tie_embeddings: bool = True,
    alphabet: str | None = None,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
) -> Path:
    """Write the model into `folder` (new or empty) and return it.

    `intermediate_size`: by default three times `hidden_size`. `rope_theta`: by default so that the slowest rotation
    makes half a turn within the context; the 10,000 of large models leaves a short context with few frequencies that
    tell its positions apart, and what depends on positions is learned later. `alphabet`: the characters of a `"char"`
    tokenizer, by default printable ASCII and the newline; others become `<unk>`. A `"byte"` tokenizer has no
    unknown text. The model's numbers are drawn from `seed` and leave torch's own generator alone.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from slipstream.trainer.model.loading import hide_progress_bars

    hide_progress_bars()
    refuse_used(folder)
    if num_heads % num_kv_heads:
        raise ConfigError(f"num_kv_heads {num_kv_heads} does not divide num_heads {num_heads}")
    if head_dim % 32:
        raise ConfigError(f"head_dim {head_dim} is not a multiple of 32, the sizes that vLLM's kernels take")
    fast: Any = new_tokenizer(tokenizer, alphabet, context_length)
    config = Qwen3Config(
        vocab_size=len(fast),
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate_size or 3 * hidden_size,
        max_position_embeddings=context_length,
        tie_word_embeddings=tie_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta or rope_theta_of(context_length, head_dim)},
        bos_token_id=None,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
    )
    save_new(folder, Qwen3ForCausalLM, config, fast, seed, dtype)
    return folder


def new_tokenizer(
    kind: Literal["byte", "char"], alphabet: str | None = None, context_length: int = 512
) -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each byte, or for each character of `alphabet`, and the ChatML
    template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if kind == "byte":
        if alphabet is not None:
            raise ConfigError("a byte tokenizer knows all text: leave alphabet out")
        # ByteLevel writes each byte as one printable character; its alphabet lists the 256 of them.
        symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
        backend = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        special = {"pad_token": PAD, "eos_token": END}
    else:
        symbols = [UNKNOWN, *dict.fromkeys(alphabet or DEFAULT_ALPHABET)]
        vocabulary = {symbol: i for i, symbol in enumerate(symbols)}
        backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN))
        backend.decoder = decoders.Fuse()
        special = {"pad_token": PAD, "eos_token": END, "unk_token": UNKNOWN}
    tokens = [AddedToken(token, special=True, normalized=False) for token in (PAD, START, END)]
    backend.add_special_tokens(tokens)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        extra_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=context_length,
        clean_up_tokenization_spaces=False,
        **special,
    )


def refuse_used(folder: Path) -> None:
    """Raises ConfigError for a folder that holds something."""
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty: give a new folder")


def save_new(folder: Path, network_class: Any, config: Any, tokenizer: Any, seed: int, dtype: str) -> None:
    """Write a network of this configuration, with numbers drawn from `seed`, and its tokenizer into `folder`."""
    import torch
    from transformers import GenerationConfig

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = network_class(config)
        initialize(network, config.get_text_config().num_hidden_layers)
    network.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    folder.mkdir(parents=True, exist_ok=True)
    network.to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def rope_theta_of(context_length: int, head_dim: int) -> float:
    """The base at which the longest wavelength, 2 pi theta**((d - 2) / d), is twice the context."""
    return round((context_length / math.pi) ** (head_dim / (head_dim - 2)), 1)


def initialize(network: Any, num_layers: int) -> None:
    """Normal weights of variance 1 / fan_in; what feeds the residual stream is scaled down by sqrt(2 *
    layers) (GPT-2), so that its variance does not grow with depth; embeddings 0.02, so that first logits are
    near zero. Of a vision tower also the convolution that embeds patches.
    """
    from torch import nn

    for name, module in network.named_modules():
        if isinstance(module, nn.Conv3d):
            nn.init.normal_(module.weight, std=module.weight[0].numel() ** -0.5)
        if isinstance(module, nn.Linear):
            std = module.in_features**-0.5
            if name.endswith(("o_proj", "down_proj")):
                std /= (2 * num_layers) ** 0.5
            nn.init.normal_(module.weight, std=std)
    # Last, because a tied head is the embedding.
    for name, module in network.named_modules():
        if isinstance(module, nn.Embedding) or name == "lm_head":
            nn.init.normal_(module.weight, std=0.02)
