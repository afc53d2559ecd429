"""Images in requests of agents, on real clients and vLLM: the tokens and pixels of the sampling are trained on."""

import base64

import anthropic
import openai
import pytest

from slipstream.commands.small_models.tiny_qwen2_vl import new_vision_model
from slipstream.data.chat_template import ChatTokenizer
from slipstream.data.images.reading import bytes_of
from slipstream.orchestrator.gateway import MODEL
from slipstream.records import SamplingParams
from tests.engine.conftest import start

from .test_agents import Episode
from .test_image_agreement import picture

pytestmark = [pytest.mark.engine, pytest.mark.servers]
WIDE, LARGE = picture(64, 32, 0), picture(300, 170, 2)


def episode(live, folder, **options):
    made = Episode(live, folder, **options)
    made.sampling = SamplingParams(5, stop_token_ids=made.tokenizer.stop_token_ids)
    return made


def data(image):
    return base64.b64encode(bytes_of(image)).decode() if image else ""


async def chat(address, turns):
    async with openai.AsyncOpenAI(base_url=address.base_url, api_key=address.api_key, max_retries=0) as client:
        messages = []
        for text, image in turns:
            url = f"data:image/png;base64,{data(image)}"
            parts = [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": url}}]
            messages.append({"role": "user", "content": parts if image else text})
            reply = await client.chat.completions.create(model=MODEL, messages=messages)
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})


async def respond(address, turns):
    async with openai.AsyncOpenAI(base_url=address.base_url, api_key=address.api_key, max_retries=0) as client:
        items = []
        for text, image in turns:
            url = f"data:image/png;base64,{data(image)}"
            parts = [{"type": "input_text", "text": text}, {"type": "input_image", "detail": "auto", "image_url": url}]
            items.append({"role": "user", "content": parts if image else text})
            response = await client.responses.create(model=MODEL, input=items, store=False)
            items += [item.model_dump(exclude_none=True) for item in response.output]


async def message(address, turns):
    url = address.base_url.removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=url, api_key=address.api_key, max_retries=0) as client:
        messages = []
        for text, image in turns:
            source = {"type": "base64", "media_type": "image/png", "data": data(image)}
            parts = [{"type": "text", "text": text}, {"type": "image", "source": source}]
            messages.append({"role": "user", "content": parts if image else text})
            reply = await client.messages.create(model=MODEL, messages=messages, max_tokens=12)
            messages.append({"role": "assistant", "content": [block.model_dump() for block in reply.content]})


async def fetch(address):
    async with openai.AsyncOpenAI(base_url=address.base_url, api_key=address.api_key, max_retries=0) as client:
        part = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x.png"}}
        await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": [part]}])


def check_images(live, folder, client, given):
    """A conversation is one row with its images in their places, and a new one after a sampled special token: it could
    stand for an image. Returns the number of rows."""
    images = ChatTokenizer(folder).images
    played = episode(live, folder, images=images)
    played.play(lambda address: client(address, [(f"turn {n}", image) for n, image in enumerate(given)]))
    assert len(played.turns) == len(given)
    specials = {*played.tokenizer._tokenizer.all_special_ids}
    spoken = [
        {*turn.completion.token_ids[: -1 if turn.completion.finish_reason == "stop" else None]} for turn in played.turns
    ]
    forged = [not specials.isdisjoint(tokens) for tokens in spoken]
    rows, is_forged = 1, False
    for number, has_special in enumerate(forged):
        if is_forged and any(given[: number + 1]):
            rows, is_forged = rows + 1, False
        is_forged |= has_special
    played.check(folder, rows)
    row, conversation = played.rows[-1], played.conversations[-1]
    assert [(each.width, each.height) for each in row.media] == [images.size_of(each) for each in given if each]
    assert [len(each.media) for each in conversation if each.role == "user"] == [int(bool(each)) for each in given]
    return len(played.rows)


def test_the_images_of_an_episode_are_in_its_row(tmp_path, sees):
    folder = new_vision_model(
        tmp_path / "tiny", hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, context_length=512
    )
    with start(folder, tmp_path, inference_socket=True) as live:
        orders = (WIDE, None, LARGE), (None, LARGE, WIDE)
        found = {
            client: [check_images(live, folder, client, given) for given in orders]
            for client in (chat, respond, message)
        }
        assert all(1 in numbers for numbers in found.values()), found
        with pytest.raises(openai.BadRequestError, match="its plan has no room for any"):
            episode(live, folder).play(lambda address: chat(address, [("see", WIDE)]))
        with pytest.raises(openai.BadRequestError, match="nothing is fetched"):
            episode(live, folder, images=ChatTokenizer(folder).images).play(fetch)
