"""Ages of tokens at their bounds: what a batch may hold, and what is measured of it."""

import pytest

from slipstream.errors import TrainingError
from slipstream.orchestrator.batches.staleness import oldest_version, refuse_stale, staleness_metrics
from slipstream.records import Rollout, Sequence, VersionSpan


def rollout_of(*sequences):
    """Each sequence has two tokens of each version, of which the second is sampled."""
    made = [
        Sequence(
            [1] * 2 * len(each),
            [False, True] * len(each),
            versions=[VersionSpan(2 * place, version) for place, version in enumerate(each)],
        )
        for each in sequences
    ]
    return Rollout("3.0.1", "t", "g", made, 0.0, "done")


@pytest.mark.parametrize(
    ("step", "staleness", "allowed"), [(0, 3, [0]), (1, 1, [0, 1]), (4, 0, [4]), (4, 2, [2, 3, 4])]
)
def test_versions_from_the_oldest_to_the_newest_are_allowed(step, staleness, allowed):
    for version in range(7):
        rollouts = [rollout_of([f"2.{allowed[0]}"]), rollout_of([f"2.{allowed[-1]}"], [f"2.{version}"])]
        if version in allowed:
            refuse_stale(rollouts, step, 2, staleness)
            continue
        names = ", ".join(f"2.{each}" for each in allowed)
        says = f"^rollout 3.0.1 holds tokens of version 2.{version} in the batch of step {step}: .* only {names}$"
        with pytest.raises(TrainingError, match=says):
            refuse_stale(rollouts, step, 2, staleness)


def test_a_batch_waits_for_no_newer_version_than_the_staleness_asks_for():
    assert [oldest_version(step, 1, first=0) for step in range(4)] == [0, 0, 1, 2]
    assert [oldest_version(step, 0, first=0) for step in range(4)] == [0, 1, 2, 3]
    assert [oldest_version(step, 1, first=5) for step in (5, 6, 7)] == [5, 5, 6], (
        "a resumed run has none before its own"
    )


def test_rollouts_that_mix_versions_are_counted_over_their_sequences():
    rollouts = [rollout_of(["0.5", "0.5"]), rollout_of(["0.5"], ["0.4"]), rollout_of(["0.4"]), rollout_of([])]
    found = staleness_metrics(5, rollouts)
    shares = {"staleness/age_0": 0.6, "staleness/age_1": 0.4}
    assert found == pytest.approx(
        {"staleness/mean": 0.4, "staleness/max": 1.0, "staleness/mixed_fraction": 0.25} | shares
    )
    assert [type(value) for value in found.values()] == [float] * 5


def test_without_sampled_tokens_nothing_is_measured():
    prompt = Sequence([1, 2], [False, False], versions=[VersionSpan(0, "0.4")])
    assert staleness_metrics(5, []) == {}
    assert staleness_metrics(5, [rollout_of([]), Rollout("a", "t", "g", [prompt], 0.0, "truncated")]) == {}


def test_long_ages_share_bins():
    found = staleness_metrics(20, [rollout_of(["0.20"] * 2, ["0.13", "0.12", "0.5", "0.4"], ["0.0"] * 2)])
    shares = {name.removeprefix("staleness/age_"): value for name, value in found.items() if "age_" in name}
    assert {age: value for age, value in shares.items() if value} == {"0": 0.25, "7": 0.125, "8": 0.25, "16": 0.375}
    assert list(shares) == [*"012345678", "16"]
    assert found["staleness/max"] == 20.0
