"""Finds characters that a model's tokenizer cannot encode: it writes `<unk>` in their place, or nothing.

A model can neither read nor write such a character. Byte-level tokenizers encode all characters; the character-level
ones of `slipstream model new` encode printable ASCII.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from slipstream.errors import DataError

_MAX_NAMED = 5
_REMEDY = "remove them, or use a model whose tokenizer has them (slipstream model new --tokenizer byte makes one)"


class Vocabulary:
    """The characters that a tokenizer can encode. `encode` gives a text's tokens without special tokens; `unknown_id`
    is the unknown token, if there is one."""

    def __init__(self, encode: Callable[[str], Sequence[int]], unknown_id: int | None) -> None:
        self._encode = encode
        self._unknown_id = unknown_id
        self._fates: dict[str, Literal["known", "unknown", "dropped"]] = {}

    def unknown_in(self, text: str) -> list[str]:
        """The characters of `text` that have no token, each once, in order."""
        lost = [character for character in dict.fromkeys(text) if self._fate(character) != "known"]
        # A word-level vocabulary may have a word but not its characters.
        if lost and self._unknown_id not in self._encode(text):
            return [character for character in lost if self._fate(character) == "dropped"]
        return lost

    def _fate(self, character: str) -> Literal["known", "unknown", "dropped"]:
        if character not in self._fates:
            tokens = self._encode(character)
            # Normalizers remove blanks and control characters on purpose.
            is_dropped = not tokens and character.isprintable() and not character.isspace()
            is_unknown = self._unknown_id in tokens
            self._fates[character] = "dropped" if is_dropped else "unknown" if is_unknown else "known"
        return self._fates[character]


def read_vocabulary(folder: Path) -> Vocabulary | None:
    """Reads the vocabulary from `tokenizer.json` in a model folder, without importing transformers; None if the file
    does not exist. Raises `DataError` if it cannot be read."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
        model = cast("Mapping[str, Any]", json.loads(file.read_text(encoding="utf-8"))["model"])
    except Exception as error:  # the library raises no more specific type
        raise DataError(f"{file} cannot be read ({error}): save the model again") from error
    name = model.get("unk_token")
    unknown_id = model.get("unk_id") if name is None else tokenizer.token_to_id(name)
    return Vocabulary(lambda text: tokenizer.encode(text, add_special_tokens=False).ids, unknown_id)


Text = tuple[str | Callable[[], str], str]
"""The origin of a text, such as `task train/3`, or a function that returns it; and the text."""


def check_vocabulary(
    vocabulary: Vocabulary, *, trained: Sequence[Text] = (), answers: Sequence[Text] = (), read: Sequence[Text] = ()
) -> list[str]:
    """Warnings, one sentence each, about text that the model cannot read or write.

    `trained` are SFT targets: one that cannot be encoded raises `DataError`. `answers` are gold answers: raises
    `DataError` if none can be encoded. `read` is text in prompts.
    """
    if found := _lost(vocabulary, trained):
        count, named = found
        raise DataError(
            f"{count} of {len(trained)} answers to imitate hold characters for which the model's tokenizer has no "
            f"token {named}, so something else would be trained in their place: {_REMEDY}"
        )
    warnings: list[str] = []
    if found := _lost(vocabulary, answers):
        count, named = found
        problem = (
            f"{count} of {len(answers)} right answers hold characters for which the model's tokenizer has no token"
        )
        if count == len(answers):
            raise DataError(f"{problem} {named}, so no task can be solved: {_REMEDY}")
        warnings.append(f"{problem} {named}, so these tasks cannot be solved: {_REMEDY}")
    if found := _lost(vocabulary, read):
        count, named = found
        warnings.append(
            f"{count} of {len(read)} prompts hold characters for which the model's tokenizer has no token {named}, so "
            f"the model does not see them: {_REMEDY}"
        )
    return warnings


def _lost(vocabulary: Vocabulary, texts: Sequence[Text]) -> tuple[int, str] | None:
    """How many of the texts cannot be encoded, with an example in brackets; None if all can."""
    characters: dict[str, None] = {}
    sources: list[str | Callable[[], str]] = []
    for where, text in texts:
        if unknown := vocabulary.unknown_in(text):
            characters |= dict.fromkeys(unknown)
            sources.append(where)
    if not sources:
        return None
    shown = [f"{character!r} (U+{ord(character):04X})" for character in list(characters)[:_MAX_NAMED]]
    more = f" and {len(characters) - len(shown)} more" if len(characters) > len(shown) else ""
    first = sources[0] if isinstance(sources[0], str) else sources[0]()
    return len(sources), f"({', '.join(shown)}{more}; first: {first})"
