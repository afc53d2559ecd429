"""The numbers that views show, and the state that they keep; their interface is `slipstream.progress`.

Each thread has one phase at a time (trainer and orchestrator work concurrently); `advance` moves the calling thread's
phase, or the newest one if that thread has none.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rich.console import Console

from slipstream.runlog import ACCURACY, REWARD
from slipstream.runlog.evaluations import figures_of
from slipstream.view.figures import waits_line
from slipstream.view.text import clean

STEP_TIME = "time/step_s"
_FIGURES = ("pass", "best", "maj")


@dataclass(frozen=True)
class Column:
    """A metric to show: the first of `names` that a row has."""

    label: str
    names: tuple[str, ...]
    format: str

    def of(self, metrics: Mapping[str, float]) -> float | None:
        """The number, or None if the row has none."""
        return next((metrics[name] for name in self.names if name in metrics), None)

    def text(self, value: float | None) -> str:
        """The number as shown."""
        return "-" if value is None else format(value, self.format)


REWARD_COLUMN = Column("reward", (REWARD,), ".3f")
ACCURACY_COLUMN = Column("accuracy", (ACCURACY,), ".3f")
EVAL_LOSS_COLUMN = Column("eval loss", ("eval/loss",), ".4f")
COLUMNS = (
    REWARD_COLUMN,
    ACCURACY_COLUMN,
    EVAL_LOSS_COLUMN,
    Column("probe diff", ("probe/abs_logprob_diff",), ".2g"),
    Column("loss", ("train/loss",), ".4f"),
    Column("grad norm", ("train/grad_norm",), ".3g"),
    Column("tokens/s", ("throughput/generated_tokens_per_s",), ",.0f"),
    Column("step s", (STEP_TIME,), ".1f"),
)


def figure_columns(row: Mapping[str, float]) -> list[Column]:
    """Columns for `pass@n`, `best@n` and `maj@n` of evaluations with n samples a task."""
    found = figures_of(row)
    most = max((int(name.partition("@")[2]) for name in found), default=0)
    names = [f"{kind}@{most}" for kind in _FIGURES]
    return [Column(name, (f"eval/{name}",), ".3f") for name in names if name in found]


def why_untrained(row: Mapping[str, float]) -> str:
    """Why a step has neither loss nor gradient; empty if it has them."""
    if row.get("train/skipped"):
        if "reward/mean" not in row and row.get("dropped/no_tokens"):
            return "skipped: no episode has a token of the policy"
        if row.get("rollout/truncated_fraction") == 1.0:
            return "skipped: every completion was cut off at its limit"
        if row.get("reward/signal_fraction"):
            return "skipped: no token had a gradient left"
        return "skipped: no group had better and worse answers"
    return "the critic alone was trained" if row.get("value/warmup") else ""


@dataclass
class Phase:
    """A phase that is running."""

    name: str
    total: int | None
    began: float
    done: int = 0
    reported: float = 0.0
    """When a line about it was last written."""

    def text(self) -> str:
        """`12/50`; empty if it has no parts."""
        if self.total is None:
            return f"{self.done:,}" if self.done else ""
        return f"{self.done:,}/{self.total:,}"


class StatefulView:
    """Holds the state to show, behind one lock; subclasses draw it on each change."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = console
        self.failure: BaseException | None = None
        self.title = ""
        self.total_steps = 0
        self.steps_done = 0
        self.first_step = 0
        self.row: dict[str, float] = {}
        """The newest value of every metric."""
        self.why_untrained = self.waits = ""
        """Of the newest step."""
        self.rewards: deque[float] = deque(maxlen=400)
        self.warnings: deque[tuple[str, str, str]] = deque(maxlen=3)
        """Time of day, level and text."""
        self.num_messages: Counter[str] = Counter()
        self.phases: dict[int, Phase] = {}
        """By thread, the newest last."""
        self.began = self.last_step_at = clock()
        self._clock = clock
        self._lock = threading.RLock()

    def start(self, title: str, total_steps: int, step: int = 0) -> None:
        """See `Progress`."""
        with self._lock:
            self.title, self.total_steps = self.printable(title), total_steps
            self.steps_done = self.first_step = step
            self.began = self.last_step_at = self._clock()
        self._show(self._on_start)

    def ready(self) -> None:
        """See `Progress`."""
        with self._lock:
            self.began = self.last_step_at = self._clock()

    def phase(self, name: str, total: int | None = None) -> None:
        """See `Progress`."""
        self.end_phase()
        with self._lock:
            now = self._clock()
            self.phases[threading.get_ident()] = Phase(self.printable(name), total, now, reported=now)

    def advance(self, n: int = 1) -> None:
        """See `Progress`."""
        with self._lock:
            newest = next(reversed(self.phases.values()), None)
            phase = self.phases.get(threading.get_ident(), newest)
            if phase is None:
                return
            phase.done += n
        self._show(lambda: self._on_advance(phase))

    def end_phase(self) -> None:
        """See `Progress`."""
        with self._lock:
            ended = self.phases.pop(threading.get_ident(), None)
        if ended:
            self._show(lambda: self._on_phase_end(ended))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Progress`. The time of the step is measured here unless the metrics have it."""
        with self._lock:
            now = self._clock()
            row = {STEP_TIME: now - self.last_step_at, **metrics}
            self.last_step_at = now
            self.steps_done = step
            self.row |= row
            self.why_untrained, self.waits = why_untrained(row), waits_line(row)
            if REWARD in row:
                self.rewards.append(row[REWARD])
        self.end_phase()
        self._show(lambda: self._on_step(row))

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Progress`. Of the numbers of an evaluation it becomes the newest."""
        with self._lock:
            self.row |= metrics
        shown = [ACCURACY_COLUMN, *figure_columns(metrics)]
        cells = [f"{column.label} {column.text(column.of(metrics))}" for column in shown]
        self._show(lambda: self._on_message("  ".join([f"evaluation of step {step}:", *cells]), "info"))

    def message(self, text: str, level: str = "info") -> None:
        """See `Progress`."""
        text = self.printable(text)
        with self._lock:
            self.num_messages[level] += 1
            if level != "info":
                self.warnings.append((time.strftime("%H:%M:%S"), level, text))
        self._show(lambda: self._on_message(text, level))

    def stop(self) -> None:
        """See `Progress`."""
        with self._lock:
            ended = list(self.phases.values())
            self.phases.clear()
        for phase in ended:
            self._show(lambda phase=phase: self._on_phase_end(phase))
        # Also after a failure, to restore the terminal's cursor and output.
        self._show(self._on_stop, anyway=True)

    def seconds_left(self) -> float | None:
        """Estimated time to the last step, at the pace so far."""
        num_done = self.steps_done - self.first_step
        if num_done <= 0:
            return None
        return (self.last_step_at - self.began) / num_done * (self.total_steps - self.steps_done)

    def printable(self, text: str) -> str:
        """The text without control sequences and characters that the terminal cannot show."""
        encoding = self.console.encoding
        return clean(text).encode(encoding, "replace").decode(encoding)

    def _show(self, change: Callable[[], None], anyway: bool = False) -> None:
        """The only place where terminal errors are caught: they must not end the run."""
        if self.failure is None or anyway:
            try:
                change()
            except (Exception, SystemExit) as error:  # noqa: BLE001 - rich exits the process on a broken pipe
                self.failure = self.failure or error

    def _on_start(self) -> None: ...
    def _on_phase_end(self, phase: Phase) -> None: ...
    def _on_advance(self, phase: Phase) -> None: ...
    def _on_step(self, row: Mapping[str, float]) -> None: ...
    def _on_message(self, text: str, level: str) -> None: ...
    def _on_stop(self) -> None: ...


class NullView(StatefulView):
    """Shows nothing."""

    def __init__(self) -> None:
        super().__init__(Console(quiet=True))
