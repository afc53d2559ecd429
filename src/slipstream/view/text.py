"""Formats numbers and untrusted text for a terminal."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

BLOCK_LEVELS = "▁▂▃▄▅▆▇█"
ASCII_LEVELS = "_.-=+*#@"


def sparkline(values: Iterable[float], width: int, levels: str = BLOCK_LEVELS) -> str:
    """At most `width` characters: means of equal parts of `values`, scaled from minimum to maximum."""
    values = list(values)
    num_cells = min(width, len(values))
    edges = [len(values) * cell // num_cells for cell in range(num_cells + 1)] if num_cells else []
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    least, span = min(means, default=0.0), max(means, default=0.0) - min(means, default=0.0)
    top = len(levels) - 1
    return "".join(levels[round((mean - least) / span * top) if span > 0 else 0] for mean in means)


def as_duration(seconds: float) -> str:
    """`4.2 s`, `3:05` or `1:02:03`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def clean(text: str) -> str:
    """Removes control characters, which could overwrite the terminal."""
    return "".join(character if character.isprintable() else " " for character in text)
