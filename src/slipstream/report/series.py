"""Defines the groups of plots, and extracts their series from a run's rows."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field, replace

from slipstream.runlog import COUNTS
from slipstream.runlog.evaluations import sources_of
from slipstream.runlog.files import Row, Rows

MAX_POINTS = 400
"""Longer lines are drawn through means of equal parts, with a band of minimum and maximum."""


@dataclass(frozen=True)
class Line:
    """One metric of a panel. `spread` is a standard deviation, clipped to `least` and `most` of the averaged numbers;
    `low` and `high` are an interval."""

    metric: str
    label: str
    spread: str = ""
    low: str = ""
    high: str = ""
    least: str = ""
    most: str = ""
    absent: float | None = None
    """Value of a missing metric, for metrics written only if there is something to report."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """All metrics for drawing it; empty names are not set."""
        return (self.metric, self.spread, self.low, self.high, self.least, self.most)


@dataclass(frozen=True)
class Panel:
    """Metrics in one plot."""

    title: str
    note: str
    lines: tuple[Line, ...]
    unit: str = ""
    log: bool = False
    from_zero: bool = False
    dots: bool = False
    """Measured at a few steps only: each is drawn as a dot."""
    always: bool = False
    """Drawn even if it does not vary."""
    missing: str = ""
    """Why it may not have been recorded, for panels expected by a reader."""


@dataclass(frozen=True)
class Group:
    """Panels for one question."""

    title: str
    note: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Series:
    """A line as drawn: one entry for each step with a number, or for each averaged part of the steps."""

    label: str
    x: list[float]
    y: list[float]
    low: list[float] = field(default_factory=list[float])
    high: list[float] = field(default_factory=list[float])
    color: int = 0
    num_steps: int = 0
    """Steps with a number; more than `len(x)` if parts were averaged."""


def _ratio_lines(group: str) -> tuple[Line, ...]:
    """The ranges of `algo.importance_sampling.ratio_shares`."""
    bounds = ("0.5", "0.8", "0.95", "1.05", "1.25", "2")
    inner = [Line(f"{group}/ratio_{low}_to_{high}", f"to {high}") for low, high in itertools.pairwise(bounds)]
    first, last = Line(f"{group}/ratio_below_0.5", "to 0.5"), Line(f"{group}/ratio_above_2", "above 2")
    return (first, *inner, last)


def _mismatch_lines(name: str, bounds: Sequence[str]) -> tuple[Line, ...]:
    """The bins of `algo.importance_sampling.difference_means`."""
    return tuple(Line(f"mismatch/at_{name}_{low}", f"from {low}") for low in bounds)


def _age_lines() -> tuple[Line, ...]:
    """The bins of `orchestrator.batches.staleness.staleness_metrics`."""
    bounds = (*range(8), 8, 16, 32, 64)
    return tuple(
        Line(f"staleness/age_{age}", f"age {age}{'' if age < 8 else ' and more'}", absent=0.0) for age in bounds
    )


def _idle_lines(side: str, reasons: Sequence[str]) -> tuple[Line, ...]:
    """The reasons of `orchestrator.batches.idle_time`, after the whole."""
    whole = Line(f"idle/{side}_s", "all")
    return (whole, *(Line(f"idle/{side}_{reason}_s", reason, absent=0.0) for reason in reasons))


GROUPS = (
    Group("Learning", "Does the policy get better at the task?", (
        Panel("Reward", "Mean over a step's rollouts; the band is one standard deviation, as far as rewards went.",
              (Line("reward/mean", "mean", spread="reward/std", least="reward/min", most="reward/max"),), always=True),
        Panel("Held-out accuracy", "Part of the held-out tasks solved, with its 95 % interval.",
              (Line("eval/accuracy", "accuracy", low="eval/accuracy_low", high="eval/accuracy_high"),), "%", dots=True,
              always=True, missing="evaluation is off, or none has been made yet"),
        Panel("Signal fraction", "Groups whose rewards differ: only these teach anything.",
              (Line("reward/signal_fraction", "groups"),), "%", from_zero=True),
        Panel("Loss", "As it was minimised, and of held-out rows. Under RL it says little: near 0 by construction.",
              (Line("train/loss", "loss"), Line("eval/loss", "held-out rows"))),
        Panel("Token accuracy", "Part of the trained tokens that greedy decoding would choose.",
              (Line("train/token_accuracy", "accuracy"),), "%"),
        Panel("Completion length", "Tokens sampled for a completion.",
              (Line("rollout/length", "mean"), Line("rollout/length_max", "longest")), from_zero=True),
        Panel("Truncated completions", "Part of the completions that reached the token limit.",
              (Line("rollout/truncated_fraction", "completions"),), "%", from_zero=True),
        Panel("Shaped rewards", "What length adds to the mean reward, or takes from it.",
              (Line("reward/overlong", "over-long"), Line("reward/length", "length in the group"),
               Line("reward/thinking", "thinking"))),
        Panel("Critic", "Part of the returns' variance that its predictions explain, before they are trained on them.",
              (Line("value/explained_variance", "explained variance"),)),
        Panel("Critic's loss", "Half the squared error of its predictions.", (Line("value/loss", "loss"),),
              from_zero=True),
    )),
    Group("Policy", "How far do the updates move the policy, and how random is it still?", (
        Panel("Entropy", "Of the policy, in nats a token.", (Line("train/entropy", "entropy"),), from_zero=True),
        Panel("KL to the reference", "Estimated on the trained tokens.", (Line("train/kl_reference", "KL"),)),
        Panel("Policy ratio", "What the clip acts on: 1 % and 99 % quantiles.",
              (Line("train/ratio_p99", "99 %"), Line("train/ratio", "mean"), Line("train/ratio_p01", "1 %"))),
        Panel("Histogram of the policy ratio", "Part of the tokens in each range of what the clip acts on.",
              _ratio_lines("train"), "%", from_zero=True),
        Panel("Clipped tokens", "Part of the tokens whose ratio left the clip range.",
              (Line("train/clip_fraction_high", "above"), Line("train/clip_fraction_low", "below"),
               Line("train/clip_fraction_dual", "above clip_dual")), "%", from_zero=True),
        Panel("Gradient norm", "Before clipping.", (Line("train/grad_norm", "norm"),), from_zero=True),
        Panel("Learning rate", "Mean over a step's updates.", (Line("train/learning_rate", "rate"),), from_zero=True),
        Panel("Changed weights", "Part of the elements that differ from the version before, under weights.delta.",
              (Line("update/changed_fraction", "elements"),), "%", from_zero=True),
    )),
    Group("Numerics", "Do engine and trainer compute the same policy?", (
        Panel("Probe difference", "Engine against trainer on the same tokens and weights, in log-probability a token.",
              (Line("probe/abs_logprob_diff", "mean"), Line("probe/max_logprob_diff", "largest")), log=True),
        Panel("Behaviour mismatch", "Log-probability of the trained tokens: engine against trainer.",
              (Line("mismatch/abs_logprob_diff", "mean"),), log=True),
        Panel("Mismatch by probability", "Engine against trainer: tokens drawn with at least this probability.",
              _mismatch_lines("probability", ("0", "0.01", "0.1", "0.5", "0.9")), log=True),
        Panel("Mismatch by position", "Engine against trainer: tokens from this position of their sequence on.",
              _mismatch_lines("position", ("0", *(str(2**bit) for bit in range(6, 16)))), log=True),
        Panel("KL of the engine from the trainer", "Estimated on the trained tokens: numerics, and staleness.",
              (Line("mismatch/kl", "KL"),), log=True),
        Panel("Staleness", "How many versions old the trained tokens are.",
              (Line("staleness/mean", "mean"), Line("staleness/max", "largest")), from_zero=True),
        Panel("Tokens by age", "Part of the trained tokens that are so many versions old.", _age_lines(), "%",
              from_zero=True),
        Panel("Importance weights", "Engine to trainer: the ratio's 1 % and 99 % quantiles, before any bound.",
              (Line("mismatch/ratio_p99", "99 %"), Line("mismatch/ratio_p01", "1 %"))),
        Panel("Histogram of the importance weights", "Part of the tokens in each range of the ratio, before any bound.",
              _ratio_lines("mismatch"), "%", from_zero=True),
        Panel("Bounded weights", "Part of the tokens whose importance weight was cut or masked.",
              (Line("train/importance_capped_fraction", "tokens"),), "%", from_zero=True),
        Panel("Effective sample size", "Of the weights from what sampled to what is trained: 1 is on-policy.",
              (Line("train/effective_sample_size", "part of the tokens"),), "%", from_zero=True),
    )),
    Group("Speed", "Where does the time go?", (
        Panel("Throughput", "Tokens a second, while generating.",
              (Line("throughput/generated_tokens_per_s", "generated"),), from_zero=True),
        Panel("Stall of generation", "How long an update held up the requests that were running, its proof included.",
              (Line("update/stall_s", "last token before to first after"),), "s", from_zero=True),
        Panel("Engine idle", "Seconds of a step in which the engine had no request, by what it waited for.",
              _idle_lines("engine", ("trainer", "environment", "update", "restart")), "s", from_zero=True),
        Panel("Trainer idle", "Seconds from the release of a version to the next batch, by what it waited for.",
              _idle_lines("trainer", ("generation", "oldest", "environment", "update", "restart")), "s",
              from_zero=True),
        Panel("Queues", "When a batch was made; batches: when the trainer took it.",
              (Line("rollout/groups_running", "groups running"), Line("rollout/groups_ready", "groups ready"),
               Line("rollout/batches_ready", "batches ready"), Line("rollout/requests_open", "requests open"),
               Line("rollout/requests_waiting", "requests without a place")), from_zero=True),
        Panel("Tokens", "Sampled since the step before, and trained on.",
              (Line("tokens/generated", "generated"), Line("tokens/trained", "trained")), from_zero=True),
    )),
)  # fmt: skip
_OWN = "What your reward returned under this name, or your environment measured: mean over a step's rollouts."
_MAX_OWN = 8
"""Most panels of reward components in the first group; the others are with all other metrics."""
_COUNTED = {
    "dropped/": ("Outcomes dropped", "Rollouts that could not be trained on, by reason."),
    "dropped_tokens/": ("Tokens dropped", "Sampled tokens that were not trained on, by reason."),
    "retry/": ("Requests tried again", "Tries that the engine gave up, by reason."),
}
"""By the beginning of the names of counts: title and note."""
_OTHER = Group("All other metrics", "", ())
_TIMES = "time/"
_REWARD = "reward/"
_NOT_OWN = ("reward/drawn_mean", "reward/non_finite", "reward/metrics_left_out")
_LARGEST = re.compile(r"eval/mean@(\d+)")
_KINDS = ("pass", "best", "maj", "mean", "worst")
_MAX_LINES = 8
"""Tasks or data sources in one panel; the table has all sources."""
_TASK = re.compile(r"task/(.+)/(\w+)")
_TASK_PANELS = {
    "reward_mean": ("Reward by task", "Mean reward of each task's completions.", ""),
    "signal_fraction": ("Signal by task", "Of each task's groups, those whose rewards differ.", "%"),
    "tokens_fraction": ("Tokens by task", "Each task's part of the sampled tokens.", "%"),
    "probability": ("Curriculum", "The probability with which a group is for this part.", "%"),
    "length": ("Length by task", "Mean tokens of each task's completions.", ""),
    "truncated_fraction": ("Truncated by task", "Of each task's completions, those cut at the limit.", "%"),
    "staleness": ("Staleness by task", "Of each task's tokens, mean versions behind the step.", ""),
}
"""By the metric's last name: title, note, unit. Counts have no plot."""


