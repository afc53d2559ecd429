import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.algo.balancing import pack, pack_evenly, split


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(1, 60))
def test_every_sequence_once_and_no_row_too_long(lengths, max_tokens):
    rows = pack(lengths, max_tokens)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    for row in rows:
        assert sum(lengths[index] for index in row) <= max_tokens or len(row) == 1
    assert rows == pack(lengths, max_tokens)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=60))
def test_no_two_rows_would_fit_into_one(lengths):
    totals = sorted(sum(lengths[index] for index in row) for row in pack(lengths, 20))
    assert len(totals) == 1 or totals[0] + totals[1] > 20


def test_by_value():
    assert pack([3, 9, 1, 5], 6) == [[1], [3, 2], [0]]
    assert pack([], 10) == []
    with pytest.raises(ValueError, match="max_tokens is 0"):
        pack([1], 0)


@given(st.integers(1, 100), st.integers(1, 100))
def test_split_is_contiguous_and_even(num_items, parts):
    if parts > num_items:
        with pytest.raises(ValueError, match="cannot be split"):
            split(num_items, parts)
        return
    ranges = split(num_items, parts)
    assert [index for part in ranges for index in part] == list(range(num_items))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 60), st.integers(1, 5))
def test_rows_for_several_processes_hold_every_sequence_once_and_are_even(lengths, max_tokens, parts):
    passes = pack_evenly(lengths, max_tokens, parts)
    assert all(len(row) == parts for row in passes)
    held = [index for row in passes for part in row for index in part]
    assert sorted(held) == list(range(len(lengths)))
    longest = max(lengths, default=0)
    assert len(passes) <= max(1, -(-len(lengths) // parts)), "nobody computes for nothing while others could"
    for row in passes:
        loads = [sum(lengths[index] for index in part) for part in row]
        assert all(load <= max_tokens or len(part) == 1 for load, part in zip(loads, row, strict=True))
    # The emptiest was always next: no two processes are further apart, in all, than one sequence for each pass.
    totals = [sum(lengths[index] for row in passes for index in row[part]) for part in range(parts)]
    assert max(totals) - min(totals) <= longest * len(passes)


def test_the_process_with_the_most_tokens_in_one_pass_has_the_fewest_in_the_next():
    assert pack_evenly([8, 7, 6, 5, 4, 3], 8, 2) == [[[0], [1]], [[3], [2]], [[4], [5]]]


def test_the_longest_goes_first_and_a_micro_batch_may_be_full():
    assert pack_evenly([1, 1, 1, 3], 3, 2) == [[[3], [0, 1, 2]]]


def test_four_processes_share_a_batch_evenly():
    lengths = [100 + 7 * (number % 13) for number in range(256)]
    passes = pack_evenly(lengths, 4096, 4)
    for row in passes:
        loads = [sum(lengths[index] for index in part) for part in row]
        assert max(loads) - min(loads) < 0.01 * max(loads)
    with pytest.raises(ValueError, match="parts is 0"):
        pack_evenly([1], 10, 0)
