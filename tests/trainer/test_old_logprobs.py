"""Which log-probabilities a batch is given before its first optimizer step."""

from types import SimpleNamespace

import pytest
import torch
from tests.recipe_settings import rl

from slipstream.config.recipes import resolved
from slipstream.records import Batch, Rollout, SamplingParams, Sequence, Version
from slipstream.trainer.old_logprobs import fill_logprobs, reward_kl_penalties
from slipstream.trainer.packing import StepBatch

SAMPLING = SamplingParams(max_tokens=4)
SEQUENCE = Sequence([1, 2, 3], [False, True, True], [0.0, -0.5, -0.5])


class Model:
    """Says the same of every token; notes what it was asked for."""

    def __init__(self, value):
        self.value = value

    def forward(self, sequences, sampling):
        return SimpleNamespace(logprobs=[torch.full((s.num_trainable,), self.value) for s in sequences])


def step():
    return StepBatch([SEQUENCE])


@pytest.mark.parametrize(("old_policy", "expected"), [("trainer", [-1.0, -1.0]), ("engine", None)])
def test_the_trainer_computes_them_unless_they_are_the_engines(old_policy, expected):
    steps = [step(), step()]
    fill_logprobs(steps, resolved(rl(old_policy=old_policy)), Model(-1.0), None, SAMPLING)
    assert [each.sequences[0].values("old_logprobs") for each in steps] == [expected] * 2


def test_the_reference_is_asked_where_the_loss_has_the_kl_term():
    first, algorithm = step(), resolved(rl(kl_coef=0.1, kl_in="loss"))
    fill_logprobs([first, first], algorithm, Model(-1.0), Model(-2.0), SAMPLING)
    assert first.sequences[0].values("reference_logprobs") == [-2.0, -2.0]
    assert SEQUENCE.streams == {}
    batch = Batch(0, Version(0, 0), [])
    assert reward_kl_penalties(batch, algorithm, Model(-1.0), Model(-2.0), SAMPLING) == (None, {})


def test_a_kl_term_in_the_reward_is_taken_from_it_and_not_from_the_loss_too():
    first, algorithm = step(), resolved(rl(kl_coef=0.1, kl_in="reward", kl_estimator="k1"))
    fill_logprobs([first], algorithm, Model(-1.0), Model(-2.0), SAMPLING)
    assert first.sequences[0].streams == {}
    rollout = Rollout("0.0.0", "t", "0.0", [SEQUENCE], 1.0, "done")
    penalties, metrics = reward_kl_penalties(
        Batch(0, Version(0, 0), [rollout]), algorithm, Model(-1.0), Model(-2.0), SAMPLING
    )
    assert [[values.tolist() for values in of_rollout] for of_rollout in penalties] == [[[0.1, 0.1]]]
    assert metrics == {"train/kl_reference": 1.0}
