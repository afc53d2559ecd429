"""Notes of the plan on the drawn tasks: of each part of a mixture, and of a method."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from slipstream.config import PlannedConfig
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


def method_notes(config: PlannedConfig) -> list[Note]:
    """The notes of the section of a method."""
    if config.method is None:
        return []
    return [Note(name, value, "", how) for name, value, how in config.method.notes(config.training.steps)]
