"""Shows what the model wrote: the same tasks answered before and after training, and every kept rollout to browse.

Both work without script, the second as a list of folded entries; the script adds filters, a search, and steps to the
next and the previous entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slipstream.records import TRAINABLE_OUTCOMES
from slipstream.report.headline import setting
from slipstream.report.markup import Child, Html, h, join, number
from slipstream.report.tokens import Key, key_of, token_views
from slipstream.runlog import RunRecord
from slipstream.runlog.files import Row
from slipstream.runlog.samples import sample_id

_MAX_PAIRS = 6
_MAX_CHARACTERS, _MIN_CHARACTERS = 4000, 300
_ALL_CHARACTERS = 6_000_000
"""About how much text all entries together may have; of longer texts the middle is left out."""
_EXCERPT_CHARACTERS = 120


def rollouts(record: RunRecord) -> Html:
    """The section; a sentence if no rollouts were kept."""
    samples = [sample for sample in record.samples if isinstance(sample.get("completion"), str)]
    if not samples:
        return h("p.missing", "This run kept no rollouts.")
    graded = [sample for sample in samples if sample.get("outcome", "done") in TRAINABLE_OUTCOMES]
    browser = _browser(samples, _threshold(record), *token_views(record))
    return join(_before_and_after(graded), h("h3", "All kept rollouts"), browser)


def _threshold(record: RunRecord) -> float:
    """The reward from which an answer counts as right."""
    try:
        return float(setting(record, "evaluation.threshold"))
    except ValueError:
        return 1.0


def _before_and_after(samples: Sequence[Row]) -> Html | None:
    """The same tasks early and late, those whose reward changed first; None if no task was kept at two such steps."""
    held_out = [sample for sample in samples if sample.get("split") == "eval"]
    trained = [sample for sample in samples if sample.get("split") != "eval"]
    words = "Held-out tasks, answered by the first and by the last version"
    pairs = _pairs(held_out, lambda first, last: first < last)
    if not pairs and trained:
        words = "The same training tasks, early and late"
        steps = [sample["step"] for sample in trained]
        span = max(steps) - min(steps)
        pairs = _pairs(trained, lambda first, last: last - first > span / 2)
    if not pairs:
        return None
    changed = [pair for pair in pairs if _change(pair) < 2]
    same = len(pairs) - len(changed)
    note = f"{words}. {same} more of them got the same answer both times." if changed and same else f"{words}."
    shown = [_pair(before, after) for before, after in (changed or pairs)[:_MAX_PAIRS]]
    return join(h("h3", "Before and after"), h("p.note", note), shown)


def _pairs(samples: Sequence[Row], apart: Callable[[int, int], bool]) -> list[tuple[Row, Row]]:
    """First and last rollout of each task that was sampled at two such steps."""
    first: dict[str, Row] = {}
    last: dict[str, Row] = {}
    for sample in samples:
        task = str(sample.get("task"))
        first.setdefault(task, sample)
        if sample["step"] > last.get(task, first[task])["step"] or task not in last:
            last[task] = sample
    pairs = [(first[task], last[task]) for task in first if apart(first[task]["step"], last[task]["step"])]
    return sorted(pairs, key=_change)


def _change(pair: tuple[Row, Row]) -> int:
    """Sort key: 0 if the reward changed, 1 if only the text did, 2 if neither."""
    before, after = pair
    return 0 if before.get("reward") != after.get("reward") else int(before["completion"] == after["completion"]) + 1


def _pair(before: Row, after: Row) -> Html:
    columns = [
        h("div.attempt", h("p.note", f"{word}, step {sample['step']}"), h("pre", _cut(sample["completion"])),
          h("p.note", _facts(sample)))
        for word, sample in (("before", before), ("after", after))
    ]  # fmt: skip
    return h("article.rollout", _prompt(after), _answer(after), h("div.pair", columns))


def _browser(samples: Sequence[Row], threshold: float, tokens: Mapping[Key, Html], missing: str) -> Html:
    """Every kept rollout as a folded entry, in the order of their steps."""
    ordered = sorted(samples, key=lambda sample: (sample["step"], sample.get("split") != "eval"))
    limit = min(_MAX_CHARACTERS, max(_MIN_CHARACTERS, _ALL_CHARACTERS // (2 * len(ordered))))
    steps = dict.fromkeys(sample["step"] for sample in ordered)
    kinds = [name for name in ("held-out", "training") if any(_kind(sample) == name for sample in ordered)]
    grades = ["right", "wrong", *(["failed"] if any(_has_failed(sample) for sample in ordered) else [])]
    has_failed_calls = any(_tools(sample) for sample in ordered)
    filters = [
        _choice("step", [(str(step), f"step {step}") for step in steps], "all steps"),
        _choice("kind", [(name, name) for name in kinds], "held-out and training") if len(kinds) > 1 else None,
        _choice("grade", [(name, name) for name in grades], " and ".join(grades)),
        _choice_of("task", ordered, "source", "all tasks"),
        _choice_of("stop", ordered, "stop", "all ends"),
        _choice("tools", [("failed", "calls that failed")], "all calls of tools") if has_failed_calls else None,
        h("input", type="search", placeholder="search", aria_label="search prompts, completions and answers"),
        h("button", "previous", type="button", data_move=-1),
        h("button", "next", type="button", data_move=1),
        h("output.note", aria_live="polite"),
        _colours() if tokens else None,
    ]
    shared = _shared_start([str(sample.get("prompt", "")) for sample in ordered])
    entries = [_entry(sample, threshold, limit, shared, tokens.get(key_of(sample))) for sample in ordered]
    note = f"Right: a reward of at least {number(threshold)}."
    if "failed" in grades:
        note += " Failed: neither graded nor trained on."
    if 0 < len(tokens) < len(ordered):
        note += f" {len(tokens)} of the latest rollouts have their tokens."
    note += f" {missing}" if missing else ""
    return join(
        h("p.note", note),
        h(
            "div.browser",
            h("div.filters", filters, hidden=True),
            h("div.entries", entries, tabindex=0, role="region", aria_label="kept rollouts"),
        ),
    )


def _choice(name: str, options: Sequence[tuple[str, str]], every: str) -> Html:
    shown = [h("option", text, value=value) for value, text in [("", every), *options]]
    return h("select", shown, data_by=name, aria_label=f"which {name}", autocomplete="off")


def _choice_of(name: str, samples: Sequence[Row], key: str, every: str) -> Html | None:
    """The filter by a text that samples have; None where they do not differ in it."""
    found = sorted({str(sample.get(key) or "") for sample in samples} - {""})
    return _choice(name, [(text, text.replace("_", " ")) for text in found], every) if len(found) > 1 else None


def _colours() -> Html:
    """What the tokens of the open entry are coloured by."""
    by = ("log-probability", "advantage", "loss mask", "version")
    shown = [h("option", "tokens by \u2026", value=""), *(h("option", f"tokens by {name}", value=name) for name in by)]
    return join(
        h("select.colour", shown, aria_label="colour the tokens by", autocomplete="off"),
        h("span.note.legend", aria_live="polite", hidden=True),
    )


def _shared_start(prompts: Sequence[str]) -> int:
    """Number of characters, up to the end of a word, with which all prompts begin and which tell none from another."""
    first, last = min(prompts), max(prompts)
    end = next((place for place, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), 0)
    return first.rfind(" ", 0, end) + 1


def _entry(sample: Row, threshold: float, limit: int, shared: int, tokens: Html | None) -> Html:
    is_right = isinstance(reward := sample.get("reward"), int | float) and reward >= threshold
    grade = "failed" if _has_failed(sample) else "right" if is_right else "wrong"
    summary = h(
        "summary",
        h("span.when", f"step {sample['step']}, {_kind(sample)}"),
        h("span", grade, class_=f"grade {grade}"),
        h("span.excerpt", _excerpt(str(sample.get("prompt", ""))[shared:])),
        h("span.excerpt.answer", _excerpt(sample["completion"])),
    )
    turns = sample.get("turns")
    body = join(
        _prompt(sample, limit),
        [_turn(turn, limit) for turn in turns] if isinstance(turns, list) else None,
        h("div.pair", _block("completion", sample["completion"], limit),
          _block("right answer", sample.get("answer"), limit)),
        _block("error", sample.get("error"), limit),
        tokens,
        h("p.note", _facts(sample)),
    )  # fmt: skip
    return h("details", summary, h("div.entry", body), name="rollout", data_step=sample["step"],
             data_kind=_kind(sample), data_grade=grade, data_tools=_tools(sample),
             data_task=sample.get("source"), data_stop=sample.get("stop"))  # fmt: skip


def _excerpt(text: str) -> str:
    """The first line's worth of a text."""
    return " ".join(text.split())[:_EXCERPT_CHARACTERS]


