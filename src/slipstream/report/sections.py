"""Text and table sections of a report: settings, start-up, versions, warnings, the end, and comparisons of several
runs."""

from __future__ import annotations

import re
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from slipstream.errors import DataError
from slipstream.orchestrator.retries import BUDGET
from slipstream.report.headline import Accuracy, Headline, headline, identity, setting
from slipstream.report.markup import NONE, Child, Html, breakable, details, duration, h, join, key, number, table
from slipstream.report.plot import linear_scale
from slipstream.report.series import value_of
from slipstream.runlog import RunRecord, RunSummary
from slipstream.runlog.files import Row
from slipstream.runlog.ledger import balance

_STATE_WORDS = {
    "finished": "finished",
    "running": "running: these are the numbers so far",
    "failed": "failed",
    "interrupted": "interrupted",
    "killed": "killed: it left no exit report",
    "damaged": "damaged: parts of its folder cannot be read",
}
_REPLICA = re.compile(r"replica_(\d{1,4})/")
_MAX_WARNINGS = 50
_MAX_VERSIONS = 400


def state(summary: RunSummary) -> Html:
    """The run's state with a coloured dot."""
    return h("span", _STATE_WORDS[summary.status], class_=f"state {summary.status}")


def steps_of(summary: RunSummary) -> str:
    """`40 of 40`."""
    return f"{summary.step} of {summary.total_steps}" if summary.total_steps else str(summary.step)


def accuracy_text(measured: Accuracy | None) -> str:
    """`97.4 % (95.6 to 98.5)`."""
    if measured is None:
        return NONE
    return f"{100 * measured.value:.1f} % ({100 * measured.low:.1f} to {100 * measured.high:.1f})"


def tiles(record: RunRecord, head: Headline) -> Html:
    """The headline numbers of one run."""
    found: list[Html] = []
    best = head.after or head.before
    if best is not None:
        words = "accuracy after" if head.after else "accuracy before"
        note = f"95 % interval {100 * best.low:.1f} to {100 * best.high:.1f}, {best.num_tasks} held-out tasks"
        found.append(_tile(words, f"{100 * best.value:.1f}", note, "%"))
    if head.gained is not None and head.before is not None:
        points, low, high = (100 * part for part in head.gained)
        unsure = "" if low > 0 or high < 0 else "; not sure to differ from 0"
        note = f"from {100 * head.before.value:.1f} %; interval {_signed(low)} to {_signed(high)}{unsure}"
        found.append(_tile("points gained", _signed(points), note))
    if head.reward is not None:
        found.append(_tile("reward", number(head.reward[1]), f"last step; first step {number(head.reward[0])}"))
    summary = record.summary
    lost = f"{head.skipped or 'no'} step{'s' * (head.skipped != 1)} skipped for want of signal" if head.reward else ""
    lost += f", {head.dropped or 'no'} rollout{'s' * (head.dropped != 1)} dropped" if head.reward else ""
    found.append(_tile("steps", f"{summary.step}", lost, f"of {summary.total_steps}" if summary.total_steps else ""))
    started = time.strftime("%Y-%m-%d %H:%M", time.localtime(summary.started)) if summary.started else ""
    found.append(_tile("time", duration(summary.duration_s), f"began {started}" if started else ""))
    if head.probe is not None:
        found.append(_tile("largest probe difference", number(head.probe), "mean of a step, engine against trainer"))
    return h("dl.tiles", found)


def before_and_after(head: Headline) -> Html | None:
    """Both accuracies with their intervals on one axis."""
    if head.before is None or head.after is None:
        return None
    scale = linear_scale([0.0, 1.0])
    rows = [
        h(
            "div",
            h("span.who", f"{word}, step {measured.step}"),
            h(
                "div.track",
                h("span.whisker",
                  style=f"left:{100 * measured.low:.2f}%;width:{100 * (measured.high - measured.low):.2f}%"),
                h("span.dot", style=f"left:{100 * measured.value:.2f}%"),
            ),
            h("span.value", accuracy_text(measured)),
            class_=f"measure {word}",
        )
        for word, measured in (("before", head.before), ("after", head.after))
    ]  # fmt: skip
    ticks = [h("span", f"{100 * tick:.0f} %", style=f"left:{100 * tick:.0f}%") for tick in scale.ticks]
    axis = h("div.measure", h("span.who"), h("div.track.axis", ticks), h("span.value"), aria_hidden="true")  # fmt: skip
    return h("div.accuracy", rows, axis)


