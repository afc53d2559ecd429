"""Dynamic sampling against a scripted engine."""

from functools import partial

import pytest
from benchmarks.scripted_engine import ScriptedEngine
from hypothesis import given
from hypothesis import strategies as st

from slipstream.algo.readiness import group_has_signal
from slipstream.envs import Task
from slipstream.errors import EnvironmentFault
from slipstream.orchestrator.batches.dynamic_sampling import MAX_TASKS, Refills, choose, task_counts
from slipstream.records import Message, Rollout, TurnSpan, Version
from tests.orchestrator.test_orchestrator import END, Odd, Watching, make_batcher


def task(letter):
    return Task(letter, (Message("user", letter),), "b", {"data_source": letter})


class Worth(Odd):
    """A text is worth its letter: b is 1, c is 0.9, x raises, all others are 0."""

    def reward(self, task, completion):
        return {"b": 1.0, "c": 0.9}[completion] if completion in "bc" else super().reward(task, completion)


def answer(prompt, seed):
    """u: right or wrong, as chance has it. d: right, or nearly. Others say their own letter."""
    letter = chr(prompt[-1])
    said = {"u": "ab"[seed % 2], "d": "bc"[seed % 2]}.get(letter, letter)
    return [ord(said), END]


async def make(first, refills, max_refills=9, threshold=None, group_size=8, max_failures=0.5):
    """The batch whose tasks are the letters `first`, and the tasks that each round began."""
    progress = Watching()
    offered = [[task(letter) for letter in letters] for letters in refills]
    has_signal = partial(group_has_signal, reward_threshold=threshold)
    refills = Refills(lambda step, number: offered[number - 1], max_refills, has_signal)
    how = {"group_size": group_size, "max_reward_failures": max_failures, "refills": refills, "progress": progress}
    batcher = make_batcher(ScriptedEngine(answer), Worth(), **how)
    batch = await batcher.make(3, Version(0, 3), [task(letter) for letter in first])
    return batch, [num_rollouts // group_size for _, num_rollouts in progress.told]


@pytest.mark.parametrize(
    ("episodes", "by_sums", "by_turns"),
    [
        ([(1.0, [1.0, 0.0]), (1.0, [0.0, 1.0])], False, True),  # the second turns earned 0 and 1
        ([(1.0, [1.0]), (1.0, [1.0])], False, False),
        ([(1.5, [1.0, 0.0]), (1.0, [1.0])], True, True),
        ([(1.0, []), (1.0, [1.0, 0.0])], False, True),
    ],
)
def test_under_turn_credit_a_group_has_signal_where_a_turns_returns_differ(episodes, by_sums, by_turns):
    group = [
        Rollout("r", "t", "g", [], sum_, "done", turn_rewards=turns, turn_spans=[TurnSpan(0, 0, 1)] * 2)
        for sum_, turns in episodes
    ]
    assert [group_has_signal(group, by_turns=by) for by in (False, True)] == [by_sums, by_turns]
    assert Refills(lambda step, number: [], 1).has_signal(group) == by_sums


async def test_groups_without_signal_are_drawn_again():
    batch, begun = await make("buab", ["bubu", "uuuu"])
    # One of four has signal: three more want twelve, and a round has four; then one more of three in eight.
    assert begun == [4, 3]
    assert [r.group_id for r in batch.rollouts[::8]] == ["3.1", "3.5", "3.7", "3.8"]
    assert all(r.task_id == "u" for r in batch.rollouts)
    assert len({r.id for r in batch.rollouts}) == len(batch.rollouts) == 32
    assert batch.dropped == {"no_signal": 5 * 8, "surplus": 2 * 8}
    assert {name: batch.metrics[name] for name in batch.metrics if name.startswith("rollout/")} == {
        "rollout/refills": 2.0,
        "rollout/drawn_groups": 11.0,
        "rollout/refilled_groups": 3.0,
        "rollout/groups": 4.0,
    }
    assert 0.4 < batch.metrics["reward/drawn_mean"] < 0.8
    counts = {name: batch.metrics[name] for name in batch.metrics if name.endswith(("drawn_groups", "signal_groups"))}
    assert {name: value for name, value in counts.items() if name.startswith("task/")} == {
        "task/u/drawn_groups": 6.0, "task/u/signal_groups": 6.0,
        "task/b/drawn_groups": 4.0, "task/b/signal_groups": 0.0,
        "task/a/drawn_groups": 1.0, "task/a/signal_groups": 0.0,
    }, "of those that were dropped, too"  # fmt: skip


async def test_it_is_the_same_again_and_seeds_differ_between_rounds():
    batches = [(await make("buab", ["bubu", "uuuu"]))[0] for _ in range(2)]
    first, second = ([(r.id, r.task_id, r.sequences, r.reward) for r in batch.rollouts] for batch in batches)
    assert first == second
    said = ["".join(r.completion for r in batches[0].rollouts[i : i + 8]) for i in range(0, 32, 8)]
    assert len(set(said)) > 1


async def test_a_batch_that_has_enough_draws_nothing_and_one_round_may_be_all():
    batch, begun = await make("uuuu", [])
    assert (begun, batch.dropped) == ([], {})
    assert batch.metrics["rollout/refills"] == 0.0
    batch, begun = await make("ubbb", ["bbbb", "uuuu"], max_refills=1)
    assert begun == [4]
    assert [r.group_id for r in batch.rollouts[::8]] == ["3.0"]
    assert batch.metrics["rollout/groups"] == 1.0


async def test_without_any_signal_the_batchs_own_groups_stay_for_the_trainer_to_see():
    batch, begun = await make("bbaa", ["bbbb", "aaaa"], max_refills=2)
    assert begun == [4, 4]
    assert [r.task_id for r in batch.rollouts[::8]] == list("bbaa")
    assert batch.dropped == {"no_signal": 64}


async def test_right_or_wrong_decides_where_there_is_a_threshold():
    with_parts, _ = await make("dddd", [])
    assert len(with_parts.rollouts) == 32
    batch, begun = await make("dddd", ["uuuu"], threshold=0.5)
    assert begun == [4]
    assert {r.task_id for r in batch.rollouts} == {"u"}


async def test_failures_are_counted_and_too_many_end_it_in_any_round():
    batch, _ = await make("uuux", ["uuuu"])
    assert batch.dropped["reward_error"] == 8
    with pytest.raises(EnvironmentFault, match="of step 3 failed"):
        await make("uubb", ["xxxx"], max_failures=0.0)


@given(st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=2, max_size=4), min_size=1, max_size=12),
       st.integers(1, 8))  # fmt: skip
