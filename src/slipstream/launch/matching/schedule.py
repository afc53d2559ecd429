"""Which channel each step of a run is trained by, and what the plan says of it."""

from __future__ import annotations

from slipstream.config import PlannedConfig
from slipstream.config.sft import MatchingConfig
from slipstream.detection.schedule import Channel, channel_by_pattern, channel_by_share
from slipstream.plan.summary import Note


def channel_of(config: MatchingConfig, step: int) -> Channel:
    """The channel of the update `step -> step + 1`, all of its optimizer steps included."""
    if config.b_ratio is not None:
        return channel_by_share(step, config.b_ratio)
    return channel_by_pattern(step, config.pattern)


def generates_for(config: PlannedConfig, step: int) -> bool:
    """Whether a step is trained on what the engine generates by the weights before it."""
    if config.matching is None:
        return config.algorithm.kind != "sft"
    return step < config.training.steps and channel_of(config.matching, step) == "B"


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
