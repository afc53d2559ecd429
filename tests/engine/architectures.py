"""Small models with random weights, one for each way in which weights can lie differently in vLLM than in files."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image

from slipstream.commands.small_models.tiny_qwen3 import new_tokenizer

TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
IMAGE_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
PATCHES = {"patch_size": 8, "temporal_patch_size": 2}
GRID = (1, 4, 6)
"""Frames, rows and columns of an image's patches."""

BESIDE = Path(__file__).parent / "beside"
TORCHVISION = Path(sys.prefix) / "torchvision"
"""Where `scripts/install.py` puts it: out of the way of everything that needs no images."""


def _save(network: Any, tokenizer: Any, folder: Path, dtype: str) -> Path:
    for name, parameter in network.named_parameters():
        # Also what is usually all ones or zeros, so that nothing can stand at the wrong place unseen.
        with torch.no_grad():
            parameter.copy_((1.0 if "norm" in name and name.endswith("weight") else 0.0) + _random(parameter))
    network.to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _random(parameter: torch.Tensor) -> torch.Tensor:
    return 0.1 * torch.randn(parameter.shape)


def _text(kind: str, **changes: Any) -> Callable[[Path, str], Path]:
    def build(folder: Path, dtype: str) -> Path:
        torch.manual_seed(0)
        tokenizer = new_tokenizer("char")
        ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
        config = getattr(transformers, f"{kind}Config")(vocab_size=len(tokenizer), **TEXT | changes, **ends)
        return _save(getattr(transformers, f"{kind}ForCausalLM")(config), tokenizer, folder, dtype)

    return build


def _vision(folder: Path, dtype: str) -> Path:
    torch.manual_seed(0)
    tokenizer: Any = new_tokenizer("char")
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|im_start|>", *IMAGE_TOKENS]})
    start, end, image, video = (tokenizer.convert_tokens_to_ids(token) for token in IMAGE_TOKENS)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    rope = {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [8, 4, 4], "mrope_interleaved": True}
    tower = {"depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "spatial_merge_size": 2}
    tower |= {"out_hidden_size": 64, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    ids = {"vision_start_token_id": start, "vision_end_token_id": end, "image_token_id": image}
    config = transformers.Qwen3VLConfig(
        text_config=TEXT | ends | {"vocab_size": len(tokenizer), "rope_parameters": rope, "tie_word_embeddings": True},
        vision_config=PATCHES | tower,
        video_token_id=video,
        tie_word_embeddings=True,
        **ids,
        **ends,
    )
    _save(transformers.Qwen3VLForConditionalGeneration(config), tokenizer, folder, dtype)
    # Written by hand, because a processor can be made only where torchvision is.
    common = PATCHES | {"merge_size": 2, "size": {"shortest_edge": 256, "longest_edge": 4096}}
    processor = {
        "processor_class": "Qwen3VLProcessor",
        "image_processor": common | {"image_processor_type": "Qwen2VLImageProcessor"},
        "video_processor": common | {"video_processor_type": "Qwen3VLVideoProcessor"},
    }
    (folder / "processor_config.json").write_text(json.dumps(processor))
    return folder


def pixels() -> torch.Tensor:
    """An image of `GRID`, as an image processor gives it."""
    size = 3 * PATCHES["temporal_patch_size"] * PATCHES["patch_size"] ** 2
    frames, rows, columns = GRID
    return torch.randn(frames * rows * columns, size, generator=torch.Generator().manual_seed(0))


def image_prompt(model: Path) -> tuple[list[int], bytes]:
    """A prompt in which an image of `GRID` stands between words, and the image."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    start, end, image = (tokenizer.convert_tokens_to_ids(token) for token in IMAGE_TOKENS[:3])
    words = [(7 * i) % 90 + 1 for i in range(24)]
    rows, columns = (PATCHES["patch_size"] * number for number in GRID[1:])
    noise = torch.randint(256, (rows, columns, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    file = io.BytesIO()
    Image.fromarray(noise.numpy()).save(file, "PNG")
    return [*words[:12], start, image, end, *words[12:]], file.getvalue()


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A row of the contract's table."""

    build: Callable[[Path, str], Path]
    dtype: str
    flipped: tuple[str, ...]
    """Parameters in which a flipped bit must be found."""
    lora_targets: tuple[str, ...]
    worker: str = "slipstream.inference.plugin.weights.receiver.WorkerExtension"
    num_workers: int = 1
    """Over which vLLM divides the model."""

    @property
    def has_images(self) -> bool:
        return self.build is _vision

    def path(self) -> list[str]:
        """More of PYTHONPATH for its engine."""
        return [str(BESIDE), str(TORCHVISION)] if self.has_images and not _torchvision_is_installed() else []

    def missing(self) -> str:
        """Why it cannot be run here, if it cannot."""
        found = not self.has_images or _torchvision_is_installed() or TORCHVISION.is_dir()
        return "" if found else f"vLLM's image models need torchvision, in the environment or in {TORCHVISION}"


def _torchvision_is_installed() -> bool:
    return importlib.util.find_spec("torchvision") is not None


ARCHITECTURES = {
    "tied": Architecture(
        _text("Qwen2", hidden_size=128, tie_word_embeddings=True),
        "float32",
        ("model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.bias"),
        ("all-linear",),
    ),
    "untied": Architecture(
        _text("Qwen3", tie_word_embeddings=False),
        "bfloat16",
        ("lm_head.weight", "model.layers.0.self_attn.v_proj.weight", "model.norm.weight"),
        ("q_proj", "v_proj", "down_proj"),
    ),
    "experts": Architecture(
        _text("Qwen3Moe", tie_word_embeddings=False, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48),
        "bfloat16",
        ("model.layers.1.mlp.experts.2.up_proj.weight", "model.layers.0.mlp.gate.weight"),
        ("all-linear",),
    ),
    "vision": Architecture(
        _vision,
        "float32",
        ("model.visual.blocks.1.attn.qkv.weight", "model.language_model.layers.1.mlp.up_proj.weight"),
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        "tests.engine.workers.TowerWorker",
    ),
}
"""Of the dense ones, `tied` also has biases; all have fewer heads of keys than of queries."""
DIVIDED = dataclasses.replace(ARCHITECTURES["experts"], num_workers=2)
