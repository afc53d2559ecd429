"""Slots: no group too old, every group once, capacity returns, whatever the order in which groups finish."""

import pytest

from slipstream.orchestrator.batches.slots import Slots


def slots(*, size=2, staleness=1, steps=10, further=0):
    return Slots(size, staleness, 0, steps, further)


def begin(made, *numbers):
    for number in numbers:
        made.begin(number)


def finish(made, *numbers):
    for number in numbers:
        made.finish(number)


def test_without_staleness_a_batch_is_its_own_groups():
    made = slots(staleness=0)
    begin(made, 0, 1)
    assert made.num_free == 0
    made.finish(1)
    assert made.cut() is None
    made.finish(0)
    assert made.cut() == [0, 1]
    assert made.num_free == 0
    made.release(1)
    assert made.num_free == 2


def test_the_first_finished_make_the_batch_also_where_all_may_wait():
    made = slots(staleness=2)
    begin(made, 0, 1, 2, 3)
    finish(made, 3, 1, 0)
    assert (made.cut(), made.num_ready, made.num_running) == ([1, 3], 1, 1)


def test_a_batch_waits_for_a_group_that_the_next_one_could_not_take():
    made = slots()
    begin(made, 0, 1, 2, 3)
    finish(made, 2, 3)
    assert made.cut() == [2, 3]
    made.release(1)
    begin(made, 4, 5)
    finish(made, 4, 5)
    assert made.cut() is None  # 0 and 1 began under version 0: step 1 is their last
    made.finish(0)
    assert made.cut() is None
    made.finish(1)
    assert made.cut() == [0, 1]


def test_several_groups_that_no_later_batch_has_room_for_are_taken_ahead():
    made = slots(staleness=2)
    begin(made, 0, 1, 2, 3, 4, 5)
    finish(made, 0, 1)
    assert made.cut() == [0, 1]
    made.release(1)
    begin(made, 6, 7)
    finish(made, 6, 7, 2)
    assert made.cut() is None  # four of version 0 are left for two batches
    made.finish(3)
    assert made.cut() == [2, 3]


def test_with_further_slots_a_batch_does_not_wait_for_the_last_group():
    made = slots(further=1)
    assert made.num_free == 5
    begin(made, 0, 1, 2, 3, 4)
    finish(made, 1, 2)
    assert made.cut() == [1, 2]
    assert made.surplus == []
    made.release(1)
    begin(made, 5, 6)
    finish(made, 5, 6)
    assert made.cut() is None  # of 0, 3 and 4, which began under version 0, two must be in the batch of step 1
    made.finish(4)
    assert made.cut() is None
    made.finish(3)
    assert (made.cut(), made.surplus) == ([3, 4], [0])
    assert (made.num_running, made.num_ready, made.num_free) == (0, 2, 1)


def after_a_batch():
    """With one further slot: 2, 3 and 4, of version 0, run on under version 1."""
    made = slots(further=1)
    begin(made, 0, 1, 2, 3, 4)
    finish(made, 0, 1)
    assert made.cut() == [0, 1]
    made.release(1)
    return made


def test_a_surplus_group_that_has_finished_is_taken_before_one_that_may_wait():
    made = after_a_batch()
    begin(made, 5, 6)
    finish(made, 5, 2, 3, 4)
    assert (made.cut(), made.surplus) == ([2, 3], [4]), "a batch has room for two, and 4 would be too old for the next"
    assert made.num_ready == 1


def test_room_in_a_batch_is_for_what_would_be_surplus_before_what_finished_earlier():
    made = after_a_batch()
    made.drop(4)
    begin(made, 5)
    finish(made, 5, 2, 3)
    assert (made.cut(), made.surplus, made.num_ready) == ([2, 3], [], 1)


def test_the_last_batch_leaves_nothing_running():
    made = slots(staleness=0, steps=1, further=2)
    begin(made, 0, 1, 2, 3)
    finish(made, 3, 1)
    assert (made.cut(), made.surplus, made.num_free) == ([1, 3], [0, 2], 0)


def test_no_more_groups_begin_than_the_last_batch_needs():
    made = slots(staleness=3, steps=2)
    assert made.num_free == 4
    begin(made, 0, 1, 2, 3)
    made.drop(2)
    assert made.num_free == 1
    begin(made, 4)
    finish(made, 0, 1)
    assert made.cut() == [0, 1]
    assert made.num_free == 0
    made.drop(3)
    assert made.num_free == 1
    assert slots(size=1, staleness=0, steps=1).num_free == 1


def test_a_group_needs_a_slot():
    made = slots(staleness=0)
    begin(made, 0, 1)
    with pytest.raises(ValueError, match="no slot is free for group 2"):
        made.begin(2)


def test_groups_that_an_earlier_attempt_began_are_used_as_far_as_they_are_in_time():
    """As when groups without signal gave their slots to others of the same version: more than batches can take."""
    slots = Slots(3, staleness=1, first=0, num_steps=3)
    for number in range(6):
        assert slots.is_in_time(0)
        slots.begin(number, 0)
        slots.finish(number)
    assert slots.cut() == [0, 1, 2]
    slots.release(1)
    assert not slots.is_in_time(0)
    assert slots.is_in_time(1)
    begin(slots, 6, 7, 8)
    finish(slots, 6, 7, 8)
    assert (slots.cut(), slots.cut()) == ([3, 4, 5], [6, 7, 8])


@pytest.mark.parametrize(("staleness", "further", "most"), [(1, 0, 2), (1, 1, 3), (2, 0, 4), (2, 3, 7)])
def test_batches_have_room_for_so_many_groups_of_an_earlier_attempt(staleness, further, most):
    """Of the version before the one that a resumed run began with."""
    made = Slots(2, staleness, 1, 9, further)
    for number in range(most):
        assert made.is_in_time(0)
        made.begin(number, 0)
    assert not made.is_in_time(0)
    assert made.is_in_time(1)
