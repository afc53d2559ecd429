import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.data.order import DataOrder
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
