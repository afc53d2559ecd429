import math

import pytest
import torch
from tests.trainer.credit import batch_from, credit_of

from slipstream import records
from slipstream.errors import TrainingError
from slipstream.trainer.old_logprobs import kl_penalties_of
from slipstream.trainer.turn_credit import turn_ends


def batch_of(rewards, group_size, lengths=None):
    """Completions of these lengths, each but the first token of a sequence sampled."""
    rollouts = [
        records.Rollout(f"{i}", "task", f"group {i // group_size}", [], reward=reward, outcome="done")
        for i, reward in enumerate(rewards)
    ]
    for rollout, length in zip(rollouts, lengths or [], strict=False):
        rollout.sequences.append(records.Sequence([1] * (length + 1), [False] + [True] * length))
    return batch_from(rollouts)


def test_advantages_from_rewards_and_from_right_or_wrong():
    batch = batch_of([0.1, 0.5, 0.9, 1.0, 0.2, 0.3, 0.2, 0.3], 4)
    credit = credit_of(batch, scale_rewards="none")
    assert credit.advantages == pytest.approx([-0.525, -0.125, 0.275, 0.375, -0.05, 0.05, -0.05, 0.05])
    assert credit.metrics["reward/signal_fraction"] == 1.0
    credit = credit_of(batch, scale_rewards="none", reward_threshold=0.9)
    assert credit.advantages == [-0.5, -0.5, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0]
    assert credit.metrics["reward/signal_fraction"] == 0.5
    assert [rollout.reward for rollout in batch.rollouts][:2] == [0.1, 0.5]


@pytest.mark.parametrize("kind", ["rloo", "reinforce_pp"])
def test_a_kl_term_in_the_reward_is_no_signal(kind):
    penalties = [[torch.full((3,), 0.01 * i, dtype=torch.float64)] for i in range(4)]
    agree = credit_of(batch_of([1.0] * 4, 2, [3] * 4), penalties, kind=kind, kl_coef=0.1)
    assert any(agree.advantages)
    assert (agree.has_signal, agree.metrics["reward/signal_fraction"]) == (False, 0.0)
    differ = credit_of(batch_of([1.0, 0.0, 1.0, 1.0], 2, [3] * 4), penalties, kind=kind, kl_coef=0.1)
    assert (differ.has_signal, differ.metrics["reward/signal_fraction"]) == (True, 0.5)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_what_a_kl_term_takes_from_the_reward(kind):
    """Of each token, by the formulas of http://joschu.net/blog/kl-approx.html; a rollout may have several sequences."""
    lengths = [[3, 1], [2], [0, 4]]
    rollouts = [
        records.Rollout(f"{i}", "t", "g", [records.Sequence([1], [False])] * len(n), reward=0.0, outcome="done")
        for i, n in enumerate(lengths)
    ]
    sizes = [size for each in lengths for size in each]
    torch.manual_seed(0)
    ours, theirs = ([-torch.rand(size) for size in sizes] for _ in range(2))
    penalties, mean = kl_penalties_of(batch_from(rollouts), ours, theirs, kind, 0.25)
    assert [[len(part) for part in each] for each in penalties] == lengths
    expected = []
    for own, reference in zip(torch.cat(ours).tolist(), torch.cat(theirs).tolist(), strict=True):
        log_ratio = own - reference
        expected.append({"k1": log_ratio, "k2": log_ratio**2 / 2, "k3": math.exp(-log_ratio) - 1 + log_ratio}[kind])
    found = torch.cat([part for each in penalties for part in each])
    assert found.tolist() == pytest.approx([0.25 * value for value in expected], abs=1e-7)
    assert mean == pytest.approx(sum(expected) / len(expected), abs=1e-7)


def test_shaping_of_rewards_by_length():
    batch = batch_of([1.0, 1.0, 1.0, 0.0], 4, [10, 9, 5, 10])
    credit = credit_of(batch, kind="dapo", scale_rewards="none")
    # A fifth of 10 tokens: 9 are half over it, 10 wholly.
    shaped = [0.0, 0.5, 1.0, -1.0]
    assert credit.advantages == pytest.approx([reward - 0.125 for reward in shaped])
    assert credit.metrics["reward/overlong"] == pytest.approx(-2.5 / 4)
    short = credit_of(batch, scale_rewards="none", length_penalty=0.2, reward_threshold=1.0)
    shaped = [1 - 0.1, 1 + 0.2 * (0.5 - 4 / 5), 1 + 0.1, -0.1]
    mean = sum(shaped) / 4
    assert short.advantages == pytest.approx([reward - mean for reward in shaped])


