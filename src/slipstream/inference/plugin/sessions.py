"""Sessions of agents, pure: the recorded turn behind a request, and the tokens of its prompt.

A chat client sends messages, not tokens. A template renders an earlier answer to other tokens than the sampled ones.
`Session.find` looks for the messages of a recorded request with the answer to them: equal content and calls, and equal
thinking if the client sends any. Such a request gets that turn's tokens, and only the rest is rendered (`marked`,
`rest_after`). A text prompt with a recorded beginning gets its tokens, too (`Session.retokenized`). Everything else is
a new row.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from slipstream.inference.plugin.wire_answers import Answer, message_answer, text_of
from slipstream.records import Completion, SamplingParams, SessionOpening, SessionTurn

MARK = "SLIPSTREAM-ANSWER-5d1c07e2"
"""Stands for an earlier answer while a conversation is rendered."""
_NEUTRAL: Mapping[str, Any] = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
"""Sampling values of every run; an agent cannot change them."""
_LEFT_OUT = ("logit_bias", "response_format", "guided_json", "guided_regex", "structured_outputs", "text")
_KIND_CHARACTERS = 40
_OWN = ("temperature", "top_p", "top_k", "min_p")

Chat = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """A request's messages. `setting`: all else in its rendering (tools, template variables), as one text."""

    messages: Sequence[Chat]
    setting: str = ""
    digests: Sequence[str] = field(init=False, compare=False)
    """Digests of the first n messages with the setting, for n from 0; without the thinking of assistants."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "digests", tuple(_digests(self.setting, self.messages)))


@dataclass(frozen=True)
class Match:
    """The answer to a recorded turn is message `place` of a conversation."""

    turn: int
    place: int


@dataclass(frozen=True)
class _Given:
    """The answer to a conversation."""

    turn: int
    answer: Answer
    thinking: Mapping[int, tuple[str, bool]]
    """Thinking of earlier assistant messages, by place; and whether we gave it, so it may be missing later."""


class Session:
    """The recorded turns of one episode."""

    def __init__(self, opening: SessionOpening) -> None:
        self.opening = opening
        self.turns: list[SessionTurn] = []
        self._given: dict[str, list[_Given]] = {}
        """By the digest of the whole conversation before the answer."""
        self._num_asked: Counter[bytes] = Counter()
        self._texts: dict[int, str] = {}
        self._asked: dict[int, list[int]] = {}
        """Prompts with images, with one placeholder for each."""
        self._forged: set[int] = set()
        """Turns with a special token among sampled ones: it could stand for an image in a later prompt."""

    def find(self, conversation: Conversation) -> Match | None:
        """The latest recorded answer in a conversation with the same messages before it as then."""
        for place in range(len(conversation.messages) - 1, -1, -1):
            message = conversation.messages[place]
            if message.get("role") != "assistant":
                continue
            answer = message_answer(message)
            for given in reversed(self._given.get(conversation.digests[place], ())):
                if _is_same(answer, given.answer) and _same_thinking(conversation.messages, given.thinking):
                    return Match(given.turn, place)
        return None

    def tokens_of(self, turn: int) -> list[int]:
        """All tokens of a turn: its prompt and its answer."""
        return [*self.turns[turn].prompt_ids, *self.turns[turn].completion.token_ids]

    def asked_of(self, turn: int, *, has_images: bool) -> list[int] | None:
        """As `tokens_of`, with one placeholder for each image; None if a prompt with images cannot continue it."""
        if has_images and turn in self._forged:
            return None
        return [*self._asked.get(turn, self.turns[turn].prompt_ids), *self.turns[turn].completion.token_ids]

    def ends_turn(self, turn: int) -> int | None:
        """The end token of a turn's answer; None if it was cut, or met a stop string."""
        completion = self.turns[turn].completion
        last = completion.token_ids[-1] if completion.token_ids else None
        ended = completion.finish_reason == "stop" and last in self.opening.sampling.stop_token_ids
        return last if ended else None

    def retokenized(
        self, prompt_ids: list[int], decode: Callable[[list[int]], str], encode: Callable[[str], list[int]]
    ) -> list[int]:
        """The tokens of a prompt. If its text begins with that of a recorded turn (the longest counts), the recorded
        tokens and those of the rest; unchanged if they begin with these already."""
        text = ""
        for turn in sorted(range(len(self.turns)), key=lambda turn: -len(self.tokens_of(turn))):
            recorded = self.tokens_of(turn)
            if prompt_ids[: len(recorded)] == recorded:
                return prompt_ids
            text = text or decode(prompt_ids)
            known = self._texts.setdefault(turn, decode(recorded))
            if len(known) < len(text) and text.startswith(known):
                return [*recorded, *encode(text[len(known) :])]
        return prompt_ids

    def seed(self, prompt_ids: Sequence[int]) -> int:
        """The seed of a request, from the session's seed, the prompt, and the number of earlier requests with it."""
        key = hashlib.blake2b(array("q", prompt_ids).tobytes(), digest_size=8).digest()
        text = f"{self.opening.seed}\x1f{key.hex()}\x1f{self._num_asked[key]}"
        self._num_asked[key] += 1
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") >> 1

    def record(
        self,
        request: int,
        prompt_ids: list[int],
        completion: Completion,
        answer: Answer,
        conversation: Conversation | None = None,
        match: Match | None = None,
        overridden: Mapping[str, float | str] | None = None,
        asked_ids: list[int] | None = None,
        *,
        has_special: bool = False,
    ) -> None:
        """Adds an answer on its way to the agent. `match`: the turn before it. `asked_ids`: a prompt with images, with
        one placeholder for each. `has_special`: whether a special token was sampled, besides one at the end."""
        number = len(self.turns)
        if asked_ids is not None:
            self._asked[number] = asked_ids
        if has_special or (match is not None and match.turn in self._forged):
            self._forged.add(number)
        messages = list(conversation.messages) if conversation is not None else []
        thinking: dict[int, tuple[str, bool]] = {}
        if match is not None:
            before = next(each for each in self._all() if each.turn == match.turn)
            thinking = {**before.thinking, match.place: (before.answer.thinking, True)}
        for place, message in enumerate(messages):
            if message.get("role") == "assistant" and place not in thinking:
                thinking[place] = (message_answer(message).thinking, False)
        self.turns.append(
            SessionTurn(
                request,
                prompt_ids,
                completion,
                messages[match.place + 1 :] if match is not None else messages,
                answer.message,
                match.turn if match is not None else -1,
                dict(overridden or {}),
            )
        )
        if conversation is not None:
            self._given.setdefault(conversation.digests[-1], []).append(_Given(number, answer, thinking))

    def _all(self) -> Iterator[_Given]:
        for each in self._given.values():
            yield from each


