"""The section [evaluation]: which held-out tasks, how often, and when a run may end for their sake."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from slipstream.config import bounds
from slipstream.config.bounds import Auto, Problems, Section

MAX_SAMPLES = 128
"""Completions of one task; `algo.validation` computes majorities of so many exactly."""


class EvaluationConfig(Section):
    """Held-out accuracy: the part of tasks whose reward reaches `threshold`. Under SFT also when the loss of held-out
    rows is measured (`data.eval_path`), which needs no environment: by `every` and `at_start`."""

    num_tasks: bounds.Items = 500
    """Held-out tasks of an evaluation; of a file, as many as it has."""
    samples_per_task: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    """Completions of each task. With n > 1 there are also `mean@n`, `std@n` and, for k = 2, 4, ..., n, `best@k`,
    `worst@k`, `maj@k` and `pass@k` (docs/validation.md); they take n times the time."""
    every: bounds.NonNegativeItems = 0
    """Steps between evaluations; 0: only before the first and after the last step."""
    at_start: bool = True
    """Also evaluate before the first step: what the starting model can do."""
    temperature: bounds.GreedyTemperature | Auto = "auto"
    """0 is greedy. `auto`: the same as `sampling.temperature`, under [matching] as `matching.temperature`."""
    beside: bool | Auto = "auto"
    """Under RL, whether an evaluation is made by one of several engines while the others go on with rollouts and the
    trainer with steps; its figures come some steps later, in the row of the step that was evaluated. The one after the
    last step is made by all engines. `auto`: with `inference.replicas` of 2 or more, a `weights.bridge` whose versions
    are files (`disk`, `lora`) and `training.staleness`, unless `stop_at` or `patience` is set (docs/validation.md)."""
    threshold: float = 1.0
    """A completion is right when its reward is at least this."""
    seed: bounds.Seed = 1_000_003
    """Seeds the draws of every evaluation, so that two of them differ only by their weights."""
    stop_at: bounds.Fraction | None = None
    """The run ends in good order when an evaluation reaches this accuracy."""
    patience: bounds.Items | None = None
    """... and after this many evaluations in a row without a better accuracy. The best checkpoint is kept, and
    `checkpoints/best` leads to it."""

    def problems(self, training_temperature: float) -> Problems:
        """A sentence for each contradiction; `training_temperature` is that of [sampling]."""
        temperature = training_temperature if self.temperature == "auto" else self.temperature
        if self.samples_per_task > 1 and temperature == 0.0:
            yield (
                f"evaluation.samples_per_task = {self.samples_per_task} at temperature 0 samples the same completion "
                "every time: set evaluation.temperature, or use 1"
            )
        for name, value in (("stop_at", self.stop_at), ("patience", self.patience)):
            if value is not None and not self.every:
                yield (
                    f"evaluation.{name} = {value:g} has no effect while evaluation.every is 0, which evaluates only "
                    "before the first and after the last step: set evaluation.every"
                )
