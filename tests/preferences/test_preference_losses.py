"""Losses of preferences in float64 against TRL's trainers, losses and gradients; and the gradient by derivatives of
sums, against that of the loss itself."""

import collections
import types

import pytest
import torch

from slipstream_preferences.losses import (
    PAIR_LOSSES,
    bradley_terry_loss,
    derivatives,
    kto_baseline,
    kto_loss,
)

pytest.importorskip("trl")
from trl.trainer import dpo_trainer, kto_trainer, reward_trainer

LENGTHS = (3, 5, 2, 4, 6, 1)
"""Of three chosen completions and three rejected ones, after a prompt of one token."""
CLOSE = {"rtol": 1e-5, "atol": 1e-12}


def draw(seed):
    """Log-probabilities of each completion's tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [-torch.rand(length, dtype=torch.float64, generator=generator) * 3 for length in LENGTHS]


def padded(rows):
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


class Model(torch.nn.Module):
    is_gradient_checkpointing = False


class Accelerator:
    device = torch.device("cpu")

    def gather(self, value):
        return value

    gather_for_metrics = gather


def outputs(logprobs):
    """What TRL's fused head returns."""
    rows = padded(logprobs)
    ones = torch.ones_like(rows)
    return types.SimpleNamespace(
        log_probs=rows, entropy=ones, log_sum_sq_probs=ones, mean_logits=ones, is_top1=ones.bool(), aux_loss=None
    )


def trainer(kind, **settings):
    """A TRL trainer without its constructor, which wants a model and a data set."""
    made = object.__new__(kind)
    made.model = Model()
    made.accelerator = Accelerator()
    made.args = types.SimpleNamespace(gradient_checkpointing_kwargs=None, center_rewards_coefficient=None)
    made._metrics = {"train": collections.defaultdict(list)}
    made._total_train_tokens, made._tp_size = 0, 1
    made.aux_loss_enabled = made.precompute_ref_logps = False
    made.__dict__ |= settings
    return made


def model_inputs():
    mask = padded([torch.tensor([0] + [1] * length) for length in LENGTHS])
    return {"input_ids": torch.zeros_like(mask), "attention_mask": torch.ones_like(mask), "completion_mask": mask}


def trl_dpo(name, policy, reference, beta):
    made = trainer(
        dpo_trainer.DPOTrainer,
        ref_model=lambda **_: outputs(reference),
        ld_alpha=None,
        f_divergence_type="reverse_kl",
        loss_types=[name],
        loss_weights=[1.0],
        beta=beta,
        use_weighting=False,
    )
    return made._compute_loss(lambda **_: outputs(policy), model_inputs(), return_outputs=False)


@pytest.mark.parametrize("beta", [0.1, 1.0])
@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_pairs(name, beta):
    policy, reference = [row.requires_grad_() for row in draw(0)], draw(1)
    theirs = trl_dpo(name, policy, reference, beta)
    gradients = torch.autograd.grad(theirs, policy)

    scale = [len(row) if name == "ipo" else 1 for row in policy]
    sums = torch.stack([(p - r).sum() / n for p, r, n in zip(policy, reference, scale, strict=True)])
    ours = PAIR_LOSSES[name](sums[:3], sums[3:], beta).mean()
    torch.testing.assert_close(ours, theirs, **CLOSE)
    for mine, other in zip(torch.autograd.grad(ours, policy), gradients, strict=True):
        torch.testing.assert_close(mine, other, **CLOSE)

    # Two passes: sums without a gradient, and then a loss that is linear in each token.
    known = sums.detach().requires_grad_()
    weights = derivatives(PAIR_LOSSES[name](known[:3], known[3:], beta).mean(), known)
    linear = sum(w * row.sum() / n for w, row, n in zip(weights, policy, scale, strict=True))
    for mine, other in zip(torch.autograd.grad(linear, policy), gradients, strict=True):
        torch.testing.assert_close(mine, other, **CLOSE)


@pytest.mark.parametrize("shift", [0.0, 3.0], ids=["z0 = 0", "z0 > 0"])
@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.3, 0.7)])
def test_kto(weights, shift):
    policy, reference = [row.requires_grad_() for row in draw(0)], draw(1)
    other_policy, other_reference = draw(2), [row - shift for row in draw(3)]
    labels = torch.tensor([True, False, True, True, False, False])

    def answers(own, other):
        return lambda **given: outputs(other if given["input_ids"].sum() else own)

    made = trainer(
        kto_trainer.KTOTrainer,
        ref_model=answers(reference, other_reference),
        calculate_KL=True,
        loss_type="kto",
        beta=0.3,
        desirable_weight=weights[0],
        undesirable_weight=weights[1],
    )
    own = model_inputs()
    others = {f"KL_{name}": value for name, value in own.items()}
    others["KL_input_ids"] = torch.ones_like(own["input_ids"])
    inputs = own | others | {"label": labels}
    theirs = made._compute_loss(answers(policy, other_policy), inputs, return_outputs=False)

    def ratios(ours, frozen):
        return torch.stack([(p - r).sum() for p, r in zip(ours, frozen, strict=True)])

    baseline = kto_baseline(ratios(other_policy, other_reference))
    assert (baseline > 0) == (shift > 0)
    ours = kto_loss(ratios(policy, reference), labels, baseline, 0.3, *weights).mean()
    torch.testing.assert_close(ours, theirs, **CLOSE)
    gradients = torch.autograd.grad(theirs, policy)
    for mine, other in zip(torch.autograd.grad(ours, policy), gradients, strict=True):
        torch.testing.assert_close(mine, other, **CLOSE)


@pytest.mark.parametrize("centering", [None, 0.01])
@pytest.mark.parametrize("has_margin", [False, True])
def test_rewards(has_margin, centering):
    rewards = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    margins = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64) if has_margin else None
    made = trainer(reward_trainer.RewardTrainer)
    made.args.center_rewards_coefficient = centering
    inputs = {"attention_mask": torch.ones(6, 2)} | ({"margin": margins} if has_margin else {})
    model = types.SimpleNamespace(logits=rewards[:, None])
    theirs = made.compute_loss(lambda **_: model, inputs)
    ours = bradley_terry_loss(rewards[:3], rewards[3:], margins, centering or 0.0).mean()
    torch.testing.assert_close(ours, theirs, **CLOSE)
    torch.testing.assert_close(torch.autograd.grad(ours, rewards)[0], torch.autograd.grad(theirs, rewards)[0], **CLOSE)
