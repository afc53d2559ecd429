"""Images of Gemma 3: equally many tokens each, between empty lines whose newlines join those of the text."""

import io
import json

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, models

from slipstream.data.chat_template import ChatTokenizer
from slipstream.data.images.families import image_processor
from slipstream.data.images.reading import decoded, read_image
from slipstream.errors import ConfigError, DataError
from slipstream.records import Message

SPECIAL = ("<pad>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>", "<soft>")
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "max_position_embeddings": 256,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"],
}
TOWER = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
    "vision_use_head": False,
}
NUM_TOKENS = 4
TEMPLATE = (
    "{% for message in messages %}<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<start_of_image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


def tokenizer_of(newlines=4):
    """A tokenizer of characters in which up to `newlines` newlines are one token, as in Gemma's."""
    characters = [chr(code) for code in range(32, 127)] + ["\n" * number for number in range(1, newlines + 1)]
    merges = [("\n", "\n"), ("\n\n", "\n"), ("\n\n", "\n\n")][: newlines - 1]
    words = {word: number for number, word in enumerate(characters)}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=merges))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return tokenizer


def save(folder, newlines=4, **processor):
    names = dict(zip(("boi_token", "eoi_token", "image_token"), SPECIAL[4:], strict=True))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_of(newlines),
        pad_token="<pad>",
        eos_token="<end_of_turn>",
        extra_special_tokens=names,
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    begin, end, soft = (tokenizer.convert_tokens_to_ids(token) for token in SPECIAL[4:])
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    transformers.Gemma3Config(
        architectures=["Gemma3ForConditionalGeneration"],
        text_config={"vocab_size": len(tokenizer)} | TEXT | ends,
        vision_config=TOWER,
        boi_token_index=begin,
        eoi_token_index=end,
        image_token_index=soft,
        mm_tokens_per_image=NUM_TOKENS,
    ).save_pretrained(folder)
    values = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 16, "width": 16}} | processor
    (folder / "preprocessor_config.json").write_text(json.dumps(values))
    whole = {"processor_class": "Gemma3Processor", "image_seq_length": NUM_TOKENS, "image_processor": values}
    (folder / "processor_config.json").write_text(json.dumps(whole))
    return folder


def save_model(folder):
    """With random weights, under the names that they have on the hub: vLLM 0.32 knows no others of the tower."""
    torch.manual_seed(0)
    network = transformers.Gemma3ForConditionalGeneration(transformers.AutoConfig.from_pretrained(save(folder)))
    for name, parameter in network.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.1)
        elif "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.05)
    names = {
        "model.language_model.": "language_model.model.",
        "model.vision_tower.": "vision_tower.vision_model.",
        "model.multi_modal_projector.": "multi_modal_projector.",
    }
    weights = {}
    for name, tensor in network.state_dict().items():
        old = next((old for old in names if name.startswith(old)), "")
        if name != "lm_head.weight":
            weights[names[old] + name.removeprefix(old)] = tensor
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("models") / "gemma")


@pytest.fixture(scope="module")
def chat(folder):
    return ChatTokenizer(folder)


def picture(width=20, height=10, colour=(255, 0, 0)):
    file = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(file, "PNG")
    return read_image(file.getvalue(), "it")


IMAGES = picture(), picture(16, 16, (0, 255, 0)), picture(7, 60, (0, 0, 255))


def talk_of(*texts):
    """A user's message with an image between each two texts."""
    return [Message("user", "<image>".join(texts), IMAGES[: len(texts) - 1])]


# With more newlines than two Gemma's tokenizer and vLLM part ways.
newlines = st.sampled_from(["", "\n", "\n\n"])
text = st.tuples(newlines, st.sampled_from(["a", "bc d"]), newlines)


