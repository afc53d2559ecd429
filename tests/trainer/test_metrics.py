"""What a batch's rows say of its rollouts: nothing is left out uncounted."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.trainer.credit import batch_from

from slipstream import records
from slipstream.envs.base import Score
from slipstream.envs.rewards.contract import NotApplicable, Reward
from slipstream.envs.rewards.functions import _as_verl_score
from slipstream.envs.rewards.rubric import Part, WeightedParts
from slipstream.errors import TrainingError
from slipstream.trainer.batch_trainer import BatchTrainer
from slipstream.trainer.metrics import (
    any_cut,
    logprob_differences,
    prompt_of,
    rollout_metrics,
    skipped_batch,
    worst_engine_mean,
)


def batch_of(*metrics):
    rollouts = [
        records.Rollout(f"{i}", "task", "group", [], reward=1.0, outcome="done", metrics=each)
        for i, each in enumerate(metrics)
    ]
    return batch_from(rollouts, dropped={"reward_error": 2})


def test_metrics_that_are_no_finite_numbers_are_counted_and_the_others_averaged():
    found = rollout_metrics(batch_of({"a": 1.0, "b": math.nan}, {"a": math.inf, "b": 4.0}, {"a": 3.0}))
    assert (found["reward/a"], found["reward/b"], found["reward/non_finite"]) == (2.0, 4.0, 2.0)
    assert found["dropped/reward_error"] == 2.0


@pytest.mark.parametrize("name", ["mean", "std", "min", "max", "signal_fraction", "drawn_mean"])
def test_a_rewards_number_with_the_name_of_a_runs_metric_is_kept_beside_it(name):
    found = rollout_metrics(batch_of({name: 7.0}, {name: 9.0}))
    assert found["reward/own/" + name] == 8.0
    assert found.get("reward/" + name) not in (7.0, 8.0, 9.0)


def test_where_all_are_numbers_there_is_nothing_to_count():
    assert "reward/non_finite" not in rollout_metrics(batch_of({"a": 1.0}))


def test_those_that_a_reward_function_of_verl_gave_are_counted_too():
    score = _as_verl_score({"score": 1.0, "acc": math.nan, "other": math.inf, "good": 2.0, "text": "nan"})
    assert score.metrics == {"good": 2.0, "non_finite": 2.0}
    found = rollout_metrics(batch_of(score.metrics, {"good": 4.0}, score.metrics))
    assert (found["reward/good"], found["reward/non_finite"]) == (8 / 3, 4.0)
    part = rollout_metrics(batch_of({"a": 1.0, "a/non_finite": 2.0}, {"a": 1.0, "non_finite": 1.0}, {"a": 1.0}))
    assert (part["reward/non_finite"], "reward/a/non_finite" in part) == (3.0, False)


NUMBERS = st.lists(st.tuples(st.sampled_from(["graded", "abstained", "another task"]), st.booleans()), min_size=1)


@given(NUMBERS)
def test_a_flag_is_a_share_of_the_rollouts_that_it_could_be_raised_for(kinds):
    rows = []
    for kind, is_open in kinds:
        row = {"unclosed_thinking": 1.0} if is_open else {}
        if kind == "graded":
            row |= {"sums": 0.5, "sums/unclosed_thinking": 1.0} if is_open else {"sums": 2.0}
        rows.append(row | ({"sums/not_applicable": 1.0} if kind == "abstained" else {}))
    found = rollout_metrics(batch_of(*rows))
    num = {kind: sum(each == kind for each, _ in kinds) for kind in ("graded", "abstained")}
    num_open = sum(is_open for _, is_open in kinds)
    of_sums = [is_open for kind, is_open in kinds if kind == "graded"]
    seen = num["graded"] + num["abstained"]
    assert found.get("reward/unclosed_thinking", 0.0) == num_open / len(kinds)
    assert found.get("reward/sums/not_applicable", 0.0) == (num["abstained"] / seen if seen else 0.0)
    assert found.get("reward/sums/unclosed_thinking", 0.0) == (sum(of_sums) / seen if seen else 0.0)
    if of_sums:
        assert found["reward/sums"] == pytest.approx(sum(0.5 if each else 2.0 for each in of_sums) / len(of_sums))


def test_the_parts_of_a_rubric_that_abstain_for_half_of_the_rows_say_so():
    def half(kind):
        def reward(task, completion):
            if task.info["kind"] != kind:
                raise NotApplicable("another kind")
            return Score(1.0)

        found = Reward()
        found.name, found.__class__ = kind, type(kind, (Reward,), {"__call__": staticmethod(reward)})
        return Part(found)

    rubric = WeightedParts([half("sum"), half("word")])
    tasks = [records.Task(f"{n}", [], info={"kind": "sum" if n < 7 else "word"}) for n in range(16)]
    found = rollout_metrics(batch_of(*(rubric(task, "").metrics for task in tasks)))
    assert (found["reward/sum/not_applicable"], found["reward/word/not_applicable"]) == (9 / 16, 7 / 16)
    assert found["reward/sum"] == found["reward/word"] == 1.0


def test_the_staleness_of_each_task_is_over_its_tokens():
    def of(source, *spans):
        sequence = records.Sequence([1] * 4, [True] * 4, versions=[records.VersionSpan(*span) for span in spans])
        return records.Rollout("r", "t", "g", [sequence], reward=1.0, outcome="done", source=source)

    rollouts = [of("a", (0, "0.7")), of("b", (0, "0.5"), (1, "0.6")), of("b", (0, "0.7"))]
    counts = {f"task/{name}/{key}": 1.0 for name in "ab" for key in ("drawn_groups", "signal_groups")}
    found = rollout_metrics(records.Batch(7, records.Version(0, 7), rollouts, metrics=counts))
    assert (found["task/a/staleness"], found["task/b/staleness"]) == (0.0, 5 / 8)


def test_what_only_some_optimizer_steps_of_a_batch_measure_is_averaged_over_those():
    first = {"a": 1.0, "train/overflows": 1.0, "memory/trainer_peak_gib": 2.0}
    second = {"a": 3.0, "train/overflows": 2.0, "memory/trainer_peak_gib": 4.0}
    rows = iter([(first, True), ({**second, "mismatch/at_position_64": 5.0}, True), ({"a": 9.0}, False)])
    training = SimpleNamespace(updates_per_batch=3, epochs_per_batch=1)
    trainer = SimpleNamespace(
        config=SimpleNamespace(training=training),
        on_optimizer_steps=lambda number: None,
        optimizer_step=lambda step, number, may_be_zero: next(rows),
    )
    found = BatchTrainer.optimizer_steps(trainer, [(0, None), (1, None), (2, None)], 0)
    peak = {"memory/trainer_peak_gib": 4.0}
    assert found == ({"a": 2.0, "train/overflows": 3.0, "mismatch/at_position_64": 5.0} | peak, 1)


def rollout(group, reward, size=1, outcome="done", **fields):
    sequence = records.Sequence([1] * (size + 1), [False] + [True] * size)
    return records.Rollout("r", "t", group, [sequence], reward=reward, outcome=outcome, **fields)


def test_rewards_lengths_and_outcomes_of_what_is_trained_on():
    rollouts = [
        rollout("g", 1.0, 1, stop="answer"),
        rollout("g", 0.0, 4, "truncated", stop="answer"),
        rollout("g", 2.0, 4),
        rollout("g", 9.0, 9, "reward_error"),
    ]
    found = rollout_metrics(batch_from(rollouts))
    assert found == {
        "reward/mean": 1.0,
        "reward/std": pytest.approx((2 / 3) ** 0.5),
        "reward/min": 0.0,
        "reward/max": 2.0,
        "rollout/length": 3.0,
        "rollout/length_max": 4.0,
        "rollout/truncated_fraction": pytest.approx(1 / 3),
        "rollout/stop_answer_fraction": pytest.approx(2 / 3),
        "rollout/num": 3.0,
        "tokens/trained": 9.0,
    }
    nothing = batch_from(rollouts[3:], dropped={"too_long": 3})
    assert rollout_metrics(nothing) == {"dropped/too_long": 3.0}


def test_turns_thinking_and_why_episodes_ended_are_told_where_there_is_something_to_tell():
    def of(*rollouts):
        return rollout_metrics(batch_from(rollouts))

    found = of(rollout("g", 1.0, stop="answer", num_turns=2), rollout("g", 1.0, stop="max_turns", num_thinking=5))
    assert (found["rollout/turns"], found["rollout/thinking_length"]) == (1.5, 2.5)
    assert (found["rollout/stop_answer_fraction"], found["rollout/stop_max_turns_fraction"]) == (0.5, 0.5)
    assert of(rollout("g", 1.0, stop="max_turns"), rollout("g", 1.0))["rollout/stop_max_turns_fraction"] == 0.5
    both = of(rollout("g", 1.0, stop="answer"), rollout("g", 1.0, stop="length"))
    assert (both["rollout/stop_answer_fraction"], both["rollout/stop_length_fraction"]) == (0.5, 0.5)
    plain = of(rollout("g", 1.0, stop="length"), rollout("g", 1.0, stop="length"))
    assert not any(name.startswith(("rollout/turns", "rollout/thinking")) for name in plain)
    assert plain["rollout/stop_length_fraction"] == 1.0


def test_each_task_of_which_groups_were_drawn_has_its_own_numbers():
    rollouts = [
        rollout("h", 0.0, 4, source="b"),
        rollout("g", 1.0, 2, source="a"),
        rollout("g", 0.5, 4, "truncated", source="a"),
        rollout("g", 0.75, 6, source="a"),
    ]
    counts = {"task/a/drawn_groups": 4.0, "task/a/signal_groups": 1.0, "task/b/drawn_groups": 0.0}
    found = rollout_metrics(batch_from(rollouts, metrics=counts))
    assert {name: value for name, value in found.items() if name.startswith("task/")} == {
        "task/a/reward_mean": 0.75,
        "task/a/signal_fraction": 0.25,
        "task/a/length": 4.0,
        "task/a/truncated_fraction": pytest.approx(1 / 3),
        "task/a/tokens_fraction": 0.75,
    }, "its sequences name no versions"
    for size, fraction in ((0, 0.0), (1, 1.0)):
        alone = rollout("g", 1.0, size, source="a")
        found = rollout_metrics(batch_from([alone], metrics=counts))
        assert found["task/a/tokens_fraction"] == fraction


@pytest.mark.parametrize(
    ("metrics", "is_cut"),
    [
        ({"loss": 1.0}, False),
        ({"clip_fraction": 0.0, "importance_capped_fraction": 0.0, "importance_weight": 1.0}, False),
        ({"clip_fraction": 0.0, "clip_fraction_low": 0.25}, True),
        ({"importance_capped_fraction": 0.5}, True),
        ({"importance_weight": 0.0}, True),
    ],
)
def test_what_clipping_and_importance_sampling_took_is_seen(metrics, is_cut):
    assert any_cut(metrics) == is_cut


def test_tokens_of_a_skipped_batch_are_not_trained_on():
    batch = batch_from([rollout("g", 1.0, 3), rollout("g", 1.0, 2), rollout("h", 0.0, 2)])
    assert skipped_batch(batch, rollout_metrics(batch)) == {
        "tokens/trained": 0.0,
        "dropped/skipped": 3.0,
        "dropped_groups/skipped": 2.0,
        "dropped_tokens/skipped": 7.0,
    }
    assert skipped_batch(batch, {"reward/mean": 7.0}) == {}


def test_the_mean_of_the_worst_engine_is_over_its_tokens():
    assert worst_engine_mean([[1.0], [2.0, 3.0], [0.0], [4.0, 4.0, 1.0], [9.0]], 2) == 4.5
    assert worst_engine_mean([[4.0], [2.0, 3.0], [0.0], [4.0, 4.0, 0.0]], 2) == 3.0
    assert math.isnan(worst_engine_mean([[1.0], [math.nan], [5.0]], 3))
    assert worst_engine_mean([[1.0], [3.0]], 1) == 2.0


def test_a_prompt_ends_before_the_first_sampled_token():
    assert prompt_of(records.Sequence([5, 6, 7, 8], [False, False, True, False])) == [5, 6]
    assert prompt_of(records.Sequence([5, 6], [False, False])) == [5, 6]


def test_log_probabilities_are_compared_where_tokens_were_sampled():
    probe = records.Sequence([1, 2, 3, 4], [False, True, False, True], [0.0, -1.0, 0.0, -0.25])
    assert logprob_differences(probe, torch.tensor([-0.5, -0.5])) == [0.5, 0.25]
    with pytest.raises(TrainingError, match="came without log-probabilities"):
        logprob_differences(records.Sequence([1, 2], [False, True]), torch.tensor([-0.5]))