def test_thinking_beyond_its_budget_costs_reward():
    batch = batch_of([1.0, 1.0, 1.0, 0.0], 4, [10] * 4)
    for rollout, num_thinking in zip(batch.rollouts, (2, 6, 10, 0), strict=True):
        rollout.num_thinking = num_thinking
    config = {"scale_rewards": "none", "thinking_penalty": 0.4}
    credit = credit_of(batch, **config, thinking_budget=2)
    shaped = [1.0, 0.8, 0.6, 0.0]
    assert credit.advantages == pytest.approx([reward - 0.6 for reward in shaped])
    assert credit.metrics["reward/thinking"] == pytest.approx(-0.15)
    assert "reward/thinking" not in credit_of(batch, **config, thinking_budget=10).metrics


def test_a_turn_is_judged_by_itself_not_the_conversation():
    batch = batch_of([1.0, 0.0], 2, [3, 3])
    batch.rollouts[0].sequences = [records.Sequence([1] * 21, [False] + ([True] * 8 + [False] * 2) * 2)]
    credit = credit_of(batch, kind="dapo")
    assert credit.metrics["reward/overlong"] == 0.0


def test_only_the_best_carry_loss_and_all_make_the_baseline():
    batch = batch_of([0.0, 1.0, 3.0, 2.0], 4)
    credit = credit_of(batch, scale_rewards="none", best_of=2)
    assert credit.advantages == [0.0, 0.0, 1.5, 0.5]
    assert credit.carries_loss == [False, False, True, True]


def test_truncated_ones_that_are_not_trained_on_make_the_baseline_only():
    batch = batch_of([0.0, 1.0, 3.0, 2.0], 4)
    batch.rollouts[2].outcome = "truncated"
    settings = {"scale_rewards": "none", "train_on_truncated": False}
    credit = credit_of(batch, **settings)
    assert [credit.of(place) for place in (1, 2)] == [
        {"advantage": -0.5, "carries_loss": True}, {"advantage": 0.0, "carries_loss": False},
    ]  # fmt: skip
    assert credit_of(batch, best_of=2, **settings).carries_loss == [False] * 3 + [True]
    batch.rollouts = [episode("a", reward, [1.0, 0.0], [2, 1]) for reward in (0.0, 1.0, 3.0)]
    batch.rollouts[2].outcome = "truncated"
    by_turn = credit_of(batch, credit="turn", **settings)
    assert by_turn.carries_loss == [True, True, False]
    assert [any(rollout.sequences[0].values("advantages")) for rollout in batch.rollouts] == by_turn.carries_loss


def test_failed_rollouts_have_no_part_in_it():
    batch = batch_of([0.0, 1.0, 9.0, 9.0], 2)
    batch.rollouts[2].outcome = batch.rollouts[3].outcome = "reward_error"
    credit = credit_of(batch, [[], [], [torch.ones(5)], [torch.ones(5)]], kind="reinforce_pp")
    assert credit.carries_loss == [True, True, False, False]
    assert credit.advantages[2:] == [0.0, 0.0]
    assert credit.advantages[0] == -credit.advantages[1] != 0.0


def test_rewards_that_are_not_numbers_are_refused():
    with pytest.raises(TrainingError, match="not finite"):
        credit_of(batch_of([math.nan, 1.0], 2))


def test_groups_that_agree_still_teach_against_the_batch():
    batch = batch_of([1.0, 1.0, 0.0, 0.0], 2)
    assert not credit_of(batch).has_signal
    credit = credit_of(batch, kind="reinforce_pp")
    assert credit.has_signal
    assert credit.metrics["reward/signal_fraction"] == 0.0


def episode(group, reward, turn_rewards, sizes, mask_before=2):
    """One sequence: before each turn two tokens that are not sampled, then the turn's `sizes`."""
    mask, spans = [], []
    for size in sizes:
        mask += [False] * mask_before + [True] * size
        spans.append(records.TurnSpan(0, len(mask) - size, len(mask)))
    sequences = [records.Sequence([1] * len(mask), mask)]
    total = reward + sum(turn_rewards)
    return records.Rollout(
        "r", "t", group, sequences, total, "done", turn_spans=spans, turn_rewards=turn_rewards, num_turns=len(sizes)
    )


