"""Groups of sequences that begin alike."""

from itertools import takewhile

from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.algo.prefixes import common_prefix, prefix_groups

sequences = st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=6)


def agreed(rows):
    """Length of the rows' common prefix, token by token."""
    return len(list(takewhile(lambda column: len(set(column)) == 1, zip(*rows, strict=False))))


def saved(sequences, groups):
    return sum((len(group) - 1) * agreed([sequences[i] for i in group]) for group in groups)


def partitions(items):
    if not items:
        yield []
        return
    first, *others = items
    for rest in partitions(others):
        yield [[first], *rest]
        for place in range(len(rest)):
            yield [*rest[:place], [first, *rest[place]], *rest[place + 1 :]]


@given(sequences)
@settings(max_examples=300)
def test_what_is_saved_is_near_the_most_that_any_partition_saves(sequences):
    groups = prefix_groups(sequences)
    assert sorted(index for group in groups for index in group) == list(range(len(sequences)))
    best = max(saved(sequences, each) for each in partitions(list(range(len(sequences)))))
    assert saved(sequences, groups) >= 0.8 * best


@given(st.lists(st.integers(0, 1), max_size=20), st.lists(st.integers(0, 1), max_size=20))
def test_a_common_prefix_is_that_token_by_token(one, other):
    assert common_prefix(one, other) == agreed([one, other])


def test_rows_of_one_instruction_are_one_group_and_others_are_not():
    rows = [[*range(50), number, number + 1] for number in range(60, 200)]
    groups = prefix_groups([*rows, [7, 8], [9]])
    assert sorted(map(len, groups)) == [1, 1, 140]
    two = [[*range(50), number] for number in range(60, 80)] + [[*range(100, 130), number] for number in range(80)]
    assert sorted(map(len, prefix_groups(two))) == [20, 80]


def test_thousands_of_rows_that_nest_need_no_recursion():
    rows = [[1] * length for length in range(3000)]
    assert sum(map(len, prefix_groups(rows))) == 3000
    assert prefix_groups([]) == []
