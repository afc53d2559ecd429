"""The tokens of detectors' answers, as the model's tokenizer has them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from slipstream.errors import ConfigError
from slipstream.plugins import ChatTokenizer
from slipstream_matching.coordinates import AnswerTokens, coordinate_ids
from slipstream_matching.matching import MatchSettings
from slipstream_matching.settings import MatchingConfig

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def answer_tokens(tokenizer: ChatTokenizer) -> AnswerTokens:
    """What answers need of the tokenizer. Raises `ConfigError`, also without 1000 coordinate tokens."""
    vocabulary, added = tokenizer.vocabulary_ids, tokenizer.added_texts
    pieces = _Pieces({number: text for text, number in vocabulary.items()}, added, tokenizer.backend)
    try:
        return AnswerTokens(
            tokenizer.plain_tokens,
            pieces.of,
            coordinate_ids(vocabulary.get),
            tokenizer.end_token_id,
            added.get(tokenizer.end_token_id, "<|im_end|>"),
        )
    except ConfigError as error:
        raise ConfigError(f"model.path = {tokenizer.path}: {error}") from error


def match_settings(config: MatchingConfig) -> MatchSettings:
    """How [matching] has objects matched."""
    return MatchSettings(**{each.name: getattr(config, each.name) for each in fields(MatchSettings)})


class _Pieces:
    """The bytes of each token, by the decoder of the tokenizer: ByteLevel's characters, which stand for one byte each,
    or text in which `▁` is a space and `<0x0A>` a byte."""

    def __init__(self, texts: Mapping[int, str], added: Mapping[int, str], backend: Any) -> None:
        described = json.loads(backend.to_str()) if backend is not None else {}
        kinds = json.dumps([described.get("decoder"), described.get("pre_tokenizer"), described.get("normalizer")])
        self._texts, self._added = texts, added
        self._has_spaces = '"▁"' in kinds or "\\u2581" in kinds
        self._has_bytes = "ByteFallback" in kinds
        self._bytes = _byte_characters() if '"ByteLevel"' in kinds else {}
        self._known: dict[int, bytes] = {}

    def of(self, id_: int) -> bytes:
        """See `AnswerTokens.piece`; nothing for an id beyond the vocabulary."""
        if id_ not in self._known:
            self._known[id_] = self._read(id_)
        return self._known[id_]

    def _read(self, id_: int) -> bytes:
        if (text := self._added.get(id_)) is not None:
            return text.encode()
        text = self._texts.get(id_, "")
        if self._bytes:
            return bytes(self._bytes[each] for each in text if each in self._bytes)
        if self._has_bytes and (found := _BYTE.fullmatch(text)):
            return bytes([int(found[1], 16)])
        return (text.replace("▁", " ") if self._has_spaces else text).encode()


def _byte_characters() -> dict[str, int]:
    """The byte of each character of ByteLevel (GPT-2): printable ones stand for themselves, others for those from 256
    on, in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
