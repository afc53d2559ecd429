"""Images in rows: where they may stand, what becomes of them, and what is refused."""

import base64
import contextlib
import io
import json
import os
import random
import socket
import struct
import warnings
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from tests.data.problems import read_problems

from slipstream.commands.small_models.tiny_qwen2_vl import new_vision_model
from slipstream.commands.small_models.tiny_qwen3 import new_model
from slipstream.data.chat_template import ChatTokenizer
from slipstream.data.conversations import Columns, read_conversations
from slipstream.data.examples import split_off, tokenized
from slipstream.data.images import reading
from slipstream.data.images.families import image_processor
from slipstream.data.images.reading import FORMATS, bytes_of, decoded, is_plain, read_image
from slipstream.errors import ConfigError, DataError
from slipstream.records import Message

ASKED = [{"role": "user", "content": "<image>How many?"}, {"role": "assistant", "content": "2"}]


def png(width=40, height=30, colour="red"):
    file = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(file, "PNG")
    return file.getvalue()


def claims(width, height):
    """A PNG file that says it has that size, and has no pixels."""
    chunks = (b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0), b"IDAT", b"IEND")
    packed = (struct.pack(">I", len(each) - 4) + each + struct.pack(">I", zlib.crc32(each)) for each in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


def data_uri(data):
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures/a.png").write_bytes(png())
    (tmp_path / "pictures/b.png").write_bytes(png(colour="blue"))
    (tmp_path / "pictures/torn.png").write_bytes(png(200, 200)[:-30])
    (tmp_path / "pictures/words.png").write_text("no picture")
    (tmp_path / "pictures/large.png").write_bytes(claims(10_000, 9_000))
    (tmp_path / "pictures/huge.png").write_bytes(claims(100_000, 90_000))
    (tmp_path / "pictures/strip.png").write_bytes(claims(9_000, 20))
    return tmp_path


def rows(folder, *values):
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, values)))
    return path


def colours(conversation):
    found = [decoded(bytes_of(image), "it").getpixel((0, 0)) for turn in conversation for image in turn.media]
    return ["red" if colour == (255, 0, 0) else "blue" if colour == (0, 0, 255) else colour for colour in found]