def marked(messages: Sequence[Chat], place: int) -> Iterator[list[Chat]]:
    """The conversation with `MARK` in the answer at `place`: as its content; then in its last call, for templates
    without content beside calls."""
    message = messages[place]
    yield [*messages[:place], {**message, "content": MARK}, *messages[place + 1 :]]
    calls: list[Chat] = list(message.get("tool_calls") or ())
    if calls:
        function = {**cast("Chat", calls[-1].get("function") or {}), "arguments": json.dumps({"answer": MARK})}
        calls[-1] = {**calls[-1], "function": function}
        yield [*messages[:place], {**message, "tool_calls": calls}, *messages[place + 1 :]]


def rest_after(text: str, end: str) -> str | None:
    """The rest of a rendered text after the turn with `MARK`: after the next `end`, or after the mark if `end` is
    empty. None if the turn cannot be found."""
    if text.count(MARK) != 1:
        return None
    rest = text[text.index(MARK) + len(MARK) :]
    if not end:
        return rest
    return rest[rest.index(end) + len(end) :] if end in rest else None


def plain(messages: Sequence[Any]) -> list[Chat]:
    """Messages as dictionaries and lists; pydantic makes iterators of lists."""
    found: list[Chat] = []
    for message in messages:
        one: Chat = dict(message)
        for name in ("content", "tool_calls"):
            value = one.get(name)
            if value is not None and not isinstance(value, str):
                one[name] = [dict(each) if isinstance(each, Mapping) else each for each in value]
        found.append({name: value for name, value in one.items() if value is not None or name == "content"})
    return found


def overridden(body: Mapping[str, Any], sampling: SamplingParams) -> dict[str, float | str]:
    """The sampling values of a request with others in the run; of a format its type, and empty for another table."""
    found: dict[str, float | str] = {}
    for name, ours in {**{name: getattr(sampling, name) for name in _OWN}, **_NEUTRAL}.items():
        value = body.get(name)
        if isinstance(value, int | float) and value != ours and not (name == "top_k" and max(value, 0) == ours):
            found[name] = float(value)
    for name in _LEFT_OUT:
        value = body.get(name)
        format_ = cast("Any", value.get("format") if name == "text" and isinstance(value, Mapping) else value)
        kind = cast("Any", format_.get("type")) if isinstance(format_, Mapping) else None
        if format_ and kind != "text":
            found[name] = kind[:_KIND_CHARACTERS] if isinstance(kind, str) else ""
    return found


def _digests(setting: str, messages: Sequence[Chat]) -> Iterator[str]:
    rolling = hashlib.sha256(setting.encode())
    yield rolling.hexdigest()
    for message in messages:
        rolling.update(json.dumps(_identity(message), sort_keys=True, default=str).encode())
        yield rolling.hexdigest()


def _identity(message: Chat) -> list[Any]:
    """A message for comparison; of an assistant's, content and calls without thinking."""
    role = message.get("role")
    if role == "assistant":
        answer = message_answer(message)
        return [role, answer.content.strip(), list(answer.calls)]
    content = message.get("content")
    is_text = content is None or isinstance(content, str) or all(_is_text(part) for part in content)
    return [role, text_of(content) if is_text else content, message.get("tool_call_id") or ""]


def _is_text(part: Any) -> bool:
    return isinstance(part, str) or (isinstance(part, Mapping) and "text" in part)


def _is_same(sent: Answer, given: Answer) -> bool:
    """Whether a client sent an answer back: white space around the text may differ, and thinking may be missing."""
    thinking = sent.thinking.strip()
    return (
        sent.content.strip() == given.content.strip()
        and sent.calls == given.calls
        and thinking in ("", given.thinking.strip())
    )


def _same_thinking(messages: Sequence[Chat], known: Mapping[int, tuple[str, bool]]) -> bool:
    for place, (thinking, is_ours) in known.items():
        sent = message_answer(messages[place]).thinking.strip()
        if sent != thinking.strip() and not (is_ours and not sent):
            return False
    return True
