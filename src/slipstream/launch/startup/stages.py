"""Times the stages of a run's start, from the command to the end of the first step.

Stages overlap: the engine starts while the trainer loads. Each is written as an event `stage` when it ends, and the
event `startup` follows the first step. A stage that does not end is not written. `began_s` counts from the beginning of
the command.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slipstream.inference.plugin.start_marks import READY
from slipstream.progress import Progress
from slipstream.runlog import REWARD, EventLog

if TYPE_CHECKING:
    from slipstream.launch.engines import RunEngine

ENGINE = "start vLLM"
WAIT = "wait for vLLM"
_POLL_S = 0.2
_ROUNDING_S = 1e-3
_SHORTEST_SHOWN_S = 0.1
"""Shorter stages are not shown in a terminal."""
_FIRST_ROW = {
    "held_out_loss": "loss of held-out rows",
    "update": "first update",
    "probe": "first probe",
    "evaluate": "first evaluation",
}
_STEP_ROW = {"batch": "first batch", "train": "first training step"}
"""Times in a metrics row, in their order, and the names of their stages."""


@dataclass(frozen=True)
class Stage:
    """A stage that has ended."""

    name: str
    began_s: float
    seconds: float


class Stages:
    """Records the stages of one run. Its methods may be called from any thread."""

    def __init__(self, began: float | None = None) -> None:
        """`began`: when the command began, by `time.monotonic`, if not now."""
        self.began = time.monotonic() if began is None else began
        self._guard = threading.Lock()
        self._done: list[Stage] = []
        self._unwritten: list[Stage] = []
        """Stages that ended before there was a run folder."""
        self._log: EventLog | None = None
        self._progress: Progress | None = None
        self._first_step: int | None = None
        self._row_at = self.began
        self._total_s: float | None = None
        self._ended = threading.Event()

    def attach(self, log: EventLog, progress: Progress) -> None:
        """Write and show stages from here on, and write those that have ended."""
        self._log, self._progress = log, progress
        for stage in self._unwritten:
            log.event("stage", **dataclasses.asdict(stage))

    @contextlib.contextmanager
    def stage(self, name: str) -> Generator[None]:
        """Time the block as a stage, and show it as the calling thread's phase; a block that raises is no stage."""
        if self._progress is not None:
            self._progress.phase(name)
        began = time.monotonic()
        yield
        self._add(name, began, time.monotonic())
        if self._progress is not None:
            self._progress.end_phase()

    def _add(self, name: str, began: float, ended: float) -> None:
        stage = Stage(name, round(began - self.began, 3), round(ended - began, 3))
        with self._guard:
            self._done.append(stage)
            if self._log is None:
                self._unwritten.append(stage)
        if self._log is not None:
            self._log.event("stage", **dataclasses.asdict(stage))

    def ended_elsewhere(self, stage: Stage) -> None:
        """Another process of the run has recorded a stage."""
        with self._guard:
            self._done.append(stage)

    def watch(self, engine: RunEngine) -> None:
        """Show the phases of an engine's start, in a thread of its own, until it is ready or `end` is called."""
        threading.Thread(target=self._watch, args=(engine,), name="engine-start", daemon=True).start()

    def _watch(self, engine: RunEngine) -> None:
        num_written: dict[int, int] = {}
        shown = ""
        while not self._ended.wait(_POLL_S):
            each = engine.phases
            for number, phases in enumerate(each):
                num_written[number] = self._add_phases(
                    phases, num_written.get(number, 0), f" {number}" if len(each) > 1 else ""
                )
            current = [phases[-1][0] for phases in each if phases and phases[-1][0] != READY]
            if current and self._progress is not None and current[0] != shown:
                shown = current[0]
                self._progress.phase(f"{ENGINE}: {shown}")
            if each and all(phases and phases[-1][0] == READY for phases in each):
                break
        if shown and self._progress is not None:
            self._progress.end_phase()

    def _add_phases(self, phases: tuple[tuple[str, float], ...], num_written: int, replica: str) -> int:
        """Add the phases of one engine that have ended since the last call; returns how many have ended."""
        ended = [*itertools.pairwise(phases)]
        for (name, began), (_, end) in ended[num_written:]:
            self._add(f"{ENGINE}{replica}: {name}", began, end)
        if len(ended) > num_written and phases[-1][0] == READY:
            self._add(f"{ENGINE}{replica}", phases[0][1], phases[-1][1])
        return len(ended)

    def begin_steps(self, step: int) -> None:
        """Everything is loaded, and the training loop begins after `step`."""
        self._first_step, self._row_at = step, time.monotonic()

    def on_row(self, step: int, row: Mapping[str, float | None]) -> None:
        """Listen to rows of metrics: the first ones hold the times of the first update and the first step."""
        if self._first_step is None or self._total_s is not None or not any(name.startswith("time/") for name in row):
            return
        at, now, is_step = self._row_at, time.monotonic(), step > self._first_step
        for phase, name in (_STEP_ROW if is_step else _FIRST_ROW).items():
            if (seconds := row.get(f"time/{phase}_s")) is None:
                continue
            if phase == "batch" and REWARD in row:
                name = "first rollouts"
            if phase == "update":  # the wait for the engine is a stage of its own
                began = at - self.began - _ROUNDING_S
                waited = sum(stage.seconds for stage in self._done if stage.name == WAIT and stage.began_s >= began)
                at, seconds = at + waited, max(0.0, seconds - waited)
            self._add(name, at, at + seconds)
            at += seconds
        self._row_at = now
        if is_step:
            self._total_s = round(now - self.began, 3)
            self._ended.set()
            if self._log is not None and self._progress is not None:
                self._log.event("startup", seconds=self._total_s)
                self._progress.message(self.summary_line())

    def end(self) -> None:
        """Stop watching engines."""
        self._ended.set()

    def summary_line(self) -> str:
        """The stages in one line, for a terminal."""
        longest = [stage for stage in self._sorted() if stage.seconds >= _SHORTEST_SHOWN_S]
        listed = ", ".join(f"{stage.name} {stage.seconds:.1f} s" for stage in longest)
        return f"first step after {self._total_s or 0.0:.1f} s; stages, some at once: {listed}"

    def _sorted(self) -> list[Stage]:
        with self._guard:
            return sorted(self._done, key=lambda stage: (stage.began_s, -stage.seconds))

    def summary(self) -> dict[str, Any]:
        """The stages as JSON: seconds to the end of the first step, None where there was none, and the stages in order
        of their beginning."""
        return {"seconds": self._total_s, "stages": [dataclasses.asdict(stage) for stage in self._sorted()]}
