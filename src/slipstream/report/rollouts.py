"""Shows rollouts from the start and the end of a run side by side: the same tasks if possible, those whose reward
changed first, each with its gold answer if known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from slipstream.report.markup import Html, h, join, number
from slipstream.runlog import RunRecord
from slipstream.runlog.samples import sample_id

_MAX_SHOWN = 6
_MAX_CHARACTERS = 4000

Sample = dict[str, Any]


def rollouts(record: RunRecord) -> Html:
    """The section; a sentence if no rollouts were kept."""
    samples = [sample for sample in record.samples if isinstance(sample.get("completion"), str)]
    if not samples:
        return h("p", "This run kept no rollouts.", class_="missing")
    held_out = [sample for sample in samples if sample.get("split") == "eval"]
    trained = [sample for sample in samples if sample.get("split") != "eval"]
    pairs = _pairs(held_out, lambda first, last: first < last)
    if pairs:
        return join(h("p", "Held-out tasks, answered by the first and by the last version.", class_="note"),
                    [_pair(before, after) for before, after in pairs[:_MAX_SHOWN]])  # fmt: skip
    steps = [sample["step"] for sample in trained or held_out]
    span = max(steps) - min(steps)
    pairs = _pairs(trained, lambda first, last: last - first > span / 2)
    if pairs:
        return join(h("p", "The same training tasks, early and late.", class_="note"),
                    [_pair(before, after) for before, after in pairs[:_MAX_SHOWN]])  # fmt: skip
    return _ends(trained or held_out)


def _pairs(samples: Sequence[Sample], apart: Callable[[int, int], bool]) -> list[tuple[Sample, Sample]]:
    """First and last rollout of each task that was sampled at two such steps."""
    first: dict[str, Sample] = {}
    last: dict[str, Sample] = {}
    for sample in samples:
        task = str(sample.get("task"))
        first.setdefault(task, sample)
        if sample["step"] > last.get(task, first[task])["step"] or task not in last:
            last[task] = sample
    pairs = [(first[task], last[task]) for task in first if apart(first[task]["step"], last[task]["step"])]
    return sorted(pairs, key=_change)


def _change(pair: tuple[Sample, Sample]) -> int:
    """Sort key: 0 if the reward changed, 1 if only the text did, 2 if neither."""
    before, after = pair
    return 0 if before.get("reward") != after.get("reward") else int(before["completion"] == after["completion"]) + 1


def _ends(samples: Sequence[Sample]) -> Html:
    """Rollouts of the first and the last step side by side, of different tasks: none was kept at both."""
    first, last = samples[0]["step"], samples[-1]["step"]
    if first == last:
        shown = [sample for sample in samples if sample["step"] == last][:_MAX_SHOWN]
        return join(h("p", f"Rollouts of step {last}.", class_="note"), h("div", [_one(sample) for sample in shown]))
    columns = [
        h(
            "div",
            h("h3", f"{word}, step {step}"),
            [_one(sample, named=True) for sample in samples if sample["step"] == step][:_MAX_SHOWN],
        )
        for word, step in (("Before", first), ("After", last))
    ]
    return join(
        h("p", "Training tasks of the first and of the last step; no task was kept at both.", class_="note"),
        h("div", columns, class_="pair"),
    )


def _pair(before: Sample, after: Sample) -> Html:
    columns = [_one(sample, word) for word, sample in (("before", before), ("after", after))]
    return h("article", _task(after), h("div", columns, class_="pair"), class_="rollout")


def _task(sample: Sample) -> Html:
    prompt = sample.get("prompt")
    answer = sample.get("answer")
    name = h("p", str(sample.get("task", "")), class_="task")
    right = h("p", "right answer: ", h("code", _cut(answer)), class_="note") if isinstance(answer, str) else None
    return join(name, h("pre", _cut(prompt), class_="prompt") if isinstance(prompt, str) and prompt else None, right)


def _one(sample: Sample, word: str = "", named: bool = False) -> Html:
    reward = sample.get("reward")
    parts = [
        f"{word}, step {sample['step']}" if word else "",
        f"reward {number(float(reward))}" if isinstance(reward, int | float) else "",
        "" if sample.get("outcome") == "done" else str(sample.get("outcome", "")),
        sample_id(str(sample.get("id", "")), sample["step"]),
    ]
    facts = h("p", " · ".join(filter(None, parts)), class_="note")
    return h("div", _task(sample) if named else None, h("pre", _cut(sample["completion"])), facts, class_="attempt")


def _cut(text: str) -> str:
    if len(text) <= _MAX_CHARACTERS:
        return text
    return f"{text[:_MAX_CHARACTERS]} … ({len(text) - _MAX_CHARACTERS:,} more characters)"
