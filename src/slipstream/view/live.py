"""The live view for a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from slipstream.view.base import COLUMNS, StatefulView, figure_columns
from slipstream.view.text import ASCII_LEVELS, BLOCK_LEVELS, as_duration, sparkline


class RichView(StatefulView):
    """A picture that is redrawn several times a second; messages scroll by above it."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console, clock)
        self._live = Live(
            console=console, get_renderable=self._safe_picture, refresh_per_second=4, vertical_overflow="crop"
        )

    def _on_start(self) -> None:
        self._live.start(refresh=True)

    def _on_message(self, text: str, level: str) -> None:
        if level == "info":
            self.console.print(Text(text))
        elif not self._live.is_started:  # before the picture and after it
            self.console.print(Text(f"{level}: {text}"))

    def _on_stop(self) -> None:
        self._live.stop()

    def _safe_picture(self) -> RenderableType:
        """Called by the refresh thread, where an error would go unnoticed."""
        pictures: list[RenderableType] = []
        self._show(lambda: pictures.append(self.picture()))
        return pictures[0] if pictures else Text(f"the view failed: {self.failure}")

    def picture(self) -> RenderableType:
        """The whole picture for the current state."""
        with self._lock:
            parts: list[RenderableType] = [self._bars(), Text(), self._numbers()]
            if self.why_untrained:
                parts += [Text(f"last step {self.why_untrained}", "dim")]
            if self.waits:
                parts += [Text(self.waits, "dim")]
            if len(self.rewards) > 1:
                parts += [Text(), self._reward_line()]
            if self.warnings:
                parts += [Text(), *self._last_warnings()]
            title = Text(self.title, "bold")
        return Panel(Group(*parts), title=title, title_align="left", border_style="dim", padding=(0, 1))

    def _bars(self) -> Table:
        table = Table.grid(padding=(0, 1), expand=True)
        table.add_column(no_wrap=True, min_width=8)
        table.add_column(ratio=1)
        table.add_column(justify="right", no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
        now, left_s = self._clock(), self.seconds_left()
        times = as_duration(now - self.began) + (f", {as_duration(left_s)} left" if left_s else "")
        bar = ProgressBar(total=max(self.total_steps, 1), completed=self.steps_done, complete_style="cyan")
        if self.total_steps:
            table.add_row(Text("step", "bold"), bar, f"{self.steps_done}/{self.total_steps}", times)
        for phase in self.phases.values():
            pulse = phase.total is None
            bar = ProgressBar(
                total=phase.total or None,
                completed=phase.done,
                pulse=pulse,
                animation_time=now,
                complete_style="cyan",
            )
            table.add_row(Text(phase.name), bar, phase.text(), as_duration(now - phase.began))
        return table

    def _numbers(self) -> Columns:
        shown = [(column, column.of(self.row)) for column in (*COLUMNS, *figure_columns(self.row))]
        cells = [
            Text.assemble((f"{column.label}\n", "dim"), (column.text(value), "bold"))
            for column, value in shown
            if value is not None
        ]
        return Columns(cells, padding=(0, 3))

    def _reward_line(self) -> Text:
        ascii_only = self.console.options.ascii_only
        width = min(48, max(10, self.console.width - 36))
        line = sparkline(self.rewards, width, ASCII_LEVELS if ascii_only else BLOCK_LEVELS)
        first, last = self.rewards[0], self.rewards[-1]
        return Text.assemble(("reward ", "dim"), (line, "green"), self.printable(f" {first:.3f} … {last:.3f}"))

    def _last_warnings(self) -> Iterable[Text]:
        for when, level, text in self.warnings:
            style = "red" if level == "error" else "yellow"
            yield Text.assemble((f"{when} ", "dim"), (f"{level}: ", style), text)
        hidden = self.num_messages["warning"] + self.num_messages["error"] - len(self.warnings)
        if hidden > 0:
            yield Text(f"and {hidden} earlier, in events.jsonl", "dim")
