"""The speed of generation, where batches are cut at their own times."""

import pytest

from slipstream.orchestrator.batches.pace import Generated, Pace
from slipstream.records import Rollout, Sequence


def group(num, tokens, outcome="done"):
    mask = [False, *[True] * tokens]
    return [Rollout(f"{n}", "t", "g", [Sequence([1] * (tokens + 1), mask)], 1.0, outcome) for n in range(num)]


def test_one_batch_counts_what_can_be_trained_on():
    made = Generated.of([group(4, 10), group(2, 7, "timeout")], 2.0)
    assert made.rates() == {
        "time/generate_s": 2.0,
        "throughput/generated_tokens_per_s": 20.0,
        "throughput/rollouts_per_s": 3.0,
    }


def test_batches_that_are_cut_at_one_moment_have_the_speed_of_the_last_few():
    pace, now = Pace(2), 100.0
    pace.begin(now)
    found = []
    for _ in range(5):  # two batches every ten seconds
        for _ in range(2):
            pace.add(group(8, 10))
        now += 10.0
        found += [pace.cut(now), pace.cut(now + 1e-6)]
    for each in found[1:]:
        assert each.tokens / each.seconds == pytest.approx(16.0, rel=1e-5)
        assert each.rollouts / each.seconds == pytest.approx(1.6, rel=1e-5)
    assert sum(each.seconds for each in found[1::2]) == pytest.approx(5 * 10.0 / 2)
