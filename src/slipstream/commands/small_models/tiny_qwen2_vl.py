"""A small Qwen2-VL model from scratch: the policy of runs with images that fit a laptop.

Guarantees: the folder loads in transformers and in vLLM, with an image processor; its tokenizer and chat template are
those of `tiny_qwen3`, with Qwen's tokens of images; the same seed gives the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from slipstream.commands.small_models.tiny_qwen3 import (
    CHAT_TEMPLATE,
    START,
    new_tokenizer,
    refuse_used,
    rope_theta_of,
    save_new,
)
from slipstream.errors import ConfigError

IMAGE_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_CONTENT = "(message['content'] or '')"
VISION_TEMPLATE = (
    "{% macro show(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content or [] %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endmacro %}" + CHAT_TEMPLATE.replace(_CONTENT, "show(message['content'])")
)
"""The template of `tiny_qwen3`, for contents of several parts too."""
_PATCH, _MERGE, _FRAMES = 8, 2, 2
_MAX_PIXELS = 128 * 128


def new_vision_model(
    folder: Path,
    *,
    tokenizer: Literal["byte", "char"] = "char",
    hidden_size: int = 128,
    num_layers: int = 4,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    intermediate_size: int | None = None,
    context_length: int = 512,
    rope_theta: float | None = None,
    seed: int = 0,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    added_tokens: Sequence[str] = (),
) -> Path:
    """Write the model into `folder` (new or empty) and return it. `added_tokens`: further tokens, read as
    text, such as coordinates. Images are scaled to at most 128 x 128 pixels; 16 x
    16 of them are a token. A head has `hidden_size / num_heads` dimensions, a multiple of 32. Other arguments as of
    `tiny_qwen3.new_model`."""
    from tokenizers import AddedToken
    from transformers import Qwen2VLForConditionalGeneration

    from slipstream.trainer.model.loading import hide_progress_bars

    hide_progress_bars()
    refuse_used(folder)
    if num_heads % num_kv_heads:
        raise ConfigError(f"num_kv_heads {num_kv_heads} does not divide num_heads {num_heads}")
    head_dim = hidden_size // num_heads
    if hidden_size % num_heads or head_dim % 32:
        raise ConfigError(
            f"hidden_size {hidden_size} over num_heads {num_heads} is not a multiple of 32, the sizes of heads that "
            "vLLM's kernels take: change one of them"
        )
    fast: Any = new_tokenizer(tokenizer, None, context_length)
    fast.add_special_tokens({"extra_special_tokens": [START, *IMAGE_TOKENS]})
    fast.add_tokens([AddedToken(token, special=False, normalized=False) for token in added_tokens])
    fast.chat_template = VISION_TEMPLATE
    text: dict[str, Any] = {
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "intermediate_size": intermediate_size or 3 * hidden_size,
        "max_position_embeddings": context_length,
    }
    config = _config(fast, text, rope_theta or rope_theta_of(context_length, head_dim))
    save_new(folder, Qwen2VLForConditionalGeneration, config, fast, seed, dtype)
    (folder / "processor_config.json").write_text(json.dumps(_processor(), indent=2) + "\n")
    return folder


def _config(tokenizer: Any, text: dict[str, Any], rope_theta: float) -> Any:
    from transformers import Qwen2VLConfig

    start, end, image, video = (tokenizer.convert_tokens_to_ids(token) for token in IMAGE_TOKENS)
    ends: dict[str, Any] = {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    pairs = text["hidden_size"] // text["num_attention_heads"] // 2
    side = 3 * pairs // 8
    rope = {"rope_type": "default", "rope_theta": rope_theta, "mrope_section": [pairs - 2 * side, side, side]}
    shared = {"vocab_size": len(tokenizer), "tie_word_embeddings": True, "rope_parameters": rope}
    tower = {
        "depth": 2,
        "embed_dim": 64,
        "hidden_size": text["hidden_size"],
        "num_heads": 2,
        "mlp_ratio": 2,
        "patch_size": _PATCH,
        "spatial_merge_size": _MERGE,
        "temporal_patch_size": _FRAMES,
    }
    return Qwen2VLConfig(
        text_config=text | shared | ends,
        vision_config=tower,
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
        tie_word_embeddings=True,
        **ends,
    )


def _processor() -> dict[str, Any]:
    """What transformers writes for such a processor, which can be made only where torchvision is installed."""
    common: dict[str, Any] = {
        "patch_size": _PATCH,
        "temporal_patch_size": _FRAMES,
        "merge_size": _MERGE,
        "size": {"shortest_edge": (_PATCH * _MERGE) ** 2, "longest_edge": _MAX_PIXELS},
    }
    return {
        "processor_class": "Qwen2VLProcessor",
        "image_processor": {**common, "image_processor_type": "Qwen2VLImageProcessor"},
        "video_processor": {**common, "video_processor_type": "Qwen2VLVideoProcessor"},
    }
