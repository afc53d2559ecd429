"""Rows that several ranks hold together: losses, gradients and scores of one process."""

import pytest
import torch
import transformers

from slipstream import records
from slipstream.algo.logprobs import token_statistics
from slipstream.trainer.checkpoints.state_files import read_state
from slipstream.trainer.distributed.context import ContextGroup, shard_targets, shard_tokens
from slipstream.trainer.model.policy import PolicyModel
from slipstream.trainer.packing import StepBatch, dummy_micro_batch, micro_batches
from tests.launch.test_ranks import BATCHES, GRPO, GSPO, PPO, SAMPLING, make_config, one_step, trained

SFT = {"kind": "sft"}
LORA = {"rank": 4, "target_modules": ["q_proj", "down_proj"]}
ROUNDING = 1e-6


SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
WINDOWS = {
    "use_sliding_window": True,
    "sliding_window": 8,
    "layer_types": ["full_attention", "sliding_attention"] * 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def save_model(folder, kind, **more):
    torch.manual_seed(0)
    network = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**SHAPE, **more))
    for parameter in network.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    network.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Grouped heads, and a sliding window in every second layer."""
    return save_model(tmp_path_factory.mktemp("models") / "windows", "Qwen3", **WINDOWS)


def first_step(config, folder):
    """The numbers of a step, its gradient, and the scores before it."""
    folder.mkdir()
    with trained(config, folder) as (parts, _):
        scores = parts.learner.forward(BATCHES[0].sequences, SAMPLING)
        metrics = one_step(parts, config, BATCHES[0])
        parts.learner.save(folder / "state")
        # Fewer rows than groups of ranks: one of these computes a dummy.
        further = [one_step(parts, config, batch)["loss"] for batch in BATCHES[1:]]
    moments = {name: each for name, each in read_state(folder / "state").items() if ".exp_avg." in name}
    return metrics, moments, scores, further


CASES = {
    "sft": (2, 2, {"algorithm": SFT}),
    "sequences": (2, 2, {"algorithm": GSPO}),
    "two groups": (4, 2, {"algorithm": GRPO, "gradient_checkpointing": True, "reshard": "step"}),
    "repeated keys": (4, 4, {"algorithm": GRPO, "gradient_checkpointing": "selective"}),
    "lazy logits": (2, 2, {"algorithm": GRPO, "fp32_head": True}),
    "lora": (2, 2, {"algorithm": GRPO, "lora": LORA}),
    "experts": (2, 2, {"algorithm": SFT}),
}


@pytest.mark.quick("sequences")
@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_one_process(case, model, tmp_path):
    ranks, together, options = CASES[case]
    if case == "experts":
        model = save_model(tmp_path / "experts", "Qwen3Moe", **EXPERTS)
    one = first_step(make_config(model, 1, **options), tmp_path / "one")
    ours = first_step(make_config(model, ranks, context_parallel=together, **options), tmp_path / "ours")
    assert ours[0].keys() == one[0].keys()
    for name in one[0].keys() - {"num_micro_batches", "num_row_tokens"}:
        assert ours[0][name] == pytest.approx(one[0][name], rel=ROUNDING, abs=ROUNDING), name
    assert ours[1].keys() == one[1].keys()
    # The first moment after one step is the gradient times 1 - beta1.
    off = {name: (ours[1][name] - moment).norm() for name, moment in one[1].items()}
    norms = {name: moment.norm() for name, moment in one[1].items()}
    # Sums in another order: 0.5 to 1.01 times 1e-6 on two processors.
    assert torch.stack(list(off.values())).norm() <= 2 * ROUNDING * torch.stack(list(norms.values())).norm()
    assert all(off[name] <= 5 * ROUNDING * norms[name] for name in off)
    for kind in ("logprobs", "entropies"):
        for own, expected in zip(getattr(ours[2], kind), getattr(one[2], kind), strict=True):
            torch.testing.assert_close(own, expected, atol=1e-5, rtol=1e-5)
    assert ours[3] == pytest.approx(one[3], rel=1e-4)


@pytest.mark.full
def test_a_critic(model, tmp_path):
    found = []
    for ranks in (1, 2):
        with trained(make_config(model, ranks, PPO, context_parallel=ranks), tmp_path) as (parts, _):
            sequences = BATCHES[0].sequences
            step = StepBatch(sequences)
            zeros = [torch.zeros(each.num_trainable) for each in sequences]
            step.fill("old_values", zeros)
            step.fill("returns", [each + 1.0 for each in zeros])
            rows = [parts.critic.train([step]) for _ in range(3)]
            found.append((rows, torch.cat(parts.critic.learner.values(sequences))))
    for row, expected in zip(found[1][0], found[0][0], strict=True):
        assert row == pytest.approx(expected, rel=1e-4, abs=1e-6)
    torch.testing.assert_close(found[1][1], found[0][1], atol=1e-5, rtol=1e-4)


def test_a_compilers_trial_needs_no_other_rank(model):
    """Shapes are those of a shard, forward and backward."""
    policy = PolicyModel.load(model)
    context = ContextGroup(1, 2).alone()
    (row,) = micro_batches(BATCHES[3], 1000, context=context)
    statistics = token_statistics(policy.logits(row), row.target_ids_N)
    assert [each.shape for each in statistics] == [row.target_ids_N.shape] * 3
    statistics[0].sum().backward()
    assert all(parameter.grad is not None for parameter in policy.network.parameters())


@pytest.mark.parametrize("size", [2, 3, 4])
def test_shards_make_up_a_row(size):
    sequences = [records.Sequence(list(range(n)), [False] + [True] * (n - 1)) for n in (2, 5, 9)]
    (whole,) = micro_batches(StepBatch(sequences), 100)
    rows = [next(iter(micro_batches(StepBatch(sequences), 100, context=ContextGroup(r, size)))) for r in range(size)]
    num_tokens = len(rows[0].token_ids_T)
    assert 0 <= num_tokens - len(whole.token_ids_T) < size
    assert rows[0].layout.lengths[: len(whole.layout.lengths)] == whole.layout.lengths, "padding is a segment"
    tokens, positions, _ = zip(*(row.inputs for row in rows), strict=True)
    assert {len(each) for each in tokens} == {num_tokens // size}
    assert torch.equal(torch.cat(tokens), rows[0].token_ids_T)
    assert torch.equal(torch.cat(positions)[: len(whole.token_ids_T)], whole.position_ids_T)
    targets = torch.cat([row.shard.index_M for row in rows])
    assert sorted(targets.tolist()) == list(range(len(whole.target_ids_N)))
    for rank, row in enumerate(rows):
        places = row.inputs[2] + rank * num_tokens // size
        assert torch.equal(places, whole.predict_index_N[row.shard.index_M])
    assert [len(dummy_micro_batch("cpu", ContextGroup(0, size)).inputs[0])] == [1], "no shard is empty"
    held = shard_tokens(12, 1, 3)
    assert (held, shard_targets(torch.tensor([3, 4, 7, 8, 5]), held).tolist()) == (range(4, 8), [1, 2, 4])