def value_of(row: Row, name: str) -> float | None:
    """The number, or None if the row has none."""
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def groups_of(runs: Sequence[Rows]) -> list[Group]:
    """The groups, with all panels for the metrics of any run. In the first group reward components follow the reward,
    and counts of drops and retries are at the end. A last group has the metrics outside all panels."""
    present = {name for rows in runs for row in rows for name in row if "/" in name}
    shown = {name for group in GROUPS for panel in group.panels for line in panel.lines for name in line.metrics}
    rest = sorted(
        name
        for name in present - shown
        if not name.startswith((_TIMES, *COUNTS)) and not _is_figure(name) and not _TASK.fullmatch(name)
    )
    own = [name for name in rest if name.startswith(_REWARD) and name not in _NOT_OWN][:_MAX_OWN]
    found: list[Group] = []
    for group in GROUPS:
        panels = [_without_absent(panel, present) for panel in group.panels]
        panels = [panel for panel in panels if any(line.metric in present for line in panel.lines)]
        if group is GROUPS[0]:
            place = next((n + 1 for n, panel in enumerate(panels) if panel.title == "Held-out accuracy"), len(panels))
            panels[place:place] = _validation_panels(present)
            panels[1:1] = [_panel_of(name, f"Reward: {name.removeprefix(_REWARD)}", _OWN) for name in own]
            panels[1:1] = _task_panels(present)
            panels += _counted(present)
        found.append(replace(group, panels=tuple(panels)))
    others = tuple(_panel_of(name, name, "") for name in rest if name not in own)
    return [*found, replace(_OTHER, panels=others)]


