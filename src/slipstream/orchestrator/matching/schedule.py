"""The channel by which each step of a run is trained."""

from __future__ import annotations

from slipstream.config import PlannedConfig
from slipstream.config.sft import MatchingConfig
from slipstream_matching.schedule import Channel, channel_by_pattern, channel_by_share


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
