"""Files on the use of a saved model, beside its weights: end tokens and tokenizer.

Guarantees: every file with end tokens for readers names the token of training, even if the base names others. An
adapter's folder has the tokenizer and `generation_config.json` of its model. A folder with the right end tokens is left
unchanged.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOKENIZER_FILES = (
    *("tokenizer*", "chat_template*", "additional_chat_templates/*", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.*", "merges.txt", "*.model", "*.tiktoken", "*tokeniz*.py", "tekken.json"),
)
"""Patterns of a model folder's files on its tokens."""
GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True)
class EndTokens:
    """The end tokens of a completion in training; the first one ends a turn."""

    ids: tuple[int, ...]
    text: str = ""
    """The first one's text, for the tokenizer's files; empty if these are not to be changed."""


def write_usage(folder: Path, source: Path, ends: EndTokens) -> None:
    """Complete the folder of a model, or of an adapter of the model in `source`, by `ends`."""
    if not (folder / "config.json").is_file():
        for path in sorted({path for pattern in TOKENIZER_FILES for path in source.glob(pattern) if path.is_file()}):
            target = folder / path.relative_to(source)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)
    config = _read(source / "config.json")
    generation = _read(source / GENERATION_CONFIG)
    if not generation:
        # Without the file, transformers takes these from the configuration.
        parts = (config, config.get("text_config") or {})
        generation = {name: part[name] for part in reversed(parts) for name in _SPECIAL if part.get(name) is not None}
    file = folder / GENERATION_CONFIG
    if _with_ends(generation, ends) or not file.is_file():
        _write(file, generation)
    if (folder / "config.json").is_file():
        own = _read(folder / "config.json")
        parts = [part for part in (own, own.get("text_config") or {}) if part.get("eos_token_id") is not None]
        if [_with_ends(part, ends) for part in parts].count(True):
            _write(folder / "config.json", own)
    _name_end(folder / "tokenizer_config.json", ends)


def copy_usage(source: Path, folder: Path) -> None:
    """Give the model in `folder` the end tokens in the folder of its adapter, `source`."""
    said = _read(source / GENERATION_CONFIG)
    if ids := _as_ids(said.get("eos_token_id")):
        token = _read(source / "tokenizer_config.json").get("eos_token")
        text = token.get("content", "") if isinstance(token, dict) else token
        write_usage(folder, folder, EndTokens(ids, text or ""))


_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def _with_ends(values: dict[str, Any], ends: EndTokens) -> bool:
    """Put the end tokens before the ones in `values`, unless these have them all; returns whether something changed."""
    before = _as_ids(values.get("eos_token_id"))
    if set(ends.ids) <= set(before):
        return False
    ids = list(dict.fromkeys((*ends.ids, *before)))
    values["eos_token_id"] = ids if len(ids) > 1 else ids[0]
    return True


def _name_end(file: Path, ends: EndTokens) -> None:
    values = _read(file)
    if not ends.text or not values:
        return
    token = values.get("eos_token")
    if isinstance(token, dict):
        changed = token.get("content") != ends.text
        token["content"] = ends.text
    else:
        changed = token != ends.text
        values["eos_token"] = ends.text
    if changed:
        _write(file, values)


def _as_ids(value: Any) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, list) else () if value is None else (int(value),)


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _write(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2, ensure_ascii=False), encoding="utf-8")