def test_every_rollout_is_in_the_batch_or_counted(rewards, size):
    groups = [
        [Rollout(f"{i}.{j}", "t", f"{i}", [], reward=reward, outcome="done") for j, reward in enumerate(group)]
        for i, group in enumerate(rewards)
    ]
    refills = Refills(lambda step, number: [], 9)
    choice = choose(refills, groups, size, 1)
    assert 1 <= len(choice.groups) <= size
    assert len(choice.groups) + len(choice.reasons) == len(groups)
    numbers = [int(group[0].group_id) for group in choice.groups]
    assert numbers == sorted(numbers)
    part = choose(refills, groups, size, 1, may_be_empty=True)
    assert all(map(refills.has_signal, part.groups)), "of a part nothing else is in the batch"
    assert len(part.groups) + len(part.reasons) == len(groups)
    some = any(map(refills.has_signal, groups))
    assert all(map(refills.has_signal, choice.groups)) or not some
    wanted = refills.num_wanted(groups, size)
    assert 0 <= wanted <= size
    assert (wanted == 0) == (sum(map(refills.has_signal, groups)) >= size)


def test_a_refill_right_after_the_batchs_own_groups_is_one():
    def group(name, *rewards):
        return [Rollout(f"{name}.{n}", "t", name, [], reward, "done") for n, reward in enumerate(rewards)]

    refills = Refills(lambda step, number: [], 9)
    choice = choose(refills, [group("0", 1.0), group("1", 0.0, 1.0)], 1, 1)
    assert [each[0].group_id for each in choice.groups] == ["1"]
    assert choice.reasons == {"0": "no_signal"}
    assert choice.metrics["rollout/refilled_groups"] == 1
    own = choose(refills, [group("0", 0.0, 1.0), group("1", 0.0, 1.0)], 1, 1)
    assert (own.metrics["rollout/refilled_groups"], own.reasons) == (0, {"1": "surplus"})


def rollouts(source, *outcomes):
    return [
        Rollout(f"{source}.{n}", "t", source, [], 0.0, outcome, source=source) for n, outcome in enumerate(outcomes)
    ]


def test_groups_are_counted_by_task_whether_they_are_trained_on_or_not():
    groups = [
        rollouts("", "done"),
        rollouts("sums", "done", "done"),
        rollouts("sums", "done", "reward_error", "truncated"),
        rollouts("words/a", "engine_error", "cancelled"),
        rollouts("", "done"),
    ]
    assert task_counts(groups, lambda group: len(group) == 3) == {
        "task/sums/drawn_groups": 2, "task/sums/signal_groups": 1, "task/sums/dropped": 1,
        "task/words/a/drawn_groups": 1, "task/words/a/signal_groups": 0, "task/words/a/dropped": 2,
    }  # fmt: skip
    many = [rollouts(f"s{n}", "done") for n in range(MAX_TASKS + 3)]
    crowded = task_counts([*many, *many], lambda group: True)
    assert (crowded["task/left_out"], crowded["task/s0/drawn_groups"]) == (3, 2)
    assert task_counts(many[:MAX_TASKS] * 2, lambda group: True)["task/s0/drawn_groups"] == 2


def test_all_groups_of_a_mixtures_parts_are_counted_for_its_curriculum():
    """The first part has as many sources as there are metrics of their own; the second one comes after them."""
    groups = [rollouts(f"first/s{n}", "done") for n in range(MAX_TASKS + 2)]
    groups += [rollouts("second", "done"), rollouts("second/a", "reward_error"), rollouts("second/b", "done")]
    found = task_counts(groups, lambda group: group[0].source != "second/b", ["first", "second"])
    assert found["task/left_out"] == 5

    def total(part, key):
        return sum(n for name, n in found.items() if name.startswith(f"task/{part}/") and name.endswith(f"/{key}"))

    assert [total(part, "drawn_groups") for part in ("first", "second")] == [MAX_TASKS + 2, 3]
    assert [total(part, "signal_groups") for part in ("first", "second")] == [MAX_TASKS + 2, 2]
    assert total("second", "dropped") == 1
    assert len({name.rpartition("/")[0] for name in found}) <= MAX_TASKS + 3