A, B = "pictures/a.png", "pictures/b.png"
FORMS = {
    "marks and a column": {"messages": ASKED, "images": [A]},
    "a column of one": {"messages": ASKED, "image": A},
    "no marks": {"prompt": "How many?", "completion": "2", "images": [A]},
    "a dictionary": {"messages": ASKED, "images": [{"image": A}]},
    "a file URI": {"messages": ASKED, "images": [{"image": "file://ROOT/pictures/a.png"}]},
    "a data URI": {"messages": ASKED, "images": [data_uri(png())]},
    "open parts": {
        "messages": [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "How many?"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "2"}]},
        ],
        "images": [A],
    },
    "OpenAI's parts": {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": data_uri(png())}},
                    {"type": "text", "text": "How many?"},
                ],
            },
            ASKED[1],
        ]
    },
    "parts with paths": {
        "prompt": [{"role": "user", "content": [{"type": "image", "image": A}, {"type": "text", "text": "How many?"}]}],
        "completion": "2",
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_an_image(form, folder):
    path = rows(folder, json.loads(json.dumps(FORMS[form]).replace("ROOT", str(folder))))
    unread = {}
    ((user, assistant),) = read_conversations(path, unread=unread)
    assert (user.content, assistant.content) == ("<image>How many?", "2")
    assert colours([user]) == ["red"]
    assert (user.media[0].width, user.media[0].height) == (40, 30)
    assert not assistant.media
    assert unread == {}


def test_images_come_in_the_order_of_their_places(folder):
    talk = [
        {"role": "user", "content": "<image> and <image>?"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "<image>?"},
        {"role": "assistant", "content": "2"},
    ]
    (conversation,) = read_conversations(rows(folder, {"messages": talk, "images": [A, B, A]}))
    assert [len(turn.media) for turn in conversation] == [2, 0, 1, 0]
    assert colours(conversation) == ["red", "blue", "red"]


def test_bytes_of_a_parquet_file(folder):
    """As verl's rows and those of `datasets` have them."""
    path = folder / "rows.parquet"
    row = {
        "data_source": "count",
        "prompt": [{"role": "user", "content": "<image>How many?"}],
        "images": [{"bytes": png(), "path": None}],
        "reward_model": {"style": "rule", "ground_truth": "2"},
    }
    pq.write_table(pa.Table.from_pylist([row]), path)
    (problem,) = read_problems(path, Columns())
    assert problem.answer == "2"
    assert colours(problem.prompt) == ["red"]
    assert problem.prompt[0].media[0].uri.startswith("data:application/octet-stream;base64,")


def test_without_images_the_mark_is_text(folder):
    ((user, _),) = read_conversations(rows(folder, {"messages": ASKED}))
    assert user.as_chat()["content"] == "<image>How many?"


BROKEN = {
    "missing": ({"images": ["pictures/c.png"]}, r"images\[0\] = 'pictures/c.png' cannot be read \(No such file"),
    "a folder": ({"images": ["pictures"]}, r"images\[0\] = 'pictures' cannot be read \(Is a directory\)"),
    "truncated": ({"images": ["pictures/torn.png"]}, r"images\[0\] cannot be decoded \(.*\): save it again"),
    "no picture": ({"images": ["pictures/words.png"]}, r"images\[0\] is in no known format of images: save it as"),
    "large": ({"images": ["pictures/large.png"]}, "has 10000 x 9000 pixels, more than 64,000,000: scale it down"),
    "huge": ({"images": ["pictures/huge.png"]}, "has far more than 64,000,000 pixels .*: scale it down"),
    "a strip": ({"images": ["pictures/strip.png"]}, "9000 x 20 pixels, one side more than 200 times"),
    "an address": ({"images": ["https://a.org/b.png"]}, "lies on a network, from which nothing is fetched"),
    "no base64": ({"images": ["data:image/png;base64,%%%"]}, "is no data: URI"),
    "plain data": ({"images": ["data:image/png,abc"]}, "is no data: URI"),
    "a number": ({"images": [7]}, r"images\[0\] = 7 is no image: give a path"),
    "nothing": ({"images": [None]}, r"images\[0\] = None is no image"),
    "too many": ({"images": [A, B]}, "images holds 2 images, and the messages have 1 places"),
    "too few": (
        {"messages": [{"role": "user", "content": "<image><image>"}, ASKED[1]], "images": [A]},
        "images holds 1 images, and the messages have 2 places",
    ),
    "no column": (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}, ASKED[1]]},
        "no column holds images, and the messages have 1 places",
    ),
    "a mark beside parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "<image>"}, {"type": "image"}]}, ASKED[1]]},
        r"messages\[0\].content\[0\] has the text <image>",
    ),
    "an unknown part": (
        {"messages": [{"role": "user", "content": [{"type": "video_url"}]}, ASKED[1]]},
        r"messages\[0\].content\[0\] is .*: give parts of type text and image_url",
    ),
    "a part that is none": ({"messages": [{"role": "user", "content": [3]}, ASKED[1]]}, r"content\[0\] = 3 is no part"),
    "a broken part": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x.png"}}]}, ASKED[1]]},
        r"messages\[0\].content\[0\].image_url = 'x.png' cannot be read",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_images_are_named_with_their_row(kind, folder):
    change, said = BROKEN[kind]
    path = rows(folder, {"messages": ASKED, "images": [A]}, {"messages": ASKED, **change})
    with pytest.raises(DataError, match=f"^row 2 of {path}: .*{said}") as raised:
        read_conversations(path)
    assert "\n" not in str(raised.value)


def test_a_picture_that_changes_later_is_refused(folder):
    image = read_image(A, "it", folder)
    (folder / A).write_bytes(png(colour="green"))
    with pytest.raises(DataError, match=r"has changed since it was read \(sha256"):
        bytes_of(image)


