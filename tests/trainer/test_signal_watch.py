"""When a run is told, while it goes on, that it has nothing to learn from."""

import pytest

from slipstream.config import RunConfig
from slipstream.plan.decided import planned_config
from slipstream.records import Rollout, Sequence
from slipstream.trainer.signal_watch import QUIET, STEPS, SignalWatch

CONFIG = {"model": {"path": "m"}, "environment": {"name": "reasoning_gym/spell_backward"}, "training": {"steps": 9}}


@pytest.fixture
def watch():
    def make(kind="grpo", *, has_terms=False, **values):
        config = RunConfig.model_validate(CONFIG | {"algorithm": {"kind": kind}} | values)
        return SignalWatch(planned_config(config), has_terms=has_terms)

    return make


def said(watch, signal, entropy, reward=0.3):
    """How often each step says something, over series of numbers."""
    rows = zip(signal, entropy, strict=True)
    found = []
    for part, nats in rows:
        row = {"reward/mean": reward, "reward/signal_fraction": part}
        found.append(watch.observe(row if nats is None else row | {"train/entropy": nats}))
    return found


def rollouts(*groups):
    sequence = Sequence([1, 2], [False, True])
    return [
        Rollout(f"{g}.{i}", f"t{g}", f"g{g}", [sequence], reward, "done", completion=f"{g} {i}")
        for g, rewards in enumerate(groups)
        for i, reward in enumerate(rewards)
    ]


def test_the_first_batch_is_judged_where_groups_are_compared(watch):
    mixed, none = rollouts((1.0, 0.0), (0.0, 0.0)), rollouts((0.0, 0.0), (0.0, 0.0))
    assert watch().judge_first(mixed).verdict == "ready for RL"
    assert watch().judge_first(none).verdict == "more SFT first"
    partial = rollouts((0.6, 0.2), (0.2, 0.0))
    assert "no reward reaches evaluation.threshold" in watch().judge_first(partial).text
    assert "pass@1 25 %" in watch(evaluation={"threshold": 0.5}).judge_first(partial).text
    assert watch().judge_first([]) is None
    for kind, values in (("reinforce_pp", {}), ("dapo", {}), ("sft", {}), ("distill", {"teacher": {"path": "t"}})):
        assert watch(kind, **values).judge_first(none) is None
    assert watch(has_terms=True).judge_first(none) is None
    assert not any(said(watch(has_terms=True), [0.0] * 9, [None] * 9))


def test_no_signal_for_several_steps_is_said_once_and_summed_up_after_a_while(watch):
    """However often the condition ends and begins again."""
    found = said(watch(), [0.9, 0.0, 0.05, 0.0, *([0.5, 0.0, 0.0, 0.0] * 50)], [0.5] * 204)
    steps = [step for step, texts in enumerate(found) if texts]
    assert (STEPS, QUIET) == (3, 50)
    assert steps[0] == 3
    assert QUIET <= steps[1] - steps[0] < QUIET + 4
    assert 2 * QUIET <= steps[2] - steps[1] < 2 * QUIET + 4
    assert len(steps) == 3
    assert "in 3 of the last 4 steps" in found[3][0]
    assert f"of the last {steps[2] - steps[1]} steps" in found[steps[2]][0]


def test_a_full_context_is_named_where_it_is_the_cause(watch):
    row = {"reward/mean": 0.0, "reward/signal_fraction": 0.0, "rollout/stop_context_full_fraction": 0.6}
    one = watch()
    (text,) = [text for _ in range(STEPS) for text in one.observe(row)]
    assert "inference.max_model_len" in text


def test_turns_whose_returns_differ_are_a_signal_where_their_sums_agree(watch):
    """Two turns that earn (1, 0) or (0, 1)."""
    group = rollouts((1.0, 1.0), (1.0, 1.0))
    for number, rollout in enumerate(group):
        rollout.turn_rewards = [1.0, 0.0] if number % 2 else [0.0, 1.0]
    assert watch(algorithm={"kind": "grpo", "credit": "turn"}).judge_first(group).verdict != "more SFT first"
    assert (
        watch(algorithm={"kind": "grpo", "credit": "turn"}, evaluation={"threshold": 2.0}).judge_first(group).is_ready
    )


