"""How a run reports its progress to whoever watches it; the views in `slipstream.view` implement this.

Each thread has one phase at a time, since trainer and orchestrator work at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Protocol

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that change a terminal or the order of its text; but for line ends and tabs."""


def printable(text: str) -> str:
    """Text of a model, a server or a file as a terminal may show it: its control characters are written out."""
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class Progress(Protocol):
    """Shows a run while it goes on. Any thread may call any method; none raises into the run."""

    def start(self, title: str, total_steps: int, step: int = 0) -> None:
        """Begin. `title`: model, algorithm and environment. `total_steps`: 0 for work that has none. `step`: steps done
        before a resume."""
        ...

    def ready(self) -> None:
        """Everything is loaded: elapsed time and the pace of the steps count from here."""
        ...

    def phase(self, name: str, total: int | None = None) -> None:
        """Begin a phase of the calling thread, of `total` parts if their number is known."""
        ...

    def advance(self, n: int = 1) -> None:
        """Count `n` more parts of the phase as done."""
        ...

    def end_phase(self) -> None:
        """End the calling thread's phase; the next has not begun."""
        ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Report a finished step; ends the calling thread's phase."""
        ...

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Report an evaluation that went on beside training, of a step that was reported before."""
        ...

    def message(self, text: str, level: str = "info") -> None:
        """Show a message; `level` is info, warning or error."""
        ...

    def stop(self) -> None:
        """End; what was shown last stays."""
        ...
