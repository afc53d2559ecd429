"""Completes an error message about an unknown name with a suggestion."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`: did you mean 'x'?`, or the known names where none is close, at most ten of them."""
    names = sorted(known)
    if close := difflib.get_close_matches(name, names, n=1, cutoff=0.6):
        return f": did you mean {close[0]!r}?"
    shown = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
    return f": use one of {shown}" if names else ""
