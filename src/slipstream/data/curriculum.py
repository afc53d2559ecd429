"""The curriculum of a mixture, as the training loop keeps it (`environment.curriculum = "adaptive"`).

Guarantee: weights change only from a step of the tasks' order without begun groups, in any order of batches. Each draw
then means the same task in every process and after a resume.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.config.planned import PlannedConfig, PlannedRL
from slipstream.data.draws import Draws
from slipstream.data.mixture_order import Weights, changes_of
from slipstream.records import Batch

RATE = 0.1
"""The part of a new fraction of groups with signal in the mean."""
FLOOR = 0.1
"""The least factor of a weight: a part with weight 0 could never come back."""
_LEAST_CHANGE = 0.01
"""Weights are replaced where one of them, as a probability, has changed by this."""


Change = tuple[int, list[float]]
"""(first step of the order of the tasks, weights from there on)."""


class Curriculum:
    """Weights that follow the recent fraction of groups with signal of each part."""

    def __init__(self, base: Sequence[float]) -> None:
        self.weights = Weights(tuple(base))
        self._signal: list[float | None] = [None] * len(base)

    def follow(self, fractions: Mapping[int, float], step: int) -> bool:
        """A batch had these fractions of groups with signal, by part; `step` is the first of the order of the tasks of
        which nothing was drawn yet. Returns whether other weights hold from there on."""
        for part, fraction in fractions.items():
            before = self._signal[part]
            self._signal[part] = fraction if before is None else before + RATE * (fraction - before)
        new = [
            base * (1.0 if signal is None else max(FLOOR, signal))
            for base, signal in zip(self.weights.base, self._signal, strict=True)
        ]
        new = [round(weight, 6) for weight in _shares(new)]
        last = _shares(self.weights.changes[-1][1] if self.weights.changes else self.weights.base)
        if all(abs(a - b) < _LEAST_CHANGE for a, b in zip(new, last, strict=True)):
            return False
        if self.weights.changes and step <= self.weights.changes[-1][0]:
            return False  # fewer groups were used up than before: the next batch tells it again
        self.weights.change(step, new)
        return True

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"signal": list(self._signal), "changes": [[step, list(new)] for step, new in self.weights.changes]}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned. Raises ValueError for another number of parts."""
        if len(state["signal"]) != len(self._signal):
            raise ValueError(f"a curriculum of {len(state['signal'])} parts, and there are {len(self._signal)}")
        self._signal = list(state["signal"])
        self.weights.changes = changes_of(state["changes"])


class MixtureCurriculum(Curriculum):
    """The curriculum of a run's mixture; it observes the batches."""

    def __init__(self, config: PlannedConfig) -> None:
        section, algorithm = config.environment, config.algorithm
        assert section is not None
        assert isinstance(algorithm, PlannedRL)
        self._parts = list(section.mixture)
        super().__init__([part.weight for part in section.mixture.values()])
        self._size, self._staleness = config.training.prompts_per_batch, config.training.staleness
        self._order, self._max_refills = config.training.order, algorithm.max_refills
        self._overprovision = config.training.overprovision

    @property
    def changes(self) -> list[Change]:
        """All changes so far."""
        return [(step, list(weights)) for step, weights in self.weights.changes]

    def observe(self, batch: Batch, step: int, draws: Draws) -> Change | None:
        """A batch was trained on, which made version `step`; `draws` are those used up by now. Returns the change that
        follows, if any."""
        fractions: dict[int, float] = {}
        for number, name in enumerate(self._parts):
            drawn, signal = (_total(batch.metrics, name, key) for key in ("drawn_groups", "signal_groups"))
            if drawn:
                fractions[number] = signal / drawn
        first = self._first_unseen(step, draws)
        return self.changes[-1] if self.follow(fractions, first) else None

    def _first_unseen(self, step: int, draws: Draws) -> int:
        """The first step of the order of which no group has begun while the engine generates for `step`."""
        if self._order == "data":
            return step + self._staleness
        # Beyond the draws of trained batches: the slots, what each of their batches drops for want of signal or as
        # surplus, and what runs beyond them.
        ahead = (self._staleness + 1) * (1 + self._max_refills) + (self._staleness + 2) * self._overprovision
        return -(-draws.next // self._size) + math.ceil(ahead) + 1

    def metrics(self, step: int) -> dict[str, float]:
        """The probability of each part in a step of the order of the tasks."""
        weights = self.weights.at(step)
        return {
            f"task/{name}/probability": weight / sum(weights) for name, weight in zip(self._parts, weights, strict=True)
        }


def _total(metrics: Mapping[str, float], part: str, key: str) -> float:
    """The sum over a part's data sources, or the part's own where it has none."""
    prefix = f"task/{part}/"
    return sum(value for name, value in metrics.items() if name.startswith(prefix) and name.endswith(f"/{key}"))


def _shares(weights: Sequence[float]) -> list[float]:
    total = sum(weights)
    return [weight / total for weight in weights]