def test_large_bytes_lie_in_the_cache_and_small_ones_in_the_record(folder, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    file = io.BytesIO()
    Image.effect_noise((200, 200), 90).save(file, "PNG")
    noise = file.getvalue()
    for given in (noise, data_uri(noise)):
        image = read_image(given, "it")
        assert image.uri == str(folder / "cache/slipstream/images" / image.sha256)
        assert bytes_of(image) == noise
    assert [path.name for path in (folder / "cache/slipstream/images").iterdir()] == [image.sha256]
    assert read_image(png(), "it").uri.startswith("data:")
    (folder / "cache/slipstream/images" / image.sha256).write_bytes(bytes(len(noise)))  # as after a loss of power
    assert bytes_of(read_image(noise, "it")) == noise
    (folder / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "file"))
    assert bytes_of(read_image(noise, "it")) == noise


def test_pictures_are_upright_and_in_colour(folder):
    grey = Image.new("L", (6, 4), 7)
    turned = Image.new("RGB", (6, 4), "red")
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    turned.save(file, "JPEG", exif=exif)
    for given, size in ((grey, (6, 4)), (file.getvalue(), (4, 6))):
        image = read_image(given, "it")
        assert (image.width, image.height) == size
        assert decoded(bytes_of(image), "it").mode == "RGB"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return new_vision_model(
        tmp_path_factory.mktemp("models") / "vision", hidden_size=64, num_layers=1, num_heads=2, num_kv_heads=1
    )


@pytest.fixture
def chat(model):
    return ChatTokenizer(model)


def talk_of(image, answer="2"):
    return [Message("user", "<image>How many?", (image,)), Message("assistant", answer)]


def test_a_placeholder_becomes_as_many_tokens_as_the_image_has(chat):
    """16 x 16 pixels are a token; sides are rounded to multiples of 16, and the area to at most 128 x 128."""
    for size, grid in (((40, 30), (1, 2, 2)), ((64, 48), (1, 3, 4)), ((1000, 500), (1, 5, 11)), ((1, 1), (1, 1, 1))):
        image = read_image(png(*size), "it")
        ids = chat.render(talk_of(image)[:1])
        (placed,) = chat.place_images(talk_of(image)[:1], ids)
        assert placed.grid == grid
        assert placed.num_tokens == grid[1] * grid[2] == ids.count(chat.images.token_id)
        assert ids[placed.start : placed.start + placed.num_tokens] == [chat.images.token_id] * placed.num_tokens
        asked, (sent,) = chat.request(ids, [placed])
        assert asked.count(chat.images.token_id) == 1
        assert chat.images.expand(asked, [image]) == ids
        assert decoded(sent, "it").size == (16 * grid[2], 16 * grid[1])


def test_the_engine_scales_a_scaled_image_no_more(chat):
    """Whatever it was: trainer and engine compute with the same pixels."""
    for size in ((7, 300), (333, 211), (128, 128), (16, 3000)):
        image = read_image(png(*size), "it")
        again = read_image(chat.images.scaled(image), "it")
        assert chat.images.size_of(again) == (again.width, again.height) == chat.images.size_of(image)
        pixels, grid = chat.images.pixels([image]).values()
        same, _ = chat.images.pixels([again]).values()
        assert pixels.equal(same)
        assert len(pixels) == grid.prod() == 4 * again.width * again.height // 256


def test_the_trainer_scales_to_the_grid_of_the_prompt(model):
    """Its own processor knows no `model.max_pixels`."""
    bounded = ChatTokenizer(model, max_pixels=2048)
    talk = talk_of(read_image(png(100, 100), "it"))[:1]
    (placed,) = bounded.place_images(talk, bounded.render(talk))
    assert placed.grid == (1, 2, 2)
    pixels, grid = image_processor(model).pixels([placed]).values()
    assert grid.tolist() == [[1, 4, 4]]
    assert pixels.equal(bounded.images.pixels([placed])["pixel_values"])
    (sent,) = bounded.request(bounded.render(talk), [placed])[1]
    assert decoded(sent, "it").size == (32, 32)


