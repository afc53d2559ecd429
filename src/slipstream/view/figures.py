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


def _per_cent(metrics: Mapping[str, Any], name: str) -> str:
    value = metrics.get(name)
    return "?" if value is None else f"{100 * value:.1f}"
