"""The view for files, pipes and `--plain`."""

from __future__ import annotations

from collections.abc import Mapping

from rich.text import Text

from slipstream.view.base import COLUMNS, Phase, StatefulView

LONG_PHASE_S = 10.0


class PlainView(StatefulView):
    """One line for each step, and lines for phases that take long."""

    def _on_start(self) -> None:
        self._line(self.title, f"{self.total_steps} steps")

    def _on_advance(self, phase: Phase) -> None:
        with self._lock:
            now = self._clock()
            if now - phase.reported < LONG_PHASE_S:
                return
            phase.reported = now
        self._line(" ", phase.name, phase.text(), f"after {now - phase.began:.0f} s")

    def _on_phase_end(self, phase: Phase) -> None:
        if (seconds := self._clock() - phase.began) >= LONG_PHASE_S:
            self._line(" ", phase.name, phase.text(), f"took {seconds:.1f} s")

    def _on_step(self, row: Mapping[str, float]) -> None:
        width = len(str(self.total_steps))
        shown = [column for column in COLUMNS if column.of(self.row) is not None]
        cells = [f"{column.label} {column.text(column.of(row)):>7}" for column in shown]
        self._line(f"step {self.steps_done:>{width}}/{self.total_steps}", *cells)

    def _on_message(self, text: str, level: str) -> None:
        self._line(text if level == "info" else f"{level}: {text}")

    def _on_stop(self) -> None:
        counts = [(self.num_messages[level], level) for level in ("warning", "error")]
        shown = [f"{count} {level}{'s' * (count > 1)}" for count, level in counts if count]
        self._line(f"stopped after step {self.steps_done} of {self.total_steps}", *shown)

    def _line(self, *parts: str) -> None:
        text = Text("  ".join(part for part in parts if part))
        self.console.print(text, soft_wrap=True, highlight=False)