def _without_absent(panel: Panel, present: Set[str]) -> Panel:
    """Without lines for metrics missing in all runs: each would be drawn at its value for a missing metric."""
    lines = tuple(line for line in panel.lines if line.absent is None or line.metric in present)
    return replace(panel, lines=lines)


def _is_figure(name: str) -> bool:
    """Whether a metric of an evaluation is in the table of figures, and needs no plot of its own."""
    return name.startswith(("eval/source/", "eval/samples_per_task")) or ("@" in name and name.startswith("eval/"))


def _validation_panels(names: Set[str]) -> list[Panel]:
    """Plots over the steps: the figures of the most samples, and the accuracy by data source."""
    found: list[Panel] = []
    if sizes := [int(match[1]) for name in names if (match := _LARGEST.fullmatch(name))]:
        size = max(sizes)
        lines = tuple(
            Line(name, f"{kind}@{size}", low=f"{name}_low", high=f"{name}_high")
            for kind in _KINDS
            if (name := f"eval/{kind}@{size}") in names
        )
        note = f"Of {size} samples a task, with 95 % intervals over tasks."
        found.append(Panel("Held-out figures", note, lines, "%", dots=True, always=True))
    if sources := sorted(sources_of(dict.fromkeys(names, 0.0))):
        lines = tuple(
            Line(f"{name}/accuracy", source, low=f"{name}/accuracy_low", high=f"{name}/accuracy_high")
            for source in sources[:_MAX_LINES]
            for name in [f"eval/source/{source}"]
        )
        more = f" The first {_MAX_LINES} of {len(sources)}." if len(sources) > _MAX_LINES else ""
        note = f"Part of the held-out tasks of each data_source solved, with its 95 % interval.{more}"
        found.append(Panel("Held-out accuracy by source", note, lines, "%", dots=True, always=True))
    return found


