"""Suggests the setting that an unknown key was most likely meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from slipstream.config.parse.aliases import NEAR
from slipstream.config.parse.keys import all_keys, keys_of, sections


def suggestion(path: str) -> str:
    """The remedy for the unknown `path`: the nearest valid key, or the list of keys in its section."""
    section, _, name = path.rpartition(".")
    known = all_keys()
    if section and section not in sections():
        near = closest(section, sections())
        if near is not None:
            candidate = f"{near}.{name}"
            return f"did you mean {candidate}?" if candidate in known else f"did you mean the section [{near}]?"
    if name in NEAR:
        return f"did you mean {NEAR[name]}?"
    elsewhere = [key.path for key in known.values() if key.name == name]
    if elsewhere:
        return f"did you mean {_likeliest(elsewhere)}?"
    if section in sections():
        own = [key.name for key in keys_of(section)]
        near = closest(name, own)
        if near is not None:
            return f"did you mean {section}.{near}?"
        return f"[{section}] has {', '.join(own)}"
    near = closest(path, sections())
    if near is not None:
        return f"did you mean the section [{near}]?"
    names = [key.name for key in known.values()]
    near = closest(name, names)
    if near is not None:
        return f"did you mean {_likeliest([key.path for key in known.values() if key.name == near])}?"
    return f"the sections are {', '.join(sections())}"


def _likeliest(paths: Sequence[str]) -> str:
    """Of several keys with one name, the most common meaning of the name without a section."""
    first = ("model", "training", "run", "sampling")
    return min(paths, key=lambda path: first.index(section) if (section := path.split(".")[0]) in first else len(first))


def closest(name: str, candidates: Sequence[str]) -> str | None:
    """The candidate that `name` is most likely a misspelling of; None if none is close."""
    close = difflib.get_close_matches(name.lower().replace("-", "_"), candidates, n=1, cutoff=0.6)
    return close[0] if close else None
