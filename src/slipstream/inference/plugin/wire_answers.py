"""Reads a client's answers out of a response's bytes: chat completions, completions, responses, messages.

Streams give the same answers as whole bodies. Nothing here knows vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """One answer: its text, its calls as pairs of name and canonical arguments, and its thinking."""

    content: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    thinking: str = ""
    call_ids: tuple[str, ...] = field(default=(), compare=False)

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a chat message."""
        found: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.thinking:
            found["reasoning_content"] = self.thinking
        if self.calls:
            ids = self.call_ids or ("",) * len(self.calls)
            found["tool_calls"] = [
                {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}
                for id_, (name, arguments) in zip(ids, self.calls, strict=True)
            ]
        return found


def answers_in(path: str, body: bytes, *, is_stream: bool) -> list[Answer]:
    """The answers of a response to `path`, by their index; none for a path with tokens only. Raises ValueError for a
    body without its end, or with an error."""
    kind = next((kind for end, kind in _KINDS.items() if path.endswith(end)), None)
    if kind is None:
        return []
    whole, pieces = kind
    try:
        if not is_stream:
            return whole(_whole(json.loads(body)))
        return pieces([_whole(event) for event in events_in(body)])
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"a response of {path} without its fields ({error!r})") from error


def message_answer(message: Json) -> Answer:
    """The answer in an assistant's chat message."""
    calls = cast("Sequence[Json]", message.get("tool_calls") or ())
    found = [(call, cast("Json", call.get("function") or call)) for call in calls]
    return Answer(
        text_of(message.get("content")),
        tuple((str(call.get("name") or ""), canonical(call.get("arguments"))) for _, call in found),
        str(message.get("reasoning_content") or message.get("reasoning") or ""),
        tuple(str(call.get("id") or "") for call, _ in found),
    )


def text_of(content: Any) -> str:
    """The text of a message's content, a text or a list of parts."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part if isinstance(part, str) else str(part.get("text") or "") for part in content)


def canonical(arguments: Any) -> str:
    """A call's arguments as one text, however they are spaced and ordered; as they are if they are no JSON."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except ValueError:
            return arguments.strip()
    return json.dumps(arguments or {}, sort_keys=True, ensure_ascii=False)


def events_in(body: bytes) -> Iterator[Json]:
    """The data of server-sent events; comments and `[DONE]` are left out."""
    for block in body.decode().replace("\r\n", "\n").split("\n\n"):
        lines = [line[5:].removeprefix(" ") for line in block.split("\n") if line.startswith("data:")]
        data = "\n".join(lines)
        if data and data != "[DONE]":
            yield json.loads(data)


def _whole(event: Json) -> Json:
    if event.get("error") or event.get("type") == "error":
        raise ValueError("the response is an error")
    return event


def _chat(body: Json) -> list[Answer]:
    return [message_answer(choice["message"]) for choice in _by_index(body["choices"])]


def _chat_pieces(events: Sequence[Json]) -> list[Answer]:
    found: dict[int, dict[str, Any]] = {}
    is_finished: set[int] = set()
    for event in events:
        for choice in event.get("choices") or ():
            message = found.setdefault(choice["index"], {"content": "", "reasoning_content": "", "tool_calls": {}})
            delta: Json = choice.get("delta") or {}
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning") or delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or ():
                one = message["tool_calls"].setdefault(call["index"], {"id": "", "name": "", "arguments": ""})
                one["id"] = call.get("id") or one["id"]
                function: Json = call.get("function") or {}
                one["name"] += function.get("name") or ""
                one["arguments"] += function.get("arguments") or ""
            if choice.get("finish_reason"):
                is_finished.add(choice["index"])
    _check_ended(bool(found) and is_finished == found.keys())
    return [
        message_answer({**found[index], "tool_calls": _in_order(found[index]["tool_calls"])}) for index in sorted(found)
    ]


def _completions(body: Json) -> list[Answer]:
    return [Answer(choice["text"]) for choice in _by_index(body["choices"])]


def _completions_pieces(events: Sequence[Json]) -> list[Answer]:
    texts: dict[int, str] = {}
    is_finished: set[int] = set()
    for event in events:
        for choice in event.get("choices") or ():
            texts[choice["index"]] = texts.get(choice["index"], "") + (choice.get("text") or "")
            if choice.get("finish_reason"):
                is_finished.add(choice["index"])
    _check_ended(bool(texts) and is_finished == texts.keys())
    return [Answer(texts[index]) for index in sorted(texts)]


def _responses(body: Json) -> list[Answer]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Json] = []
    for item in body["output"]:
        if item["type"] == "message":
            texts += [part.get("text") or "" for part in item["content"]]
        elif item["type"] == "reasoning":
            thoughts += [part.get("text") or "" for part in item.get("content") or item.get("summary") or ()]
        elif item["type"] == "function_call":
            calls.append({"id": item.get("call_id"), "name": item["name"], "arguments": item["arguments"]})
    return [message_answer({"content": "".join(texts), "reasoning": "".join(thoughts), "tool_calls": calls})]


def _responses_pieces(events: Sequence[Json]) -> list[Answer]:
    ends = [event for event in events if event.get("type") in ("response.completed", "response.incomplete")]
    _check_ended(bool(ends))
    return _responses(ends[-1]["response"])


def _messages(body: Json) -> list[Answer]:
    return [_of_blocks(body["content"])]


def _messages_pieces(events: Sequence[Json]) -> list[Answer]:
    blocks: dict[int, dict[str, Any]] = {}
    for event in events:
        if event.get("type") == "content_block_start":
            blocks[event["index"]] = {"text": "", "thinking": "", "json": "", **event["content_block"]}
        elif event.get("type") == "content_block_delta":
            block, delta = blocks[event["index"]], event["delta"]
            block["text"] += delta.get("text") or ""
            block["thinking"] += delta.get("thinking") or ""
            block["json"] += delta.get("partial_json") or ""
    _check_ended(any(event.get("type") == "message_stop" for event in events))
    for block in blocks.values():
        if block["json"]:
            block["input"] = block["json"]
    return [_of_blocks([blocks[index] for index in sorted(blocks)])]


def _of_blocks(blocks: Sequence[Json]) -> Answer:
    def joined(kind: str) -> str:
        return "".join(block.get(kind) or "" for block in blocks if block["type"] == kind)

    calls = [
        {"id": block.get("id"), "name": block.get("name"), "arguments": block.get("input")}
        for block in blocks
        if block["type"] == "tool_use"
    ]
    return message_answer({"content": joined("text"), "reasoning": joined("thinking"), "tool_calls": calls})


def _by_index(choices: Sequence[Json]) -> list[Json]:
    return sorted(choices, key=lambda choice: choice["index"])


def _in_order(calls: Mapping[int, Json]) -> list[Json]:
    return [calls[index] for index in sorted(calls)]


def _check_ended(has_ended: bool) -> None:
    if not has_ended:
        raise ValueError("the stream has no end")


_KINDS: dict[str, tuple[Callable[[Json], list[Answer]], Callable[[Sequence[Json]], list[Answer]]]] = {
    "/chat/completions": (_chat, _chat_pieces),
    "/completions": (_completions, _completions_pieces),
    "/responses": (_responses, _responses_pieces),
    "/messages": (_messages, _messages_pieces),
}
