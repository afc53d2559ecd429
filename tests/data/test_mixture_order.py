"""The order of a mixture's tasks: frequencies, epochs, refills, and what a curriculum changes."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.config import RunConfig
from slipstream.data.curriculum import FLOOR, Curriculum, MixtureCurriculum
from slipstream.data.draws import Draws
from slipstream.data.mixture_order import MixtureOrder, Weights
from slipstream.orchestrator.batches.slots import Slots
from slipstream.plan.decided import planned_config
from slipstream.records import Batch, Version

SIZES = (40, 7, 300)


def p_value(observed, expected=None):
    """Of Pearson's chi-square test."""
    expected = expected or [sum(observed) / len(observed)] * len(observed)
    statistic = sum((seen - due) ** 2 / due for seen, due in zip(observed, expected, strict=True))
    half = torch.tensor([(len(observed) - 1) / 2, statistic / 2], dtype=torch.float64)
    return torch.special.gammaincc(*half).item()


def order(weights=(3.0, 1.0, 6.0), sizes=SIZES, size=16, seed=0):
    part_of_item = [part for part, number in enumerate(sizes) for _ in range(number)]
    return MixtureOrder(part_of_item, Weights(weights), size, seed), part_of_item


def test_parts_are_drawn_by_weight():
    made, part_of_item = order()
    drawn = Counter(part_of_item[item] for step in range(500) for item in made.at(step))
    expected = [500 * 16 * weight / 10 for weight in (3, 1, 6)]
    assert p_value([drawn[part] for part in range(3)], expected) > 0.01
    refilled = Counter(part_of_item[item] for step in range(500) for item in made.refill(step, 1))
    assert p_value([refilled[part] for part in range(3)], expected) > 0.01


def test_over_many_seeds_the_frequencies_are_those_of_independent_draws():
    """Neither further from the weights than chance nor nearer: the p-values of 200 seeds are uniform."""
    found = []
    for seed in range(200):
        made, part_of_item = order(seed=seed)
        drawn = Counter(part_of_item[item] for step in range(20) for item in made.at(step))
        found.append(p_value([drawn[part] for part in range(3)], [96, 32, 192]))
    assert p_value([sum(low <= p < low + 0.25 for p in found) for low in (0, 0.25, 0.5, 0.75)]) > 0.01


@given(seed=st.integers(0, 1000), steps=st.integers(1, 40), sizes=st.lists(st.integers(1, 30), min_size=1, max_size=4))
@settings(max_examples=40, deadline=None)
def test_each_part_goes_through_its_items_epoch_by_epoch(seed, steps, sizes):
    made, part_of_item = order([1.0] * len(sizes), sizes, size=8, seed=seed)
    drawn = [item for step in range(steps) for item in made.at(step)]
    for part, number in enumerate(sizes):
        own = [item for item in drawn if part_of_item[item] == part]
        for start in range(0, len(own), number):
            epoch = own[start : start + number]
            assert len(set(epoch)) == len(epoch), "an item came twice in an epoch"
        assert made.epochs(steps)[part] == len(own) / number
    again, _ = order([1.0] * len(sizes), sizes, size=8, seed=seed)
    step = steps - 1  # asked for first
    assert again.at(step) == drawn[8 * step :]


@given(step=st.integers(0, 20), number=st.integers(1, 3), sizes=st.lists(st.integers(1, 60), min_size=1, max_size=3))
@settings(max_examples=40, deadline=None)
def test_refills_are_fresh_while_their_part_has_others(step, number, sizes):
    made, part_of_item = order([1.0] * len(sizes), sizes, size=8)
    before = Counter(made.at(step))
    for refill in range(1, number):
        before.update(made.refill(step, refill))
    refilled = made.refill(step, number)
    assert len(refilled) == 8
    for item, times in Counter(refilled).items():
        part = part_of_item[item]
        left = {other for other in range(len(part_of_item)) if part_of_item[other] == part} - set(before)
        if times > 1 or item in before:
            assert left <= set(refilled), "an item that was used comes again, and another one was never used"
    assert made.refill(step, number) == refilled


