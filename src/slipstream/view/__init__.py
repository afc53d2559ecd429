"""Terminal output of a run: a live display, plain lines, or nothing; and tables.

Any thread may call any method of a view; no method raises into the run or waits for anything but the terminal. A view
that fails is switched off and keeps the reason in `failure`. Numbers come from the rows that `runlog` writes.
"""

from __future__ import annotations

import sys
from typing import Literal

from rich.console import Console

from slipstream.progress import Progress
from slipstream.view.base import NullView
from slipstream.view.live import RichView
from slipstream.view.plain import PlainView
from slipstream.view.tables import render_runs, render_table
from slipstream.view.text import as_duration, sparkline

__all__ = [
    "NullView",
    "PlainView",
    "RichView",
    "ViewKind",
    "as_duration",
    "make_view",
    "render_runs",
    "render_table",
    "sparkline",
]

ViewKind = Literal["auto", "rich", "plain", "none"]


def make_view(kind: ViewKind = "auto", console: Console | None = None) -> Progress:
    """The view of that kind; `auto` is `rich` in a terminal and `plain` in a file, a pipe or a notebook."""
    # Kernels of notebooks set FORCE_COLOR, by which rich takes a pipe to them for a terminal.
    console = console or Console(emoji=False, force_terminal=None if sys.stdout.isatty() else False)
    if kind == "auto":
        kind = "rich" if console.is_terminal and not console.is_dumb_terminal else "plain"
    if kind == "none":
        return NullView()
    return RichView(console) if kind == "rich" else PlainView(console)
