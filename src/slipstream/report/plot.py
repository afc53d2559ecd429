"""Draws one plot: SVG marks that stretch with the page, labels that do not, hover data, and a table of the numbers.

The plot needs no script. Strokes keep their width when stretched; a dot is a line of zero length with round ends. The
script only adds the read-out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.report.markup import NONE, Child, Html, data, details, h, join, number, table
from slipstream.report.series import Panel, Series

WIDTH, HEIGHT = 1000, 400
NUM_COLORS = 7
_MAX_TABLE_ROWS = 120
_serial = itertools.count()


@dataclass(frozen=True)
class Scale:
    """Maps numbers of an axis to 0..1."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def place(self, value: float) -> float:
        """Position of `value`, clamped to the axis."""
        if self.log:
            value = math.log10(max(value, 1e-300))
            part = (value - math.log10(self.low)) / (math.log10(self.high) - math.log10(self.low))
        else:
            part = (value - self.low) / (self.high - self.low)
        return min(1.0, max(0.0, part))


def linear_scale(values: Sequence[float], *, from_zero: bool = False) -> Scale:
    """A linear axis with round ticks."""
    low, high = min(values), max(values)
    if from_zero and low >= 0:
        low = 0.0
    if low == high:
        margin = abs(low) / 2 or 1.0
        low, high = (low, high + margin) if from_zero and low == 0 else (low - margin, high + margin)
    step = _round_step((high - low) / 4)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(round(place * step, 12) if step > 1e-9 else place * step for place in range(first, last + 1))
    return Scale(ticks[0], ticks[-1], ticks)


def step_scale(values: Sequence[float]) -> Scale:
    """An axis of steps that ends at the last step."""
    low, high = min(values), max(values)
    if low == high:
        low, high = low - 1, high + 1
    step = max(1.0, _round_step((high - low) / 5))
    first = math.ceil(low / step)
    ticks = [place * step for place in range(first, math.floor(high / step) + 1)]
    return Scale(low, high, tuple(ticks))


def log_scale(values: Sequence[float]) -> Scale:
    """A logarithmic axis; all values must be positive."""
    low, high = math.floor(math.log10(min(values)) + 1e-9), math.ceil(math.log10(max(values)) - 1e-9)
    if low == high:
        high += 1
    every = math.ceil((high - low) / 5)
    ticks = tuple(10.0**power for power in range(low, high + 1, every))
    return Scale(10.0**low, 10.0**high, ticks, log=True)


def figure(panel: Panel, series: Sequence[Series], across: Scale, *, note: str = "", named: bool = False) -> Html:
    """The plot of a panel; `across` is its axis of steps; with `named` even a single line has a legend."""
    log = panel.log and all(value > 0 for line in series for value in line.y)
    bounds = [value for line in series for value in (*line.y, *line.low, *line.high)]
    if log:
        vertical = log_scale([value for value in bounds if value > 0])
    else:
        if panel.unit == "%":
            bounds = [min(1.0, max(0.0, value)) for value in bounds]
        vertical = linear_scale(bounds, from_zero=panel.from_zero)
    marks = [_marks(line, across, vertical, panel.dots) for line in series]
    legend = h("p.legend", [_key(line) for line in series]) if named or len(series) > 1 else None
    averaged = max(line.num_steps for line in series) > len(series[0].x)
    return framed(
        panel.title,
        _description(panel, series),
        join(panel.note, note and f" {note}"),
        legend,
        [_grid(vertical), *marks],
        (y_labels(vertical, panel.unit), _x_labels(across)),
        _hover(panel, series, across, vertical),
        [_numbers(panel, series), h("p", "Means of equal parts of the steps.") if averaged else None],
    )


def framed(
    title: str,
    description: str,
    note: Child,
    legend: Html | None,
    marks: Sequence[Html],
    labels: tuple[Html, Html],
    hover: dict[str, object],
    numbers: Child,
    *,
    kind: str = "figure.plot",
) -> Html:
    """A figure of `marks` between the `labels` of its vertical and its horizontal axis, with the script's read-outs and
    a table of the numbers."""
    name = f"plot{next(_serial)}"
    svg = h(
        "svg",
        h("title", title, id=f"{name}-t"),
        h("desc", description, id=f"{name}-d"),
        marks,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        aria_labelledby=f"{name}-t {name}-d",
        tabindex=0,
        focusable="true",
    )
    area = h("div.area", svg, h("div.cursor", hidden=True), h("div.readout", hidden=True))
    return h(
        kind,
        h("figcaption", h("h3", title), h("p.note", note)),
        legend,
        h("div.frame", labels[0], area, labels[1]),
        h("script", data(hover), type="application/json"),
        details("Numbers", numbers),
    )


