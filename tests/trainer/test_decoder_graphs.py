"""A decoder's CUDA graphs: rows padded to a shape mean the same, and both passes give what they give without graphs."""

import itertools
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slipstream import records
from slipstream.errors import TrainingError
from slipstream.trainer.attention import packed
from slipstream.trainer.attention.row_layout import layout_of, segment_layout
from slipstream.trainer.learner import Learner
from slipstream.trainer.loss import SFTObjective
from slipstream.trainer.model import decoder_graphs
from slipstream.trainer.model.decoder_graphs import DecoderGraphs, RowShape, fill, makes_logits
from slipstream.trainer.model.policy import PolicyModel
from slipstream.trainer.optim.base import MasterAdamW
from slipstream.trainer.packing import StepBatch, micro_batches

FAMILIES = st.lists(st.tuples(st.integers(1, 40), st.lists(st.integers(1, 30), max_size=3)), min_size=1, max_size=4)
"""A segment and its continuations."""


def keys_of_queries(index, query_ends, key_ends):
    """For each row position the positions of the keys that a causal kernel aligned at the end lets it see."""
    seen = {}
    for number in range(len(query_ends) - 1):
        (first, last), end = query_ends[number : number + 2], key_ends[number + 1]
        for query in range(first, last):
            seen[query] = [int(each) for each in index[key_ends[number] : end - (last - 1 - query)]]
    return seen


@given(FAMILIES, st.integers(0, 5))
def test_padding_leaves_each_token_its_keys_and_slots(families, extra):
    lengths, prefixes = [], []
    for shared, sizes in families:
        prefixes += [None, *[len(lengths)] * len(sizes)]
        lengths += [shared, *sizes]
    layout, num_tokens = segment_layout(lengths, prefixes=prefixes), sum(lengths)
    least = RowShape.of(layout)
    assert least == (1024, 8192 if least.keys else 0, 256, 256, 512)
    shape = least._replace(tokens=num_tokens + extra, keys=least.keys and 4096, longest_query=max(*lengths, 3))
    places, ends = fill(layout, shape)
    query_ends, key_ends = ends.reshape(2, -1)
    assert (len(query_ends), ends.dtype, query_ends[-1]) == (shape.segments + 1, np.int32, shape.tokens)
    assert np.diff(query_ends).max() <= shape.longest_query
    host, identity = layout.host_ragged, np.arange(shape.tokens)
    own = identity if host.keys is None else host.keys.index_K
    expected = keys_of_queries(own, host.query_ends, host.key_ends)
    index = places[: shape.keys] if shape.keys else identity
    found = keys_of_queries(index, query_ends, key_ends)
    assert [found[each] for each in range(num_tokens)] == [expected[each] for each in range(num_tokens)]
    assert all(min(found[each]) >= num_tokens for each in range(num_tokens, shape.tokens)), "padding sees padding alone"
    if not shape.keys:
        return
    order, starts = places[shape.keys : 2 * shape.keys], places[2 * shape.keys :]
    slots = [order[start:end].tolist() for start, end in itertools.pairwise(starts)]
    used = int(key_ends[-1])
    assert slots == [np.flatnonzero(index[:used] == each).tolist() for each in range(shape.tokens)]


def test_a_row_within_a_sliding_window_stays_within_it():
    layout = segment_layout([700])
    assert [RowShape.of(layout, window).longest_key for window in (0, 600, 700, 2000)] == [1024, 1024, 700, 1024]


@pytest.mark.parametrize("fp32_head", [False, True])
def test_only_a_model_with_plain_logits_is_served(model_folder, fp32_head):
    model = PolicyModel.load(model_folder, fp32_head=fp32_head)
    decoder = model.network.get_decoder()
    assert makes_logits(model, decoder)

    def scaled(*args, **kwargs):
        output = type(decoder).forward(decoder, *args, **kwargs)
        output.last_hidden_state = output.last_hidden_state / 4
        return output

    network = type("Scaled", (torch.nn.Module,), {"forward": lambda self, **kwargs: scaled(**kwargs)})()
    assert not makes_logits(model, network), "MiniCPM3 scales between decoder and head"


