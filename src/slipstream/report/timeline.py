"""Report section on time: phases of each step, and a typical step of trainer and engine side by side."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.report.markup import NONE, Html, duration, h, join, number, table
from slipstream.report.plot import HEIGHT, WIDTH, framed, linear_scale, y_labels
from slipstream.report.series import value_of
from slipstream.runlog import RunRecord
from slipstream.runlog.files import Row

MAX_BARS = 150
OTHER = "other"
# In the order in which a step goes through them; a checkpoint is recorded in the row after it.
_PHASES = {
    "checkpoint": "write checkpoint",
    "batch": "wait for batch",
    "train": "train",
    "update": "update engine",
    "probe": "probe",
    "evaluate": "evaluate",
}
_COLORS = {"batch": 0, "train": 1, "update": 2, "probe": 4, "evaluate": 3, "checkpoint": 5, OTHER: 9}
# Not phases of the trainer: generation is on another thread, and the rest are sums of phases.
_NOT_PHASES = {"generate", "after_batch", "step"}


@dataclass(frozen=True)
class StepTime:
    """The trainer's time in a step; `wall` is the time since the previous row, or since the run folder was opened."""

    step: int
    wall: float
    phases: dict[str, float]
    generate: float


def step_times(record: RunRecord) -> list[StepTime]:
    """One entry for each row that has times."""
    opened = {event["lineage"]: event["time"] for event in record.events if event["kind"] == "opened"}
    found: list[StepTime] = []
    before: Row | None = None
    for row in record.rows:
        phases = {
            name.removeprefix("time/").removesuffix("_s"): value
            for name in row
            if name.startswith("time/") and (value := value_of(row, name)) is not None
        }
        generate = phases.get("generate", 0.0)
        phases = {name: phases[name] for name in [*_PHASES, *sorted(phases)] if name in phases}
        phases = {name: seconds for name, seconds in phases.items() if name not in _NOT_PHASES}
        same = before is not None and before["lineage"] == row["lineage"]
        since = before["time"] if before is not None and same else opened.get(row["lineage"], row["time"])
        wall = max(row["time"] - since, sum(phases.values()))
        rest = wall - sum(phases.values())
        found.append(StepTime(row["step"], wall, {**phases, OTHER: rest} if rest > 0 else phases, generate))
        before = row
    return found


def timeline(record: RunRecord) -> Html:
    """The section; a sentence if the run has recorded no times."""
    steps = step_times(record)
    if not any(step.phases for step in steps):
        return h("p.missing", "No step has recorded its times yet.")
    generates = any(step.generate for step in steps)
    label = "wait for rollouts" if generates else "read batch"
    names = {name: {**_PHASES, "batch": label, OTHER: "other"}.get(name, name.replace("_", " "))
             for step in steps for name in step.phases}  # fmt: skip
    order = [name for name in [*_PHASES, *names] if name in names]
    order = list(dict.fromkeys(name for name in order if name != OTHER)) + [name for name in names if name == OTHER]
    later = [step for step in steps if step.step > 0]
    return join(
        _sentence(later, generates),
        _lanes(later, label) if generates and len(later) > 1 else None,
        _bars(steps, order, names),
    )


def _sentence(steps: Sequence[StepTime], generates: bool) -> Html | None:
    """Breakdown of the run's time after the first row, which includes the engine's start."""
    wall = sum(step.wall for step in steps)
    if not generates or not wall:
        return None
    waited = sum(step.phases.get("batch", 0.0) for step in steps)
    busy = sum(min(step.generate, step.wall) + step.phases.get("evaluate", 0.0) for step in steps)
    trained = sum(step.phases.get("train", 0.0) for step in steps)
    updates = sum(step.phases.get("update", 0.0) + step.phases.get("probe", 0.0) for step in steps)
    return h(
        "p.lead",
        f"After the start, the trainer trained for {trained / wall:.0%} of the time and waited for rollouts for "
        f"{waited / wall:.0%}. The engine generated for {min(1.0, busy / wall):.0%}. Bringing new weights to it and "
        f"probing them took {updates / wall:.1%}.".replace("%", "\u00a0%"),
    )


def _lanes(steps: Sequence[StepTime], label: str) -> Html:
    """A typical step: medians of the phases, trainer above, engine below."""
    median = {
        name: statistics.median(step.phases.get(name, 0.0) for step in steps)
        for name in ("batch", "train", "update", "probe")
    }
    generate = statistics.median(step.generate for step in steps)
    total = max(sum(median.values()), 1e-9)
    spans: list[tuple[str, str, float, float]] = []
    at = 0.0
    for name, words in (("batch", label), ("train", "train"), ("update", "update"), ("probe", "probe")):
        spans.append((name, words, at, median[name]))
        at += median[name]
    after = median["batch"] + median["train"]
    # Generation starts beside the probe and continues while a checkpoint is written. Without staleness it ends before
    # training; it may then start at the end of the update.
    early = min(generate, median["probe"])
    if early < generate <= median["batch"] + median["update"]:
        early = max(early, generate - median["batch"])
    busy = min(generate - early, after) if generate < total else total
    engine = [("generate", "generate", 0.0, busy)]
    if generate < total:
        _, (_, _, begin, _), (_, _, _, probe) = spans[1:]
        start = total - max(early, probe)
        engine += [("idle", "idle", busy, after - busy), ("update", "update", begin, start - begin)]
        engine.append(("generate", "generate", start, early))
    return h(
        "div.lanes",
        h("h3", "An ordinary step"),
        h("p.note", f"Medians of {len(steps)} steps; together {duration(total)}."),
        [_lane(name, lane, total) for name, lane in (("trainer", spans), ("engine", engine))],
    )


