"""The operation for variable-length kernels, with plain torch in their place: what it hands them is right, its
gradients are, and a compiled layer is one graph with it."""

import gc
import itertools

import pytest
import torch
from tests.trainer.test_shared_prefix import make_groups

from slipstream.errors import TrainingError
from slipstream.trainer.attention import packed
from slipstream.trainer.attention.row_layout import segment_layout
from slipstream.trainer.learner import add_gradients, deterministic_on_cpu
from slipstream.trainer.loss import SFTObjective
from slipstream.trainer.model import layers
from slipstream.trainer.model.compilation import compile_layers
from slipstream.trainer.model.policy import PolicyModel
from slipstream.trainer.packing import micro_batches


def segments(query, key, query_ends, key_ends, longest_query, longest_key, dropout, is_causal, **options):
    """Of each segment its queries, its keys and which of these they see: the causal mask is aligned with the last of
    both."""
    assert dropout == 0.0
    left, right = options["window_size_left"], options["window_size_right"]
    assert right == 0
    assert is_causal == (left == -1)
    ends = list(zip(query_ends.tolist(), key_ends.tolist(), strict=True))
    assert ends[-1] == (len(query), len(key))
    for (q, k), (next_q, next_k) in itertools.pairwise(ends):
        assert 0 < next_q - q <= longest_query
        assert 0 < next_k - k <= longest_key
        back = torch.arange(next_k - k)[next_k - k - (next_q - q) :, None] - torch.arange(next_k - k)
        yield slice(q, next_q), slice(k, next_k), (back >= 0) & ((back <= left) | (left == -1))


def shares(query_QHD, key_JHD, visible_QJ, scale):
    scores_HQJ = torch.einsum("qhd,jhd->hqj", query_QHD, key_JHD) * scale
    return scores_HQJ.masked_fill(~visible_QJ, -torch.inf).softmax(-1)


def repeated(tensor, heads):
    return tensor.repeat_interleave(heads // tensor.shape[1], 1)


def forward(query, key, value, *rest, **options):
    """What FlashAttention's gives."""
    assert not options["return_debug_mask"]
    output = torch.empty_like(query)
    for q, k, visible in segments(query, key, *rest, **options):
        shares_HQJ = shares(query[q], repeated(key[k], query.shape[1]), visible, options["scale"])
        output[q] = torch.einsum("hqj,jhd->qhd", shares_HQJ, repeated(value[k], query.shape[1]))
    return output, query.new_zeros(query.shape[1], len(query), dtype=torch.float32), None, None, None


def backward(grad, query, key, value, output, lse, *rest, **options):
    *rest, state, unused = rest
    assert (state.dtype, unused.numel(), lse.shape) == (torch.uint64, 0, (query.shape[1], len(query)))
    heads, scale = query.shape[1], options["scale"]
    of_query, of_key, of_value = (torch.empty_like(part) for part in (query, key, value))
    for q, k, visible in segments(query, key, *rest, **options):
        keys, values = repeated(key[k], heads), repeated(value[k], heads)
        shares_HQJ = shares(query[q], keys, visible, scale)
        of_shares_HQJ = torch.einsum("qhd,jhd->hqj", grad[q], values)
        inner_HQ1 = torch.einsum("qhd,qhd->hq", grad[q], output[q])[..., None]
        of_scores_HQJ = shares_HQJ * (of_shares_HQJ - inner_HQ1) * scale
        of_query[q] = torch.einsum("hqj,jhd->qhd", of_scores_HQJ, keys)
        for result, part in (
            (of_key, torch.einsum("hqj,qhd->jhd", of_scores_HQJ, query[q])),
            (of_value, torch.einsum("hqj,qhd->jhd", shares_HQJ, grad[q])),
        ):
            result[k] = part.unflatten(1, (key.shape[1], -1)).sum(2)
    return of_query, of_key, of_value


@pytest.fixture
def kernels(monkeypatch):
    monkeypatch.setattr(packed, "_flash_forward", forward)
    monkeypatch.setattr(packed, "_flash_backward", backward)
    monkeypatch.setattr(packed, "_has_kernel", lambda query: True)


def results(model, batch, most=10_000):
    """Logits of every row, and the gradients of all parameters."""
    model.network.zero_grad()
    logits = []
    for row in micro_batches(batch, most):
        with deterministic_on_cpu(model.device):
            logits.append(model.logits(row))
            logits[-1].square().mean().backward()
    return torch.cat(logits), {name: p.grad.clone() for name, p in model.network.named_parameters()}


def test_it_gives_what_the_padded_route_gives(kernels, monkeypatch, save_model, tmp_path):
    folder = save_model(
        tmp_path, "Qwen2", use_sliding_window=True, sliding_window=6, max_window_layers=1, num_hidden_layers=2
    )
    model = PolicyModel.load(folder)
    ours, gradients = results(model, make_groups())
    monkeypatch.setattr(packed, "_has_kernel", lambda query: False)
    expected, others = results(model, make_groups())
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradients, others, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    "checkpointing", [*(pytest.param(each, marks=pytest.mark.full) for each in (False, True)), "selective"]
)
@pytest.mark.full
def test_a_layer_is_one_graph_for_rows_of_any_layout(checkpointing, kernels, fresh_compiler, model_folder, make_batch):
    plain, model = (PolicyModel.load(model_folder, checkpointing=checkpointing) for _ in range(2))
    assert compile_layers(model) == ""
    assert sum(fresh_compiler["graph_break"].values()) == 0
    fresh_compiler.clear()
    for batch in (make_groups(), make_batch(9, advantages=False), make_groups(3)):
        for most in (60, 10_000):
            expected, others = results(plain, batch, most)
            ours, gradients = results(model, batch, most)
            torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(gradients, others, atol=2e-6, rtol=1e-4)
    assert fresh_compiler["stats"]["unique_graphs"] == 0, "the trial's graphs do for every layout"


@pytest.mark.parametrize("checkpointing", [False, True, "selective"])
def test_a_rank_without_a_row_makes_its_backward_pass(checkpointing, kernels, model_folder):
    model = PolicyModel.load(model_folder)
    model.layers = layers.LayerOptions(checkpointing)
    layers.configure_layers(model.network, model.layers)
    add_gradients(model, [None], SFTObjective(), {})
    assert all(p.grad is not None and not p.grad.any() for p in model.network.parameters())


def test_selective_checkpointing_keeps_attention(kernels, monkeypatch, model_folder):
    calls = []
    monkeypatch.setattr(packed, "_flash_forward", lambda *args, **kwargs: calls.append(1) or forward(*args, **kwargs))
    num, found = {}, {}
    for checkpointing in (False, "selective", True):
        model = PolicyModel.load(model_folder, checkpointing=checkpointing)
        calls.clear()
        found[checkpointing] = results(model, make_groups())
        num[checkpointing] = len(calls)
    assert num[False] == num["selective"] < num[True]
    torch.testing.assert_close(found["selective"], found[False], atol=1e-6, rtol=1e-5)


def test_a_layout_that_is_gone_is_said():
    layout = segment_layout([3, 4])
    layout_id = layout.layout_id
    assert packed.layout_of(layout_id) is layout
    del layout
    gc.collect()
    with pytest.raises(TrainingError, match="keep the micro-batch"):
        packed.layout_of(layout_id)
