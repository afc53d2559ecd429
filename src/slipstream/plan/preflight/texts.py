"""Warnings about special tokens: in the text of messages, and missing at the beginning of a prompt."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from slipstream.data.chat_template import ChatTokenizer
from slipstream.errors import DataError
from slipstream.records import IMAGE_MARK, Message

Place = Callable[[Sequence[Message]], str]


def check_texts(
    tokenizer: ChatTokenizer, conversations: Sequence[Sequence[Message]], place: Place, *, imitated: bool
) -> list[str]:
    """Counts the conversations with the text of a special token, `imitated` ones also by whether the model learns to
    write it. Raises `DataError` for a placeholder of images in a conversation without any."""
    pattern = re.compile("|".join(map(re.escape, sorted(tokenizer.special_texts, key=len, reverse=True))))
    found: dict[bool, dict[str, Sequence[Message]]] = {False: {}, True: {}}
    counts = {False: 0, True: 0}
    for conversation in conversations:
        texts = _texts_of(conversation, pattern)
        if texts and not any(turn.media for turn in conversation):
            _refuse_placeholders(tokenizer, conversation, texts, place)
        for written in {is_written and imitated for is_written in texts.values()}:
            counts[written] += 1
            for text, is_written in texts.items():
                if (is_written and imitated) == written:
                    found[written].setdefault(text, conversation)
    return [
        f"{counts[written]} of {len(conversations)} conversations hold special tokens as text "
        f"({', '.join(sorted(found[written]))}; first: {place(next(iter(found[written].values())))}), {what}: remove "
        "them, or write them differently"
        for written, what in (
            (False, "which the model reads as control tokens, so that a text can forge a turn"),
            (True, "which the model learns to write"),
        )
        if counts[written]
    ] + _bos(tokenizer)


def _texts_of(conversation: Sequence[Message], pattern: re.Pattern[str]) -> dict[str, bool]:
    """The special tokens in a conversation's texts, and whether the assistant writes them."""
    found: dict[str, bool] = {}
    for turn in conversation:
        for text in pattern.findall(turn.content) if pattern.pattern else ():
            if text != IMAGE_MARK or not turn.media:
                found[text] = found.get(text, False) or turn.role == "assistant"
    return found


def _refuse_placeholders(
    tokenizer: ChatTokenizer, conversation: Sequence[Message], texts: Mapping[str, bool], place: Place
) -> None:
    if held := tokenizer.placeholders.intersection(texts):
        raise DataError(
            f"{place(conversation)}: a message holds {min(held)} as text, which stands for an image, and there is "
            "none: remove it, or give the image"
        )


def _bos(tokenizer: ChatTokenizer) -> list[str]:
    if not (token := tokenizer.missing_bos):
        return []
    return [
        f"the tokenizer of {tokenizer.path} begins a text with {token}, and the chat template does not: if the model "
        "was trained with it, put {{ bos_token }} at the beginning of the template"
    ]