def _task_panels(present: Set[str]) -> list[Panel]:
    """For each figure of the tasks of a mixture, or of data sources, a plot with a line for each task."""
    names: dict[str, list[str]] = {}
    for name in sorted(present):
        if found := _TASK.fullmatch(name):
            names.setdefault(found[2], []).append(found[1])
    panels: list[Panel] = []
    for key, (title, note, unit) in _TASK_PANELS.items():
        if tasks := names.get(key):
            lines = tuple(Line(f"task/{task}/{key}", task) for task in tasks[:_MAX_LINES])
            more = f" The first {_MAX_LINES} of {len(tasks)} tasks." if len(tasks) > _MAX_LINES else ""
            panels.append(Panel(title, note + more, lines, unit, from_zero=bool(unit)))
    return panels


def _counted(present: Set[str]) -> Iterator[Panel]:
    """The panels of counts by reason, as far as there are any."""
    for prefix, (title, note) in _COUNTED.items():
        reasons = sorted(name for name in present if name.startswith(prefix))
        if reasons:
            lines = tuple(Line(name, name.removeprefix(prefix).replace("_", " "), absent=0.0) for name in reasons)
            yield Panel(title, note, lines, from_zero=True)


def _panel_of(name: str, title: str, note: str) -> Panel:
    return Panel(title, note, (Line(name, name.partition("/")[2]),))


def series_of(rows: Rows, line: Line, label: str, color: int) -> Series | None:
    """The line through a run's rows; None if no row has the metric."""
    points: list[tuple[float, float, float, float]] = []
    for row in rows:
        value = value_of(row, line.metric)
        if value is None:
            # The first row is the start model's evaluation: it has no rollouts.
            if line.absent is None or value_of(row, "rollout/num") is None:
                continue
            value = line.absent
        spread = value_of(row, line.spread) or 0.0
        least, most = value_of(row, line.least), value_of(row, line.most)
        low, high = value_of(row, line.low), value_of(row, line.high)
        points.append(
            (
                float(row["step"]),
                value,
                max(value - spread, -math.inf if least is None else least) if low is None else low,
                min(value + spread, math.inf if most is None else most) if high is None else high,
            )
        )
    if not points:
        return None
    num_steps = len(points)
    points = _thinned(points)
    x, y, low, high = (list(column) for column in zip(*points, strict=True))
    has_band = any(b > a for a, b in zip(low, high, strict=True))
    return Series(label, x, y, low if has_band else [], high if has_band else [], color, num_steps)


def _thinned(points: list[tuple[float, float, float, float]]) -> list[tuple[float, float, float, float]]:
    """At most `MAX_POINTS` points: means of equal parts, with minimum and maximum as the band."""
    if len(points) <= MAX_POINTS:
        return points
    edges = [len(points) * part // MAX_POINTS for part in range(MAX_POINTS + 1)]
    parts = [points[a:b] for a, b in itertools.pairwise(edges)]
    return [
        (
            part[-1][0],
            math.fsum(point[1] for point in part) / len(part),
            min(point[2] for point in part),
            max(point[3] for point in part),
        )
        for part in parts
    ]


def varies(series: Sequence[Series]) -> bool:
    """Whether a line has two different numbers, as far as one can see in a plot; with one number it has not."""
    return any(max(line.y) - min(line.y) > 1e-4 * max(map(abs, line.y)) for line in series)
