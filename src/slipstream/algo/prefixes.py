"""Groups of token sequences with a common beginning, to compute each group's common prefix once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class _Group:
    """Sequences with `length` tokens in common."""

    length: int
    members: list[int]

    @property
    def saved(self) -> int:
        """Repeated tokens, not computed again."""
        return (len(self.members) - 1) * self.length


@dataclass
class _Interval:
    """Neighbours in sorted order with `length` tokens in common: groups of them, and the ones in no group yet."""

    length: int
    groups: list[_Group] = field(default_factory=list[_Group])
    single: list[int] = field(default_factory=list[int])

    def add(self, part: _Interval) -> None:
        """Add another part of the interval."""
        self.groups += part.groups
        self.single += part.single

    def merge(self) -> None:
        """Make one group of the single ones and of all groups with less saved by themselves than as a part of it."""
        merged, kept = _Group(self.length, self.single), list[_Group]()
        for group in self.groups:
            if len(group.members) * self.length > group.saved:
                merged.members = merged.members + group.members
            else:
                kept.append(group)
        if len(merged.members) > 1 and self.length:
            self.groups, self.single = [*kept, merged], []


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning of two sequences, in tokens."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def prefix_groups(sequences: Sequence[list[int]]) -> list[list[int]]:
    """Partition `sequences`, for a large sum over groups of `(size - 1) * common prefix`; returns indices.

    Goes bottom-up through the tree of common prefixes of the sorted sequences (Abouelhoda et al., J. Discrete
    Algorithms 2, 2004), and at each node merges the groups below it if this saves more.
    """
    order = sorted(range(len(sequences)), key=lambda index: sequences[index])
    open_: list[_Interval] = []
    last = _Interval(0)
    for place, index in enumerate(order):
        is_end = place + 1 == len(order)
        common = -1 if is_end else common_prefix(sequences[index], sequences[order[place + 1]])
        last = _Interval(0, single=[index])
        while open_ and open_[-1].length > common:
            open_[-1].add(last)
            last = open_.pop()
            last.merge()
        if open_ and open_[-1].length == common:
            open_[-1].add(last)
        elif not is_end:
            open_.append(_Interval(common, last.groups, last.single))
    return [*(group.members for group in last.groups), *([index] for index in last.single)]