def _marks(line: Series, across: Scale, vertical: Scale, dots: bool) -> Html:
    def point(x: float, y: float) -> str:
        return f"{WIDTH * across.place(x):.1f} {HEIGHT * (1 - vertical.place(y)):.1f}"

    parts: list[Html] = []
    if line.low and not dots:
        upper = [point(x, y) for x, y in zip(line.x, line.high, strict=True)]
        lower = [point(x, y) for x, y in zip(line.x, line.low, strict=True)]
        parts.append(h("path.band", d=f"M{'L'.join(upper + lower[::-1])}Z"))
    elif line.low:
        whiskers = zip(line.x, line.low, line.high, strict=True)
        parts.append(h("path.whisker.mark", d="".join(f"M{point(x, a)}L{point(x, b)}" for x, a, b in whiskers)))
    points = [point(x, y) for x, y in zip(line.x, line.y, strict=True)]
    if len(points) > 1:
        parts.append(h("path.line.mark", d=f"M{'L'.join(points)}"))
    if dots or len(points) < 3:
        parts.append(h("path.dot.mark", d="".join(f"M{at}l0 0" for at in points)))
    return h("g", parts, class_=_style(line))


def _style(line: Series) -> str:
    return f"c{line.color % NUM_COLORS}" + (" dashed" if line.color >= NUM_COLORS else "")


def _key(line: Series) -> Html:
    swatch = h("svg.swatch", h("path.line", d="M0 5L18 5"), viewBox="0 0 18 10", aria_hidden="true")
    return h("span", swatch, line.label, class_=f"key {_style(line)}")


def _grid(vertical: Scale) -> Html:
    heights = [HEIGHT * (1 - vertical.place(tick)) for tick in vertical.ticks]
    return h("path.grid", d="".join(f"M0 {y:.1f}L{WIDTH} {y:.1f}" for y in heights), aria_hidden="true")


def y_labels(vertical: Scale, unit: str = "") -> Html:
    """The labels of a vertical axis."""

    def shown(tick: float) -> str:
        if unit == "%":
            return f"{tick_text(100 * tick, [100 * each for each in vertical.ticks])} %"
        return f"1e{round(math.log10(tick))}" if vertical.log else tick_text(tick, vertical.ticks)

    labels = [h("span", shown(tick), style=f"top:{100 * (1 - vertical.place(tick)):.2f}%") for tick in vertical.ticks]
    return h("div.y", labels, aria_hidden="true")


def _x_labels(across: Scale) -> Html:
    labels = [
        h("span", number(tick), style=f"left:{100 * across.place(tick):.2f}%") for tick in across.ticks if tick >= 0
    ]
    return h("div.x", labels, h("span.axis-name", "step"), aria_hidden="true")


def tick_text(value: float, ticks: Sequence[float]) -> str:
    """A tick's label, with as many digits as distinguish it from the next."""
    step = abs(ticks[1] - ticks[0])
    if value == 0:
        return "0"
    if max(abs(tick) for tick in ticks) < 1e-2 or step >= 1e5:
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}".replace("-", "\u2212", 1 if value < 0 else 0)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    digits += 0 if math.isclose(step * 10**digits, round(step * 10**digits)) else 1
    return f"{value:,.{digits}f}".replace(",", "\u202f").replace("-", "\u2212")


def _hover(panel: Panel, series: Sequence[Series], across: Scale, vertical: Scale) -> dict[str, object]:
    lines = [
        {
            "n": line.label,
            "c": _style(line),
            "x": line.x,
            "p": [round(vertical.place(y), 4) for y in line.y],
            "t": [_reading(line, place, panel.unit) for place in range(len(line.x))],
        }
        for line in series
    ]
    return {"x0": across.low, "x1": across.high, "lines": lines}


def _reading(line: Series, place: int, unit: str) -> str:
    shown = number(line.y[place], unit)
    if not line.low:
        return shown
    return f"{shown} ({number(line.low[place], unit)} to {number(line.high[place], unit)})"


def _numbers(panel: Panel, series: Sequence[Series]) -> Html:
    """The plotted numbers as a table; a long line is subsampled."""
    steps = sorted({x for line in series for x in line.x})
    every = math.ceil(len(steps) / _MAX_TABLE_ROWS)
    kept = sorted({*steps[::every], steps[-1]})
    found = [{x: _reading(line, place, panel.unit) for place, x in enumerate(line.x)} for line in series]
    rows = [[number(step), *(readings.get(step, NONE) for readings in found)] for step in kept]
    return table(["step", *(line.label for line in series)], rows, caption=f"{panel.title}, numbers")


def _description(panel: Panel, series: Sequence[Series]) -> str:
    ends = [
        f"{line.label}: {number(line.y[0], panel.unit)} at step {number(line.x[0])}, "
        f"{number(line.y[-1], panel.unit)} at step {number(line.x[-1])}"
        for line in series
    ]
    return f"{panel.note} {'; '.join(ends)}."


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * (1 - 1e-9))
