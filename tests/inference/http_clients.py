"""Foreign clients of an engine: OpenAI's and Anthropic's packages, and plain HTTP, on its Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

import anthropic
import httpx
import httpx2
import openai

from slipstream.inference.settings import INFERENCE_SOCKET

MODEL = "tiny"
URL = "http://localhost"
MESSAGES = [{"role": "user", "content": "Say something long."}]
PARAMETERS = {"type": "object", "properties": {"unit": {"type": "string", "enum": ["m", "km"]}}, "required": ["unit"]}
TOOL = {"type": "function", "function": {"name": "measure", "parameters": PARAMETERS, "strict": True}}
CHOICE = {"type": "function", "function": {"name": "measure"}}


@dataclasses.dataclass
class Answer:
    """What a client got: its version spans, and where it asked for them token ids and log-probabilities."""

    kind: str
    versions: list[list[tuple[int, str]]]
    digests: dict[str, str]
    prompt_ids: list[int] = dataclasses.field(default_factory=list)
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    text: str = ""
    error: str = ""
    num_calls: int = 0


def socket_of(live: Any) -> str:
    """The path of an engine's socket for foreign clients."""
    return str(Path(live.engine.process.client.socket).with_name(INFERENCE_SOCKET))


class Clients:
    """One of each kind. Use it in one event loop."""

    def __init__(self, socket: str, *, length: int = 40) -> None:
        transport = httpx.AsyncHTTPTransport(uds=socket, limits=httpx.Limits(max_connections=None))
        self.http = httpx.AsyncClient(transport=transport, timeout=120, base_url=URL)
        self.openai = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="any", http_client=self.http, max_retries=0)
        theirs = httpx2.AsyncClient(transport=httpx2.AsyncHTTPTransport(uds=socket), timeout=120)
        self.anthropic = anthropic.AsyncAnthropic(base_url=URL, api_key="any", http_client=theirs, max_retries=0)
        self.length = length
        self.seeds = itertools.count()

    async def close(self) -> None:
        await self.openai.close()
        await self.anthropic.close()

    @property
    def kinds(self) -> dict[str, Callable[[], Awaitable[Answer]]]:
        """Each kind of request, by name."""
        names = ("completion", "completion_stream", "chat", "chat_stream", "chat_tools", "chat_tools_stream")
        names += ("response", "response_stream", "message", "message_stream", "message_tools", "tokens", "generate")
        return {name: getattr(self, name) for name in names}

    def _prompt(self) -> list[int]:
        number = next(self.seeds)
        return [(7 * number + 3 * j) % 90 + 1 for j in range(10 + number % 7)]

    async def completion(self) -> Answer:
        prompt = self._prompt()
        body = {"return_token_ids": True, "ignore_eos": True}
        got = await self.openai.completions.create(
            model=MODEL, prompt=prompt, max_tokens=self.length, logprobs=0, extra_body=body
        )
        choice = got.choices[0]
        return _answer("completion", got, prompt, choice.token_ids, choice.logprobs.token_logprobs, choice.text)

    async def completion_stream(self, on_tokens: Callable[[int], None] = lambda count: None) -> Answer:
        prompt, ids, logprobs, text, error, last = self._prompt(), [], [], "", "", None
        body = {"return_token_ids": True, "ignore_eos": True}
        try:
            stream = await self.openai.completions.create(
                model=MODEL, prompt=prompt, max_tokens=self.length, logprobs=0, stream=True, extra_body=body
            )
            async for last in stream:
                ids += last.choices[0].token_ids
                logprobs += last.choices[0].logprobs.token_logprobs
                text += last.choices[0].text
                on_tokens(len(ids))
        except openai.APIError as failure:
            error = str(failure) or type(failure).__name__
        return _answer("completion_stream", None if error else last, prompt, ids, logprobs, text, error)

    async def chat(self) -> Answer:
        got = await self.openai.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=self.length, logprobs=True, n=2
        )
        assert len(got.choices) == 2
        assert all(choice.logprobs.content for choice in got.choices)
        return _answer("chat", got)

    async def chat_stream(self) -> Answer:
        stream = await self.openai.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=self.length, stream=True
        )
        events = [event async for event in stream]
        assert [hasattr(event, "versions") for event in events] == [False] * (len(events) - 1) + [True]
        return _answer(
            "chat_stream", events[-1], text="".join(event.choices[0].delta.content or "" for event in events)
        )

    async def chat_tools(self) -> Answer:
        got = await self.openai.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=120, tools=[TOOL], tool_choice=CHOICE
        )
        return _answer("chat_tools", got, num_calls=len(got.choices[0].message.tool_calls or []))

    async def chat_tools_stream(self) -> Answer:
        stream = await self.openai.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=120, tools=[TOOL], tool_choice=CHOICE, stream=True
        )
        calls = 0
        async for event in stream:
            calls += sum(bool(call.function.name) for call in event.choices[0].delta.tool_calls or [])
        return _answer("chat_tools_stream", event, num_calls=calls)

    async def response(self) -> Answer:
        got = await self.openai.responses.create(
            model=MODEL, input="Go on", max_output_tokens=self.length, include=["message.output_text.logprobs"]
        )
        return _answer("response", got, text=got.output_text)

    async def response_stream(self) -> Answer:
        stream = await self.openai.responses.create(
            model=MODEL, input="Go on", max_output_tokens=self.length, stream=True
        )
        text = ""
        async for event in stream:
            text += event.delta if event.type == "response.output_text.delta" else ""
        return _answer("response_stream", event, text=text)

    async def message(self) -> Answer:
        got = await self.anthropic.messages.create(model=MODEL, max_tokens=self.length, messages=MESSAGES)
        return _answer("message", got)

    async def message_stream(self) -> Answer:
        stream = await self.anthropic.messages.create(
            model=MODEL, max_tokens=self.length, messages=MESSAGES, stream=True
        )
        text = ""
        async for event in stream:
            text += getattr(event.delta, "text", "") if event.type == "content_block_delta" else ""
        return _answer("message_stream", event, text=text)

    async def message_tools(self) -> Answer:
        tool = {"name": "measure", "input_schema": PARAMETERS, "strict": True}
        got = await self.anthropic.messages.create(
            model=MODEL,
            max_tokens=120,
            messages=MESSAGES,
            tools=[tool],
            tool_choice={"type": "tool", "name": "measure"},
        )
        return _answer("message_tools", got, num_calls=sum(block.type == "tool_use" for block in got.content))

    async def tokens(self) -> Answer:
        prompt = self._prompt()
        sampling = {"max_tokens": self.length, "logprobs": 0, "ignore_eos": True}
        body = {"model": MODEL, "token_ids": prompt, "sampling_params": sampling}
        got = await self._post("/inference/v1/generate", body)
        (choice,) = got["choices"]
        logprobs = [each["logprob"] for each in choice["logprobs"]["content"]]
        return _answer("tokens", got, prompt, choice["token_ids"], logprobs)

    async def generate(self) -> Answer:
        prompt = self._prompt()
        body = {"prompt": {"prompt_token_ids": prompt}, "logprobs": 0, "max_tokens": self.length, "ignore_eos": True}
        got = await self._post("/generate", body)
        pairs = [next(iter(each[0].items())) for each in got["logprobs"][0]]
        assert [int(token) for token, _ in pairs] == got["token_ids"][0]
        return _answer("generate", got, prompt, got["token_ids"][0], [value for _, value in pairs])

    async def _post(self, path: str, body: Any) -> dict[str, Any]:
        got = await self.http.post(path, json=body)
        assert got.status_code == 200, got.text
        return got.json()


def _answer(
    kind: str,
    got: Any,
    prompt: Any = (),
    ids: Any = (),
    logprobs: Any = (),
    text: str = "",
    error: str = "",
    num_calls: int = 0,
) -> Answer:
    def field(name: str) -> Any:
        return got[name] if isinstance(got, dict) else getattr(got, name)

    versions = [[(start, name) for start, name in spans] for spans in field("versions")] if got is not None else []
    digests = field("digests") if got is not None else {}
    return Answer(kind, versions, digests, list(prompt), list(ids), list(logprobs), text, error, num_calls)


@contextlib.asynccontextmanager
async def tcp_port(socket: str) -> AsyncGenerator[int]:
    """A TCP port on loopback whose connections go to a Unix socket, for clients that know no such sockets."""

    async def pump(reader: Any, writer: Any) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def connect(reader: Any, writer: Any) -> None:
        theirs = await asyncio.open_unix_connection(socket)
        await asyncio.gather(pump(reader, theirs[1]), pump(theirs[0], writer))

    async with await asyncio.start_server(connect, "127.0.0.1") as server:
        yield server.sockets[0].getsockname()[1]


def events_of(text: str) -> list[Any]:
    """The events of a stream, without comments."""
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]
