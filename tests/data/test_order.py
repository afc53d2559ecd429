import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.data.order import DataOrder
from slipstream.errors import ConfigError


@given(num=st.integers(1, 40), seed=st.integers(-5, 5), sizes=st.lists(st.integers(0, 60), max_size=8))
def test_however_it_is_cut_the_order_is_one_and_every_epoch_is_whole(num, seed, sizes):
    order = DataOrder(num, seed)
    taken = [item for size in sizes for item in order.take(size)]
    assert taken == DataOrder(num, seed).take(sum(sizes))
    assert order.position == sum(sizes)
    assert order.num_epochs == sum(sizes) // num
    for epoch in range(order.num_epochs):
        assert sorted(taken[epoch * num : (epoch + 1) * num]) == list(range(num))


@given(num=st.integers(1, 40), first=st.integers(0, 100), then=st.integers(0, 60))
def test_it_resumes_from_its_position(num, first, then):
    order = DataOrder(num, 3)
    order.take(first)
    resumed = DataOrder.from_state(order.state(), num, 3)
    assert order.at(first, then) == resumed.take(then) == order.take(then)


def test_epochs_and_seeds_differ():
    order = DataOrder(50, 0)
    first, second = order.take(50), order.take(50)
    assert first != second
    assert first != DataOrder(50, 1).take(50)
    assert first != list(range(50))


def test_other_data_or_another_seed_is_refused():
    state = DataOrder(5, 0).state()
    with pytest.raises(ConfigError, match="items = 5, now it is 6"):
        DataOrder.from_state(state, 6, 0)
    with pytest.raises(ConfigError, match="seed = 0, now it is 1"):
        DataOrder.from_state(state, 5, 1)
    with pytest.raises(ConfigError, match="0 items"):
        DataOrder(0, 0)
