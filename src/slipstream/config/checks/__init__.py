"""Checks of settings against each other, without the model, the tasks or the machine."""

from slipstream.config.checks.batches import warmup_problems
from slipstream.config.checks.mixture_parts import mixture_problems
from slipstream.config.checks.settings import contradictions, foreign_key, inapplicable, probe_limits, reason_against

__all__ = [
    "contradictions",
    "foreign_key",
    "inapplicable",
    "mixture_problems",
    "probe_limits",
    "reason_against",
    "warmup_problems",
]