def ending(record: RunRecord) -> Html:
    """Why the run ended, files that could not be read, and its warnings."""
    report, summary = record.exit, record.summary
    parts: list[Child] = []
    if record.damage:
        sentences = h("ul", [h("li", sentence) for sentence in record.damage])
        parts.append(h("div.alert", h("p", "Not everything in the run folder could be read:"), sentences))
    if report is None:
        words = {
            "running": "The run is still going on; it writes its exit report when it ends.",
            "killed": "There is no exit report and no process holds the folder: the run was killed. "
            "Go on with --resume.",
        }
        parts.append(h("p", words.get(summary.status, "There is no exit report that can be read.")))
    else:
        how = f"{report.status} at step {report.step} with exit code {report.exit_code}"
        parts.append(h("p", f"The run {how}, {duration(report.seconds)} after its last start."))
        if report.message:
            parts.append(h("p.alert", f"{report.error}: {report.message}"))
        if report.traceback:
            parts.append(details("Traceback", h("pre", report.traceback)))
    parts.append(_warnings(record.events))
    parts.append(_retries(record))
    parts.append(_replicas(record.rows))
    return join(*parts)


def _retries(record: RunRecord) -> Html | None:
    """How much of the budget for further tries was used; None where requests have none."""
    most, timeout_s = (setting(record, f"inference.{name}") for name in ("request_retries", "request_timeout_s"))
    if not most.isdecimal() or not int(most):
        return None
    used: Counter[str] = Counter()
    for row in record.rows:
        for name in row:
            if name.startswith("retry/"):
                used[name.removeprefix("retry/")] += round(value_of(row, name) or 0.0)
    exhausted = used.pop("exhausted", 0)
    within = f" within {BUDGET:g} times {timeout_s} s" if timeout_s else ""
    reasons = f" ({', '.join(f'{reason} {count:,}' for reason, count in sorted(used.items()))})" if used else ""
    return h(
        "p",
        f"Requests were tried again {sum(used.values()):,} times{reasons}. Each had {most} further tries{within}, and "
        f"{exhausted:,} requests used all of them.",
    )


def groups(record: RunRecord) -> Html | None:
    """Where the groups of rollouts are, as the ledger has it; None without one."""
    try:
        found = balance(record.summary.folder)
    except DataError as error:
        return h("p.alert", str(error))
    if found is None or not found.num_begun:
        return None
    rows = [
        [f"{entry.state}{entry.reason and f': {entry.reason}'}", f"{entry.num_groups:,}", f"{entry.num_tokens:,}"]
        for entry in found.entries
    ]
    words = f"{found.num_begun:,} groups were begun in all attempts, {found.num_open:,} of them have not ended."
    words += f" The last attempt ended {found.ended}." if found.ended else ""
    return join(h("p", words), table(["group", "groups", "sampled tokens"], rows, caption="Groups of rollouts"))


def _replicas(metrics: Sequence[Mapping[str, float | None]]) -> Html | None:
    """Metrics of each of several engines, from `replica_<number>/...`; empty if there was one."""
    found = {match[1] for row in metrics for name in row if (match := _REPLICA.match(name))}
    numbers = sorted(map(int, found))
    if not numbers:
        return None

    def values(number: int, name: str) -> list[float]:
        found = (row.get(f"replica_{number}/{name}") for row in metrics)
        return [value for value in found if value is not None]

    rows = [
        [
            str(replica),
            f"{sum(values(replica, 'requests')):,.0f}",
            f"{statistics.median(values(replica, 'tokens_per_s') or [0.0]):,.0f}",
            duration(sum(values(replica, "idle_s"))),
            f"{max(values(replica, 'restarts'), default=0):.0f}",
        ]
        for replica in numbers
    ]
    head = ["engine", "requests answered", "tokens a second while it had any, median of the steps", "idle", "restarts"]
    return join(h("h3", "Engines"), table(head, rows, caption="What each engine did"))


def warnings_of(events: Sequence[Row]) -> dict[str, int]:
    """The run's warnings in their order, with how often each was given."""
    found = [str(event.get("message", "")) for event in events if event["kind"] == "warning"]
    found += [str(text) for event in events if event["kind"] == "start" for text in _listed(event.get("warnings"))]
    return Counter(found)


def _warnings(events: Sequence[Row]) -> Html:
    found = warnings_of(events)
    for event in events:
        if event["kind"] == "start":
            found |= {str(text): 1 for text in _listed(event.get("changed"))}
    if restarts := sum(event["kind"] == "engine_restart" for event in events):
        found[f"The engine was restarted {restarts} times."] = 1
    if attempts := sum(event["kind"] == "restart" for event in events):
        found[f"The run was restarted {attempts} times because an engine died with its weights."] = 1
    found |= {f"Resumed after step {event['step']}.": 1 for event in events if event["kind"] == "resume"}
    if not found:
        return h("p", "No warnings.")
    lines = [h("li", text, f" ({count} times)" if count > 1 else None) for text, count in found.items()]
    more = len(lines) - _MAX_WARNINGS
    return join(
        h("h3", "Warnings and changes"),
        h("ul.warnings", lines[:_MAX_WARNINGS]),
        h("p.note", f"and {more} more in events.jsonl") if more > 0 else None,
    )


