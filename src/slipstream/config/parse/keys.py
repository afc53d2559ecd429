"""Lists the keys of run files, and describes the values of each.

Everything is read from the schema, so a new field needs no change here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from slipstream.config.bounds import Section, put
from slipstream.config.schema import RunConfig

Config = TypeVar("Config", bound=RunConfig)
BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
CONTROL = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\u2028\\u2029]")
"""Characters to escape in a TOML file. The last two are legal, but some readers break lines there."""
NEVER_REACHED = 1e6


@dataclass(frozen=True)
class Key:
    """One leaf of the tree of settings."""

    section: str
    name: str
    requirement: str
    """The values it accepts, as in "use ..."."""
    required: bool
    is_flag: bool = False
    """Accepts true and false, so `--section.name` alone means true."""
    is_text: bool = False
    """Accepts text only: a value on the command line is never parsed as a number."""
    is_free: bool = False
    """A table with arbitrary keys."""
    choices: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    """The algorithms that have this key; empty if it does not depend on the algorithm."""

    @property
    def path(self) -> str:
        """`section.name`."""
        return f"{self.section}.{self.name}"


def sections() -> tuple[str, ...]:
    """The names of all sections."""
    return tuple(RunConfig.model_fields)


def optional_sections() -> tuple[str, ...]:
    """Sections that `name = false` turns off."""
    return tuple(
        name
        for name, field in RunConfig.model_fields.items()
        if not field.is_required() and field.get_default() is not None and "None" in str(field.annotation)
    )


def keys_of(section: str) -> list[Key]:
    """The keys of a section; in [algorithm] those of every kind."""
    return [key for key in all_keys().values() if key.section == section]


def leaves(config: RunConfig, *of: str) -> Iterator[tuple[str, Any]]:
    """Path and value of every leaf, or of those `of` some sections; keys inside free tables are leaves, absent sections
    have none."""
    for section in of or sections():
        model = getattr(config, section)
        if model is None:
            continue
        for name in type(model).model_fields:
            value = getattr(model, name)
            if all_keys()[f"{section}.{name}"].is_free:
                yield from flatten((section, name), as_table(value))
            else:
                yield f"{section}.{name}", value


def as_table(value: Mapping[str, Any] | Section) -> dict[str, Any]:
    """The value of a free table; of sections inside what differs from their defaults."""
    if isinstance(value, Section):
        return value.model_dump()
    return {
        name: inner.model_dump(exclude_defaults=True) if isinstance(inner, Section) else inner
        for name, inner in value.items()
    }


def keys_inside(key: Key, name: str) -> dict[str, Key]:
    """The keys of the sections in a free table, below `name`; none where its values are no sections."""
    value = _free_sections().get(key.path)
    if value is None:
        return {}
    model = RunConfig.model_json_schema()["$defs"][value]
    section, required = dotted((*key.path.split("."), name)), model.get("required", ())
    return {each: _key(section, each, spec, each in required, ()) for each, spec in model["properties"].items()}


def flatten(path: Sequence[str], value: Any) -> Iterator[tuple[str, Any]]:
    """The leaves below `value` as (dotted path as TOML writes it, value); an empty table is a leaf."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from flatten((*path, name), inner)
    else:
        yield dotted(path), value


def dotted(path: Sequence[str]) -> str:
    """`path` as a TOML key: `section.key`, with quotes where a name needs them."""
    return ".".join(name if BARE_KEY.fullmatch(name) else quoted(name) for name in path)


def quoted(text: str) -> str:
    """`text` as a TOML string, on one line."""
    return CONTROL.sub(lambda found: f"\\u{ord(found[0]):04X}", json.dumps(text, ensure_ascii=False))


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """A copy of `config` with the given `section.key` values, validated again; raises pydantic's error for an invalid
    value."""
    data = {name: model.model_dump() for name in sections() if (model := getattr(config, name)) is not None}
    for name in optional_sections():
        data.setdefault(name, None)
    for path, value in values.items():
        put(data, path, value)
    return type(config).model_validate(data)