def test_examples_keep_their_images(chat, folder):
    image, other = read_image(A, "it", folder), read_image(png(64, 64), "it")
    talks = [talk_of(image), [Message("user", "Hi"), Message("assistant", "Ho")], talk_of(other)]
    _, examples = tokenized(talks, chat, "all", 100, "error", {}, where=str)
    assert [len(each.media) for each in examples] == [1, 0, 1]
    first, _, last = examples
    assert first.media[0].sha256 == image.sha256
    assert last.media[0].num_tokens == 16
    assert not any(first.mask[first.media[0].start :][: first.media[0].num_tokens])
    assert first.num_trainable == 2


def test_all_tokens_but_those_of_images_carry_loss(chat, folder):
    sequence = chat.training_tokens(talk_of(read_image(A, "it", folder)), "everything")
    assert sequence.num_trainable == len(sequence) - 1 - 4


def test_a_cut_conversation_ends_before_the_image_that_would_be_cut(chat, folder):
    image = read_image(A, "it", folder)
    talk = [*talk_of(image), *talk_of(image, "3")]
    whole = chat.training_tokens(talk, "all")
    second = whole.media[1]
    _, (cut,) = tokenized([talk], chat, "all", second.start + 2, "truncate", {}, where=str)
    assert len(cut) == second.start
    assert cut.media == whole.media[:1]


def test_pictures_decide_what_is_held_out(folder):
    """Rows that differ in their picture alone are different rows."""
    talks = [talk_of(read_image(png(16, 16, (n, 0, 0)), "it")) for n in range(60)]
    kept, held_out = split_off(talks, 0.5)
    assert len(kept) + len(held_out) == 60
    assert min(len(kept), len(held_out)) > 10


def test_a_row_whose_text_holds_the_placeholder_is_named(chat, folder):
    talk = [Message("user", "<image>a <|image_pad|>", (read_image(A, "it", folder),)), Message("assistant", "2")]
    with pytest.raises(DataError, match="row 7: the chat template renders 2 image placeholders for 1 images"):
        tokenized([talk], chat, "all", 100, "error", {}, where=lambda _: "row 7")


def test_a_model_of_text_reads_no_images(tmp_path, folder):
    text = new_model(tmp_path / "text", hidden_size=32, num_layers=1, num_heads=1, num_kv_heads=1)
    with pytest.raises(ConfigError, match="reads no images, and there are some in the data"):
        image_processor(text)
    chat = ChatTokenizer(text)
    with pytest.raises(ConfigError, match="reads no images"):
        chat.render(talk_of(read_image(A, "it", folder))[:1])


def test_a_folder_without_processor_is_refused(model, tmp_path):
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((model / file).read_bytes())
    with pytest.raises(ConfigError, match=r"its image processor cannot be loaded .*preprocessor_config.json"):
        image_processor(tmp_path)


