"""Writes a Qwen3-VL of the size of the real one with 4 B parameters, or a Gemma 3 that reads images, with random
weights, and pictures for it.

    python benchmarks/vision_shapes.py FOLDER tiny|4b|gemma-tiny|gemma-1b

Its tokenizer has a token for every id of the vocabulary, the 1000 coordinates among them; Qwen's images are scaled to
at most 1024 x 1024 pixels, and 32 x 32 of them are a token. `gemma-1b` has the decoder of the Gemma 3 with 1 B
parameters and the tower of the larger ones, and their 256 tokens for an image.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from shapes import VOCABULARY, random_network, word_tokenizer

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "text": {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
        | {"head_dim": 64, "intermediate_size": 256},
        "tower": {"depth": 2, "hidden_size": 64, "num_heads": 2, "intermediate_size": 96, "out_hidden_size": 128}
        | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
        "sections": [12, 10, 10],
    },
    "4b": {
        "text": {"hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8}
        | {"head_dim": 128, "intermediate_size": 9728},
        "tower": {"depth": 24, "hidden_size": 1024, "num_heads": 16, "intermediate_size": 4096}
        | {"out_hidden_size": 2560, "num_position_embeddings": 2304, "deepstack_visual_indexes": [5, 11, 17]},
        "sections": [24, 20, 20],
    },
}
_PATCH, _MERGE = 16, 2
SQUARES: dict[str, dict[str, Any]] = {
    "gemma-tiny": {
        "text": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
        | {"head_dim": 64, "intermediate_size": 512, "sliding_window": 32, "query_pre_attn_scalar": 64}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2},
        "tower": {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256}
        | {"image_size": 64, "patch_size": 8},
        "tokens": 16,
        "std": 0.1,
    },
    "gemma-1b": {
        "text": {"hidden_size": 1152, "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1}
        | {"head_dim": 256, "intermediate_size": 6912, "sliding_window": 512, "query_pre_attn_scalar": 256},
        "tower": {"hidden_size": 1152, "num_hidden_layers": 27, "num_attention_heads": 16, "intermediate_size": 4304}
        | {"image_size": 896, "patch_size": 14},
        "tokens": 256,
        "std": 0.02,
    },
}
SQUARE_TOKENS = ("<start_of_image>", "<end_of_image>", "<image_soft_token>")
SQUARE_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<start_of_image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def shaped_vision_model(folder: Path, shape: str) -> Path:
    """Write a bfloat16 model of `shape` into `folder` and return the folder."""
    from transformers import GenerationConfig, Qwen3VLConfig, Qwen3VLForConditionalGeneration

    from slipstream.commands.small_models.tiny_qwen2_vl import IMAGE_TOKENS, VISION_TEMPLATE
    from slipstream.trainer.model.loading import hide_progress_bars
    from slipstream_matching.coordinates import LITERALS

    hide_progress_bars()
    tokenizer = word_tokenizer(VISION_TEMPLATE, IMAGE_TOKENS, LITERALS)
    start, end, image, video = (tokenizer.convert_tokens_to_ids(token) for token in IMAGE_TOKENS)
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    sizes = SHAPES[shape]
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": sizes["sections"], "mrope_interleaved": True}
    shared = {"vocab_size": VOCABULARY, "tie_word_embeddings": True, "max_position_embeddings": 32_768}
    config = Qwen3VLConfig(
        text_config=sizes["text"] | shared | {"rope_parameters": rope} | ends,
        vision_config=sizes["tower"] | {"patch_size": _PATCH, "spatial_merge_size": _MERGE, "temporal_patch_size": 2},
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
        tie_word_embeddings=True,
        **ends,
    )
    network = random_network(Qwen3VLForConditionalGeneration, config)
    network.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, do_sample=True)
    network.to("cpu").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    common = {"patch_size": _PATCH, "temporal_patch_size": 2, "merge_size": _MERGE}
    common |= {"size": {"shortest_edge": (_PATCH * _MERGE) ** 2, "longest_edge": 1024 * 1024}}
    processor = {
        "processor_class": "Qwen3VLProcessor",
        "image_processor": common | {"image_processor_type": "Qwen2VLImageProcessor"},
        "video_processor": common | {"video_processor_type": "Qwen3VLVideoProcessor"},
    }
    (folder / "processor_config.json").write_text(json.dumps(processor))
    return folder


def shaped_square_model(folder: Path, shape: str) -> Path:
    """The same for a Gemma 3, under the names of the hub's files, which vLLM knows."""
    import torch
    from safetensors.torch import save_file
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    sizes = SQUARES[shape]
    tokenizer = word_tokenizer(SQUARE_TEMPLATE, SQUARE_TOKENS, ["\n\n", "\n\n\n", "\n\n\n\n"])
    begin, end, soft = (tokenizer.convert_tokens_to_ids(token) for token in SQUARE_TOKENS)
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Gemma3Config(
        architectures=["Gemma3ForConditionalGeneration"],
        dtype="bfloat16",
        text_config=sizes["text"] | {"vocab_size": VOCABULARY, "max_position_embeddings": 32_768} | ends,
        vision_config=sizes["tower"] | {"vision_use_head": False},
        mm_tokens_per_image=sizes["tokens"],
        boi_token_index=begin,
        eoi_token_index=end,
        image_token_index=soft,
    )
    network = random_network(Gemma3ForConditionalGeneration, config)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=sizes["std"])
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    names = {
        "model.language_model.": "language_model.model.",
        "model.vision_tower.": "vision_tower.vision_model.",
        "model.multi_modal_projector.": "multi_modal_projector.",
    }
    weights = {
        new + name.removeprefix(old): tensor.cpu().contiguous()
        for name, tensor in network.state_dict().items()
        for old, new in names.items()
        if name.startswith(old)
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    tokenizer.save_pretrained(folder)
    extra = dict(zip(("boi_token", "eoi_token", "image_token"), SQUARE_TOKENS, strict=True))
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"extra_special_tokens": extra} | extra
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    side = sizes["tower"]["image_size"]
    processor = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": side, "width": side}}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    whole = {"processor_class": "Gemma3Processor", "image_seq_length": sizes["tokens"], "image_processor": processor}
    (folder / "processor_config.json").write_text(json.dumps(whole))
    return folder