def _models() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every section with its JSON schema; [algorithm] once for each of its classes, then tables with keys in it."""
    schema = RunConfig.model_json_schema()
    for section, reference in schema["properties"].items():
        for name in _references(reference):
            model = schema["$defs"][name]
            yield section, model
            for key, spec in model["properties"].items():
                if "$ref" in spec:
                    yield f"{section}.{key}", schema["$defs"][_references(spec)[0]]


@cache
def all_keys() -> Mapping[str, Key]:
    """Every key by its path `section.name`, in the schema's order."""
    keys: dict[str, Key] = {}
    every_kind: tuple[str, ...] = ()
    for section, model in _models():
        kinds = _kinds(model) if section == "algorithm" else ()
        every_kind += kinds
        for name, spec in model["properties"].items():
            path = f"{section}.{name}"
            before = keys[path].kinds if path in keys else ()
            keys[path] = _key(section, name, spec, name in model.get("required", ()), (*before, *kinds))
    kind_words = join_choices([f'"{kind}"' for kind in every_kind])
    keys["algorithm.kind"] = Key("algorithm", "kind", kind_words, required=True, is_text=True, choices=every_kind)
    return keys


@cache
def _free_sections() -> dict[str, str]:
    """For each free table of sections the name of their schema."""
    found: dict[str, str] = {}
    for section, model in _models():
        for name, spec in model["properties"].items():
            values = [*spec.get("patternProperties", {}).values(), spec.get("additionalProperties")]
            names = [each for value in values if isinstance(value, dict) for each in _references(value)]
            if names:
                found[f"{section}.{name}"] = names[0]
    return found


def _kinds(model: Mapping[str, Any]) -> tuple[str, ...]:
    """The kinds of algorithm that have this section, in the schema's order."""
    spec = model["properties"]["kind"]
    return tuple(spec.get("enum", (spec.get("const"),)))


def _references(spec: Mapping[str, Any]) -> list[str]:
    if "$ref" in spec:
        return [spec["$ref"].rsplit("/", 1)[-1]]
    return [name for part in spec.get("anyOf", spec.get("oneOf", ())) for name in _references(part)]


def _key(section: str, name: str, spec: Mapping[str, Any], required: bool, kinds: tuple[str, ...]) -> Key:
    parts = [part for part in spec.get("anyOf", (spec,)) if part.get("type") != "null"]
    types = {part.get("type", "object") for part in parts}
    choices = tuple(choice for part in parts for choice in part.get("enum", [part.get("const")]) if choice)
    return Key(
        section,
        name,
        requirement=join_choices([word for part in parts for word in _words(part)]),
        required=required,
        is_flag="boolean" in types,
        is_text=types == {"string"},
        is_free=types == {"object"},
        choices=choices,
        kinds=kinds,
    )


def _words(spec: Mapping[str, Any]) -> list[str]:
    """Describes the values that one alternative of a JSON schema accepts."""
    if "const" in spec:
        return [f'"{spec["const"]}"']
    if "enum" in spec:
        return [f'"{choice}"' for choice in spec["enum"]]
    kind = spec.get("type", "object")
    plain = {
        "boolean": ["true", "false"],
        "object": ["a table of keys and values"],
        "array": [_list_words(spec.get("items", {}))],
        "string": ["a path" if spec.get("format") == "path" else "a text"],
    }
    if kind in plain:
        return plain[kind]
    bounds = [
        f"{words} {_plain(spec[name])}"
        for name, words in (
            ("exclusiveMinimum", "greater than"),
            ("minimum", "of at least"),
            ("exclusiveMaximum", "less than"),
            ("maximum", "at most"),
        )
        # A bound that only a typing error exceeds is shown only in the error for it.
        if name in spec and (name != "maximum" or spec[name] < NEVER_REACHED)
    ]
    noun = "whole number" if kind == "integer" else "number"
    if bounds == ["greater than 0"]:
        return [f"a positive {noun}"]
    return [f"a {noun} {' and '.join(bounds)}".rstrip()]


def _list_words(items: Mapping[str, Any]) -> str:
    choices = [f'"{choice}"' for choice in items.get("enum", ())]
    if "$ref" in items:
        return "a list of tables"
    return f"a list of {join_choices(choices)}" if choices else "a list of texts"


def _plain(number: float) -> str:
    return str(int(number)) if float(number).is_integer() else str(number)


def join_choices(words: Sequence[str]) -> str:
    """`a, b or c`."""
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
