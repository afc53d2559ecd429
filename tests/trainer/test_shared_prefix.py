"""Prompts that a micro-batch holds once, against each sequence by itself through transformers' own attention."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream import records
from slipstream.config.recipes import resolved
from slipstream.config.schema import RLConfig
from slipstream.errors import ConfigError
from slipstream.trainer.attention.row_layout import segment_layout, take_slots
from slipstream.trainer.loss import PolicyObjective, SFTObjective
from slipstream.trainer.model.packing_check import check_isolation
from slipstream.trainer.model.policy import PolicyModel
from slipstream.trainer.packing import StepBatch, micro_batches

MODELS = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mistral-window": ("Mistral", {"sliding_window": 5}),
    "gemma3-window": (
        "Gemma3Text",
        {"head_dim": 8, "sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "phi3-longrope": (
        "Phi3",
        {
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "short_factor": [1.0, 1.0, 1.0, 1.0],
                "long_factor": [1.0, 2.0, 4.0, 8.0],
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "llama-dynamic": (
        "Llama",
        {
            "max_position_embeddings": 32,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0},
        },
    ),
}
OBJECTIVES = {
    "sft": SFTObjective(),
    "grpo": PolicyObjective(resolved(RLConfig()), records.SamplingParams(max_tokens=64, temperature=0.8)),
}


def make_groups(seed=0):
    """Prompts of uneven lengths, one of them once; completions of 1 to 30 tokens, some of several turns, two alike;
    a prompt that is the beginning of another; and rows of one instruction, each of which goes on by itself."""
    rng = random.Random(seed)
    long = [rng.randrange(1, 64) for _ in range(70)]
    prompts = [long, long[:20], [rng.randrange(1, 64) for _ in range(33)], [5], [6, 7, 8]]
    sequences = []
    for prompt, sizes in zip(prompts, ([1, 9, 9, 4], [30, 2, 17], [1, 1], [6, 3, 1], [11]), strict=True):
        for size in sizes:
            turns = [True] * size if size < 9 else [True, True, False, False, False, *[True] * (size - 7), False, False]
            mask = [False] * len(prompt) + turns
            ids = prompt + [rng.randrange(1, 64) for _ in range(size)]
            logprobs = [rng.uniform(-6.0, -3.0) if trained else 0.0 for trained in mask]
            sequences.append(records.Sequence(ids, mask, logprobs))
    sequences.append(sequences[1])
    instruction = [rng.randrange(1, 64) for _ in range(24)]
    for size in (1, 2, 5, 9, 12):
        ids = instruction + [rng.randrange(1, 64) for _ in range(2 * size)]
        sequences.append(records.Sequence(ids, [False] * (24 + size) + [True] * size, [-4.0] * len(ids)))
    rng.shuffle(sequences)
    return StepBatch(sequences, [rng.gauss(0, 1) for _ in sequences])


def num_row_tokens(batch, max_tokens):
    return sum(len(micro.token_ids_T) for micro in micro_batches(batch, max_tokens))


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_each_sequence_by_itself(
    name, objective, save_model, make_learner, gradients_of, tmp_path
):
    kind, changes = MODELS[name]
    folder, batch = save_model(tmp_path, kind, **changes), make_groups()
    plain = make_learner(folder=folder, packing=False)
    expected = plain.forward_backward(batch, OBJECTIVES[objective])
    gradients = gradients_of(plain)
    for micro_batch_tokens in (40, 100, 170, 10_000):
        learner = make_learner(micro_batch_tokens, folder=folder)
        metrics = learner.forward_backward(batch, OBJECTIVES[objective])
        assert metrics["num_row_tokens"] < expected["num_row_tokens"]
        assert metrics["loss"] == pytest.approx(expected["loss"], abs=1e-5)
        ours = gradients_of(learner)
        torch.testing.assert_close(ours, gradients, atol=1e-5, rtol=1e-5)


def test_scores_are_those_of_each_sequence_by_itself(make_learner):
    batch = make_groups()
    expected = make_learner(packing=False).forward(batch.sequences)
    scores = make_learner(150).forward(batch.sequences)
    for name in ("logprobs", "entropies"):
        torch.testing.assert_close(getattr(scores, name), getattr(expected, name), atol=1e-5, rtol=1e-5)


def test_shared_rows_repeat_bit_for_bit(make_learner, gradients_of):
    runs = []
    for _ in range(2):
        learner = make_learner(200)
        learner.forward_backward(make_groups(), OBJECTIVES["grpo"])
        runs.append(gradients_of(learner))
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


def test_a_prompt_is_held_once():
    prompt, mask = list(range(1, 71)), [False] * 70 + [True] * 6
    batch = StepBatch([records.Sequence([*prompt, *range(k, k + 6)], mask) for k in range(8)])
    (micro,) = micro_batches(batch, 10_000)
    # The last token of each completion is only a target.
    assert len(micro.token_ids_T) == 70 + 8 * 5
    assert micro.layout.lengths == (70, *[5] * 8)
    assert micro.predict_index_N.tolist().count(69) == 8
    assert sum(micro.counts) == 48
    assert sum(len(micro.token_ids_T) for micro in micro_batches(batch, 10_000, packing=False)) == 8 * 75


def test_the_common_beginning_of_different_prompts_is_held_once():
    """As rows of SFT begin: one instruction, then each its own question and answer."""
    instruction, rows = list(range(100, 140)), [3, 4, 5, 6]
    batch = StepBatch(
        [records.Sequence([*instruction, *[size] * size, 7, 8], [False] * (40 + size) + [True] * 2) for size in rows]
    )
    (micro,) = micro_batches(batch, 10_000)
    assert micro.layout.lengths[0] == 40
    assert sorted(micro.layout.lengths[1:]) == [size + 1 for size in rows]
    assert len(micro.token_ids_T) == 40 + sum(size + 1 for size in rows)
    assert sorted(micro.token_ids_T[micro.predict_index_N].tolist()) == sorted([*rows, *[7] * 4])
    few = StepBatch([records.Sequence([1, 2, *[size] * 30, 8], [False] * 32 + [True]) for size in rows])
    (micro,) = micro_batches(few, 10_000)
    assert set(micro.layout.prefixes) == {None}, "two tokens are not worth it"


def test_a_long_instruction_with_short_answers_gathers_a_bounded_number_of_keys():
    sequences = [records.Sequence([*[1] * 900, size, 3], [False] * 901 + [True]) for size in range(64)]
    (micro,) = micro_batches(StepBatch(sequences), 100_000)
    keys = sum(
        length + (0 if prefix is None else micro.layout.lengths[prefix])
        for length, prefix in zip(micro.layout.lengths, micro.layout.prefixes, strict=True)
    )
    assert len(micro.token_ids_T) < 64 * 901 / 6
    assert keys <= (8 + 1) * len(micro.token_ids_T)


def test_sequences_that_share_nothing_stay_whole(make_batch):
    batch = make_batch(num=12)
    (micro,) = micro_batches(batch, 10_000)
    assert set(micro.layout.prefixes) == {None}
    assert len(micro.layout.lengths) == 12


def test_long_completions_of_a_short_prompt_share_it_only_where_that_pays():
    sequences = [records.Sequence([1] * (10 + size), [False] * 10 + [True] * size) for size in (300, 20, 300, 30)]
    (micro,) = micro_batches(StepBatch(sequences), 10_000)
    assert sorted(micro.layout.lengths) == [10, 19, 29, 309, 309]
    (micro,) = micro_batches(StepBatch(sequences), 10_000, device="meta")
    assert sorted(micro.layout.lengths) == [10, 19, 29, 299, 299]


@pytest.mark.parametrize("max_tokens", [1, 30, 75, 80, 110, 150, 400])
def test_micro_batches_keep_to_their_size(max_tokens):
    batch = make_groups()
    seen = []
    for micro in micro_batches(batch, max_tokens):
        seen += micro.sequences
        if len(micro.sequences) > 1:
            assert len(micro.token_ids_T) <= max_tokens
            assert len(micro.predict_index_N) <= max_tokens
    assert sorted(seen) == list(range(len(batch.sequences)))
    assert num_row_tokens(batch, max_tokens) >= num_row_tokens(batch, 10_000)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 150), st.lists(st.integers(1, 90), max_size=6)), min_size=1, max_size=8))
def test_each_query_sees_its_prefix_and_itself_in_both_layouts(families):
    lengths, prefixes, expected = [], [], []
    for shared, sizes in families:
        prefix, origin = len(lengths), sum(lengths)
        for size, continued in [(shared, None), *((size, prefix) for size in sizes)]:
            start = sum(lengths)
            before = [] if continued is None else list(range(origin, origin + shared))
            expected += [before + list(range(start, start + place + 1)) for place in range(size)]
            lengths.append(size)
            prefixes.append(continued)
    layout = segment_layout(lengths, prefixes=prefixes)
    seen = {}
    for bucket, mask in zip(layout.padded.buckets, layout.masks(0, torch.float32), strict=True):
        for block in range(len(bucket.queries_BQ)):
            for query in bucket.real_BQ[block].nonzero()[:, 0].tolist():
                visible = range(query + 1) if mask is None else (mask[block, 0, query] == 0).nonzero()[:, 0].tolist()
                seen[int(bucket.queries_BQ[block, query])] = bucket.keys_BJ[block, list(visible)].tolist()
    assert [sorted(seen[token]) for token in range(sum(lengths))] == expected
    ragged = layout.ragged
    keys = torch.arange(sum(lengths)) if ragged.keys is None else ragged.keys.index
    for segment, (start, end) in enumerate(zip(ragged.query_ends, ragged.query_ends[1:], strict=False)):
        mine = keys[ragged.key_ends[segment] : ragged.key_ends[segment + 1]]
        # Aligned at the end: the last query sees all, the one before it all but the last.
        for token in range(start, end):
            assert mine[: len(mine) - (int(end) - 1 - token)].tolist() == expected[token]


def test_the_gradient_of_a_shared_token_is_the_sum_over_its_slots():
    layout = segment_layout([70, 3, 60, 2, 4, 5], prefixes=[None, 0, 0, None, 3, 3])
    for gather in (layout.padded.queries, layout.padded.keys, layout.ragged.keys):
        row = torch.randn(144, 3, dtype=torch.float64, requires_grad=True)
        taken = take_slots(row, gather)
        assert torch.equal(taken, row[gather.index])
    keys = layout.ragged.keys
    weights = torch.randn(len(keys.index), 3, dtype=torch.float64)
    (ours,) = torch.autograd.grad((take_slots(row, keys) * weights).sum(), row)
    (expected,) = torch.autograd.grad((row[keys.index] * weights).sum(), row)
    torch.testing.assert_close(ours, expected)


def test_a_model_that_numbers_the_row_by_itself_is_refused(model_folder):
    model = PolicyModel.load(model_folder)
    check_isolation(model)

    def counted(_module, args):
        """Whatever positions are given: rotary ones are relative, so a whole sequence does not notice."""
        hidden_states, position_ids = args
        return hidden_states, torch.arange(position_ids.shape[1])[None]

    model.network.model.rotary_emb.register_forward_pre_hook(counted)
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM does not continue a shared prompt as its own"):
        check_isolation(model)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", MODELS)
def test_variable_length_kernel_equals_the_padded_route(name, save_model, tmp_path):
    kind, changes = MODELS[name]
    folder = save_model(tmp_path, kind, **changes)
    (micro,) = micro_batches(make_groups(), 10_000, device="cuda")
    half, full = (PolicyModel.load(folder, dtype, "cuda") for dtype in ("bfloat16", "float32"))
    gradients = []
    for model in (half, full):
        logits = model.logits(micro).float()
        logits.log_softmax(-1).gather(-1, micro.target_ids_N[:, None]).mean().backward()
        gradients.append(torch.cat([p.grad.float().flatten() for p in model.network.parameters()]))
    assert torch.cosine_similarity(*gradients, dim=0) > 0.99
