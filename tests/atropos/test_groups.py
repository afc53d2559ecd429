"""Groups of Atropos become rollouts, or are refused with a reason; and what training makes of them."""

import pytest

from slipstream.atropos.groups import Refused, Terms, rollouts_of
from slipstream.atropos.protocol import ScoredData
from slipstream.config.recipes import resolved
from slipstream.config.schema import RLConfig
from slipstream.records import Batch, TurnSpan, Version
from slipstream.trainer.credit_assignment import assign_credit
from slipstream.trainer.packing import make_step_batches, micro_batches

TERMS = Terms(max_tokens=6, vocab_size=100, temperature=1.0, needs_logprobs=True, decode=lambda ids: f"{list(ids)}")
TOKENS = [[1, 2, 3, 4, 5], [1, 2, 9]]
GROUP = {
    "tokens": TOKENS,
    "masks": [[-100, 2, -100, 4, 5], [-100, -100, 9]],
    "scores": [1.0, 0.0],
    "inference_logprobs": [[1.0, -0.2, 1.0, -0.4, -0.5], [1.0, 1.0, 0.0]],
}


def rollouts(terms=TERMS, **changes):
    return rollouts_of(ScoredData(**GROUP | changes), terms, "letter_0")


def test_a_group_becomes_rollouts():
    first, second = rollouts(messages=[[{"role": "user", "content": "say 1"}], []])
    assert [each.token_ids for each in (*first.sequences, *second.sequences)] == TOKENS
    assert first.sequences[0].mask == [False, True, False, True, True]
    assert first.sequences[0].logprobs == [0.0, -0.2, 0.0, -0.4, -0.5]
    assert first.turn_spans == [TurnSpan(0, 1, 2), TurnSpan(0, 3, 5)]
    assert (first.reward, first.outcome, first.num_turns, first.source) == (1.0, "done", 2, "letter_0")
    assert (first.prompt, first.completion) == ("say 1", "[2][4, 5]")
    assert (second.prompt, second.completion) == ("[1, 2]", "[9]")
    assert "advantages" not in first.sequences[0].streams


def test_advantages_and_overrides():
    first, second = rollouts(
        advantages=[[1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 2.0, 3.0]], overrides=[{}, {"set_advantage_to_zero": True}]
    )
    assert first.sequences[0].values("advantages") == [2.0, 4.0, 5.0]
    assert not any(second.sequences[0].values("advantages"))


def test_absent_fields_come_as_empty_lists():
    """As the default `collect_trajectories` of atroposlib sends them."""
    empty = {name: [] for name in ("advantages", "ref_logprobs", "messages", "overrides", "images")}
    assert len(rollouts(**empty, group_overrides={}, generation_params={"temperature": 1})) == 2
    without = Terms(6, 100, 1.0, needs_logprobs=False)
    assert rollouts(without, inference_logprobs=None)[0].sequences[0].logprobs is None


def test_a_teacher_from_outside():
    terms = Terms(6, 100, 1.0, needs_logprobs=True, needs_teacher=True)
    ids = [[[token, 7] for token in own] for own in TOKENS]
    values = [[[-0.1 * token, -9.0] for token in own] for own in TOKENS]
    first, _ = rollouts(terms, distill_token_ids=ids, distill_logprobs=values)
    assert first.sequences[0].values("teacher_logprobs") == pytest.approx([-0.2, -0.4, -0.5])
    ids[0][3] = [8, 7]
    for changes in ({}, {"distill_token_ids": ids, "distill_logprobs": values}):
        with pytest.raises(Refused) as refused:
            rollouts(terms, **changes)
        assert refused.value.reason == "no_teacher"


def test_nothing_to_train_on_is_no_failure():
    first, second = rollouts(masks=[[-100] * 5, [1, -100, -100]])
    assert (first.outcome, second.outcome) == ("no_tokens", "no_tokens"), "nothing comes before a first token"


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("shape", {"tokens": [], "masks": [], "scores": []}),
        ("shape", {"scores": [1.0]}),
        ("shape", {"scores": [1.0, float("nan")]}),
        ("shape", {"masks": [[-100] * 4, [-100] * 3]}),
        ("shape", {"advantages": [[1.0] * 5, [1.0] * 2]}),
        ("shape", {"advantages": [[float("inf")] * 5, [1.0] * 3]}),
        ("shape", {"overrides": [{}]}),
        ("shape", {"tokens": [[1, 100, 3, 4, 5], [1, 2, 9]]}),
        ("shape", {"tokens": [[1, 2, 3, 4, 5], [-1, 2, 9]]}),
        ("too_long", {"tokens": [[1] * 7, [1, 2, 9]], "masks": [[-100] * 7, [-100] * 3], "inference_logprobs": []}),
        ("too_long", {"tokens": [[], [1, 2, 9]], "masks": [[], [-100] * 3], "inference_logprobs": []}),
        ("labels", {"masks": [[-100, 1, -100, 4, 5], [-100, -100, 9]]}),
        ("no_logprobs", {"inference_logprobs": None}),
        ("no_logprobs", {"inference_logprobs": [[1.0] * 5, [1.0, 1.0, -0.1]]}),
        ("shape", {"inference_logprobs": [[1.0, float("-inf"), 1.0, -0.1, -0.1], [1.0, 1.0, -0.1]]}),
        ("temperature", {"generation_params": {"temperature": 0.7}}),
        ("temperature", {"group_overrides": {"temperature": 0.7}}),
        ("temperature", {"overrides": [{}, {"temperature": 0.7}]}),
        ("images", {"images": ["x"]}),
    ],
)
def test_refusals(reason, changes):
    with pytest.raises(Refused) as refused:
        rollouts(**changes)
    assert refused.value.reason == reason


def test_token_advantages_are_trained_on_and_zeros_are_not():
    """Also where scores alone would teach nothing."""
    made = rollouts(scores=[1.0, 1.0], advantages=[[0.5] * 5, [-0.5] * 3], overrides=[{}, {"set_advantage_to_zero": 1}])
    for rollout in made:
        rollout.group_id = "0.0"
    batch = Batch(0, Version(0, 0), made)
    credit = assign_credit(batch, resolved(RLConfig(kind="grpo")), max_tokens=6)
    assert credit.has_signal
    (step,) = make_step_batches(batch, credit.advantages, updates_per_batch=1, carries_loss=credit.carries_loss)
    rows = list(micro_batches(step, 100, packing=False))
    assert [row.streams["advantages"].tolist() for row in rows] == [[0.5] * 3, [0.0]]
    for rollout in made:
        rollout.sequences[0].streams.clear()
    assert not assign_credit(batch, resolved(RLConfig(kind="grpo")), max_tokens=6).has_signal
