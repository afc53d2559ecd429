"""Which version made which token, against a list that says it for each token."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slipstream.inference.plugin.version_labels import TokenLabels


@given(st.lists(st.sampled_from(["token", "version"]), max_size=30), st.booleans())
def test_spans_say_what_happened(history, counts_begin_late):
    labels, made, version = TokenLabels(), [], 0
    labels.change("0", {})
    labels.begin("a")
    for event in history:
        if event == "token":
            made.append(str(version))
        else:
            version += 1
            labels.change(str(version), {"a": len(made)} if made or not counts_begin_late else {})
    spans = labels.end("a", len(made))
    starts = [start for start, _ in spans]
    assert starts == sorted(set(starts))
    ends = [*starts[1:], len(made)]
    said = [name for (start, name), end in zip(spans, ends, strict=True) for _ in range(start, end)]
    assert said == made
    assert labels.running == ()


def test_requests_do_not_touch_each_other():
    labels = TokenLabels()
    labels.change("0", {})
    labels.begin("a")
    labels.change("1", {"a": 3})
    labels.begin("b")
    labels.change("2", {"a": 5, "b": 1})
    assert labels.running == ("a", "b")
    assert labels.end("a", 6) == [(0, "0"), (3, "1"), (5, "2")]
    assert labels.end("b", 1) == [(0, "1")]
