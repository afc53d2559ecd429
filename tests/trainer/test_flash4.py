"""Newer attention kernels: used where a trial finds them right, and never where it does not."""

import logging
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_ragged_attention import backward as plain_backward
from test_ragged_attention import forward as plain_forward
from torch.nn.functional import scaled_dot_product_attention

from slipstream.trainer.attention import flash4, packed
from slipstream.trainer.attention.row_layout import segment_layout

ROOT = Path(__file__).resolve().parents[2]
LENGTHS, PREFIXES = (300, 120, 90, 1, 513), (None, 0, 0, 0, None)


def as_new(wrong=""):
    """The package's interface, computed by torch's formulas; what `wrong` names is so."""

    def fwd(query, key, value, *, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, return_lse):
        assert causal
        assert return_lse
        ends = (cu_seqlens_q, cu_seqlens_k, 10_000, 10_000, 0.0, True)
        options = {"window_size_left": -1, "window_size_right": 0, "return_debug_mask": False, "scale": softmax_scale}
        output = plain_forward(query, key, value, *ends, **options)[0]
        lengths = (tuple(each.diff().tolist()) for each in (cu_seqlens_q, cu_seqlens_k))
        lse = flash4.reference(output, query, key, value, *lengths, softmax_scale)[1]
        return output * {"output": 1.1, "rounding": 1.01}.get(wrong, 1.0), lse, None, None

    def bwd(query, key, value, output, grad, lse, *, cu_seqlens_q, cu_seqlens_k, dq, dk, dv, softmax_scale, causal):
        assert causal
        if wrong == "raises":
            raise RuntimeError("no such\narchitecture")
        ends = (cu_seqlens_q, cu_seqlens_k, 10_000, 10_000, 0.0, True)
        rest = (query.new_empty(2, dtype=torch.uint64), query.new_empty(0))
        options = {"window_size_left": -1, "window_size_right": 0, "scale": softmax_scale}
        found = plain_backward(grad, query, key, value, output, lse, *ends, *rest, **options)
        for place, each in zip((dq, dk, dv), found, strict=True):
            assert place.is_contiguous()
            place.copy_(each)
        if wrong == "keys":
            dk[-1] = torch.nan
        return dq, dk, dv

    return SimpleNamespace(_flash_attn_fwd=fwd, _flash_attn_bwd=bwd)


@pytest.fixture
def route(monkeypatch):
    """Has the package be there, as `route(wrong)` says; counts the calls of torch's kernels."""
    old = []
    monkeypatch.setattr(flash4, "_found", {})
    monkeypatch.setattr(flash4, "_made_for", lambda query: True)
    monkeypatch.setattr(flash4.importlib.util, "find_spec", {"flash_attn": "found"}.get)
    monkeypatch.setattr(packed, "_flash_forward", lambda *a, **k: old.append("forward") or plain_forward(*a, **k))
    monkeypatch.setattr(packed, "_flash_backward", lambda *a, **k: old.append("backward") or plain_backward(*a, **k))

    def set_up(wrong=""):
        monkeypatch.setattr(flash4.importlib, "import_module", lambda name: as_new(wrong))
        return old

    return set_up


def drawn(num_heads, num_kv_heads, head_dim, device="cpu", dtype=torch.float32, lengths=LENGTHS):
    torch.manual_seed(0)
    return [
        torch.randn(heads, sum(lengths), head_dim, device=device).to(dtype).transpose(0, 1).requires_grad_()
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    ]


def compute(states, layout, window=0):
    """What the operation gives, and the gradients."""
    output, _ = packed.ragged_attention(*states, layout.layout_id, 0.1, window)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    return [output.detach(), *torch.autograd.grad(output, states, weights)]


def expected(states, layout):
    """In float32 by torch's attention over the whole row, with a mask."""
    place_T, segment_T, prefix_T = layout._tokens
    visible = (segment_T[:, None] == segment_T) | (prefix_T[:, None] == segment_T)
    visible = (visible & (place_T[:, None] >= place_T)).to(states[0].device)
    states = [each.detach().float().requires_grad_() for each in states]
    rows = [each.transpose(0, 1)[None] for each in states]
    output = scaled_dot_product_attention(*rows, attn_mask=visible, scale=0.1, enable_gqa=True)[0].transpose(0, 1)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    return [output.detach(), *torch.autograd.grad(output, states, weights)]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("", "FlashAttention 4 computes attention of 6 heads on 2 of 16"),
        ("output", "output"), ("keys", "keys is nan"), ("raises", "no such arch"),
    ],
)  # fmt: skip
def test_what_is_right_is_used_and_what_is_wrong_is_said_once(wrong, said, route, caplog):
    old = route(wrong)
    states, layout = drawn(6, 2, 16), segment_layout(LENGTHS, prefixes=PREFIXES)
    with caplog.at_level(logging.WARNING if wrong else logging.INFO):
        for _ in range(2):
            torch.testing.assert_close(compute(states, layout), expected(states, layout), atol=2e-5, rtol=1e-4)
    assert old == (["forward", "backward"] * 2 if wrong else [])
    (message,) = caplog.messages
    assert said in message if wrong else message == said


