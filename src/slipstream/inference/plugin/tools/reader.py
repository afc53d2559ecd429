"""`ToolReader`: reads the tool calls out of a finished completion with one of vLLM's tool parsers.

Guarantees: no text of a policy, and no error of a parser, ends a request or the engine; a parser's error is
counted and told. Tokens and log-probabilities are not touched: it decodes for itself. Parsing has a thread of its own,
so the server's event loop goes on.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import msgspec

from slipstream.inference.plugin.tools.call_records import Found, Parsed, as_records, read_calls
from slipstream.inference.plugin.tools.formats import FORMATS, answer_start, ends_in_thought
from slipstream.records import GenerateRequest, ToolCall

_TAIL_TOKENS = 16
"""End of a prompt: a template may begin a thought in it."""
_MAX_KNOWN = 64
_log = logging.getLogger("slipstream.engine")


@dataclass(frozen=True)
class Reading:
    """The calls of a completion, and its text apart from them."""

    calls: list[ToolCall] = field(default_factory=list)
    content: str = ""
    failure: str = ""
    """The parser's exception: an error of its own or its report of an unreadable call."""


@dataclass(frozen=True)
class _Tools:
    """Tools as vLLM takes them."""

    tools: list[Any]
    request: Any
    """vLLM's request with these tools, as parsers expect one."""
    keeps_special: bool
    """Whether the parser reads special tokens."""