def _kind(sample: Row) -> str:
    return "held-out" if sample.get("split") == "eval" else "training"


def _has_failed(sample: Row) -> bool:
    """Whether it was lost, and so neither graded nor trained on."""
    return sample.get("outcome", "done") not in TRAINABLE_OUTCOMES


def _tools(sample: Row) -> str:
    """`failed` if a call of a tool failed in it."""
    metrics = sample.get("metrics")
    return "failed" if isinstance(metrics, dict) and metrics.get("tool_failures") else ""


def _turn(turn: Any, limit: int) -> Html | None:
    """One message of an episode of several turns."""
    if not isinstance(turn, dict):
        return None
    return _block(str(turn.get("role", "")), str(turn.get("content", "")), limit)


def _block(name: str, text: object, limit: int) -> Html | None:
    if not isinstance(text, str):
        return None
    return h("div", h("p.note", name), h("pre", _cut(text, limit) or h("i", "empty")))


def _prompt(sample: Row, limit: int = _MAX_CHARACTERS) -> Html:
    prompt = sample.get("prompt")
    name = h("p.task", str(sample.get("task", "")))
    return join(name, h("pre.prompt", _cut(prompt, limit)) if isinstance(prompt, str) and prompt else None)


def _answer(sample: Row) -> Html | None:
    answer = sample.get("answer")
    return h("p.note", "right answer: ", h("code", _cut(answer))) if isinstance(answer, str) else None