def test_turns_get_the_credit_of_what_follows_them():
    """Against returns and group means written out by hand."""
    group = [
        episode("g", 1.0, [0.5, 0.0], [2, 1]),
        episode("g", 0.0, [0.0, 2.0], [1, 3]),
        episode("g", 0.0, [1.0], [2]),
    ]
    batch = batch_from(group)
    credit = credit_of(batch, scale_rewards="none", credit="turn")
    first, second = (1.5 + 2.0 + 1.0) / 3, (1.0 + 2.0) / 2
    values = [rollout.sequences[0].values("advantages") for rollout in group]
    assert values[0] == pytest.approx([1.5 - first, 1.5 - first, 1.0 - second])
    assert values[1] == pytest.approx([2.0 - first, *[2.0 - second] * 3])
    assert values[2] == pytest.approx([1.0 - first] * 2)
    assert credit.has_signal
    assert credit.carries_loss == [True] * 3


def test_turn_rewards_and_the_setting_must_agree():
    given = batch_from([episode("g", 1.0, [0.5], [1]), episode("g", 0.0, [0.0], [1])])
    with pytest.raises(TrainingError, match=r'set algorithm.credit = "turn", or "episode"'):
        credit_of(given)
    whole = credit_of(given, credit="episode", scale_rewards="none")
    assert whole.advantages == [0.75, -0.75]
    with pytest.raises(TrainingError, match="the environment rewards no turns"):
        credit_of(batch_of([1.0, 0.0], 2, [1, 1]), credit="turn")


def test_where_a_turns_reward_lies_among_the_sampled_tokens():
    rollout = episode("g", 1.0, [0.5, 0.25], [2, 3])
    rollout.sequences.insert(0, records.Sequence([1, 1], [False, True]))
    rollout.turn_spans = [records.TurnSpan(0, 1, 2), *(records.TurnSpan(1, s.start, s.end) for s in rollout.turn_spans)]
    rollout.turn_rewards = [0.125, 0.5, 0.25]
    assert list(turn_ends(rollout)) == [(0, 0.125), (2, 0.5), (5, 0.25)]
    rollout.turn_spans.insert(1, records.TurnSpan(1, 2, 2))
    rollout.turn_rewards = [0.125, 1.0, 0.5, 0.25]
    ends = [(0, 0.125), (0, 1.0), (2, 0.5), (5, 0.25)]
    assert list(turn_ends(rollout)) == ends, "a turn without a token ends with the one before"
    rollout.turn_spans = [rollout.turn_spans[i] for i in (1, 2, 3, 0)]
    assert list(turn_ends(rollout)) == [(1, 1.0), (4, 0.5), (5, 0.25)], "in the order of sampling"
    rollout.turn_rewards = []
    assert list(turn_ends(rollout)) == [(1, 0.0), (4, 0.0), (5, 0.0)]


def test_under_turn_credit_a_kl_term_alone_is_no_signal_and_samples_show_no_advantage_of_the_whole():
    same = [episode("g", 1.0, [0.5], [2]), episode("g", 1.0, [0.5], [2])]
    batch = batch_from(same)
    penalties = [[torch.ones(2, dtype=torch.float64)], [torch.zeros(2, dtype=torch.float64)]]
    credit = credit_of(batch, penalties, kind="reinforce_pp", credit="turn")
    assert not credit.has_signal
    first, second = (rollout.sequences[0].values("advantages") for rollout in same)
    assert first[-1] == -second[-1] != 0.0
    assert credit.of(0) == {"carries_loss": True}


def test_metrics_are_those_of_the_terms_that_are_set():
    """A threshold alone shapes nothing by length, nor does a buffer of 0; differences are kept in float64."""
    batch = batch_of([1.0, 1.0 + 1e-9], 2, [3, 3])
    credit = credit_of(batch, scale_rewards="none")
    assert credit.metrics == {"reward/signal_fraction": 1.0}
    assert credit.has_signal
    assert credit.advantages == pytest.approx([-5e-10, 5e-10])
    assert credit.of(1) == {"advantage": credit.advantages[1], "carries_loss": True}
    right = credit_of(batch, reward_threshold=1.0)
    assert right.metrics == {"reward/signal_fraction": 0.0}
    longest = credit_of(batch, kind="dapo")
    assert longest.metrics == {"reward/signal_fraction": 1.0, "reward/overlong": 0.0}
    no_budget = credit_of(batch, thinking_budget=9)
    assert no_budget.metrics.keys() == {"reward/signal_fraction", "reward/thinking"}


