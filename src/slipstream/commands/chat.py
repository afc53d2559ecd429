"""Chat with a model at an OpenAI-compatible address, or with one for which vLLM's server is started on this machine.

Guarantees: a server that was started here is reached with a key that nobody else has, and ends with the session; every
wait has a deadline and ends at Ctrl-C.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from slipstream.commands.serve import free_port, vllm_arguments
from slipstream.data.chat_template import ChatTokenizer
from slipstream.envs.answers import THINK_CLOSE, THINK_OPEN, final_answer
from slipstream.errors import ConfigError, DataError, EngineError
from slipstream.inference.chat_server import ChatServer
from slipstream.inference.openai_server import ServerChild
from slipstream.openai_client import OpenAIClient, Unanswered
from slipstream.plan.deployable import Deployable, ServeOptions
from slipstream.processes.temporary import temporary

_REQUEST_TIMEOUT_S = 600.0
_PATIENCE_S = 30.0
"""How long a message is sent again when its connection is lost or the server is busy: somebody waits for the answer."""
_REFUSED = frozenset({400, 413, 422})
"""Statuses of a conversation that the server does not take, as one longer than its context."""


@dataclass(frozen=True)
class Answer:
    """The model's reply to one message."""

    text: str
    """The text after its thinking; empty when the thinking did not end."""
    thinking: str
    finish_reason: Literal["stop", "length"]
    num_tokens: int


@dataclass
class Conversation:
    """The messages so far, and the server that answers them."""

    url: str
    model: str
    key: str = ""
    system: str = ""
    single_turn: bool = False
    """Every message starts a new conversation."""
    request: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Fields of each request, such as `temperature`."""
    unknown: Callable[[str], Sequence[str]] = lambda text: ()
    """The characters of a message that the model cannot see."""
    messages: list[dict[str, str]] = field(default_factory=list[dict[str, str]])

    def ask(self, text: str) -> Answer:
        """Return the model's reply to `text`. Raises `DataError`, and forgets `text`, when the server refuses it."""
        if self.single_turn:
            self.messages = []
        messages = [*self.messages, {"role": "user", "content": text}]
        first = [{"role": "system", "content": self.system}] if self.system else []
        try:
            found = asyncio.run(self._post({**self.request, "model": self.model, "messages": [*first, *messages]}))
            choice = found["choices"][0]
            message = choice["message"]
            reply = str(message["content"] or "")
        except Unanswered as error:
            if error.status in _REFUSED:
                raise DataError(f"{error}: begin a new conversation with /new, or send less") from None
            raise EngineError(f"the model at {self.url} gave no answer: {error}") from None
        except (KeyError, IndexError, TypeError):
            raise EngineError(f"the server at {self.url} sent no chat completion") from None
        self.messages = [*messages, {"role": "assistant", "content": reply}]
        answer = final_answer(reply)
        thinking = reply if answer is None else reply[: len(reply) - len(answer)]
        thinking = thinking.replace(THINK_OPEN, "").replace(THINK_CLOSE, "").strip()
        # Servers with a reasoning parser send the thinking by itself.
        thinking = thinking or str(message.get("reasoning") or message.get("reasoning_content") or "")
        reason = "length" if choice.get("finish_reason") == "length" else "stop"
        return Answer(answer or "", thinking, reason, int((found.get("usage") or {}).get("completion_tokens") or 0))

    async def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        async with OpenAIClient(self.url, self.key) as client:
            return await client.ask(
                "POST", "/chat/completions", body, deadline_s=_REQUEST_TIMEOUT_S, patience_s=_PATIENCE_S
            )


def model_at(url: str, model: str, key: str) -> str:
    """The name of the model at an address; `model`: which, where it has several. Raises ConfigError."""

    async def find() -> str:
        async with ChatServer(url, model, key) as server:
            return server.model

    return asyncio.run(find())


def chat_tokenizer(
    deployable: Deployable,
    system: str | None = None,
    thinking: bool | None = None,
    *,
    trust_remote_code: bool = False,
) -> ChatTokenizer:
    """Load the model's tokenizer. None: as in the run that made the model."""
    run = deployable.run_settings
    system = run.get("environment.system_prompt", "") if system is None else system
    given = run.get("model.chat_template_kwargs", {})
    switch = run.get("model.thinking") if thinking is None else thinking
    if not isinstance(system, str) or not isinstance(given, dict) or switch not in (True, False, None):
        raise ConfigError(f"the settings of the run that {deployable.name} comes from cannot be used: export its model")
    variables, switch = cast("dict[str, Any]", given), cast("bool | None", switch)
    return ChatTokenizer(deployable.model, system, trust_remote_code, variables, thinking=switch)


@contextlib.contextmanager
def started_server(
    deployable: Deployable, tokenizer: ChatTokenizer, options: ServeOptions, start_timeout_s: float
) -> Generator[tuple[str, str]]:
    """Start a server on the model; gives its URL and key, and ends it afterwards. SIGTERM ends the session as Ctrl-C
    does."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell has SIGINT ignored in the background
        signal.signal(number, signal.default_int_handler)
    arguments, key = vllm_arguments(deployable, tokenizer.template_kwargs, options), secrets.token_urlsafe()
    with temporary("chat") as folder:
        port = free_port("127.0.0.1")
        server = ServerChild(arguments, port=port, api_key=key, log_path=Path(folder) / "server.log")
        try:
            server.wait_ready(start_timeout_s)
            yield f"http://127.0.0.1:{port}/v1", key
        finally:
            server.stop()
