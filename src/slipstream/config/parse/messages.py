"""Turns pydantic's validation errors into sentences: value, reason, remedy, place.

One sentence for each wrong key, however many alternatives its type has.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from slipstream.config.parse.keys import Key, all_keys, keys_inside, keys_of, quoted
from slipstream.config.parse.suggestions import FORMER_KINDS

Where = Callable[[str], str]
"""Maps a key's path to the place where it was set: `run.toml:12`, `--training.steps`; empty for a default."""


def rewrite(error: ValidationError, where: Where) -> dict[str, str]:
    """One sentence for each key in `error`, by the key's path."""
    sentences: dict[str, str] = {}
    for item in error.errors(include_url=False):
        section = str(item["loc"][0])
        names = [str(part) for part in item["loc"][1:]]
        # The location of an algorithm's key has the algorithm's kind between section and key.
        if section == "algorithm" and names and names[0] in all_keys()["algorithm.kind"].choices:
            names = names[1:]
        path = f"{section}.{names[0]}" if names else section
        if item["type"] == "missing" and not names:
            for key in keys_of(section):
                if key.required:
                    sentences[key.path] = missing(key)
            continue
        key = all_keys().get(".".join((section, *names[:2]))) or all_keys().get(path)
        if item["type"].startswith("union_tag"):
            key = all_keys()["algorithm.kind"]
        if key is not None and key.is_free and len(names) > 1 and (inside := keys_inside(key, names[1])):
            path, sentence = _inside(inside, item, names, where)
            sentences.setdefault(path, sentence)
        # Of several complaints about alternatives the first is the most useful: the last one is about "auto".
        elif key is not None and key.path not in sentences:
            sentences[key.path] = _sentence(key, item, where)
    return sentences


def _inside(keys: Mapping[str, Key], item: Mapping[str, Any], names: Sequence[str], where: Where) -> tuple[str, str]:
    """The path of a wrong key inside a free table of sections, and the sentence."""
    section = next(iter(keys.values())).section
    if names[-1] == "[key]":
        rule = "use letters, digits, '_' and '-', at most 64"
        return section, located(f"{section} is no name for a part: {rule}", where(section))
    if len(names) == 2:
        text = f"{section} = {show(item['input'])} is not a table: write [{section}] and its keys below it"
        return section, located(text, where(section))
    key = keys.get(names[2])
    if key is None:
        path = f"{section}.{names[2]}"
        near = difflib.get_close_matches(names[2], keys, 1)
        hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(keys)}"
        return path, located(f"{path} is not a known key: {hint}", where(path))
    if item["type"] == "missing":
        return key.path, f"{key.path} is missing: set it to {key.requirement}, in [{section}]"
    return key.path, _sentence(key, {**item, "loc": item["loc"][2:]}, where)


def missing(key: Key) -> str:
    """The sentence for a required key that is not set."""
    return f"{key.path} is missing: set it to {key.requirement}, in [{key.section}] or with --{key.path} VALUE"


def show(value: Any) -> str:
    """A value as TOML, shortened if long."""
    if isinstance(value, bool):
        return str(value).lower()
    return shortened(quoted(value[:80]) if isinstance(value, str) else str(value))


def shortened(text: str) -> str:
    """`text`, cut when long."""
    return text if len(text) <= 60 else text[:57] + "..."


def located(sentence: str, place: str) -> str:
    """The sentence with its place, if it has one."""
    return f"{sentence} ({place})" if place else sentence


def _sentence(key: Key, item: Mapping[str, Any], where: Where) -> str:
    kind: str = item["type"]
    if kind in ("missing", "union_tag_not_found"):
        return missing(key)
    value = item["input"]
    if kind == "union_tag_invalid":
        value = item["input"]["kind"]
    inside = [part for part in item["loc"][2:] if isinstance(part, int)]
    path = f"{key.path}[{inside[0]}]" if inside else key.path
    remedy = key.requirement
    if isinstance(value, str) and key.choices:
        near = difflib.get_close_matches(value, key.choices)
        # Two transposed letters are the most common typing error.
        near.sort(key=lambda choice: sorted(choice) != sorted(value))
        remedy = f'did you mean "{near[0]}"? It takes {remedy}' if near else f"use {remedy}"
        if loss := FORMER_KINDS.get(value):
            if kind == "union_tag_invalid":
                remedy = f'set algorithm.kind = "sft" and preferences.loss = "{loss}"'
            elif key.path == "preferences.loss":
                remedy = f'use "{loss}"'
    else:
        remedy = f"use {remedy}"
    # A table given as text is not shown: it may hold secrets.
    shown = "" if key.is_free and isinstance(value, str) else f" = {show(value)}"
    return located(f"{path}{shown} {_reason(kind, item.get('ctx', {}), value)}: {remedy}", where(key.path))


def _reason(kind: str, context: Mapping[str, Any], value: Any) -> str:
    bounds = {
        "greater_than": ("must be greater than", "gt"),
        "greater_than_equal": ("must be at least", "ge"),
        "less_than": ("must be less than", "lt"),
        "less_than_equal": ("must be at most", "le"),
    }
    if kind in bounds:
        words, name = bounds[kind]
        bound = context[name]
        return f"{words} {int(bound) if float(bound).is_integer() else bound}"
    if kind == "finite_number":
        return "is not a finite number"
    if isinstance(value, str) and (kind == "literal_error" or kind == "union_tag_invalid"):
        return "is not a choice"
    if value == []:
        return "is an empty list"
    return f"is {_type_name(value)}"


def _type_name(value: Any) -> str:
    if isinstance(value, bool):
        return "a flag"
    words: tuple[tuple[type | tuple[type, ...], str], ...] = (
        (str, "a text"),
        (int, "a whole number"),
        (float, "a number with a decimal point"),
        (list, "a list"),
        (dict, "a table"),
    )
    return next((text for types, text in words if isinstance(value, types)), "a date or time")
