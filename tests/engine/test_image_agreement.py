"""Engine and trainer on prompts with images: the same tokens, and the same log-probabilities."""

import io
import json

import pytest
import torch
import transformers
from PIL import Image

from slipstream.commands.small_models.tiny_qwen2_vl import new_vision_model
from slipstream.data.chat_template import ChatTokenizer
from slipstream.data.images.reading import read_image
from slipstream.records import GenerateRequest, Message, SamplingParams
from slipstream.trainer.learner import score
from slipstream.trainer.model.policy import PolicyModel
from tests.data.test_square_images import save_model as save_squares

from .conftest import sequence_of, start

pytestmark = pytest.mark.engine

_TOWER = {"depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "out_hidden_size": 64}
_TOWER |= {"patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2}
TOWERS = {
    "Qwen2_5_VL": _TOWER | {"window_size": 32, "fullatt_block_indexes": [1]},
    "Qwen3_VL": _TOWER | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
}


def save(folder, family):
    """A small model of a family; all but Gemma's configuration is that of `model new --vision`."""
    if family == "Gemma3":
        return save_squares(folder)
    new_vision_model(folder, hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, context_length=256)
    if family == "Qwen2_VL":
        return folder
    config = json.loads((folder / "config.json").read_text())
    text = {key: value for key, value in config["text_config"].items() if key not in ("model_type", "layer_types")}
    ids = {key: config[key] for key in config if key.endswith("_token_id")}
    kind = family.replace("Qwen3_VL", "Qwen3VL")
    if family == "Qwen3_VL":
        text |= {"head_dim": 32, "rope_parameters": text["rope_parameters"] | {"mrope_interleaved": True}}
    torch.manual_seed(0)
    parts = {"text_config": text, "vision_config": TOWERS[family], "tie_word_embeddings": True}
    made = getattr(transformers, f"{kind}Config")(**parts, **ids)
    network = getattr(transformers, f"{kind}ForConditionalGeneration")(made)
    for name, parameter in network.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.1)
        elif "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.05)
    (folder / "model.safetensors").unlink()
    network.save_pretrained(folder)
    processor = json.loads((folder / "processor_config.json").read_text())
    if family == "Qwen3_VL":
        processor["processor_class"] = "Qwen3VLProcessor"
        processor["video_processor"]["video_processor_type"] = "Qwen3VLVideoProcessor"
    else:
        processor["processor_class"] = "Qwen2_5_VLProcessor"
    (folder / "processor_config.json").write_text(json.dumps(processor))
    return folder


def picture(width, height, seed):
    noise = torch.randint(256, (height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    file = io.BytesIO()
    Image.fromarray(noise.numpy()).save(file, "PNG")
    return read_image(file.getvalue(), "picture")


def talks_with_images():
    """Sizes that are scaled and that are not, several images, and, last, none."""
    wide, tall, large = picture(64, 32, 0), picture(37, 91, 1), picture(300, 170, 2)
    return [
        [Message("user", "<image>What?", (wide,))],
        [Message("user", "First <image> then <image>: which?", (tall, wide))],
        [Message("user", "<image>", (large,)), Message("assistant", "a"), Message("user", "<image>?", (tall,))],
        [Message("user", "no picture")],
    ]


@pytest.mark.full
@pytest.mark.parametrize("family", ["Qwen2_VL", "Qwen2_5_VL", "Qwen3_VL", "Gemma3"])
def test_tokens_and_logprobs_of_image_prompts(family, tmp_path, sees):
    folder = save(tmp_path / "model", family)
    tokenizer = ChatTokenizer(folder)
    talks = talks_with_images()
    sampling, prompts, requests = SamplingParams(max_tokens=12), [], []
    for number, talk in enumerate(talks):
        ids = tokenizer.render(talk)
        media = tokenizer.place_images(talk, ids)
        asked, images = tokenizer.request(ids, media)
        prompts.append((ids, media))
        requests.append(GenerateRequest(f"r{number}", asked, sampling, seed=number, images=images))
    with start(folder, tmp_path) as live:
        completions = live.generate(*requests)
    sequences = []
    for (ids, media), completion in zip(prompts, completions, strict=True):
        assert completion.prompt_ids == (ids if media else None)
        sequences.append(sequence_of(ids, completion, media=list(media)))
    ours = score(PolicyModel.load(folder), sequences, micro_batch_tokens=1024).logprobs
    for (_, media), mine, completion in zip(prompts, ours, completions, strict=True):
        if family == "Gemma3" and media:
            continue  # vLLM on a CPU has no attention for its images: such runs are refused
        assert (mine - torch.tensor(completion.logprobs)).abs().max() < 1e-3
