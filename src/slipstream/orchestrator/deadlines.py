"""Deadlines and retries of a run's generating side, from its settings."""

from __future__ import annotations

from collections.abc import Callable

from slipstream.config import PlannedConfig
from slipstream.config.traits import apply_timeout_s
from slipstream.orchestrator.control.handle import Waits
from slipstream.orchestrator.retries import BUDGET, LONGEST_WAIT_S, Retries

START_GRACE_S = 60.0


def silence_limit_s(config: PlannedConfig) -> float:
    """Most seconds without progress before a batch or an evaluation fails. Progress is a turn, a retry or a finished
    rollout. The limit is the sum of a rollout's deadlines and the longest wait between two tries of a request."""
    section, inference = config.environment, config.inference
    own_s = section.run_timeout_s + section.reward_timeout_s if section is not None else 0.0
    engine_s = inference.request_timeout_s + inference.start_timeout_s
    return own_s + engine_s + apply_timeout_s(config) + (LONGEST_WAIT_S if inference.request_retries else 0.0)


def retries_of(config: PlannedConfig, count: Callable[[dict[str, float]], None] = lambda values: None) -> Retries:
    """How often the requests of rollouts are tried again; `count`: see `Retries`."""
    inference = config.inference
    return Retries(inference.request_retries, BUDGET * inference.request_timeout_s, count)


def waits_of(config: PlannedConfig) -> Waits:
    """Deadlines of the trainer's waits for the orchestrator."""
    start_s = config.inference.start_timeout_s
    # With staleness, an engine unable to keep its requests first ends the batch in the making.
    apply_s = apply_timeout_s(config) + start_s + bool(config.training.staleness) * silence_limit_s(config)
    return Waits(start_s + START_GRACE_S, apply_s, silence_limit_s(config))
