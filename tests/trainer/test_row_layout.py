"""The layouts of a row that kernels take: what each token sees, by a plain list of it, and when a mask is needed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.trainer.attention.row_layout import segment_layout

FAMILIES = st.lists(st.tuples(st.integers(1, 40), st.lists(st.integers(1, 30), max_size=3)), min_size=1, max_size=4)
"""A segment and its continuations."""


def as_segments(families):
    """Lengths, prefixes, and for each token of the row those of its sequence up to itself."""
    lengths, prefixes, before = [], [], []
    for shared, sizes in families:
        prefix = len(lengths)
        for number, size in enumerate((shared, *sizes)):
            start = sum(lengths)
            first = list(range(sum(lengths[:prefix]), sum(lengths[:prefix]) + shared)) if number else []
            before += [first + list(range(start, start + place + 1)) for place in range(size)]
            lengths.append(size)
            prefixes.append(prefix if number else None)
    return lengths, prefixes, before


def seen_by(layout, window):
    """For each token the keys that its mask leaves it."""
    seen = {}
    for bucket, mask in zip(layout.padded.buckets, layout.masks(window, torch.float32), strict=True):
        num_blocks, num_keys = bucket.keys_BJ.shape
        if mask is None:
            mask = torch.full((num_keys, num_keys), -torch.inf).triu(1)[None, None]
        assert set(mask.unique().tolist()) <= {0.0, -torch.inf}
        visible = (mask == 0).expand(num_blocks, 1, -1, -1)[:, 0]
        for block, query in bucket.real_BQ.nonzero().tolist():
            seen[int(bucket.queries_BQ[block, query])] = sorted(bucket.keys_BJ[block, visible[block, query]].tolist())
    return [seen[token] for token in range(len(seen))]


@given(FAMILIES, st.integers(0, 50), st.data())
def test_a_token_sees_its_sequence_its_window_and_its_image(families, window, data):
    lengths, prefixes, before = as_segments(families)
    blocks, start = [], 0
    for length in lengths:
        if data.draw(st.booleans()):
            first = data.draw(st.integers(0, length - 1))
            blocks.append((start + first, start + data.draw(st.integers(first + 1, length))))
        start += length
    layout = segment_layout(lengths, prefixes=prefixes, blocks=blocks)
    expected = []
    for token, sequence in enumerate(before):
        near = sequence[-window:]
        later = [key for first, end in blocks if first <= token < end for key in range(token + 1, end)]
        expected.append(sorted(near + later))
    assert seen_by(layout, window) == expected
    ragged = layout.ragged
    keys = torch.arange(sum(lengths)) if ragged.keys is None else ragged.keys.index
    for start, end, end_of_keys in zip(ragged.query_ends, ragged.query_ends[1:], ragged.key_ends[1:], strict=False):
        # Aligned at the end: the last query sees all, the one before it all but the last.
        for token in range(start, end):
            last = int(end_of_keys) - (int(end) - 1 - token)
            assert keys[last - len(before[token]) : last].tolist() == before[token]
    assert ragged.key_ends.diff().tolist() == [len(before[end - 1]) for end in ragged.query_ends[1:].tolist()]


def test_only_what_a_causal_kernel_cannot_do_has_a_mask():
    whole = segment_layout([5, 3])
    assert whole.masks(0, torch.float32) == whole.masks(5, torch.float32) == [None]
    (mask,) = whole.masks(4, torch.bfloat16)
    assert (mask.shape, mask.dtype) == ((1, 1, 5, 5), torch.bfloat16)
    assert whole.masks(4, torch.bfloat16)[0] is mask, "all layers take the same one"
    first, second = segment_layout([5, 3], prefixes=[None, 0]).masks(0, torch.float32)
    assert first is None
    assert second.shape == (1, 1, 3, 8)
    assert segment_layout([5], blocks=[(1, 3)]).masks(0, torch.float32)[0].shape == (1, 1, 5, 5)


@pytest.mark.parametrize(
    ("lengths", "sizes"),
    [
        ([100, 75], [(2, 100)]),
        ([74, 100], [(1, 100), (1, 74)]),
        ([1, 64, 20], [(3, 64)]),
        ([65, 1], [(1, 65), (1, 1)]),
        ([100, 80, 70, 60, 59], [(2, 100), (3, 70)]),
    ],
)
def test_segments_of_similar_length_are_computed_together(lengths, sizes):
    assert [tuple(bucket.keys_BJ.shape) for bucket in segment_layout(lengths).padded.buckets] == sizes


@pytest.mark.parametrize(
    ("lengths", "keys"),
    [
        ([10, 32, 32], [(1, 74)]),
        ([10, 32, 33], [(2, 43)]),
        ([100, 50, 50], [(1, 200)]),
        ([100, 50, 51], [(2, 151)]),
        ([10, 20, 20, 30], [(2, 50)]),
    ],
)
def test_short_continuations_share_a_copy_of_their_prefix(lengths, keys):
    layout = segment_layout(lengths, prefixes=[None, *[0] * (len(lengths) - 1)])
    assert [tuple(bucket.keys_BJ.shape) for bucket in layout.padded.buckets[1:]] == keys


def test_continuations_of_different_prefixes_have_a_copy_each():
    layout = segment_layout([10, 4, 10, 4], prefixes=[None, 0, None, 2])
    assert [tuple(bucket.keys_BJ.shape) for bucket in layout.padded.buckets] == [(2, 10), (2, 14)]


def test_boundaries_for_kernels_of_any_length():
    ragged = segment_layout([4, 2, 7, 3], prefixes=[None, 0, 0, None]).ragged
    assert (ragged.query_ends.tolist(), ragged.query_ends.dtype) == ([0, 4, 6, 13, 16], torch.int32)
    assert (ragged.key_ends.tolist(), ragged.key_ends.dtype) == ([0, 4, 10, 21, 24], torch.int32)
    assert (ragged.longest_query, ragged.longest_key) == (7, 11)
    assert segment_layout([4, 2]).ragged.keys is None, "they are the row as it is"


@given(st.lists(st.integers(1, 300), min_size=1, max_size=20))
def test_layout_is_a_bijection_of_bounded_cost(lengths):
    layout = segment_layout(lengths).padded
    slots = sum(bucket.queries_BQ.numel() for bucket in layout.buckets)
    if layout.queries is None:
        assert slots == sum(lengths)
    else:
        assert len(layout.queries.index) == slots
        assert torch.equal(layout.queries.index[layout.queries.slot_T], torch.arange(sum(lengths)))
        assert not layout.queries.repeated
    cost = sum(bucket.queries_BQ.numel() * bucket.queries_BQ.shape[1] for bucket in layout.buckets)
    assert cost <= 16 / 9 * sum(max(64, length) ** 2 for length in lengths) + 1e-6