@given(texts=st.lists(text.map("".join) | st.just(""), min_size=2, max_size=4))
def test_the_tokens_are_those_of_the_text_with_the_images_written_out(texts, chat):
    """As transformers' processor for Gemma 3 makes them, from text."""
    talk = talk_of(*texts)
    shown = "<start_of_turn>user\n" + "<start_of_image>".join(texts) + "<end_of_turn>\n<start_of_turn>model\n"
    whole = "\n\n<start_of_image>" + "<soft>" * NUM_TOKENS + "<end_of_image>\n\n"
    expected = tokenizer_of().encode(shown.replace("<start_of_image>", whole)).ids
    ids = chat.render(talk)
    assert ids == expected
    placed = chat.place_images(talk, ids)
    soft = tokenizer_of().token_to_id("<soft>")
    assert [place for image in placed for place in range(image.start, image.start + image.num_tokens)] == [
        place for place, token in enumerate(ids) if token == soft
    ]
    assert all(image.sees_itself and image.grid == (0, 0, 0) for image in placed)
    asked, sent = chat.request(ids, placed)
    assert asked == tokenizer_of().encode(shown).ids
    assert [decoded(data, "it").size for data in sent] == [(16, 16)] * len(placed)


@given(gaps=st.lists(st.lists(st.sampled_from([0, 1, 2, 3, 4, 5]), max_size=4), min_size=2, max_size=4))
def test_what_the_engine_is_asked_becomes_the_same_tokens_again(gaps, chat):
    """Whatever stands between the images, tokens of newlines that no tokenizer puts side by side included."""
    processor = chat.images
    one = tokenizer_of().token_to_id("\n")
    ids = list[int]()
    for number, gap in enumerate(gaps):
        ids += [processor.token_id] * (number > 0) + [7 if kind > 3 else one + kind for kind in gap]
    images = IMAGES[: len(gaps) - 1]
    expanded = processor.expand(ids, images)
    asked, _ = processor.request(expanded, processor.place(expanded, images))
    assert processor.expand(asked, images) == expanded


def test_tokens_around_an_image_that_are_not_its_own_are_named(chat):
    ids = chat.render(talk_of("a", "b"))
    (image,) = chat.place_images(talk_of("a", "b"), ids)
    wrong = [*ids[: image.start - 2], ids[0], *ids[image.start - 1 :]]
    with pytest.raises(DataError, match="around an image are not what its empty lines make of a text"):
        chat.request(wrong, [image])
    with pytest.raises(DataError, match="renders 1 image placeholders for 0 images"):
        chat.images.expand(chat.request(ids, [image])[0], [])
    with pytest.raises(DataError, match="a text has the token that stands for a part of an image"):
        chat.render(talk_of("a<soft>", "b"))


def test_every_image_is_scaled_to_the_towers_square(folder):
    processor = image_processor(folder)
    values = processor.pixels(IMAGES)
    assert list(values) == ["pixel_values"]
    assert values["pixel_values"].shape == (3, 3, 16, 16)
    again = [read_image(processor.scaled(image), "it") for image in IMAGES]
    assert values["pixel_values"].equal(processor.pixels(again)["pixel_values"])
    assert [processor.num_tokens(image) for image in IMAGES] == [NUM_TOKENS] * 3
    assert processor.bounds == "to 16 x 16 pixels"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"do_pan_and_scan": True}, r"cuts images into several \(do_pan_and_scan\)"),
        ({"size": {"height": 32, "width": 16}}, "scales to 16 x 32 pixels, and its tower reads 16 x 16"),
    ],
)
def test_processors_that_do_something_else_are_refused(changes, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        image_processor(save(tmp_path, **changes))


def test_settings_and_models_that_do_not_fit_are_refused(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"model.max_pixels = 64 has no effect: .* every image to 16 x 16 pixels"):
        image_processor(folder, max_pixels=64)
    config = transformers.AutoConfig.from_pretrained(save(tmp_path, newlines=3))
    with pytest.raises(ConfigError, match="has no token of 4 newlines, which vLLM needs around images"):
        ChatTokenizer(tmp_path).render(talk_of("a", "b"))
    config.text_config.sliding_window = 3
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="an image has 4 tokens and its sliding window 3"):
        image_processor(tmp_path)