def test_other_weights_change_no_step_before_them():
    plain, _ = order()
    changed, part_of_item = order()
    first = [plain.at(step) for step in range(6)]
    changed.change(4, (0.0001, 0.0001, 1.0))
    assert [changed.at(step) for step in range(4)] == first[:4]
    assert {part_of_item[item] for step in range(4, 8) for item in changed.at(step)} == {2}
    with pytest.raises(ValueError, match="step 7 was drawn"):
        changed.change(7, (1.0, 1.0, 1.0))
    changed.change(9, (1.0, 1.0, 1.0))
    with pytest.raises(ValueError, match="after those from step 9"):
        changed.change(9, (1.0, 1.0, 2.0))


def test_a_curriculum_draws_less_of_what_has_no_signal():
    curriculum = Curriculum((2.0, 1.0, 1.0))
    for step in range(60):
        curriculum.follow({0: 1.0, 1: 0.5, 2: 0.0}, step + 1)
    weights = curriculum.weights.at(1000)
    shares = [2.0, 0.5, FLOOR]
    assert weights == pytest.approx([share / sum(shares) for share in shares], abs=0.01)
    assert curriculum.weights.at(0) == (2.0, 1.0, 1.0), "the first batches are drawn by what is set"
    assert len(curriculum.weights.changes) < 60, "what hardly differs is no change"
    loaded = Curriculum((2.0, 1.0, 1.0))
    loaded.load(curriculum.state())
    for step in range(100, 110):
        assert loaded.follow({2: 1.0}, step) == curriculum.follow({2: 1.0}, step)
    assert loaded.state() == curriculum.state()
    with pytest.raises(ValueError, match="3 parts, and there are 2"):
        Curriculum((1.0, 1.0)).load(curriculum.state())


def test_a_part_of_which_nothing_was_drawn_keeps_its_weight():
    curriculum = Curriculum((1.0, 1.0))
    assert curriculum.follow({0: 0.0}, 1)
    low, high = curriculum.weights.at(1)
    assert high / low == pytest.approx(1 / FLOOR, rel=1e-3)


@given(staleness=st.integers(0, 3), refills=st.integers(0, 2), choose=st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_no_weight_changes_for_a_step_of_which_a_group_may_have_begun(staleness, refills, choose):
    """A generating side with real slots that is as far ahead as they let it be, and a trainer behind it."""
    size, num_steps = 3, 12
    config = planned_config(
        RunConfig.model_validate(
            {
                "model": {"path": "m"},
                "environment": {"name": "mixture", "curriculum": "adaptive", "mixture": {"a": {"name": "x"}}},
                "algorithm": {"kind": "grpo", "max_refills": refills},
                "training": {
                    "steps": num_steps, "prompts_per_batch": size, "staleness": staleness, "order": "ready",
                },
            }
        )
    )  # fmt: skip
    curriculum, draws = MixtureCurriculum(config), Draws()
    slots, begun, running, made, silent = Slots(size, staleness, 0, num_steps), -1, [], [], []
    for trained in range(num_steps):
        while not made or choose.random() < 0.7:
            while slots.num_free and slots.step < num_steps:
                begun += 1
                slots.begin(begun)
                running.append(begun)
            if not running:
                break
            number = running.pop(choose.randrange(len(running)))
            if choose.random() < 0.6 and len(silent) < refills * size:
                silent.append(number)
                slots.drop(number)
            else:
                slots.finish(number)
            while slots.step < num_steps and (numbers := slots.cut()) is not None:
                made.append([*numbers, *silent])
                silent = []
        batch = Batch(trained, Version(0, trained), [])
        draws.use(sorted(made.pop(0)))
        first = curriculum._first_unseen(trained + 1, draws)
        assert begun < first * size
        assert curriculum.observe(batch, trained + 1, draws) is None, "nothing was counted"
        slots.release(trained + 1)
