"""The view for files, pipes and `--plain`."""

from __future__ import annotations

from collections.abc import Mapping

from rich.text import Text

from slipstream.view.base import (
    ACCURACY_COLUMN,
    COLUMNS,
    EVAL_LOSS_COLUMN,
    Phase,
    StatefulView,
    figure_columns,
    why_untrained,
)

LONG_PHASE_S = 10.0
QUICK_STEP_S = 2.0


class PlainView(StatefulView):
    """A line for each step, at most one in two seconds; and lines for long phases."""

    _written = -QUICK_STEP_S

    def _on_start(self) -> None:
        self._line(self.title, f"{self.total_steps} steps" if self.total_steps else "")

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
        now = self._clock()
        is_evaluated = any(column.of(row) is not None for column in (ACCURACY_COLUMN, EVAL_LOSS_COLUMN))
        is_notable = is_evaluated or self.steps_done >= self.total_steps
        if now - self._written < QUICK_STEP_S and not is_notable:
            return
        self._written = now
        width = len(str(self.total_steps))
        shown = [column for column in COLUMNS if column.of(self.row) is not None] + figure_columns(self.row)
        cells = [f"{column.label} {column.text(column.of(row)):>7}" for column in shown]
        self._line(f"step {self.steps_done:>{width}}/{self.total_steps}", *cells, why_untrained(row))

    def _on_message(self, text: str, level: str) -> None:
        self._line(text if level == "info" else f"{level}: {text}")

    def _on_stop(self) -> None:
        counts = [(self.num_messages[level], level) for level in ("warning", "error")]
        shown = [f"{count} {level}{'s' * (count > 1)}" for count, level in counts if count]
        ended = "made all" if self.steps_done >= self.total_steps else f"stopped after step {self.steps_done} of"
        if self.total_steps or shown:
            self._line(f"{ended} {self.total_steps} steps" if self.total_steps else "", *shown)

    def _line(self, *parts: str) -> None:
        text = Text("  ".join(part for part in parts if part))
        self.console.print(text, soft_wrap=True, highlight=False)
