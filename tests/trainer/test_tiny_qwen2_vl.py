import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

from slipstream.commands.small_models.tiny_qwen2_vl import IMAGE_TOKENS, new_vision_model
from slipstream.data.images.families import image_processor
from slipstream.errors import ConfigError
from slipstream.trainer.model.loading import check_architecture

SMALL = {"hidden_size": 64, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "context_length": 128}


@pytest.mark.parametrize("kind", ["byte", "char"])
def test_the_folder_loads_with_tokenizer_and_processor(tmp_path, kind):
    folder = new_vision_model(tmp_path / "model", tokenizer=kind, **SMALL)
    check_architecture(folder)
    network = AutoModelForImageTextToText.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert network.config.image_token_id == tokenizer.convert_tokens_to_ids(IMAGE_TOKENS[2])
    assert network.generation_config.eos_token_id == tokenizer.eos_token_id
    processor = image_processor(folder)
    assert processor.token_id == network.config.image_token_id
    assert processor.pinned == {"min_pixels": 256, "max_pixels": 16_384, "patch_size": 8, "merge_size": 2}
    shown = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Hi"}]}]
    text = tokenizer.apply_chat_template(shown, tokenize=False)
    assert text == "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Hi<|im_end|>\n"
    assert text == tokenizer.decode(tokenizer.encode(text))


def test_the_seed_alone_decides_the_weights(tmp_path):
    before = torch.get_rng_state()
    a, b, c = (new_vision_model(tmp_path / name, seed=seed, **SMALL) for name, seed in (("a", 5), ("b", 5), ("c", 6)))
    assert torch.get_rng_state().equal(before)
    first, same, other = ((folder / "model.safetensors").read_bytes() for folder in (a, b, c))
    assert first == same != other


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_kv_heads": 3, "num_heads": 4, "hidden_size": 128}, "does not divide"),
        ({"hidden_size": 96}, "is not a multiple of 32"),
    ],
)
def test_wrong_sizes_are_refused(tmp_path, change, said):
    with pytest.raises(ConfigError, match=said):
        new_vision_model(tmp_path / "model", **SMALL | change)
    assert not (tmp_path / "model").exists()


def test_a_used_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is not empty"):
        new_vision_model(tmp_path)
