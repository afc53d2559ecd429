"""Further losses of an optimizer step: their gradients add up, each over its own mask and divisor."""

import msgspec
import pytest
import torch

from slipstream.config.recipes import resolved
from slipstream.config.schema import RLConfig
from slipstream.records import SamplingParams
from slipstream.trainer.loss import PolicyObjective, SFTObjective
from slipstream.trainer.packing import StepBatch

OWN = """
import msgspec
from slipstream import Algorithm, LossTerm
class Both(Algorithm):
    def terms(self, sequences):
        masks = [[False, *(not own for own in sequence.mask[1:])] for sequence in sequences]
        theirs = [msgspec.structs.replace(s, mask=mask, streams={}) for s, mask in zip(sequences, masks)]
        return [LossTerm("theirs", theirs, 0.25), LossTerm("squares", theirs, 2.0, "squares"), LossTerm("none", [])]
    def squares(self, inputs):
        return inputs.logprobs_N ** 2 * inputs.advantages_N
"""


@pytest.fixture
def objective(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return PolicyObjective(resolved(RLConfig(hooks=f"{tmp_path}/own.py:Both")), SamplingParams(max_tokens=8))


def test_gradients_add_up(objective, make_batch, make_learner, gradients_of):
    batch = make_batch()
    sequences = [msgspec.structs.replace(s, mask=[False, *(not own for own in s.mask[1:])]) for s in batch.sequences]

    def gradients(*parts):
        learner = make_learner()
        metrics = [learner.forward_backward(*part) for part in parts]
        return gradients_of(learner), metrics

    cross_entropy = (StepBatch(sequences), objective.term(""), 0.25)
    both, metrics = gradients((batch, objective), cross_entropy)
    policy, _ = gradients((batch, objective))
    supervised, expected = gradients((StepBatch(sequences), SFTObjective()))
    assert metrics[1]["loss"] == pytest.approx(expected[0]["loss"])
    for name, gradient in both.items():
        torch.testing.assert_close(gradient, policy[name] + 0.25 * supervised[name], atol=1e-6, rtol=1e-5)


def test_a_method_of_the_class_is_a_loss(objective, make_batch, make_learner):
    batch, learner = make_batch(), make_learner()
    (_, term) = objective.algorithm.terms(batch.sequences)[:2]
    found = learner.forward_backward(StepBatch(term.sequences), objective.term(term.loss), term.weight)
    logprobs = torch.cat(learner.forward(term.sequences).logprobs)
    assert found["loss"] == pytest.approx(logprobs.square().mean().item(), rel=1e-5)
