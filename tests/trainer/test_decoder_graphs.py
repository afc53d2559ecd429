"""A decoder's CUDA graphs: rows padded to a shape mean the same, and both passes give what they give without graphs."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream import records
from slipstream.trainer.attention.row_layout import segment_layout
from slipstream.trainer.learner import Learner
from slipstream.trainer.loss import SFTObjective
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
    assert (len(graphs._graphs), graphs._problem) == (num_graphs, "")
    assert all(map(torch.equal, plain_logprobs, logprobs))
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, plain[name], rtol=2e-2, atol=2e-3 * float(plain[name].abs().max()))
    (row,) = micro_batches(StepBatch(sequences[:2]), 999, device="cuda")
    first, second = graphs.hidden(row), graphs.hidden(row)
    assert first is not None
    assert second is None, "the first row's activations are needed"
    del first
    assert graphs.hidden(row) is not None