def test_a_collapse_of_the_entropy_is_said(watch):
    found = said(watch(), [0.5] * 7, [0.5, 0.65, 0.3, 0.06, 0.05, 0.04, 0.04])
    assert [len(texts) for texts in found] == [0, 0, 0, 0, 0, 1, 0]
    assert "from 0.65 to 0.04" in found[5][0]


def test_a_batch_that_was_skipped_has_no_entropy(watch):
    assert [len(texts) for texts in said(watch(), [0.0] * 4, [None] * 4)] == [0, 0, 1, 0]


@pytest.mark.parametrize("evaluation", [{}, {"evaluation": {"threshold": 0.5}}])
def test_a_run_that_has_solved_its_tasks_is_left_alone(watch, evaluation):
    reward = 0.45 if evaluation else 0.9
    assert said(watch(**evaluation), [0.05] * 6, [0.6, 0.5, 0.01, 0.01, 0.01, 0.01], reward) == [[]] * 6


def test_nothing_is_said_of_sft(watch):
    assert watch("sft").observe({"train/entropy": 0.0}) == []
    assert watch("sft").observe({"reward/mean": 0.0, "reward/signal_fraction": 0.0}) == []


def test_groups_are_left_alone_where_nothing_is_compared_within_them(watch):
    assert said(watch("reinforce_pp"), [0.0] * 6, [0.5] * 6) == [[]] * 6
    assert said(watch("distill", teacher={"path": "t"}), [0.0] * 6, [0.5, 0.5, 0.0, 0.0, 0.0, 0.0]) == [[]] * 6


def test_at_its_limits_nothing_is_said(watch):
    """A tenth of the groups, a tenth of the highest entropy; what is solved is so from four fifths on."""
    assert said(watch(), [0.1] * 4, [0.5] * 4) == [[]] * 4
    assert said(watch(), [0.5] * 5, [0.5, 0.05, 0.05, 0.05, 0.05]) == [[]] * 5
    assert said(watch(), [0.0] * 4, [0.5] * 4, reward=0.8) == [[]] * 4
    found = said(watch(), [0.0] * 3, [0.5] * 3, reward=0.79)
    assert [len(texts) for texts in found] == [0, 0, 1]
    assert "in 3 of the last 3 steps" in found[2][0]
    assert "(mean reward 0.79)" in found[2][0]


def test_a_batch_that_does_not_say_how_many_groups_differ_has_all(watch):
    one = watch()
    assert said(one, [0.0] * 2, [0.5] * 2) == [[], []]
    assert one.observe({"reward/mean": 0.3, "train/entropy": 0.5}) == []
    assert said(one, [0.0] * 2, [0.5] * 2) == [[], []]
    assert len(said(one, [0.0], [0.5])[0]) == 1


def test_both_are_said_at_once_and_rows_without_rewards_are_passed_over(watch):
    one = watch()
    said(one, [0.0] * 2, [0.5, 0.01])
    assert one.observe({"train/entropy": 0.01}) == []
    assert said(one, [0.0, 0.0], [0.01, 0.01])[1][0].startswith("the policy's entropy fell from 0.5 to 0.01 nats")


def test_a_threshold_of_the_rewards_decides_which_groups_differ(watch):
    partial = rollouts((0.6, 0.2), (0.7, 0.5))
    settings = {"evaluation": {"threshold": 0.5}}
    assert watch(**settings).judge_first(partial).verdict == "ready for RL"
    one = watch(algorithm={"kind": "grpo", "arguments": {"reward_threshold": 0.1}}, **settings)
    assert one.judge_first(partial).verdict != "ready for RL"
    refilled = watch(algorithm={"kind": "grpo", "max_refills": 2})
    assert refilled.judge_first(partial) is None
    left_out = watch(algorithm={"kind": "grpo", "advantage": "leave_one_out"})
    assert left_out.judge_first(partial) is not None