def settings(record: RunRecord) -> Html:
    """Every setting with its origin; those that the user set first."""
    if not record.settings:
        return h("p.missing", "The run has not written its settings.")

    def rows(wanted: bool) -> list[list[Child]]:
        return [
            [key(item.name), h("code", breakable(item.value or "not set")), item.origin]
            for item in record.settings
            if wanted == (item.applies and item.origin != "default")
        ]

    head = ["setting", "value", "origin"]
    return join(
        h("h3", "Chosen or derived"),
        table(head, rows(True), numbers=False, caption="Settings that were chosen or derived"),
        details(f"Defaults and settings without effect ({len(rows(False))})",
                table(head, rows(False), numbers=False, caption="Defaults and settings without effect")),
    )  # fmt: skip


def versions(record: RunRecord, head: Headline) -> Html:
    """Software versions, and the digest of every version that the engine proved to hold."""
    software = [[name, h("code", version)] for name, version in (record.exit.versions if record.exit else {}).items()]
    parts: list[Child] = []
    if software:
        parts.append(table(["software", "version"], software, numbers=False, caption="Software versions"))
    else:
        parts.append(h("p.missing", "Software versions are recorded when a run ends."))
    applied = [event for event in record.events if event["kind"] == "apply"]
    if applied:
        last = f"The engine last held version {head.digest.partition(' ')[0]}, digest "
        parts.append(h("p", last, h("code", head.digest.partition(" ")[2]), "."))
        rows = [
            [
                str(event.get("version", "")),
                h("code", str(event.get("digest", ""))),
                number(value_of(event, "transfer_s"), "s"),
                number(value_of(event, "verify_s"), "s"),
            ]
            for event in applied[-_MAX_VERSIONS:]
        ]
        title = f"{len(applied)} versions applied and verified"
        parts.append(details(title, table(["version", "digest", "transfer", "verify"], rows, caption=title)))
    return join(*parts)


def comparison(records: Sequence[RunRecord], names: Sequence[Html]) -> Html:
    """The runs' headline numbers side by side, and the settings that differ."""
    heads = [headline(record) for record in records]
    facts: list[tuple[str, Sequence[Child]]] = [
        ("state", [record.summary.status for record in records]),
        ("steps", [steps_of(record.summary) for record in records]),
        ("time", [duration(record.summary.duration_s) for record in records]),
        ("accuracy before", [accuracy_text(head.before) for head in heads]),
        ("accuracy after", [accuracy_text(head.after) for head in heads]),
        ("points gained", [_signed(100 * head.gained[0]) if head.gained else NONE for head in heads]),
        ("last reward", [number(head.reward[1]) if head.reward else NONE for head in heads]),
        ("largest probe difference", [number(head.probe) for head in heads]),
        ("rollouts dropped", [str(head.dropped) for head in heads]),
    ]
    identities = [dict(identity(record)) for record in records]
    facts += [
        (name, [breakable(each.get(name, NONE)) for each in identities])
        for name in ("model", "environment", "data", "algorithm")
        if any(name in each for each in identities)
    ]
    differing = _differing(records)
    settings_table = (
        table(["setting", *names], differing, numbers=False, caption="Settings that differ")
        if differing
        else h("p", "All settings are the same.")
    )
    return join(
        table(["", *names], [[name, *cells] for name, cells in facts], numbers=False, caption="Runs compared"),
        h("h3", "Settings that differ"),
        settings_table,
    )


def _differing(records: Sequence[RunRecord]) -> list[list[Child]]:
    names = dict.fromkeys(item.name for record in records for item in record.settings if item.name != "run.folder")
    found: list[list[Child]] = []
    for name in names:
        values = [setting(record, name) for record in records]
        if len(set(values)) > 1:
            found.append([key(name), *(h("code", breakable(value)) if value else NONE for value in values)])
    return found


def _tile(name: str, value: str, note: str, unit: str = "") -> Html:
    shown = h("dd", h("span.big", value), h("span.unit", f" {unit}") if unit else None,
              h("span.note", note))  # fmt: skip
    return h("div", h("dt", name), shown)


def _signed(value: float) -> str:
    return f"{value:+.1f}".replace("-", "\u2212")


def _listed(value: object) -> list[object]:
    return list(value) if isinstance(value, list) else []


def startup(record: RunRecord) -> Html | None:
    """The start-up stages of the last process that recorded any, in order of their start; None if none did."""
    stages = [event for event in record.events if event["kind"] in ("stage", "startup")]
    if not stages:
        return None
    last = [event for event in stages if event["lineage"] == stages[-1]["lineage"]]
    stages = [event for event in last if event["kind"] == "stage"]
    stages.sort(key=lambda event: value_of(event, "began_s") or 0.0)
    total = next((value_of(event, "seconds") for event in last if event["kind"] == "startup"), None)
    words = "The run did not come to the end of its first step."
    if total is not None:
        words = f"The first step ended {total:.1f} s after the command began; stages overlap."
    rows = [
        [str(event.get("name", "")), *(number(value_of(event, name), "s") for name in ("began_s", "seconds"))]
        for event in stages
    ]
    return join(h("p", words), table(["stage", "began after", "took"], rows, caption="Stages of the start"))
