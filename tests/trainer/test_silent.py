"""Rollouts of advantage 0 are counted and, but for a sample, not computed: gradients are those of computing them."""

import random

import pytest
import torch
from tests.recipe_settings import rl
from tests.trainer.credit import batch_from

from slipstream import records
from slipstream.config.recipes import resolved
from slipstream.trainer.loss import PolicyObjective, SFTObjective
from slipstream.trainer.packing import make_step_batches

SAMPLING = records.SamplingParams(max_tokens=24, temperature=0.8)


def batch_of(num_groups=6, size=6, seed=0):
    """Groups of which every second one agrees, and of the others one rollout in three is average; with lengths that
    differ, so that the divisors do."""
    rng = random.Random(seed)
    rollouts, advantages = [], []
    for group in range(num_groups):
        prompt = [rng.randrange(1, 97) for _ in range(rng.randint(3, 20))]
        for number in range(size):
            length = rng.randint(1, 24)
            mask = [False] * len(prompt) + [True] * length
            ids = prompt + [rng.randrange(1, 97) for _ in range(length)]
            logprobs = [rng.uniform(-6.0, -3.0) if trained else 0.0 for trained in mask]
            sequence = records.Sequence(ids, mask, logprobs)
            rollouts.append(records.Rollout(f"{group}-{number}", f"{group}", f"{group}", [sequence], 0.0, "done"))
            advantages.append(0.0 if group % 2 or number % 3 == 0 else rng.gauss(0, 1))
    return batch_from(rollouts), advantages


OBJECTIVES = {
    "token": rl(),
    "sequence": rl(normalize="sequence"),
    "constant": rl(normalize="constant"),
    "masked": rl(importance_sampling="masked"),
    "gspo": rl(loss="gspo"),
    "cispo": rl(loss="cispo"),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradients_are_those_of_computing_them(name, make_learner, gradients_of):
    objective = PolicyObjective(resolved(OBJECTIVES[name]), SAMPLING)
    assert objective.ignores_silent
    batch, advantages = batch_of()
    found = []
    for ignores in (False, True):
        learner = make_learner()
        (step,) = make_step_batches(batch, advantages, ignores_silent=ignores)
        found.append((step, learner.forward_backward(step, objective), gradients_of(learner)))
    (whole, whole_metrics, expected), (step, metrics, gradients) = found
    assert (step.num_tokens, step.num_sequences) == (whole.num_tokens, whole.num_sequences)
    assert sum(advantage == 0.0 for advantage in advantages) == 24
    assert len(step.silent) == 24 - 3
    for key in ("loss", "num_tokens", "num_sequences"):
        assert metrics[key] == pytest.approx(whole_metrics[key], rel=1e-5, abs=1e-7)
    torch.testing.assert_close(gradients, expected, atol=2e-7, rtol=1e-5)
    assert metrics["num_row_tokens"] < 0.6 * whole_metrics["num_row_tokens"]


def test_a_step_of_silent_rollouts_keeps_a_sample_and_has_no_signal():
    batch, advantages = batch_of(num_groups=2)
    steps = make_step_batches(batch, advantages, updates_per_batch=2, epochs=2, ignores_silent=True)
    assert [step.has_signal for step in steps] == [True, False] * 2
    assert [len(step.sequences) for step in steps] == [5, 1] * 2
    assert steps[0] is steps[2]


def test_whatever_else_teaches_them_keeps_them():
    batch, advantages = batch_of(num_groups=2)
    for rollout in batch.rollouts:
        rollout.sequences[0].put("teacher_logprobs", [0.0] * len(rollout.sequences[0]))
    (step,) = make_step_batches(batch, advantages, ignores_silent=True)
    assert not step.silent
    for config, coef in (
        (rl(kl_coef=0.1), None),
        (rl(entropy_coef=0.1), None),
        (rl(), 0.5),
    ):
        assert not PolicyObjective(resolved(config), SAMPLING, coef).ignores_silent
    assert PolicyObjective(resolved(rl(kl_coef=0.1, kl_in="reward")), SAMPLING).ignores_silent
    assert not SFTObjective().ignores_silent
    own = PolicyObjective(resolved(rl(loss=f"{__file__}:own_loss")), SAMPLING)
    assert not own.ignores_silent


def own_loss(inputs):
    """Teaches sequences of any advantage."""
    return -inputs.logprobs_N
