"""Lines about an evaluation: its accuracy, and the figures of several samples a task and by data source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from slipstream.runlog.evaluations import figures_of, sources_of


def accuracy_line(metrics: Mapping[str, Any]) -> str:
    """The accuracy with its interval."""
    samples = round(metrics.get("eval/samples_per_task") or 1)
    each = f", {samples} completions of each" if samples > 1 else ""
    return (
        f"accuracy:   {_per_cent(metrics, 'eval/accuracy')} % of {metrics['eval/num_tasks']:.0f} held-out tasks{each} "
        f"(95 % interval {_per_cent(metrics, 'eval/accuracy_low')} to {_per_cent(metrics, 'eval/accuracy_high')})"
    )


def figure_lines(metrics: Mapping[str, Any]) -> Iterator[str]:
    """A line for each kind of figure, and one for each data source; none with one sample a task and no source."""
    kinds: dict[str, list[str]] = {}
    for name, (value, low, high) in figures_of(metrics).items():
        kind, _, number = name.partition("@")
        interval = f" ({100 * low:.1f} to {100 * high:.1f})" if low is not None and high is not None else ""
        kinds.setdefault(kind, []).append(f"@{number} {100 * value:.1f}{interval}")
    for kind, parts in kinds.items():
        yield f"{f'{kind}:':<12}{', '.join(parts)}"
    for source in sources_of(metrics):
        name = f"eval/source/{source}"
        low, high = (_per_cent(metrics, f"{name}/accuracy_{end}") for end in ("low", "high"))
        tasks = round(metrics.get(f"{name}/num_tasks") or 0)
        yield f"  {source}: {_per_cent(metrics, f'{name}/accuracy')} % of {tasks} tasks ({low} to {high})"


def waits_line(row: Mapping[str, float]) -> str:
    """What engine and trainer waited for in the last step, and what is under way; empty where nothing is generated."""
    if "idle/engine_s" not in row:
        return ""
    parts = [f"idle: {', '.join(_idle(row, side) for side in ('engine', 'trainer'))}"]
    if "rollout/groups_running" in row:
        parts.append(f"groups: {row['rollout/groups_running']:.0f} running, {row['rollout/groups_ready']:.0f} ready")
    if oldest := row.get("staleness/max"):
        ages = {int(name.rpartition("_")[2]): part for name, part in row.items() if name.startswith("staleness/age_")}
        ages = {age: part for age, part in ages.items() if age <= oldest}
        parts.append(f"tokens by age: {', '.join(f'{age}: {100 * part:.0f} %' for age, part in sorted(ages.items()))}")
    if dropped := sum(value for name, value in row.items() if name.startswith("dropped/")):
        parts.append(f"dropped: {dropped:.0f}")
    return "  ".join(parts)


def _idle(row: Mapping[str, float], side: str) -> str:
    """`engine 1.2 s (trainer)`: with the reason that took most of it."""
    whole = f"idle/{side}_s"
    reasons = {name: value for name, value in row.items() if name.startswith(f"idle/{side}_") and name != whole}
    longest = max(reasons, key=lambda name: reasons[name], default="")
    why = f" ({longest.removeprefix(f'idle/{side}_').removesuffix('_s')})" if longest and row[whole] else ""
    return f"{side} {row[whole]:.1f} s{why}"


def _per_cent(metrics: Mapping[str, Any], name: str) -> str:
    value = metrics.get(name)
    return "?" if value is None else f"{100 * value:.1f}"
