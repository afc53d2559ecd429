"""`ChatServer`: a model at any OpenAI-compatible address, asked with messages (`/chat/completions`).

It takes the place of an engine if only texts count, as in an evaluation. Conversations and replies are tokens of
`MessageTokens`: bytes instead of the model's tokens. So nothing here can be trained on. Guarantees: at most
`concurrency` requests run at once; `openai_client` repeats a request until its own deadline; an abandoned request is
an aborted completion with its reason, and is counted.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from slipstream.data.images.reading import bytes_of, decoded, encoded, is_plain
from slipstream.errors import ConfigError
from slipstream.openai_client import OpenAIClient, Unanswered
from slipstream.records import Completion, GenerateRequest, Media, Message

_CONNECT_S = 30.0
_TYPES = {"png": b"\x89PNG\r\n", "jpeg": b"\xff\xd8\xff"}
"""How files of these formats begin."""


_CONCURRENCY = 32
"""Requests to a server at once."""


class MessageTokens:
    """The tokenizer of `ChatServer`: a token is a byte. `system` is the run's system prompt."""

    def __init__(self, system: str = "") -> None:
        self._system = [{"role": "system", "content": system}] if system else []

    def render(self, messages: Sequence[Message]) -> list[int]:
        """The messages as JSON, with a part `{"type": "image"}` at the place of each image."""
        chat = [message.as_chat() for message in messages]
        if not chat or chat[0]["role"] != "system":
            chat = self._system + chat
        return list(msgspec.json.encode(chat))

    def place_images(self, messages: Sequence[Message], token_ids: Sequence[int]) -> tuple[Media, ...]:
        """The images of the messages; they have no tokens here."""
        return tuple(image for message in messages for image in message.media)

    def request(self, token_ids: Sequence[int], media: Sequence[Media]) -> tuple[list[int], tuple[bytes, ...]]:
        """The prompt and its images, as PNG or JPEG files: all servers read these."""
        return list(token_ids), tuple(_file_of(image) for image in media)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a reply."""
        return bytes(token_ids).decode("utf-8", "replace")

    def decode_turn(self, token_ids: Sequence[int]) -> tuple[str, str]:
        """The same twice: a reply has no special tokens."""
        text = self.decode(token_ids)
        return text, text


def _file_of(image: Media) -> bytes:
    """As it is, if it is an upright PNG or JPEG file: not every server turns images."""
    data = bytes_of(image)
    return data if _type_of(data) and is_plain(data) else encoded(decoded(data, f"image {image.uri:.80}"))


def _type_of(data: bytes) -> str:
    """`png` or `jpeg`; empty for another format."""
    return next((kind for kind, start in _TYPES.items() if data.startswith(start)), "")


def _with_images(chat: list[dict[str, Any]], images: Sequence[bytes]) -> list[dict[str, Any]]:
    """The messages with the images in the places of their parts, as OpenAI's requests have them."""
    given = iter(images)
    for message in chat if images else ():
        parts = message["content"] if isinstance(message["content"], list) else []
        for place, part in enumerate(parts):
            if part["type"] == "image":
                data = next(given)
                url = f"data:image/{_type_of(data)};base64,{base64.b64encode(data).decode()}"
                parts[place] = {"type": "image_url", "image_url": {"url": url}}
    return chat


class ChatServer:
    """See the module. Belongs to one event loop; use as `async with`."""

    num_restarts = 0

    def __init__(self, url: str, model: str = "", key: str = "") -> None:
        """`model`: its name there; empty: the only one."""
        self._client = OpenAIClient(url, key)
        self._shown = self._client.shown
        self.model = model
        self._slots = asyncio.Semaphore(_CONCURRENCY)
        self.num_tokens = 0
        """Sampled tokens, as the server counts them."""
        self.num_counted = 0
        """Replies with such a count."""
        self.num_stops_unknown = 0
        """Replies perhaps ended by a stop string, without the server naming it."""

    @property
    def each(self) -> tuple[ChatServer]:
        """See `Generates`."""
        return (self,)

    async def __aenter__(self) -> ChatServer:
        try:
            await self._find_model()
        except BaseException:
            await self._client.close()
            raise
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self._client.close()

    async def _find_model(self) -> None:
        """Check that the server answers and has the model. Raises `ConfigError`."""
        try:
            listed = await self._client.ask("GET", "/models", deadline_s=_CONNECT_S)
            names = [str(each["id"]) for each in listed["data"]]
        except Unanswered as error:
            raise ConfigError(
                f"the server at {self._shown} cannot be asked ({error}): check the address, which ends with /v1, and "
                "--key-variable"
            ) from None
        except (KeyError, TypeError):
            names = []
        if self.model and (self.model in names or not names):
            return
        if self.model or len(names) != 1:
            known = ", ".join(names[:20]) or "does not say which"
            problem = f"does not serve {self.model!r}" if self.model else "needs the name of a model"
            raise ConfigError(f"the server at {self._shown} {problem} (it has: {known}): give --served-name")
        self.model = names[0]

    async def revive(self) -> None:
        """See `Generates`: there is nothing to start."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """See `Generates`. An abandoned request is an aborted completion."""
        sampling = request.sampling
        body: dict[str, Any] = {
            "model": self.model,
            "messages": _with_images(msgspec.json.decode(bytes(request.prompt_ids)), request.images),
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_tokens,
        }
        # Values without an effect are left out: not every server knows all of them.
        given = {"top_p": (sampling.top_p, 1.0), "top_k": (sampling.top_k, 0), "min_p": (sampling.min_p, 0.0)}
        body |= {name: value for name, (value, none) in given.items() if value != none}
        if request.seed is not None:
            body["seed"] = request.seed
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        try:
            async with self._slots:
                # The wait for a slot is not the server's time.
                answer = await self._client.ask("POST", "/chat/completions", body, deadline_s=request.timeout_s)
            completion = self._completion(request.id, answer, sampling.stop)
            # A prompt's image tokens in the model are the server's business.
            return msgspec.structs.replace(completion, prompt_ids=request.prompt_ids if request.images else None)
        except Unanswered as error:
            return Completion(
                request.id, [], None, "abort", error=str(error), cause="late" if error.is_late else "invalid"
            )

    def _completion(self, name: str, answer: dict[str, Any], stop: Sequence[str]) -> Completion:
        try:
            choice = answer["choices"][0]
            text = choice["message"]["content"] or ""
            reason = choice.get("finish_reason")
            if stop and reason == "stop":
                text += self._stop_string(choice, stop, text)
            data = list(text.encode("utf-8", "replace"))  # JSON may have half of a surrogate pair
        except (KeyError, IndexError, TypeError, AttributeError):
            raise Unanswered(f"the server at {self._shown} sent no chat completion") from None
        usage = answer.get("usage")
        count = usage.get("completion_tokens") if isinstance(usage, dict) else None
        if isinstance(count, int):
            self.num_tokens += count
            self.num_counted += 1
        return Completion(name, data, None, "length" if reason == "length" else "stop")

    def _stop_string(self, choice: Mapping[str, Any], stop: Sequence[str], text: str) -> str:
        """The stop string at a text's end. Servers leave it out of the text, and rewards see all sampled text.
        vLLM and SGLang name it."""
        named = [choice[key] for key in ("stop_reason", "matched_stop") if key in choice]
        self.num_stops_unknown += not named
        return next((each for each in named if each in stop and not text.endswith(each)), "")
