"""Numbers of a step that are neither the loss's nor the optimizer's. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

from slipstream import records


def any_cut(metrics: Mapping[str, float]) -> bool:
    """Whether importance sampling or clipping took any token's gradient; a weight can also be too small for float32."""
    shares = (value for name, value in metrics.items() if name.startswith(("clip_fraction", "importance_capped")))
    return any(share > 0.0 for share in shares) or metrics.get("importance_weight") == 0.0


def rollout_metrics(batch: records.Batch) -> dict[str, float]:
    """What the batch looks like before training: rewards, lengths, outcomes."""
    rollouts = [rollout for rollout in batch.rollouts if rollout.outcome in records.TRAINABLE_OUTCOMES]
    metrics = {f"dropped/{reason}": float(count) for reason, count in batch.dropped.items()}
    if not rollouts:
        return metrics
    rewards = [rollout.reward for rollout in rollouts]
    lengths = [rollout.num_sampled for rollout in rollouts]
    components: dict[str, list[float]] = {}
    num_not_finite = 0.0
    for rollout in rollouts:
        num_not_finite += rollout.metrics.get(records.NON_FINITE, 0.0)
        for name, value in rollout.metrics.items():
            if not math.isfinite(value):
                num_not_finite += 1
            elif name != records.NON_FINITE:
                components.setdefault(name, []).append(value)
    metrics |= {f"reward/{name}": statistics.fmean(values) for name, values in components.items()}
    if num_not_finite:
        metrics[f"reward/{records.NON_FINITE}"] = num_not_finite
    metrics |= {
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "reward/min": min(rewards),
        "reward/max": max(rewards),
        "rollout/length": statistics.fmean(lengths),
        "rollout/length_max": float(max(lengths)),
        "rollout/truncated_fraction": statistics.fmean(r.outcome == "truncated" for r in rollouts),
        "rollout/num": float(len(rollouts)),
    }
    if any(thinking := [rollout.num_thinking for rollout in rollouts]):
        metrics["rollout/thinking_length"] = statistics.fmean(thinking)
    return metrics