def test_sequences_without_a_sampled_token_have_no_length():
    batch = batch_of([1.0, 0.0, 1.0], 3, [0, 10, 3])
    batch.rollouts[2].sequences.clear()
    credit = credit_of(batch, kind="dapo", overlong_penalty=0.5)
    assert credit.metrics["reward/overlong"] == pytest.approx(-0.5 / 3)


def test_a_batch_of_failures_is_refused():
    batch = batch_of([1.0, 0.0, 1.0], 3)
    for rollout in batch.rollouts:
        rollout.outcome = "engine_error"
    batch.dropped["reward_error"] = 2
    told = r"no rollout of step 0 can be trained on \(2 by reward_error, 3 by engine_error\): read the errors"
    with pytest.raises(TrainingError, match=told):
        credit_of(batch)


def test_a_teacher_is_a_signal_where_rewards_agree():
    batch = batch_of([1.0, 1.0], 2, [2, 2])
    assert not credit_of(batch).has_signal
    batch.rollouts[1].sequences[0].put("teacher_logprobs", [0.0, -1.0, -1.0])
    assert credit_of(batch).has_signal


def test_penalties_of_failed_rollouts_are_passed_over():
    batch = batch_of([9.0, 1.0, 0.0], 3, [1, 2, 2])
    batch.rollouts[0].outcome = "reward_error"
    penalties = [[torch.full((1,), 100.0)], [torch.tensor([0.25, 0.25])], [torch.tensor([0.0, 0.25])]]
    credit = credit_of(batch, penalties, scale_rewards="none")
    assert credit.advantages == [0.0, 0.125 * 3, -0.125 * 3]


def test_the_kl_of_a_batch_without_tokens_is_zero():
    assert kl_penalties_of(batch_of([1.0], 1), [], [], "k1", 0.5) == ([[]], 0.0)


def test_turns_of_rollouts_that_carry_no_loss_get_no_credit_and_each_sequence_its_own():
    group = [episode("g", 2.0, [0.5, 0.5], [2, 1]), episode("g", 0.0, [0.0, 0.0], [1, 1])]
    # The first one's second turn lies in a sequence of its own, with a token before it.
    group[0].sequences = [
        records.Sequence([1] * 4, [False, False, True, True]),
        records.Sequence([1] * 2, [False, True]),
    ]
    group[0].turn_spans = [records.TurnSpan(0, 2, 4), records.TurnSpan(1, 1, 2)]
    penalties = [[torch.tensor([0.25, 0.25]), torch.tensor([0.5])], [torch.zeros(2)]]
    credit = credit_of(batch_from(group), penalties, scale_rewards="none", credit="turn", best_of=1)
    # Returns are 3 - 1 and 2.5 - 0.5 against 0 and 0.
    assert [each.values("advantages") for each in group[0].sequences] == [[1.0, 1.0], [1.0]]
    assert group[1].sequences[0].values("advantages") == [0.0] * 2
    assert credit.carries_loss == [True, False]
    assert credit.has_signal
    assert credit.advantages == [None, None]


def test_returns_of_turns_that_are_no_numbers_are_refused():
    """The whole rewards are, and equal."""
    group = [episode("g", 0.0, [math.inf], [1]), episode("g", 0.0, [0.0], [1])]
    for rollout in group:
        rollout.reward = 1.0
    group[0].turn_rewards, group[1].turn_rewards = [math.inf, 0.0], [0.0, 0.0]
    for rollout in group:
        rollout.turn_spans = [*rollout.turn_spans, rollout.turn_spans[0]]
    with pytest.raises(TrainingError, match="not finite"):
        credit_of(batch_from(group), scale_rewards="none", credit="turn")


def test_what_a_kl_term_takes_away_is_no_signal_any_more():
    """Rewards that differ as much as the penalties: nothing is left to train on."""
    penalties = [[torch.tensor([1.0, 0.0])], [torch.zeros(2)]]
    batch = batch_of([1.0, 0.0], 2, [2, 2])
    credit = credit_of(batch, penalties, scale_rewards="none")
    assert (credit.advantages, credit.has_signal) == ([0.0, 0.0], False)
    group = [episode("g", 0.0, [1.0], [2]), episode("g", 0.0, [0.0], [2])]
    credit = credit_of(batch_from(group), penalties, scale_rewards="none", credit="turn")
    assert not credit.has_signal
