"""PackedTensor rows against the plain model, one sequence at a time; and cuts of a step against each other."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.trainer.plain import loss_and_gradients, plain

from slipstream import records
from slipstream.config.recipes import resolved
from slipstream.config.schema import RLConfig
from slipstream.errors import ConfigError
from slipstream.trainer.attention.packed import packed_attention
from slipstream.trainer.attention.row_layout import segment_layout
from slipstream.trainer.loss import PolicyObjective, SFTObjective
from slipstream.trainer.packing import StepBatch, micro_batches

SAMPLING = records.SamplingParams(max_tokens=64, temperature=0.8)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("micro_batch_tokens", [100, 150, 10_000])
def test_sft_equals_the_plain_model_however_it_is_cut(
    packing, micro_batch_tokens, model_folder, make_learner, make_batch, gradients_of
):
    batch = make_batch(advantages=False)
    loss, gradients = loss_and_gradients(plain(model_folder), batch.sequences)
    learner = make_learner(micro_batch_tokens, packing=packing)
    metrics = learner.forward_backward(batch, SFTObjective())
    assert metrics["loss"] == pytest.approx(loss, abs=1e-5)
    num_micro_batches = {100: 4, 150: 3, 10_000: 1}[micro_batch_tokens] if packing else 9
    assert metrics["num_micro_batches"] == num_micro_batches
    ours = gradients_of(learner)
    torch.testing.assert_close(ours, gradients, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("normalize", ["token", "sequence"])
def test_grpo_does_not_depend_on_the_cut(normalize, make_learner, make_batch, gradients_of):
    batch = make_batch()
    batch.old_logprobs = [torch.full((s.num_trainable,), -4.4) for s in batch.sequences]
    objective = PolicyObjective(resolved(RLConfig(normalize=normalize)), SAMPLING)
    results = []
    for micro_batch_tokens in (90, 200, 10_000):
        learner = make_learner(micro_batch_tokens)
        metrics = learner.forward_backward(batch, objective)
        results.append((metrics, gradients_of(learner)))
    for metrics, gradients in results[1:]:
        for name, value in results[0][0].items():
            if name != "num_micro_batches":
                assert metrics[name] == pytest.approx(value, abs=1e-5), name
        torch.testing.assert_close(gradients, results[0][1], atol=1e-5, rtol=1e-5)


def test_packed_rows_repeat_bit_for_bit(make_learner, make_batch, gradients_of):
    runs = []
    for _ in range(2):
        learner = make_learner(300)
        learner.forward_backward(make_batch(num=20), SFTObjective())
        runs.append(gradients_of(learner))
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


@settings(deadline=None)
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


def test_micro_batches_hold_every_target_once_and_nothing_after_the_last(make_batch):
    batch = make_batch(num=12)
    batch.sequences.append(records.Sequence([1, 2, 3], [False] * 3))
    seen = {}
    for micro in micro_batches(batch, 120):
        start = 0
        for place, index in enumerate(micro.sequences):
            length = micro.layout.lengths[place]
            row = micro.token_ids_T[start : start + length]
            assert row.tolist() == batch.sequences[index].token_ids[:length]
            assert micro.position_ids_T[start : start + length].tolist() == list(range(length))
            mine = micro.sequence_index_N == place
            seen[index] = (micro.predict_index_N[mine] - start + 1).tolist()
            assert seen[index][-1] == length
            assert micro.target_ids_N[mine].tolist() == [
                batch.sequences[index].token_ids[position] for position in seen[index]
            ]
            start += length
    for index, sequence in enumerate(batch.sequences):
        expected = [position for position, trained in enumerate(sequence.mask) if trained]
        assert seen.get(index, []) == expected


def test_per_token_advantages_of_a_sequence_come_first(make_batch):
    batch = make_batch(num=2)
    sequence = copy.copy(batch.sequences[0])
    sequence.advantages = [float(position) for position in range(len(sequence))]
    (micro,) = micro_batches(StepBatch([sequence, batch.sequences[1]], [9.0, -1.0]), 10_000)
    first = micro.sequence_index_N == micro.sequences.index(0)
    assert micro.advantages_N is not None
    assert micro.advantages_N[first].tolist() == [float(i) for i, m in enumerate(sequence.mask) if m]
    assert set(micro.advantages_N[~first].tolist()) == {-1.0}


def kept_bytes(learner, batch, objective):
    """What the backward pass is kept for, and what it gives."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.nbytes) or t, lambda t: t):
        metrics = learner.forward_backward(batch, objective)
    return sum(kept), metrics


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("kind", ["sft", "grpo"])
def test_layers_computed_again_give_the_same_loss_and_gradients(
    packing, kind, model_folder, make_learner, make_batch, gradients_of
):
    batch = make_batch(advantages=kind == "grpo")
    objective = SFTObjective() if kind == "sft" else PolicyObjective(resolved(RLConfig()), SAMPLING)
    results = []
    for checkpointing in (False, True):
        learner = make_learner(300, packing=packing, checkpointing=checkpointing)
        results.append((*kept_bytes(learner, batch, objective), gradients_of(learner)))
    (bytes_all, plain, gradients), (bytes_few, again, same) = results
    assert bytes_few < 0.7 * bytes_all
    assert again["loss"] == pytest.approx(plain["loss"], abs=1e-6)
    torch.testing.assert_close(same, gradients, atol=1e-6, rtol=1e-6)


def test_attention_that_says_nothing_of_its_direction_is_causal_and_another_is_refused():
    states = torch.randn(3, 1, 2, 5, 4)
    layout = segment_layout([5])
    output, _ = packed_attention(torch.nn.Module(), *states, None, segments=layout)
    whole = torch.nn.functional.scaled_dot_product_attention(*states, is_causal=True)
    torch.testing.assert_close(output, whole.transpose(1, 2))
    packed_attention(torch.nn.Module(), *states, None, segments=layout, sliding_window=3)
    assert layout.windows_seen == {0, 3}, "by which a model that does not tell its window is found"
    other = torch.nn.Module()
    other.is_causal = False
    with pytest.raises(ConfigError, match="bidirectional attention, which packed attention does not do"):
        packed_attention(other, *states, None, segments=layout)


def test_a_prompt_of_one_token_is_not_shared():
    """As all have it that are trained on everything: sharing it would save nothing and cost another kernel."""
    sequences = [records.Sequence([1, *range(5, 5 + size)], [False] + [True] * size) for size in (3, 6, 4)]
    (micro,) = micro_batches(StepBatch(sequences), 64)
    assert len(micro.token_ids_T) == 3 + 6 + 4
    assert micro.token_ids_T.tolist().count(1) == 3
