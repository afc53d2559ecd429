"""A verdict on short runs of each channel, a pure function of their metrics.

A finished run says little: a policy whose every rollout is invalid is trained on the appended true objects, with a
loss like any other. Healthy is a run with mostly valid and whole rollouts, of which some match, and with losses of one
order in both channels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Channels = Literal["a_only", "b_only", "ab"]
B_RATIOS: dict[Channels, float] = {"a_only": 0.0, "b_only": 1.0, "ab": 0.5}
_ORDER = 10.0
"""By how much losses of one order may differ."""
Row = Mapping[str, float | None]


@dataclass(frozen=True)
class Limits:
    """What a healthy run keeps."""

    invalid: float = 0.1
    """Largest share of rollouts of which nothing can be kept."""
    truncated: float = 0.3
    """Largest share of rollouts that end with something unclosed."""


@dataclass(frozen=True)
class Health:
    """The figures of one run; None for a channel without a step."""

    channels: Channels
    num_steps: int
    loss_a: float | None = None
    loss_b: float | None = None
    invalid_rate: float | None = None
    truncated_rate: float | None = None
    any_match_rate: float | None = None
    problems: tuple[str, ...] = ()


def health_of(channels: Channels, rows: Iterable[Row], limits: Limits, error: str = "") -> Health:
    """The verdict on one run by its metrics; `error`: what it ended with, if it failed."""
    steps = [row for row in rows if row.get("stage2/channel_a") is not None]
    of_a = [row for row in steps if row["stage2/channel_a"]]
    of_b = [row for row in steps if row["stage2/channel_b"]]
    problems = [f"it ended with: {error}"] if error else []
    for name, found in (("A", of_a), ("B", of_b)):
        if not found and not error and channels in ("ab", f"{name.lower()}_only"):
            problems.append(f"no step was trained by channel {name}")
    losses = [row.get("train/loss") for row in steps if not row.get("train/skipped")]
    if any(loss is None or not math.isfinite(loss) for loss in losses):
        problems.append("a loss is missing or not finite")
    samples = _sum(of_b, "rollout/num_samples")
    invalid = _sum(of_b, "stage2/invalid_rollout") / samples if samples else None
    truncated = _sum(of_b, "rollout/parse_truncated") / samples if samples else None
    any_match = _mean(of_b, "rollout/sample_any_match_rate")
    if invalid is not None and invalid > limits.invalid:
        problems.append(f"{100 * invalid:.0f} % of rollouts are invalid, more than {100 * limits.invalid:.0f} %")
    if truncated is not None and truncated > limits.truncated:
        problems.append(f"{100 * truncated:.0f} % of rollouts are truncated, more than {100 * limits.truncated:.0f} %")
    if of_b and not any_match:
        problems.append("no rollout matches any true object")
    loss_a, loss_b = _mean(of_a, "train/loss"), _mean(of_b, "train/loss")
    if (text := _of_one_order(loss_a, loss_b)) and not error:
        problems.append(text)
    return Health(channels, len(steps), loss_a, loss_b, invalid, truncated, any_match, tuple(problems))


def _of_one_order(loss_a: float | None, loss_b: float | None) -> str:
    if not loss_a or not loss_b or 1 / _ORDER <= loss_b / loss_a <= _ORDER:
        return ""
    return f"the losses of channel A, {loss_a:.3g}, and of channel B, {loss_b:.3g}, are not of one order"


def across(found: Sequence[Health]) -> list[str]:
    """Faults of the runs together: losses of channel B far from those of channel A in another run."""
    of_a = next((each.loss_a for each in found if each.channels == "a_only"), None)
    others = (each.loss_b for each in found if each.channels == "b_only")
    return [text for loss_b in others if (text := _of_one_order(of_a, loss_b))]


def _values(rows: Iterable[Row], name: str) -> list[float]:
    return [value for row in rows if (value := row.get(name)) is not None]


def _sum(rows: Iterable[Row], name: str) -> float:
    return sum(_values(rows, name))


def _mean(rows: Iterable[Row], name: str) -> float | None:
    values = _values(rows, name)
    return sum(values) / len(values) if values else None
