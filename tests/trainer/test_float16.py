"""Training in float16: a scaled loss, and overflows that are made again."""

import pytest
import torch
from tests.trainer.steps import advance

from slipstream import records
from slipstream.errors import TrainingError
from slipstream.trainer.learner import Learner
from slipstream.trainer.loss import SFTObjective
from slipstream.trainer.model.policy import PolicyModel
from slipstream.trainer.optim.base import MasterAdamW
from slipstream.trainer.optim.loss_scale import FIRST, GROWTH_INTERVAL, LARGEST, LossScale
from slipstream.trainer.packing import StepBatch


def batch():
    torch.manual_seed(3)
    tokens = torch.randint(3, 90, (6, 40)).tolist()
    return StepBatch([records.Sequence(own, [False] * 8 + [True] * 32, [0.0] * 40) for own in tokens])


def learner_of(folder, dtype, **changes):
    model = PolicyModel.load(folder, dtype, **changes)
    return Learner(model, MasterAdamW(model.network.named_parameters(), max_grad_norm=1e9), micro_batch_tokens=512)


def test_its_update_is_that_of_float32(model_folder):
    """The masters after a step, from the same float16 weights; Adam's first step is the gradient's sign."""
    float16 = learner_of(model_folder, "float16", fp32_residual=True)
    assert float16.optimizer.loss_scale.value == FIRST
    float32 = learner_of(model_folder, "float32")
    with torch.no_grad():
        for parameter in float32.model.network.parameters():
            parameter.copy_(parameter.half().float())
    norms, gradients = [], []
    for learner in (float32, float16):
        learner.forward_backward(batch(), SFTObjective())
        scale = learner.optimizer.loss_scale.value
        gradients.append({name: master.grad / scale for name, master in learner.optimizer.masters().items()})
        norms.append(learner.optim_prepare(1e-3).grad_norm)
        learner.optim_commit()
        for name, gradient in gradients[-1].items():  # Adam's step itself would be the same at any scale
            torch.testing.assert_close(
                learner.optimizer.state()[f"exp_avg.{name}"], 0.1 * gradient, atol=1e-9, rtol=1e-4
            )
    assert norms[1] == pytest.approx(norms[0], rel=2e-3)
    for name, gradient in gradients[0].items():
        assert (gradients[1][name] - gradient).norm() < 0.02 * gradient.norm() + 1e-7, name
    assert all(each.dtype == torch.float16 for each in float16.model.network.parameters())


def test_an_overflow_is_made_again_at_a_lower_scale(model_folder):
    updates = []
    for scale in (1024.0, 2.0**40):
        learner = learner_of(model_folder, "float16")
        learner.optimizer.loss_scale.value = scale
        learner.forward_backward(batch(), SFTObjective())
        stats = learner.optim_prepare(1e-3)
        learner.optim_commit()
        updates.append((stats, dict(learner.named_weights())))
    (plain, wanted), (stats, weights) = updates
    assert plain.num_overflows == 0
    assert plain.loss_scale == 1024.0
    assert stats.num_overflows > 10
    assert stats.loss_scale == 2.0 ** (40 - stats.num_overflows)
    assert learner.step == 1
    assert stats.grad_norm == pytest.approx(plain.grad_norm, rel=1e-3)
    torch.testing.assert_close(weights, wanted, atol=3e-3, rtol=0.0)


def test_what_is_not_finite_at_any_scale_is_an_error(model_folder):
    learner = learner_of(model_folder, "float16")
    learner.forward_backward(batch(), SFTObjective())
    masters = list(learner.optimizer.masters().values())

    def spoil(*_):
        for master in masters:
            master.grad = torch.full_like(master, torch.nan)

    learner.forward_backward = spoil
    spoil()
    with pytest.raises(TrainingError, match="are NaN or infinite"):
        learner.optim_prepare(1e-3)


def test_the_scale_grows_and_is_resumed(model_folder, tmp_path):
    scale = LossScale(is_needed=True)
    for _ in range(GROWTH_INTERVAL):
        scale.count_good()
    assert scale.value == 2 * FIRST
    scale.value = LARGEST
    for _ in range(GROWTH_INTERVAL):
        scale.count_good()
    assert scale.value == LARGEST
    learner = learner_of(model_folder, "float16")
    learner.optimizer.loss_scale.value = 128.0
    advance(learner, batch(), 1e-3)
    learner.save(tmp_path / "state")
    other = learner_of(model_folder, "float16")
    other.load(tmp_path / "state")
    assert other.optimizer.loss_scale.state()["loss_scale"].tolist() == [128.0, 1.0]
    assert not LossScale(is_needed=False).state()
