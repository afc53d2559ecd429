"""Advantages of a user's function for complete groups, and its errors."""

import pytest
from tests.trainer.credit import credit_of

from slipstream import records
from slipstream.algo.algorithm import algorithm_of, write_credit
from slipstream.algo.readiness import group_has_signal
from slipstream.algo.trial import check_algorithm
from slipstream.config.recipes import resolved
from slipstream.config.schema import RLConfig
from slipstream.errors import ConfigError, TrainingError
from slipstream.trainer.packing import make_step_batches, micro_batches

OWN = '''
def shorter(group):
    """Right answers, less the share of the longest."""
    longest = max(rollout.num_sampled for rollout in group)
    return [rollout.reward - rollout.num_sampled / longest for rollout in group]
def by_token(group):
    return [range(rollout.num_sampled) for rollout in group]
def nothing(group):
    return [0.0] * len(group)
def short(group):
    return [1.0]
def infinite(group):
    return [float("inf")] * len(group)
def fails(group):
    return group[0].nothing
def later(group):
    return [1.0 / (rollout.reward + 1.0) if rollout.group_id == "0.0" else [] for rollout in group]
'''


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return lambda name: f"{path}:{name}"


def check_credit(name):
    check_algorithm(resolved(RLConfig(credit=name)))


def give(name, group):
    write_credit(algorithm_of(resolved(RLConfig(credit=name))), "credit", group)


def group_of(*rewards):
    made = [records.Sequence([1] * (n + 2), [False] + [True] * (n + 1), [-1.0] * (n + 2)) for n in range(len(rewards))]
    return [
        records.Rollout(f"5.0.{n}", "t", "5.0", [sequence], reward, "done", num_turns=1)
        for n, (sequence, reward) in enumerate(zip(made, rewards, strict=True))
    ]


def trained(group):
    """The advantage of each trained token, as the loss sees it."""
    batch = records.Batch(5, records.Version(0, 5), group)
    credit = credit_of(batch)
    (step,) = make_step_batches(batch, credit.advantages, carries_loss=credit.carries_loss, ignores_silent=True)
    rows = micro_batches(step, 100, packing=False)
    return [row.streams["advantages"].tolist() for row in rows], credit.has_signal


def test_its_advantages_are_trained_on_instead_of_those_of_rewards(own):
    group = group_of(1.0, 1.0)
    give(own("shorter"), group)
    assert trained(group) == ([[0.5], [0.0, 0.0]], True)
    give(own("by_token"), group)
    assert trained(group)[0] == [[0.0], [0.0, 1.0]]


def test_a_sample_has_no_advantage_of_the_rollout_beside_those_of_its_tokens(own):
    group = group_of(1.0, 0.0)
    give(own("shorter"), group)
    credit = credit_of(records.Batch(5, records.Version(0, 5), group))
    assert [credit.of(place) for place in range(2)] == [{"carries_loss": True}] * 2


def test_zeros_are_no_signal_though_rewards_differ(own):
    group = group_of(1.0, 0.0)
    assert group_has_signal(group)
    give(own("nothing"), group)
    assert not group_has_signal(group)
    assert trained(group)[1] is False


def test_failed_rollouts_are_not_shown_to_it(own):
    group = group_of(1.0, 0.0)
    group[1].outcome = "reward_error"
    give(own("shorter"), group)
    assert group[1].sequences[0].streams == {}
    group[0].outcome = "engine_error"
    give(own("fails"), group)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("short", "zip() argument 2 is shorter than argument 1"),
        ("infinite", "the advantages of 0.0.0 are not finite"),
        ("fails", "has no attribute 'nothing'"),
        ("missing", "has no function 'missing'"),
    ],
)
def test_it_is_tried_before_a_run(own, name, says):
    with pytest.raises(ConfigError) as error:
        check_credit(own(name))
    assert says in str(error.value)
    assert str(error.value).startswith("algorithm.credit")


def test_an_error_of_a_later_group_names_file_and_group(own):
    check_credit(own("later"))
    with pytest.raises(TrainingError, match=r"own.py:later: .*0 advantages.*\(group 5.0\)"):
        give(own("later"), group_of(1.0))


def test_built_in_credits_leave_it_to_the_rewards():
    for name in (None, "episode", "turn"):
        group = group_of(1.0, 0.0)
        give(name, group)
        assert group == group_of(1.0, 0.0)
        check_credit(name)