class ToolReader:
    """Reads calls in the format of the parser `name`. Raises RuntimeError when the installed vLLM has no such parser,
    or when it does not work with this tokenizer."""

    def __init__(self, name: str, tokenizer: Any) -> None:
        self.name = name
        self.num_failures = 0
        self._tokenizer = tokenizer
        self._format = FORMATS.get(name)
        self._cleanup = (
            {"clean_up_tokenization_spaces": False} if hasattr(tokenizer, "clean_up_tokenization_spaces") else {}
        )
        self._special = _special_tokens(tokenizer)
        self._special_ids = frozenset(self._special)
        self._tools_in = lru_cache(_MAX_KNOWN)(self._made)
        self._executor = ThreadPoolExecutor(1, "tool-calls")
        # A traceback for every unreadable call would fill the engine's log.
        for parsers in ("vllm.tool_parsers", "vllm.parser"):
            logging.getLogger(parsers).setLevel(logging.CRITICAL)
        self._class = _parser_class(name)
        self._takes_tools = "tools" in inspect.signature(self._class.__init__).parameters
        trial = ({"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}},)
        try:
            self._parse("an answer", self._tools_of(trial))
        except Exception as error:
            raise RuntimeError(
                f"vLLM's tool parser {name} does not work with this model ({type(error).__name__}: {error}): set "
                "inference.tool_parser to the one of the model's own format"
            ) from error

    def check(self, tools: Sequence[dict[str, Any]]) -> None:
        """Raises ValueError for tools vLLM does not take."""
        self._tools_of(tools)

    async def read(self, request: GenerateRequest, output: Any) -> Reading:
        """Reads the calls in vLLM's finished output for `request`."""
        out = output.outputs[0]
        ended = out.finish_reason == "stop" and not isinstance(getattr(out, "stop_reason", None), str)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self.read_tokens, request, list(out.token_ids), ended)

    def read_tokens(self, request: GenerateRequest, token_ids: list[int], ended: bool) -> Reading:
        """Reads the calls in a completion. `ended`: its last token ends it, and no stop string does."""
        text = ""
        try:
            given = self._tools_of(request.tools)
            spoken = token_ids[:-1] if ended else token_ids
            text = whole = self._decode(spoken, keeps_special=False)
            if not self._special_ids.isdisjoint(spoken):
                whole = self._decode(spoken, keeps_special=True)
            begins_thinking = ends_in_thought(self._decode(request.prompt_ids[-_TAIL_TOKENS:], keeps_special=True))
            start, end = answer_start(whole, self._format, begins_thinking=begins_thinking)
            errors: list[Exception] = []
            answer = self._chosen(whole[start:end], given)
            found, content = read_calls(answer, lambda part: self._tried(part, given, errors), self._format)
            failure = self._told(errors[0]) if errors else ""
            if not found:
                return Reading([], text, failure)
            calls = as_records(found, whole, [*request.prompt_ids, *token_ids])
            return Reading(calls, self._plain(whole[:start] + content + whole[end:]), failure)
        except Exception as error:  # noqa: BLE001 (a completion without calls, and told)
            return Reading([], text, self._told(error))

    def _chosen(self, answer: str, given: _Tools) -> str:
        """The parser's input: the answer with its special tokens if it reads these, or if only they show a call."""
        plain = self._plain(answer)
        shows = self._format is not None and self._format.regions(answer) and not self._format.regions(plain)
        return answer if given.keeps_special or shows else plain

    def _tried(self, text: str, given: _Tools, errors: list[Exception]) -> Parsed:
        try:
            return self._parse(text, given)
        except Exception as error:  # noqa: BLE001 (collected)
            errors.append(error)
            return Parsed((), text)

    def _parse(self, text: str, given: _Tools) -> Parsed:
        # Parsers keep state, so each text gets its own.
        found = self._parser(given.tools).extract_tool_calls(text, given.request)
        calls = found.tool_calls if found.tools_called else []
        return Parsed(
            tuple(Found(call.function.name or "", call.function.arguments or "", call.id or "") for call in calls),
            (found.content or "") if calls else text,
        )

    def _parser(self, tools: list[Any]) -> Any:
        return self._class(self._tokenizer, tools) if self._takes_tools else self._class(self._tokenizer)

    def _tools_of(self, tools: Sequence[dict[str, Any]]) -> _Tools:
        return self._tools_in(msgspec.json.encode(tools))

    def _made(self, encoded: bytes) -> _Tools:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        message = {"role": "user", "content": ""}
        request: Any = ChatCompletionRequest.model_validate(
            {"messages": [message], "model": "", "tools": msgspec.json.decode(encoded)}
        )
        adjusted = self._parser(request.tools).adjust_request(request.model_copy())
        return _Tools(request.tools, request, keeps_special=not getattr(adjusted, "skip_special_tokens", True))

    def _decode(self, token_ids: list[int], *, keeps_special: bool) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=not keeps_special, **self._cleanup)

    def _plain(self, text: str) -> str:
        for special in self._special.values():
            text = text.replace(special, "")
        return text

    def _told(self, error: Exception) -> str:
        self.num_failures += 1
        if self.num_failures in (1, 10, 100) or self.num_failures % 1000 == 0:
            _log.warning(
                "vLLM's tool parser %s raised, the %d. time; such a completion has no calls, but for what is seen to "
                "be meant as one",
                *(self.name, self.num_failures),
                exc_info=error,
            )
        return f"{type(error).__name__}: {error}"[:1000]


def _parser_class(name: str) -> Any:
    try:
        from vllm.tool_parsers import ToolParserManager
    except ImportError as error:
        raise RuntimeError(
            f"the installed vLLM has no tool parsers that Slipstream knows ({error}): install another version"
        ) from error
    try:
        return ToolParserManager.get_tool_parser(name)
    except KeyError as error:
        known = ", ".join(sorted({*ToolParserManager.tool_parsers, *ToolParserManager.lazy_parsers}))
        raise RuntimeError(f"the installed vLLM has no tool parser {name}: use one of {known}") from error


def _special_tokens(tokenizer: Any) -> dict[int, str]:
    """The tokens left out by decoding: the tokenizer's special ones, and others marked as special."""
    ids, texts = getattr(tokenizer, "all_special_ids", []), getattr(tokenizer, "all_special_tokens", [])
    added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    marked = {id_: str(token) for id_, token in added.items() if getattr(token, "special", False)}
    return dict(zip(ids, map(str, texts), strict=False)) | marked
