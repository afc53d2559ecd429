"""Prompts that a micro-batch holds once, against each sequence by itself through transformers' own attention."""

import random

import pytest
import torch

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
    for micro_batch_tokens in (40, 150, 10_000):
        learner = make_learner(micro_batch_tokens, folder=folder)
        metrics = learner.forward_backward(batch, OBJECTIVES[objective])
        assert metrics["num_row_tokens"] < expected["num_row_tokens"]
        assert metrics["loss"] == pytest.approx(expected["loss"], abs=1e-5)
        ours = gradients_of(learner)
        torch.testing.assert_close(ours, gradients, atol=1e-5, rtol=1e-5)


def test_shared_rows_repeat_bit_for_bit(make_learner, gradients_of):
    runs = []
    for _ in range(2):
        learner = make_learner(200)
        learner.forward_backward(make_groups(), OBJECTIVES["grpo"])
        runs.append(gradients_of(learner))
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


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
