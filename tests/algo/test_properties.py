"""What holds for every loss, correction and normalisation: how a step is cut, ordered and padded changes nothing."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.algo.problem import FixedPolicy

from slipstream import records
from slipstream.algo.surrogate_losses import LOSSES
from slipstream.config.recipes import resolved
from slipstream.config.schema import RLConfig, TeacherConfig
from slipstream.trainer.loss import PolicyObjective
from slipstream.trainer.packing import StepBatch, micro_batches

VOCABULARY = 9
LENGTHS = st.lists(st.integers(1, 6), min_size=1, max_size=7)
CONFIGS = st.builds(
    lambda loss, normalize, correction, entropy: RLConfig(
        loss=loss, normalize=normalize, importance_sampling=correction, entropy_coef=entropy
    ),
    st.sampled_from(sorted(LOSSES)),
    st.sampled_from(["token", "sequence", "constant"]),
    st.sampled_from(["none", "truncated", "masked", "sequence_truncated", "sequence_masked"]),
    st.sampled_from([0.0, 0.1]),
)


def step_of(lengths, seed, *, padding=0):
    """Random sequences with everything that a loss may read, and their logits; `padding`: tokens of no interest after
    each."""
    generator = torch.Generator().manual_seed(seed)
    sequences, logits, old = [], [], []
    for length in lengths:
        drawn = torch.randn(length, VOCABULARY, generator=generator, dtype=torch.float64)
        tokens = torch.randint(VOCABULARY, (length,), generator=generator)
        exact = drawn.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        noise = 0.3 * torch.randn(3, length, generator=generator, dtype=torch.float64)
        behaviour, teacher = (exact + noise[0]).tolist(), (exact + noise[1]).tolist()
        rest = [0.0] * padding
        sequences.append(
            records.Sequence(
                [1, 2, *tokens.tolist(), *[3] * padding],
                [False] * 2 + [True] * length + [False] * padding,
                [0.0, 0.0, *behaviour, *rest],
                streams={"teacher_logprobs": records.Stream.of(teacher)},
            )
        )
        logits.append(drawn)
        old.append((exact + noise[2]).float())
    advantages = torch.randn(len(lengths), generator=generator).tolist()
    batch = StepBatch(sequences, advantages)
    batch.fill("old_logprobs", old)
    return batch, logits


def gradients(config, batch, logits, *, room=4096, packing=True, teacher_coef=None):
    leaves = [each.clone().requires_grad_() for each in logits]
    teacher = None if teacher_coef is None else TeacherConfig(coef=teacher_coef)
    objective = PolicyObjective(resolved(config), records.SamplingParams(max_tokens=8), teacher)
    divisors = objective.counts(batch)
    for micro in micro_batches(batch, room, packing=packing):
        objective.terms(FixedPolicy(leaves), micro, divisors)[0].backward()
    return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]


@settings(deadline=None, max_examples=40)
@given(
    *(LENGTHS, st.integers(0, 10_000), CONFIGS, st.integers(3, 40), st.booleans(), st.sampled_from([None, 0.5])),
    *(st.integers(0, 9), st.randoms(use_true_random=False)),
)
def test_cut_order_and_tokens_after_the_last_trained_one(
    lengths, seed, config, room, packing, teacher_coef, padding, random
):
    batch, logits = step_of(lengths, seed)
    wanted = gradients(config, batch, logits, teacher_coef=teacher_coef)
    batch, _ = step_of(lengths, seed, padding=padding)
    order = random.sample(range(len(lengths)), len(lengths))
    shuffled = StepBatch(*([values[i] for i in order] for values in (batch.sequences, batch.advantages)))
    moved = [logits[i] for i in order]
    ours = gradients(config, shuffled, moved, room=room, packing=packing, teacher_coef=teacher_coef)
    for one, i in zip(ours, order, strict=True):
        torch.testing.assert_close(one, wanted[i], atol=1e-6, rtol=1e-5)