def draw(number: int, side: int, boxes: int = 4) -> tuple[Any, list[dict[str, Any]]]:
    """A picture of `side` pixels with rectangles, and its objects as a detector's row has them."""
    from PIL import Image, ImageDraw

    numbers = random.Random(number)
    picture = Image.new("RGB", (side, side), "white")
    pen, objects = ImageDraw.Draw(picture), []
    for _ in range(boxes):
        left, top = numbers.randint(0, side // 2), numbers.randint(0, side // 2)
        right, bottom = (
            left + numbers.randint(side // 8, side // 2 - 1),
            top + numbers.randint(side // 8, side // 2 - 1),
        )
        colour = numbers.choice(("red", "green", "blue", "black"))
        pen.rectangle((left, top, right, bottom), fill=colour)
        bins = [round(999 * edge / side) for edge in (left, top, right, bottom)]
        objects.append({"desc": colour, "bbox_2d": bins})
    return picture, objects


def write_rows(folder: Path, num_rows: int, side: int) -> Path:
    """Rows of a detector's data, with their pictures beside them; the file."""
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    with (folder / "rows.jsonl").open("w") as rows:
        for number in range(num_rows):
            picture, objects = draw(number, side)
            picture.save(folder / f"pictures/{number}.png")
            row = {"images": [f"pictures/{number}.png"], "objects": objects, "width": side, "height": side}
            rows.write(json.dumps(row) + "\n")
    return folder / "rows.jsonl"


if __name__ == "__main__":
    (shaped_square_model if sys.argv[2] in SQUARES else shaped_vision_model)(Path(sys.argv[1]), sys.argv[2])