def _facts(sample: Row) -> Child:
    """Reward with its parts, outcome, turns and id, on one line."""
    reward, parts, turns = sample.get("reward"), sample.get("metrics"), sample.get("num_turns")
    measured = parts.items() if isinstance(parts, dict) else ()
    facts = [
        f"reward {number(float(reward))}" if isinstance(reward, int | float) and not _has_failed(sample) else "",
        *(f"{name} {number(float(value))}" for name, value in measured if isinstance(value, int | float)),
        "" if sample.get("outcome") == "done" else str(sample.get("outcome", "")),
        "" if sample.get("stop", "answer") == "answer" else f"stop: {sample['stop']}",
        f"{turns} turns" if isinstance(turns, int) and turns > 1 else "",
        f"advantage {number(float(gain))}" if isinstance(gain := sample.get("advantage"), int | float) else "",
        sample_id(str(sample.get("id", "")), sample["step"]),
    ]
    return " · ".join(filter(None, facts))


def _cut(text: str, limit: int = _MAX_CHARACTERS) -> str:
    """The text without its middle if it is too long: the end of a completion holds its answer."""
    if len(text) <= limit:
        return text
    head = limit // 2
    return f"{text[:head]}\n\u2026 ({len(text) - limit:,} characters left out) \u2026\n{text[-(limit - head) :]}"
