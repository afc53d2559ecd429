"""Images in requests of agents, in all forms: scaled as in training, and nothing fetched."""

import base64
import io
import json

import pytest
from PIL import Image

from slipstream.commands.small_models.tiny_qwen2_vl import new_vision_model
from slipstream.data.chat_template import ChatTokenizer
from slipstream.data.images.reading import read_image
from slipstream.errors import DataError
from slipstream.orchestrator.agent_images import with_scaled_images


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return ChatTokenizer(new_vision_model(folder, hidden_size=32, num_layers=1, num_heads=1, num_kv_heads=1)).images


def encoded(width=200, height=90):
    file = io.BytesIO()
    Image.linear_gradient("L").resize((width, height)).convert("RGB").save(file, "JPEG")
    return base64.b64encode(file.getvalue()).decode()


def openai(data):
    return {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{data}", "detail": "low"}}


def responses(data):
    return {"type": "input_image", "image_url": f"data:image/jpeg;base64,{data}"}


def anthropic(data):
    return {"type": "image", "source": {"type": "base64", "media_type": "image/jpeg", "data": data}}


def data_in(part):
    """The image of a part, however it is given."""
    given = part.get("image_url") or f"data:image/png;base64,{part['source']['data']}"
    return read_image(given, "it")


@pytest.mark.parametrize(("form", "name"), [(openai, "messages"), (responses, "input"), (anthropic, "messages")])
def test_images_are_scaled_once_in_all_forms(images, form, name):
    within = {"type": "tool_result", "tool_use_id": "1", "content": [form(encoded(64, 64))]}
    fields = {
        "model": "m",
        name: [{"role": "user", "content": [{"type": "text", "text": "see"}, form(encoded()), within]}],
    }
    body = with_scaled_images(json.dumps(fields).encode(), images)
    _, first, nested = json.loads(body)[name][0]["content"]
    for part, given in ((first, form(encoded())), (nested["content"][0], form(encoded(64, 64)))):
        scaled, original = data_in(part), data_in(given)
        assert images.size_of(original) == images.size_of(scaled) == (scaled.width, scaled.height)
        assert images.scaled(original) == images.scaled(scaled)
        assert part.keys() == given.keys()
    assert first.get("image_url", {}) != {} or first["source"]["media_type"] == "image/png"
    again = with_scaled_images(body, images)
    assert json.loads(again) == json.loads(body)


def test_what_is_no_image_stays_as_it_is(images):
    for text in ('{"messages": [{"content": "an image"}]}', '{"image', "[" * 100_000 + '"image"', '["image"]'):
        assert with_scaled_images(text.encode(), None) == text.encode()


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1/secret"}},
        {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
        {"type": "input_image", "file_id": "file-1"},
        {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/secret"}},
        {"type": "image", "source": "/etc/passwd"},
        openai("AAAA"),
    ],
)
def test_nothing_is_fetched_or_read(images, part):
    body = json.dumps({"messages": [{"role": "user", "content": [part]}]}).encode()
    with pytest.raises(DataError, match="an image of the request"):
        with_scaled_images(body, images)


def test_a_run_without_images_refuses_them():
    body = json.dumps({"messages": [{"role": "user", "content": [openai(encoded())]}]}).encode()
    with pytest.raises(DataError, match="its plan has no room for any"):
        with_scaled_images(body, None)