@pytest.mark.parametrize(
    "written",
    [
        {"min_pixels": 3136, "max_pixels": 12_845_056, "size": {"min_pixels": 3136, "max_pixels": 12_845_056}},
        {"min_pixels": 3136, "max_pixels": 12_845_056},
        {"size": {"shortest_edge": 3136, "longest_edge": 12_845_056}},
    ],
)
@pytest.mark.parametrize("kind", ["Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast"])
def test_forms_of_a_processors_file(model, tmp_path, written, kind):
    """As the models on the hub have them: of Qwen2-VL, Qwen2.5-VL and Qwen3-VL."""
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((model / file).read_bytes())
    values = {"image_processor_type": kind, "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, **written}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(values))
    processor = image_processor(tmp_path)
    bounds = {"min_pixels": 3136, "max_pixels": 12_845_056}
    assert processor.pinned == {**bounds, "patch_size": 14, "merge_size": 2}
    assert processor.grid_of(read_image(png(280, 140), "it")) == (1, 5, 10)


def test_scaled_images_are_kept_within_bounds(chat, monkeypatch):
    monkeypatch.setattr("slipstream.data.images.processor._MOST_BYTES", 2000)
    for number in range(60):
        chat.images.scaled(read_image(png(64, 64, (number, 0, 0)), "it"))
    assert chat.images._num_bytes <= 2000
    assert chat.images._num_bytes == sum(map(len, chat.images._scaled.values()))


def grey(mode, name):
    """Four grey pixels from black to white, in a mode of Pillow."""
    file = io.BytesIO()
    kind, white = {"I;16": ("<u2", 65535), "I;16B": (">u2", 65535), "F": ("f4", 1), "I": ("i4", 255)}[mode]
    Image.fromarray((white * np.array([0.0, 0.2, 0.7, 1.0])).astype(kind).reshape(2, 2)).save(file, name)
    return file.getvalue()


@pytest.mark.parametrize(("mode", "name"), [("I;16", "PNG"), ("I;16", "TIFF"), ("I;16B", "TIFF")])
def test_grey_pixels_of_16_bits_keep_their_shades(mode, name):
    data = grey(mode, name)
    assert np.asarray(decoded(data, "it"))[..., 1].ravel().tolist() == [0, 51, 179, 255]
    assert not is_plain(data)


@pytest.mark.parametrize("mode", ["F", "I"])
def test_pixels_without_a_white_are_refused(mode):
    with pytest.raises(DataError, match=f"^it has pixels of type {mode}"):
        decoded(grey(mode, "TIFF"), "it")


def test_a_file_uri_is_read_as_it_is_written_by_pathlib(folder):
    place = folder / "pictures/ä b%20#.png"
    place.write_bytes(png())
    for uri in (place.as_uri(), place.as_uri().replace("file://", "file://localhost")):
        assert read_image(uri, "it").uri == str(place)
    assert read_image("pictures/ä b%20#.png", "it", folder).uri == str(place)


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n"


def of_format(name, mode="RGB"):
    file = io.BytesIO()
    Image.new(mode, (21, 13), 7).save(file, name)
    return file.getvalue()


@pytest.mark.parametrize("name", FORMATS)
def test_formats_that_are_read(name):
    assert decoded(of_format(name), "it").size == (21, 13)


def test_an_image_starts_no_program(folder, monkeypatch):
    """Pillow gives an EPS file to Ghostscript, whatever the file is called."""
    program = folder / "gs"
    program.write_text(f"#!/bin/sh\ntouch {folder}/ran\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    (folder / "pictures/eps.png").write_bytes(EPS)
    for image in ("pictures/eps.png", data_uri(EPS)):
        with pytest.raises(DataError, match="row 1"):
            read_conversations(rows(folder, {"messages": ASKED, "images": [image]}))
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("path", ["/dev/zero", "fifo", "socket", "pictures", "~nosuchuser/x.png", "large", "link"])
def test_only_regular_files_of_some_size_are_opened(path, folder):
    os.mkfifo(folder / "fifo")
    (folder / "link").symlink_to(folder / "fifo")
    with (folder / "large").open("wb") as file:
        file.truncate(1 << 40)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(os.path.relpath(folder / "socket"))
        with pytest.raises(DataError, match="row 1"):
            read_conversations(rows(folder, {"messages": ASKED, "images": [path]}))


@pytest.mark.parametrize("name", FORMATS)
def test_a_damaged_image_is_a_data_error_without_a_warning(name, recwarn, capfd):
    whole = of_format(name) if name != "TIFF" else of_format(name, "P")
    chance = random.Random(0)
    for _ in range(150):
        data = bytearray(whole[: chance.choice([len(whole), chance.randrange(len(whole))])])
        for _ in range(chance.randrange(1, 6)):
            if data:
                data[chance.randrange(len(data))] = chance.randrange(256)
        with warnings.catch_warnings(record=True) as said:
            reading._quieten.cache_clear()
            with contextlib.suppress(DataError):
                decoded(bytes(data), "it")
        assert not said
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("error", [RuntimeError, IndexError, NotImplementedError, struct.error, MemoryError, KeyError])
def test_whatever_a_decoder_raises_is_a_data_error(error, monkeypatch):
    def load(self):
        raise error("damaged")

    monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.load", load)
    with pytest.raises(DataError, match="it"):
        decoded(png(), "it")


def test_images_of_a_program_that_are_none(folder):
    itself = {}
    itself["image"] = itself
    half = io.BytesIO(png()[:60])
    for source in (itself, Image.new("RGB", (0, 0)), Image.open(half)):
        with pytest.raises(DataError, match="row 1"):
            read_image(source, "row 1", folder)