def _lane(name: str, spans: Sequence[tuple[str, str, float, float]], total: float) -> Html:
    cells = [
        h(
            "span",
            h("span", words) if seconds / total > 0.12 else None,
            class_=f"span p{_COLORS.get('batch' if kind == 'generate' else kind, 9)} {kind}",
            style=f"left:{100 * start / total:.2f}%;width:{100 * seconds / total:.2f}%",
            title=f"{words}: {duration(seconds)}",
        )
        for kind, words, start, seconds in spans
        if seconds > 0
    ]
    durations = ", ".join(f"{words} {duration(seconds)}" for _, words, _, seconds in spans)
    return h("div", h("span.who", name), h("div.lane", cells, role="img", aria_label=durations))


def _bars(steps: Sequence[StepTime], order: Sequence[str], names: dict[str, str]) -> Html:
    """Stacked bars for each step; for a long run, means of equal parts."""
    bars = _thinned(steps)
    # The start of engine and model would flatten the other bars.
    usual = [bar.wall for bar in bars if bar.step > 0] or [bar.wall for bar in bars]
    scale = linear_scale([0.0, max(usual)], from_zero=True)
    width = WIDTH / len(bars)
    gap = min(2.0, width * 0.15)
    marks: list[Html] = []
    for at, name in enumerate(order):
        rects: list[str] = []
        for place, bar in enumerate(bars):
            below = sum(bar.phases.get(key, 0.0) for key in order[:at])
            top, bottom = (
                (1 - scale.place(seconds)) * HEIGHT for seconds in (below + bar.phases.get(name, 0.0), below)
            )
            if bottom - top > 0.05:
                left = place * width + gap / 2
                rects.append(f"M{left:.2f} {bottom:.1f}V{top:.1f}h{width - gap:.2f}V{bottom:.1f}Z")
        if rects:
            marks.append(h("path", d="".join(rects), class_=f"fill mark p{_COLORS.get(name, 6)}"))
    totals = {name: sum(step.phases.get(name, 0.0) for step in steps) for name in order}
    wall = sum(step.wall for step in steps)
    durations = "; ".join(f"{names[name]} {duration(totals[name])}" for name in order)
    cut = [bar for bar in bars if bar.wall > scale.high]
    note = "Seconds a step, by what the trainer did." + (
        f" Step {cut[0].step} took {duration(cut[0].wall)}, more than is drawn: engine and model start in it."
        if cut and cut[0].step == 0
        else ""
    )
    keys = [
        h("span.key", h("i", class_=f"chip p{_COLORS.get(name, 6)}"), f"{names[name]} ",
          h("b", duration(totals[name])))
        for name in order
    ]  # fmt: skip
    ends = [(0, bars[0]), (len(bars) - 1, bars[-1])] if len(bars) > 1 else [(0, bars[0])]
    places = [(number(bar.step), 100 * (place + 0.5) / len(bars)) for place, bar in ends]
    steps_axis = h("div.x", [h("span", text, style=f"left:{left:.2f}%") for text, left in places], aria_hidden="true")
    rows = [
        [names[name], duration(totals[name]), f"{100 * totals[name] / wall:.1f} %" if wall else NONE,
         number(statistics.median(step.phases.get(name, 0.0) for step in steps), "s")]
        for name in order
    ]  # fmt: skip
    return framed(
        "Every step",
        f"Time of each step by phase. All steps together: {durations}.",
        note,
        h("p.legend", keys),
        marks,
        (y_labels(scale), steps_axis),
        _hover(bars, order, names),
        table(["phase", "all steps", "share", "median of a step"], rows, caption="Time by phase"),
        kind="figure.plot.wide",
    )


def _hover(bars: Sequence[StepTime], order: Sequence[str], names: dict[str, str]) -> dict[str, object]:
    lines = [
        {
            "n": names[name],
            "c": f"p{_COLORS.get(name, 6)}",
            "x": [place + 0.5 for place in range(len(bars))],
            "t": [number(bar.phases.get(name, 0.0), "s") if bar.phases.get(name) else "" for bar in bars],
        }
        for name in order
    ]
    return {"x0": 0, "x1": len(bars), "lines": lines, "heads": [f"step {bar.step}" for bar in bars]}


def _thinned(steps: Sequence[StepTime]) -> list[StepTime]:
    if len(steps) <= MAX_BARS:
        return list(steps)
    edges = [1 + (len(steps) - 1) * part // (MAX_BARS - 1) for part in range(MAX_BARS)]
    found = [steps[0]]
    for a, b in itertools.pairwise(edges):
        part = steps[a:b]
        names = dict.fromkeys(name for step in part for name in step.phases)
        means = {name: sum(step.phases.get(name, 0.0) for step in part) / len(part) for name in names}
        found.append(
            StepTime(
                part[-1].step,
                sum(step.wall for step in part) / len(part),
                means,
                sum(step.generate for step in part) / len(part),
            )
        )
    return found
