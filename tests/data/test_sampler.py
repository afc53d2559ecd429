import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.data.sampler import DataOrder
from slipstream.errors import ConfigError


@given(num=st.integers(1, 40), seed=st.integers(-5, 5), sizes=st.lists(st.integers(0, 60), max_size=8))
def test_however_it_is_cut_the_order_is_one_and_every_epoch_is_whole(num, seed, sizes):
    order = DataOrder(num, seed)
    starts = itertools.accumulate(sizes, initial=0)
    taken = [item for start, size in zip(starts, sizes, strict=False) for item in order.at(start, size)]
    assert taken == DataOrder(num, seed).at(0, sum(sizes))
    for epoch in range(sum(sizes) // num):
        assert sorted(taken[epoch * num : (epoch + 1) * num]) == list(range(num))


@given(num=st.integers(1, 40), first=st.integers(0, 100), then=st.integers(0, 60))
def test_any_position_is_known_without_those_before(num, first, then):
    assert DataOrder(num, 3).at(first, then) == DataOrder(num, 3).at(0, first + then)[first:]


def test_epochs_and_seeds_differ():
    order = DataOrder(50, 0)
    first, second = order.at(0, 50), order.at(50, 50)
    assert first != second
    assert first != DataOrder(50, 1).at(0, 50)
    assert first != list(range(50))


def test_no_items_are_refused():
    with pytest.raises(ConfigError, match="0 items"):
        DataOrder(0, 0)


@given(st.integers(1, 60), st.integers(1, 12), st.integers(0, 30), st.integers(1, 5), st.integers(0, 3))
def test_refills_are_new_items_as_long_as_there_are_any(num_items, size, step, number, seed):
    order = DataOrder(num_items, seed)
    offered = [*order.at(step * size, size), *(i for n in range(1, number) for i in order.refill(step, size, n))]
    drawn = order.refill(step, size, number)
    assert len(drawn) == len(set(drawn)) == min(size, num_items)
    left = num_items - len(set(offered))
    assert len(set(drawn) - set(offered)) == min(size, left)
    # Whoever comes back knows it at once, and the epochs go on as they would have.
    assert DataOrder(num_items, seed).refill(step, size, number) == drawn
    assert order.at(step * size + size, size) == DataOrder(num_items, seed).at(step * size + size, size)


def test_refills_depend_on_seed_step_and_number():
    order = DataOrder(10_000, 0)
    several = [tuple(order.refill(step, 20, number)) for step in range(3) for number in (1, 2)]
    assert len({*several, tuple(DataOrder(10_000, 1).refill(0, 20, 1))}) == 7
