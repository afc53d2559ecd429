"""The schedule of evaluations, evaluations beside training, and early stopping: `evaluation.stop_at` reached, or
`evaluation.patience` used up.

Guarantees: early stopping depends on the evaluations alone, and every checkpoint saves its state, so a resumed run
stops at the same step as an uninterrupted one. One evaluation goes on at a time: the next one waits for it, and so does
the end of a run. A run resumed from the step of an unfinished evaluation makes it again. A run resumed from a later
step has other weights, and reports the evaluation as missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from slipstream.config.planned import PlannedConfig
from slipstream.config.schema import EvaluationConfig
from slipstream.progress import Progress
from slipstream.runlog import ACCURACY, RunLog, read_metrics

LATER = "eval/steps_later"
"""How many steps the trainer was ahead when an evaluation beside it was recorded."""


class EarlyStop:
    """Follows a run's evaluations; without `stop_at` and `patience` it never stops the run."""

    def __init__(self, config: EvaluationConfig | None) -> None:
        self._stop_at = config.stop_at if config else None
        self._patience = config.patience if config else None
        self._last: float | None = None
        self._num_worse = 0
        self.best: float | None = None
        """The highest accuracy so far."""
        self.best_step: int | None = None
        """The first step with this accuracy."""

    @property
    def keeps_best(self) -> bool:
        """Whether the best step's checkpoint is to be kept."""
        return self._patience is not None

    def observe(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Record the evaluation after `step`, if `metrics` have one; returns whether it is the best so far."""
        accuracy = metrics.get(ACCURACY)
        if accuracy is None or self.reason:  # the reason to end the run is final
            return False
        self._last = accuracy
        if self.best is None or accuracy > self.best:
            self.best, self.best_step, self._num_worse = accuracy, step, 0
            return True
        self._num_worse += 1
        return False

    @property
    def reason(self) -> str:
        """Why the run should end; empty while it should continue."""
        if self._stop_at is not None and self._last is not None and self._last >= self._stop_at:
            return f"accuracy {self._last:.4g} reached evaluation.stop_at = {self._stop_at:g}"
        if self._patience is not None and self._num_worse >= self._patience:
            return (
                f"{self._num_worse} evaluations in a row brought no better accuracy than {self.best:.4g} of step "
                f"{self.best_step} (evaluation.patience = {self._patience})"
            )
        return ""

    def state(self) -> dict[str, Any]:
        """The state for `load`, JSON-serializable."""
        return {"last": self._last, "best": self.best, "best_step": self.best_step, "num_worse": self._num_worse}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a result of `state`."""
        self._last, self.best, self.best_step = state["last"], state["best"], state["best_step"]
        self._num_worse = state["num_worse"]


Meanwhile = Callable[[Callable[[], bool]], None]
"""Work during a wait; its argument tells whether the wait is over."""


def nothing(is_over: Callable[[], bool]) -> None:
    """No work during a wait."""


class Evaluates(Protocol):
    """Evaluates versions: the loop's `Engine`."""

    def evaluate(self, step: int, meanwhile: Meanwhile = nothing) -> dict[str, float]:
        """Evaluate the version applied last, `step`, on held-out tasks; returns metrics."""
        ...

    def begin_evaluation(self, step: int) -> None:
        """Begin to evaluate the version applied last, beside rollouts and updates."""
        ...

    def take_evaluation(self, *, waits: bool) -> dict[str, float] | None:
        """The metrics of the begun evaluation; None while it goes on, unless this call `waits`."""
        ...


class Evaluations:
    """The evaluations of one run."""

    def __init__(
        self, config: PlannedConfig, log: RunLog, progress: Progress, on_best: Callable[[int, float], None]
    ) -> None:
        """`on_best` gets step and accuracy of an evaluation beside training, if it is the best so far and the best
        checkpoint is kept."""
        self._config, self._steps = config.evaluation, config.training.steps
        self._log, self._progress, self._on_best = log, progress, on_best
        self.early_stop = EarlyStop(config.evaluation)
        """Decides after each evaluation whether the run is done."""
        self.done_step = -1
        """The step of the last finished evaluation."""
        self.running: int | None = None
        """The step under evaluation beside training."""

    def is_due_at_start(self, step: int) -> bool:
        """Whether to evaluate the start model or, on resume at `step`, to make up for an interrupted evaluation."""
        if step > 0:
            return self.done_step < step and self.is_due(step, is_last=step >= self._steps)
        return self._config is not None and self._config.at_start

    def is_due(self, step: int, *, is_last: bool) -> bool:
        """Whether the version after `step` is to be evaluated."""
        every = self._config.every if self._config is not None else 0
        return self._config is not None and (is_last or (every > 0 and step % every == 0))

    def make(self, engine: Evaluates, step: int, *, is_last: bool, meanwhile: Meanwhile = nothing) -> dict[str, float]:
        """Evaluate version `step`; returns metrics, none yet if the evaluation goes on beside training."""
        if self.running is not None:
            self._progress.phase(f"wait for the evaluation of step {self.running}")
        with self._log.phase("evaluate"):
            self.take(engine, step, waits=True)
            beside = self._config is not None and self._config.beside
            if beside and not is_last and not self.early_stop.reason:
                engine.begin_evaluation(step)
                self.running = step
                self._log.event("evaluation_began", step=step)
                return {}
            metrics = engine.evaluate(step, meanwhile)
        self.done_step = step
        return metrics

    def take(self, engine: Evaluates, step: int, *, waits: bool) -> None:
        """Record the evaluation beside training if it has ended, or wait for it; `step`: the trainer's."""
        if self.running is None or (metrics := engine.take_evaluation(waits=waits)) is None:
            return
        of, self.running = self.running, None
        self._record(of, {**metrics, LATER: float(step - of)})

    def make_last(self, engine: Evaluates, step: int) -> None:
        """Evaluate the last version too, if the run ends early, some steps after the deciding evaluation."""
        if self._config is not None and self._config.beside and self.done_step < step:
            self._progress.phase("evaluate")
            self._record(step, engine.evaluate(step))

    def _record(self, step: int, metrics: dict[str, float]) -> None:
        self._log.add_metrics(step, metrics)
        self._progress.evaluated(step, metrics)
        self._observe(step, metrics)

    def _observe(self, step: int, metrics: Mapping[str, float]) -> None:
        self.done_step = max(step, self.done_step)
        if self.early_stop.observe(step, metrics) and self.early_stop.keeps_best:
            self._on_best(step, metrics[ACCURACY])

    def state(self) -> dict[str, Any]:
        """The state for `load`, JSON-serializable."""
        return {
            "evaluated_step": self.done_step,
            "evaluating_step": self.running,
            "early_stop": self.early_stop.state(),
        }

    def load(self, state: Mapping[str, Any], step: int) -> None:
        """Go on at `step` from a result of `state`. An evaluation still running then may have been recorded before the
        run ended; otherwise, if it was of an earlier step, it is missing."""
        self.done_step = int(state["evaluated_step"])
        self.early_stop.load(state["early_stop"])
        running: int | None = state.get("evaluating_step")
        if running is None or running >= step:
            return
        rows = [
            row for row in read_metrics(self._log.folder) if row["step"] == running and row.get(ACCURACY) is not None
        ]
        if rows:
            self._observe(running, rows[0])
        else:
            self._log.warning(
                f"the evaluation of step {running} had not ended when the run did, and is missing: the run goes on "
                f"from step {step}, whose weights are others",
                step=running,
            )