class Tape(TorchDispatchMode):
    """A CUDA graph on the CPU: operations, which `replay` computes again in the same memory."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, output))
        return output

    @torch.no_grad()
    def replay(self):
        for func, args, kwargs, output in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(output), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def attention_of_any_layout(query, key, value, layout_id, scale, window):
    """As the kernels, by masks: a fixed number of operations on tensors of the layout's shape."""
    layout, (num_queries, num_heads, _) = layout_of(layout_id).ragged, query.shape
    if layout.keys is not None:
        key, value = (each.index_select(0, layout.keys.index) for each in (key, value))
    key, value = (each.repeat_interleave(num_heads // each.shape[1], 1) for each in (key, value))
    segments, backs = [], []
    for ends, number in ((layout.query_ends, num_queries), (layout.key_ends, len(key))):
        places = torch.arange(number, dtype=torch.int32)
        segments.append(torch.searchsorted(ends, places, right=True))
        backs.append(ends[segments[-1].clamp(max=len(ends) - 1)] - places)
    visible = (segments[0][:, None] == segments[1]) & (backs[1] >= backs[0][:, None])
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    shares = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", shares, value), None


@pytest.fixture
def make_graphs(monkeypatch):
    """Small shapes, by tapes in place of CUDA graphs."""
    for name, value in (("TOKENS", 64), ("QUERIES", 32), ("KEYS", 32), ("SEGMENTS", 16)):
        monkeypatch.setattr(decoder_graphs, f"_LEAST_{name}", value)
    monkeypatch.setattr(packed, "_has_kernel", lambda query: True)
    monkeypatch.setattr(packed, "ragged_attention", attention_of_any_layout)
    modes = []
    others = {"graph_pool_handle": object, "get_sync_debug_mode": int, "set_sync_debug_mode": modes.append}
    for name, fake in ({"CUDAGraph": Tape, "graph": lambda tape, **_: tape} | others).items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return lambda model: DecoderGraphs(model.network.get_decoder(), 1, 0)


def groups(number, length=6):
    """Two completions of each prompt."""
    return [
        records.Sequence([1 + each, 5, 7, *([9 + other] * length)], [False, False, False, *([True] * length)])
        for each in range(number)
        for other in range(2)
    ]


def trained(learner, optimizer, *batches):
    """The gradient of these batches, and the losses."""
    losses = [learner.forward_backward(StepBatch(batch), SFTObjective())["loss"] for batch in batches]
    gradients = {name: holder.grad.clone() for name, holder in optimizer._holders.items()}
    optimizer.discard_gradients()
    return gradients, losses


def check_close(found, expected):
    for (name, gradient), other in zip(found[0].items(), expected[0].values(), strict=True):
        torch.testing.assert_close(gradient, other, msg=lambda text, name=name: f"{name}: {text}")
    assert found[1] == pytest.approx(expected[1])


def test_rows_of_a_step_share_their_graphs(model_folder, make_graphs):
    """Row after row of two shapes, step after step, with an eager row before, and without gradients."""
    model = PolicyModel.load(model_folder)
    optimizer = MasterAdamW(model.network.named_parameters())
    learner = Learner(model, optimizer, micro_batch_tokens=120)
    steps = [groups(14), groups(9, 11), groups(4)]
    plain = [trained(learner, optimizer, step) for step in steps]
    both = trained(learner, optimizer, steps[0], steps[2])
    logprobs = learner.forward(steps[0]).logprobs
    graphs = model.graphs = make_graphs(model)
    for step, expected in zip([*steps, *steps[::-1]], [*plain, *plain[::-1]], strict=True):
        check_close(trained(learner, optimizer, step), expected)
    assert graphs.problem == ""
    assert len({shape.tokens for shape, _ in graphs._graphs}) == 2
    for found, expected in zip(learner.forward(steps[0]).logprobs, logprobs, strict=True):
        torch.testing.assert_close(found, expected)
    model.graphs, first = None, StepBatch(steps[0])
    learner.forward_backward(first, SFTObjective())
    model.graphs = graphs
    gradients, _ = trained(learner, optimizer, steps[2])
    check_close((gradients, []), (both[0], []))


def test_a_row_waits_for_its_backward_pass(model_folder, make_graphs):
    model = PolicyModel.load(model_folder)
    MasterAdamW(model.network.named_parameters())
    graphs = make_graphs(model)
    (row,) = micro_batches(StepBatch(groups(2)), 999)
    first, second = graphs.hidden(row), graphs.hidden(row)
    assert second is None, "the first row's activations are needed"
    first.sum().backward(retain_graph=True)
    with pytest.raises(TrainingError, match="ran twice"):
        first.sum().backward()
    third = graphs.hidden(row)
    assert third is not None
    del third
    assert graphs.hidden(row) is not None, "it was never differentiated"


def test_weights_that_moved_are_captured_again(model_folder, make_graphs):
    model = PolicyModel.load(model_folder)
    optimizer = MasterAdamW(model.network.named_parameters())
    learner = Learner(model, optimizer, micro_batch_tokens=120)
    graphs = model.graphs = make_graphs(model)
    trained(learner, optimizer, groups(3))
    before = set(graphs._graphs.values())
    with torch.no_grad():
        for parameter in model.network.parameters():
            parameter.data = parameter.data * 1.5
    found = trained(learner, optimizer, groups(3))
    assert graphs._graphs
    assert not before & set(graphs._graphs.values())
    model.graphs = None
    check_close(found, trained(learner, optimizer, groups(3)))


def test_where_a_capture_fails_the_step_goes_on_without(model_folder, make_graphs, monkeypatch, caplog):
    model = PolicyModel.load(model_folder)
    optimizer = MasterAdamW(model.network.named_parameters())
    learner = Learner(model, optimizer, micro_batch_tokens=100)
    expected, captured = trained(learner, optimizer, groups(11)), []

    @contextmanager
    def graph(tape, **_):
        captured.append(tape)
        with tape:
            yield
        if len(captured) == 4:  # the second row's backward pass
            raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "graph", graph)
    graphs = model.graphs = make_graphs(model)
    check_close(trained(learner, optimizer, groups(11)), expected)
    assert graphs.problem.endswith("operation not permitted when stream is capturing")
    assert "the decoder computes without CUDA graphs (RuntimeError: operation not" in caplog.text
    check_close(trained(learner, optimizer, groups(11)), expected)
    assert len(captured) == 4, "it is not tried again"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("num_completions", [1, 4])
@pytest.mark.parametrize(("micro_batch_tokens", "num_graphs"), [(200, 1), (2000, 2)])
def test_both_passes_give_what_they_give_without_graphs(model_folder, num_completions, micro_batch_tokens, num_graphs):
    model = PolicyModel.load(model_folder, "bfloat16", "cuda", fp32_head=True, fp32_residual=True)
    optimizer = MasterAdamW(model.network.named_parameters())
    learner = Learner(model, optimizer, micro_batch_tokens=micro_batch_tokens)
    # Rows of two shapes in one step, if they are long enough: 2,048 tokens, then 1,024.
    sequences = [
        records.Sequence([1 + number // 4, 5, 7, *([9 + number % 20] * 20)], [False, False, False, *([True] * 20)])
        for number in range(400)
        if number % 4 < num_completions
    ]
    sequences = sequences[: 2200 // (20 if num_completions > 1 else 22)]
    results = []
    for graphs in (None, DecoderGraphs.of(model, micro_batch_tokens)):
        model.graphs = graphs
        learner.forward_backward(StepBatch(sequences), SFTObjective())
        gradients = {name: holder.grad.clone() for name, holder in optimizer._holders.items()}
        learner.optimizer.discard_gradients()
        results.append((learner.forward(sequences).logprobs, gradients))
    (plain_logprobs, plain), (logprobs, gradients) = results
    assert graphs is not None
    assert (len(graphs._graphs), graphs.problem) == (num_graphs, "")
    assert all(map(torch.equal, plain_logprobs, logprobs))
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, plain[name], rtol=2e-2, atol=2e-3 * float(plain[name].abs().max()))
