"""What packed attention hands to a kernel, which kernel it takes, and what the compiler is told of it."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from test_ragged_attention import kernels  # noqa: F401
from tests.refusals import refuses
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_map

from slipstream.errors import ConfigError
from slipstream.shared_kernels import flash3
from slipstream.trainer.attention import packed
from slipstream.trainer.attention.row_layout import segment_layout


def drawn(heads, kv_heads, length, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, each, length, 8, generator=generator).to(dtype) for each in (heads, kv_heads, kv_heads)]


def masked(states, visible_TT, scale=None):
    return scaled_dot_product_attention(*states, attn_mask=visible_TT, scale=scale, enable_gqa=True).transpose(1, 2)


@pytest.mark.parametrize(("window", "scale"), [(None, None), (3, None), (1, 0.3), (None, 0.3)])
@pytest.mark.usefixtures("kernels")
def test_scale_and_window_are_the_models_or_the_usual_ones(window, scale):
    states, layout = drawn(4, 2, 7), segment_layout([5, 2])
    places, segment = torch.arange(7), torch.tensor([0] * 5 + [1] * 2)
    back = places[:, None] - places
    visible = (segment[:, None] == segment) & (back >= 0) & (back < (window or 7))
    output, weights = packed.packed_attention(
        torch.nn.Module(), *states, None, segments=layout, scaling=scale, sliding_window=window
    )
    assert weights is None
    torch.testing.assert_close(output, masked(states, visible, scale))
    assert layout.windows_seen == {window or 0}


@pytest.mark.usefixtures("kernels")
def test_images_whose_tokens_see_one_another_do_not_go_to_the_kernel(monkeypatch):
    monkeypatch.setattr(packed, "ragged_attention", None)
    states, layout = drawn(2, 2, 6), segment_layout([6], blocks=[(2, 4)])
    output, _ = packed.packed_attention(torch.nn.Module(), *states, None, segments=layout)
    plain = scaled_dot_product_attention(*states, is_causal=True).transpose(1, 2)
    is_same = [torch.allclose(output[:, place], plain[:, place], atol=1e-5) for place in range(6)]
    assert is_same == [True, True, False, True, True, True]


@pytest.mark.parametrize(
    "asked", [{"dropout": 0.1}, *({name: 1.0} for name in ("softcap", "s_aux", "position_bias", "cache"))]
)
def test_what_it_does_not_do_is_refused(asked):
    states, layout = drawn(2, 2, 3), segment_layout([3])
    with refuses("training.packing"):
        packed.packed_attention(torch.nn.Module(), *states, None, segments=layout, **asked)
    with pytest.raises(ConfigError, match="Module needs a mask, dropout or bidirectional attention"):
        packed.packed_attention(torch.nn.Module(), *states, torch.ones(3, 3), segments=layout)
    packed.packed_attention(torch.nn.Module(), *states, None, segments=layout, **dict.fromkeys(asked))


def test_the_kernel_is_for_gpus_and_half_precision():
    for is_cuda, dtype, has in (
        (True, torch.bfloat16, True), (True, torch.float16, True), (True, torch.float32, False),
        (False, torch.bfloat16, False), (False, torch.float32, False),
    ):  # fmt: skip
        assert packed._has_kernel(SimpleNamespace(is_cuda=is_cuda, dtype=dtype)) is has


def test_the_compiler_is_told_the_shapes_that_come(kernels, monkeypatch):  # noqa: F811
    layout = segment_layout([5, 2], prefixes=[None, 0])
    query, key, value = (each[0].transpose(0, 1) for each in drawn(4, 2, 7))
    own = packed.ragged_attention(query, key, value, layout.layout_id, 0.5, 0)
    grads = packed.ragged_attention_backward(query, query, key, value, *own, layout.layout_id, 0.5, 0)

    def facts(tensor):
        return tensor.shape, tensor.dtype, tensor.is_contiguous()

    meta = [each.to("meta") for each in (query, key, value, *own, layout.layout_id)]
    told = torch.ops.slipstream.ragged_attention(*meta[:3], meta[5], 0.5, 0)
    assert tree_map(facts, told) == tree_map(facts, own)
    told = torch.ops.slipstream.ragged_attention_backward(meta[0], *meta, 0.5, 0)
    assert tree_map(facts, told) == tree_map(facts, grads)


def test_a_kernels_results_are_handed_on_in_rows(kernels, monkeypatch):  # noqa: F811
    """Whatever the order of the memory that the kernel gives."""
    layout = segment_layout([5, 2])
    query, key, value = (each[0].transpose(0, 1) for each in drawn(4, 2, 7))
    compute = {name: getattr(packed, name) for name in ("_flash_forward", "_flash_backward")}

    def in_another_order(name, *args, **options):
        return [each if each is None else each.mT.contiguous().mT for each in compute[name](*args, **options)]

    for name in compute:
        monkeypatch.setattr(packed, name, partial(in_another_order, name))
    output, lse = packed.ragged_attention(query, key, value, layout.layout_id, 0.5, 0)
    grads = packed.ragged_attention_backward(query, query, key, value, output, lse, layout.layout_id, 0.5, 0)
    assert all(each.is_contiguous() for each in (output, *grads))


@pytest.mark.usefixtures("kernels")
def test_the_engines_kernel_is_taken_where_it_is_shared(monkeypatch):
    layout, heard = segment_layout([5, 2], prefixes=[None, 0]), []
    query, key, value = (each[0].transpose(0, 1) for each in drawn(4, 2, 7))

    def forward(query, keys, values, *rest):
        heard.append((len(keys), len(values), *(each.tolist() if torch.is_tensor(each) else each for each in rest)))
        return query + 1.0, query.new_zeros(4, 7)

    monkeypatch.setattr(flash3, "enabled", lambda: True)
    monkeypatch.setattr(flash3, "forward", forward)
    output, _ = packed.ragged_attention(query, key, value, layout.layout_id, 0.5, 9)
    assert torch.equal(output, query + 1.0)
    assert heard == [(12, 12, [0, 5, 7], [0, 5, 12], 5, 7, 0.5, 9)]


def test_attention_that_says_nothing_of_its_direction_is_causal_and_another_is_refused():
    states = torch.randn(3, 1, 2, 5, 4)
    layout = segment_layout([5])
    output, _ = packed.packed_attention(torch.nn.Module(), *states, None, segments=layout)
    whole = scaled_dot_product_attention(*states, is_causal=True)
    torch.testing.assert_close(output, whole.transpose(1, 2))
    packed.packed_attention(torch.nn.Module(), *states, None, segments=layout, sliding_window=3)
    assert layout.windows_seen == {0, 3}, "by which a model that does not tell its window is found"
    other = torch.nn.Module()
    other.is_causal = False
    with pytest.raises(ConfigError, match="bidirectional attention, which packed attention does not do"):
        packed.packed_attention(other, *states, None, segments=layout)
