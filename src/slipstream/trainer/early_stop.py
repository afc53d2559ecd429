"""Early stopping: `evaluation.stop_at` reached, or `evaluation.patience` used up.

Guarantees: its state depends on the evaluations alone and is saved in every checkpoint, so that a resumed run stops
where an uninterrupted one would. The loop ends the run and keeps the best checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.config.schema import EvaluationConfig

ACCURACY = "eval/accuracy"


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
        """The first step that had it."""

    @property
    def keeps_best(self) -> bool:
        """Whether the best step's checkpoint is to be kept."""
        return self._patience is not None

    def observe(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Record the evaluation after `step`, if `metrics` have one; returns whether it is the best so far."""
        accuracy = metrics.get(ACCURACY)
        if accuracy is None:
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
        """Go on from what `state` returned."""
        self._last, self.best, self.best_step = state["last"], state["best"], state["best_step"]
        self._num_worse = state["num_worse"]
