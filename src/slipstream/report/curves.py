"""The sections of curves: a plot for each panel whose numbers vary, and one line for those that do not."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.report.markup import Child, Html, details, h, join, number
from slipstream.report.plot import Scale, figure, step_scale
from slipstream.report.series import GROUPS, Group, Panel, Series, groups_of, series_of, varies
from slipstream.runlog import RunRecord

_MAX_CONSTANTS = 60
"""Most metrics that a line of constants lists."""


def curves(records: Sequence[RunRecord], names: Sequence[str]) -> dict[str, Html]:
    """The content of each section by its title; without a finished step, a sentence below the first. Of several runs
    each panel compares the first metric."""
    all_rows = [record.rows for record in records]
    steps = [float(row["step"]) for rows in all_rows for row in rows]
    across = step_scale(steps or [0.0])
    found: dict[str, Html] = {}
    *groups, others = groups_of(all_rows)
    for group in groups:
        drawn, constant = _plots(group, records, names, across)
        if drawn or constant:
            grid = h("div.plots", drawn) if drawn else None
            found[group.title] = join(h("p.lead", group.note), grid, _constants(constant), _missing(group))
    if not found:
        none = "No step has been finished yet, so there is nothing to draw."
        return {groups[0].title: h("p.missing", none)}
    if others.panels:
        drawn, constant = _plots(others, records, names, across)
        grid = h("div.plots", drawn) if drawn else None
        last = next(reversed(found))
        title = f"{others.title} ({len(drawn) + len(constant)})"
        found[last] = join(found[last], details(title, grid, _constants(constant)))
    return found


def _plots(
    group: Group, records: Sequence[RunRecord], names: Sequence[str], across: Scale
) -> tuple[list[Html], list[tuple[Panel, list[Series]]]]:
    """The plots of a group, and the panels whose numbers do not vary."""
    drawn: list[Html] = []
    constant: list[tuple[Panel, list[Series]]] = []
    for panel in group.panels:
        series = _series(panel, records, names)
        if not series:
            continue
        if not panel.always and not varies(series) and (len(records) == 1 or _agree(series)):
            constant.append((panel, series))
            continue
        # The axis covers the steps that have the metric; all steps of longer runs would compress it.
        shared = across if len(records) == 1 else step_scale([x for line in series for x in line.x])
        note = f"Shown: {panel.lines[0].label}." if len(records) > 1 and len(panel.lines) > 1 else ""
        drawn.append(figure(panel, series, shared, note=note, named=len(records) > 1))
    return drawn, constant


def _series(panel: Panel, records: Sequence[RunRecord], names: Sequence[str]) -> list[Series]:
    if len(records) == 1:
        lines = panel.lines
        found = [series_of(records[0].rows, line, line.label, color) for color, line in enumerate(lines)]
    else:
        runs = enumerate(zip(records, names, strict=True))
        found = [series_of(record.rows, panel.lines[0], name, color) for color, (record, name) in runs]
    return [line for line in found if line is not None]


def _agree(series: Sequence[Series]) -> bool:
    """Whether lines that do not vary have the same number."""
    values = [line.y[0] for line in series]
    return max(values) - min(values) <= 1e-4 * max(map(abs, values))


def _constants(constant: Sequence[tuple[Panel, list[Series]]]) -> Html | None:
    """One line with the numbers of panels that do not vary."""
    if not constant:
        return None
    shown: list[Html] = []
    for panel, series in constant[:_MAX_CONSTANTS]:
        value = number(series[0].y[0], panel.unit)
        is_left_of_several = len(series) == 1 and panel.lines[0].absent is not None
        if is_left_of_several or not _agree(series):
            lines = [line for line in series if line.y[0] != 0.0] or series
            value = ", ".join(f"{line.label} {number(line.y[0], panel.unit)}" for line in lines)
        shown.append(h("span.constant", f"{panel.title} ", h("b", value)))
    more = len(constant) - len(shown)
    words: list[Child] = [h("span.constant", "The same at every step:"), *shown]
    return h("p.constants.note", words, f"and {more} more" if more else None)


def _missing(group: Group) -> Html | None:
    """Panels that a reader looks for and that no run recorded."""
    known = next(known for known in GROUPS if known.title == group.title)
    shown = {panel.title for panel in group.panels}
    missing = [
        f"{panel.title}: {panel.missing}" for panel in known.panels if panel.missing and panel.title not in shown
    ]
    return h("p.note", "Not recorded: " + "; ".join(missing) + ".") if missing else None