def test_windows_and_short_rows_are_torchs(route, monkeypatch):
    old = route("raises")
    compute(drawn(6, 2, 16), segment_layout(LENGTHS), window=7)
    compute(drawn(6, 2, 16, lengths=(20, 40)), segment_layout([20, 40]))
    monkeypatch.setattr(flash4, "find", lambda *_: None)
    compute(drawn(6, 2, 16), segment_layout(LENGTHS))
    assert old == ["forward", "backward"] * 3
    assert not flash4._found


def test_what_rounding_explains_is_right(route):
    route("rounding")
    assert flash4.find(*drawn(6, 2, 16)[:2], 0) is not None


def test_each_number_of_heads_is_tried_with_as_many(route, monkeypatch, caplog):
    route()
    tried, interface = [], as_new()

    def fwd(query, key, value, **options):
        tried.append((query.shape[1:], key.shape[1:], value.shape[1:]))
        return as_new()._flash_attn_fwd(query, key, value, **options)

    interface._flash_attn_fwd = fwd
    monkeypatch.setattr(flash4.importlib, "import_module", lambda name: interface)
    kinds = [(6, 2, 16), (6, 3, 16), (4, 2, 16), (4, 2, 8)]
    for _ in range(2):
        for heads, kv_heads, size in kinds:
            assert flash4.find(*drawn(heads, kv_heads, size)[:2], 0) is interface
    assert tried == [((heads, size), (kv_heads, size), (kv_heads, size)) for heads, kv_heads, size in kinds]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ModuleNotFoundError("No module named 'flash_attn.cute'", name="flash_attn.cute"), ""),
        (ModuleNotFoundError("No module named 'cutlass'", name="cutlass"), "No module named 'cutlass'"),
        (ModuleNotFoundError("gone"), "gone"),
    ],
)
def test_an_older_package_of_that_name_is_no_news_but_a_part_that_is_lacking_is(
    error, said, route, monkeypatch, caplog
):
    def raises(name):
        raise error

    route()
    monkeypatch.setattr(flash4.importlib, "import_module", raises)
    assert flash4.find(*drawn(6, 2, 16)[:2], 0) is None
    assert len(caplog.messages) == bool(said)
    assert said in caplog.text


def test_the_package_is_imported_only_where_it_can_be_used(route, monkeypatch):
    route()
    monkeypatch.setattr(flash4.importlib, "import_module", None)
    monkeypatch.setattr(flash4.importlib.util, "find_spec", lambda name: None)
    assert flash4.find(*drawn(6, 2, 16)[:2], 0) is None
    monkeypatch.setattr(flash4.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(flash4, "_made_for", lambda query: False)
    assert flash4.find(*drawn(4, 2, 16)[:2], 0) is None


@pytest.mark.parametrize(
    ("capability", "size", "is_cuda", "is_made"),
    [
        ((9, 0), 128, True, True),
        ((10, 3), 64, True, True),
        ((9, 0), 96, True, False),
        ((8, 9), 128, True, False),
        ((11, 0), 128, True, False),
        ((12, 10), 128, True, False),
        ((9, 0), 128, False, False),
    ],
)
def test_it_is_made_for_some_cards_and_heads(capability, size, is_cuda, is_made, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert flash4._made_for(SimpleNamespace(is_cuda=is_cuda, device="cuda", shape=(2000, 8, size))) == is_made


def test_rows_of_its_smallest_size_are_its_own(route):
    route()
    for tokens, is_used in ((1023, False), (1024, True)):
        assert (flash4.find(*drawn(6, 2, 16, lengths=(tokens,))[:2], 0) is not None) == is_used
    torch.use_deterministic_algorithms(True)
    try:
        assert flash4.find(*drawn(6, 2, 16)[:2], 0) is None
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_extra_installs_what_was_measured():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    measured = re.search(r"`flash-attn-4` (\S+)\)", (ROOT / "dev/bench/LOG.md").read_text())
    assert extras["flash"] == [f"flash-attn-4=={measured[1]}"]
    assert extras["flash"][0] in (ROOT / "constraints/gpu.txt").read_text().splitlines()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("newer", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(12, 2, 128), (28, 4, 128), (14, 2, 64), (8, 8, 128)])
def test_on_a_gpu(heads, kv_heads, head_dim, newer, monkeypatch):
    if not newer:
        monkeypatch.setattr(flash4, "find", lambda *_: None)
    states = drawn(heads, kv_heads, head_dim, "cuda", torch.bfloat16)
    if newer and flash4.find(*states[:2], 0) is None:
        pytest.skip("FlashAttention 4 is not installed, or not for this GPU")
    for prefixes in (None, PREFIXES):
        layout = segment_layout(LENGTHS, "cuda", prefixes)
        for ours, theirs in zip(compute(states, layout), expected(states, layout), strict=True):
            assert float((ours.float() - theirs).norm() / theirs.norm()) < 0.01
