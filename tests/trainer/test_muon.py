"""Muon against a float64 reference of its rule by singular values, and against torch's own."""

import math

import pytest
import torch
from tests.trainer.steps import apply, check_interruption
from torch import nn

from slipstream.errors import TrainingError
from slipstream.trainer.optim.muon import MasterMuon

A, B, C = 3.4445, -4.7750, 2.0315
"""Jordan's coefficients."""


class Network(nn.Module):
    """An embedding, three matrices of different shapes, a norm, and a head."""

    def __init__(self, *, tied):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.tall, self.wide, self.square = nn.Linear(8, 24), nn.Linear(24, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.norm, self.back = nn.LayerNorm(6), nn.Linear(6, 8, bias=False)
        self.head = nn.Linear(8, 11, bias=False)
        self.value_head = nn.Linear(6, 1)
        if tied:
            self.head.weight = self.embed.weight

    def get_output_embeddings(self):
        return self.head


def reference_step(weight, momentum, gradient, rate, decay, mu):
    """One step as the papers have it, in float64; through the singular values, without the iteration's products."""
    momentum.mul_(mu).add_(gradient, alpha=1 - mu)
    nesterov = (1 - mu) * gradient + mu * momentum
    u, s, v = torch.linalg.svd(nesterov / nesterov.norm(), full_matrices=False)
    for _ in range(5):
        s = A * s + B * s**3 + C * s**5
    weight.mul_(1 - rate * decay)
    weight.sub_(rate * 0.2 * math.sqrt(max(weight.shape)) * (u * s) @ v)


@pytest.mark.parametrize("tied", [True, False])
def test_matrices_are_muons_and_the_rest_adamws(tied):
    torch.manual_seed(0)
    network = Network(tied=tied)
    optimizer = MasterMuon(network.named_parameters(), network)
    for parameter in network.parameters():
        parameter.grad = None
    sum(parameter.square().sum() for parameter in network.parameters()).backward()
    apply(optimizer, 1e-3)
    state = optimizer.state()
    muon = {key.partition(".")[2] for key in state if key.startswith("momentum_buffer.")}
    adamw = {key.partition(".")[2] for key in state if key.startswith("exp_avg.")}
    assert muon == {"tall.weight", "wide.weight", "square.weight", "back.weight"}
    assert muon | adamw == set(optimizer.masters())
    assert not muon & adamw


@pytest.mark.parametrize("shape", [(24, 8), (6, 24), (16, 16)])
def test_equals_the_rule_in_float64_and_torchs_muon(shape):
    generator = torch.Generator().manual_seed(1)
    ours, theirs = (nn.Linear(shape[1], shape[0], bias=False) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    exact = ours.weight.detach().double()
    start, buffer = exact.clone(), torch.zeros_like(exact)
    optimizer = MasterMuon(ours.named_parameters(), ours, weight_decay=0.1, max_grad_norm=1e9)
    torchs = torch.optim.Muon(
        theirs.parameters(), lr=0.02, momentum=0.95, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    for _ in range(4):
        gradient = torch.randn(shape, generator=generator)
        (ours.weight * gradient).sum().backward()
        theirs.weight.grad = gradient.clone()
        apply(optimizer, 0.02)
        torchs.step()
        reference_step(exact, buffer, gradient.double(), 0.02, 0.1, 0.95)
    assert torch.equal(ours.weight, theirs.weight)
    # The iteration is in bfloat16, whose resolution is 1/256.
    moved, expected = ours.weight.detach().double() - start, exact - start
    assert (moved - expected).norm() < 0.03 * expected.norm()


def test_an_interrupted_run_is_the_same_bit_for_bit(make_learner, make_batch, tmp_path):
    def muon(named, **settings):
        named = list(named)
        embedding = nn.Embedding(1, 1)
        embedding.weight = next(parameter for name, parameter in named if "embed" in name)
        return MasterMuon(named, embedding, **settings)

    def learner():
        return make_learner(dtype="bfloat16", kind=muon, weight_decay=0.1)

    found = check_interruption(learner, make_batch, tmp_path)
    assert not any("momentum" in name and "embed" in name for name in found)
    other = make_learner(dtype="bfloat16")
    with pytest.raises(TrainingError, match=r"another optimizer's: .*momentum_buffer.* exp_avg are needed"):
        other.load(tmp_path)
    assert other.step == 0
