"""Notes of the plan on the drawn tasks: of each part of a mixture, and of each channel of rollout matching."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from slipstream.config import PlannedConfig
from slipstream.orchestrator.matching.schedule import generates_for
from slipstream.plan.summary import Note


def mixture_notes(config: PlannedConfig, part_of_item: Sequence[int]) -> list[Note]:
    """For each part of a mixture its training tasks, and how often they are drawn."""
    if not part_of_item or config.environment is None:
        return []
    parts, sizes = config.environment.mixture, Counter(part_of_item)
    total, training = sum(part.weight for part in parts.values()), config.training
    drawn = training.steps * training.prompts_per_batch
    notes: list[Note] = []
    for number, (name, part) in enumerate(parts.items()):
        share = part.weight / total
        how = f"{100 * share:.3g} % of what is drawn, {share * drawn / sizes[number]:.3g} passes over them"
        if config.environment.curriculum == "adaptive":
            how += ", before the curriculum changes it"
        notes.append(Note(f"tasks of {name}", sizes[number], "", how))
    return notes


def schedule_notes(config: PlannedConfig) -> list[Note]:
    """How many steps are channel B's."""
    if config.matching is None:
        return []
    steps, matching = config.training.steps, config.matching
    count = sum(generates_for(config, step) for step in range(steps))
    how = f"matching.pattern = {', '.join(matching.pattern)}"
    if matching.b_ratio is not None:
        how = f"matching.b_ratio = {matching.b_ratio:g}"
    if not count:
        how += ": no rollouts are made to train on"
    forwards = matching.softctx_iterations
    return [
        Note("steps of channel B", count, "", f"of {steps}, by {how}"),
        Note("forwards of channel A", forwards, "", "of each row, by matching.softctx_iterations"),
    ]
