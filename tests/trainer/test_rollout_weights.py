"""How much a rollout weighs in the loss: as much as any other, however many sequences its episode has."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.trainer.credit import batch_from

from slipstream import records
from slipstream.algo.surrogate_losses import token_weights
from slipstream.config import RLConfig
from slipstream.config.recipes import resolved
from slipstream.trainer.distributed.worker import rank_batch_of
from slipstream.trainer.loss import PolicyObjective
from slipstream.trainer.packing import even_rows, make_step_batches, micro_batches, micro_batches_of

MAX_TOKENS = 6
SAMPLING = records.SamplingParams(max_tokens=MAX_TOKENS)


def batch_of(draw, most_sequences):
    """Rollouts of several sequences in groups of two; each sequence's first token is the prompt, and a token's id is
    its number in the batch."""
    rollouts, number = [], 1
    for place in range(draw.randint(2, 6)):
        sequences = []
        for _ in range(draw.randint(1, most_sequences)):
            size = draw.randint(0 if sequences else 1, MAX_TOKENS)
            sequences.append(records.Sequence([0, *range(number, number + size)], [False] + [True] * size))
            number += size
        rollouts.append(records.Rollout(f"{place}", "t", f"g{place // 2}", sequences, 0.0, "done"))
    return batch_from(rollouts)


def weights_of(step, rows, normalize):
    """Each computed token's part of the loss, by its id."""
    objective = PolicyObjective(resolved(RLConfig(normalize=normalize)), SAMPLING)
    divisor = objective.counts(step)["loss"]
    found = {}
    for row in rows:
        given = (row.sequence_index_N, row.num_sequences, normalize, row.rollout_tokens_S)
        parts = (token_weights(*given) / divisor).tolist()
        found |= dict(zip(row.target_ids_N.tolist(), parts, strict=True))
    return found


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**9), st.sampled_from(["token", "sequence", "constant"]), st.integers(1, 3), st.booleans())
def test_a_rollout_weighs_the_same_however_many_sequences_it_has(seed, normalize, updates, over_ranks):
    draw = random.Random(seed)
    batch = batch_of(draw, 4)
    advantages = [draw.choice([0.0, 1.0, -1.0]) for _ in batch.rollouts]
    steps = make_step_batches(batch, advantages, updates_per_batch=updates, ignores_silent=True)
    found = {}
    for step in steps:
        if over_ranks:
            shares = [rank_batch_of(step, list(rank))[0] for rank in zip(*even_rows(step, 12, 2), strict=True)]
            rows = [row for share in shares for row in micro_batches_of(share.batch, share.rows) if row]
        else:
            rows = micro_batches(step, 12)
        found |= weights_of(step, rows, normalize)
    for step in steps:
        inside = {id(sequence) for sequence in (*step.sequences, *step.silent)}
        own = [rollout for rollout in batch.rollouts if id(rollout.sequences[0]) in inside]
        total = sum(rollout.num_sampled for rollout in own)
        assert step.num_rollouts == len(own)
        for rollout in own:
            expected = {
                "token": 1 / total,
                "sequence": 1 / (rollout.num_sampled * len(own)),
                "constant": 1 / (len(own) * MAX_TOKENS),
            }[normalize]
            tokens = [t for s in rollout.sequences for t, m in zip(s.token_ids, s.mask, strict=True) if m]
            assert [found[t] for t in tokens if t in found] == pytest.approx(
                [expected] * sum(t in found for t in tokens)
            )


@pytest.mark.parametrize("normalize", ["sequence", "constant"])
def test_one_sequence_a_rollout_has_the_bits_of_the_mean_over_sequences(normalize):
    batch = batch_of(random.Random(0), 1)
    (step,) = make_step_batches(batch, [1.0] * len(batch.rollouts))
    assert (step.rollout_tokens, step.num_rollouts) == (None, step.num_sequences)
    (row,) = micro_batches(step, 100)
    lengths = torch.tensor(row.counts, dtype=torch.float32)[row.sequence_index_N]
    given = token_weights(row.sequence_index_N, row.num_sequences, normalize, row.rollout_tokens_S)
    assert torch.equal(given, 1.0 / lengths if normalize == "sequence" else torch.ones_like(lengths))
