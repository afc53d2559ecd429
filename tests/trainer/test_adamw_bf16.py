"""AdamW on bfloat16 weights alone, against torch's in float32: the same moments, and weights in the mean."""

import math
import weakref

import pytest
import torch
from tests.trainer.steps import apply, check_interruption
from torch import nn
from torch.optim.adamw import adamw

from slipstream.errors import TrainingError
from slipstream.trainer.optim import adamw_bf16
from slipstream.trainer.optim.adamw_bf16 import RoundedAdamW, round_to_bfloat16_
from slipstream.trainer.optim.base import MasterAdamW


def bfloat16_model(value=None, shape=(64, 64)):
    model = nn.Linear(*shape, bias=False).to(torch.bfloat16)
    if value is not None:
        nn.init.constant_(model.weight, value)
    return model


def step(optimizer, model, weight, rate):
    (model.weight.float() * weight).sum().backward()
    stats = optimizer.prepare(rate)
    optimizer.commit()
    return stats


@pytest.mark.parametrize("value", [1.001, -1.001, 3.1415926, -2e-5, 1e-30, 0.0, 1.5, 255.3])
def test_rounding_is_to_a_neighbour_and_right_in_the_mean(value):
    num = 200_000
    exact = torch.tensor(value, dtype=torch.float32)
    values = exact.repeat(num)
    round_to_bfloat16_(values, torch.Generator().manual_seed(5))
    assert torch.equal(values.to(torch.bfloat16).float(), values)
    low, high = values.min(), values.max()
    assert low <= exact <= high
    bits = torch.stack([low, high]).to(torch.bfloat16).view(torch.int16)
    assert abs(int(bits[0]) - int(bits[1])) <= 1
    gap = (high - low).double()
    # Five standard errors of a mean of draws between two values.
    assert (values.double().mean() - exact.double()).abs() <= 5 * gap * 0.5 / math.sqrt(num)


def test_the_mean_over_seeds_is_torchs_adamw():
    torch.manual_seed(0)
    start = torch.randn(32, 16).to(torch.bfloat16)
    gradients = [torch.randn(32, 16) for _ in range(3)]
    exact = nn.Parameter(start.float())
    reference = torch.optim.AdamW([exact], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for gradient in gradients:
        exact.grad = gradient.clone()
        reference.step()
    num, total = 400, torch.zeros(32, 16, dtype=torch.float64)
    for seed in range(num):
        model = bfloat16_model(shape=(16, 32))
        with torch.no_grad():
            model.weight.copy_(start)
        optimizer = RoundedAdamW(model.named_parameters(), seed=seed, weight_decay=0.1, max_grad_norm=1e9)
        for gradient in gradients:
            step(optimizer, model, gradient, 1e-3)
        memory = optimizer.state()
        # Gradients pass through the live weight's dtype; the moments of what came are exact.
        torch.testing.assert_close(memory["exp_avg.weight"], reference.state[exact]["exp_avg"], atol=3e-3, rtol=1e-2)
        total += model.weight.detach().double()
    error = total / num - exact.detach().double()
    ulp = start.abs().double() * 2**-7 + 1e-6
    # Three roundings, each off by half a step at most in the standard deviation; rounded gradients move less than that.
    assert (error.abs() <= 5 * math.sqrt(3) * 0.5 * ulp / math.sqrt(num) + 2e-5).all()
    assert abs((error / ulp).mean()) < 4 * math.sqrt(3) * 0.5 / math.sqrt(num * error.numel()) + 1e-3


def test_a_gradient_goes_as_soon_as_its_weights_are_made(monkeypatch):
    """The plan counts on it: gradients in fp32 are twice as large as the weights."""
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False, dtype=torch.bfloat16) for _ in range(4)))
    optimizer = RoundedAdamW(model.named_parameters(), seed=0)
    model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
    made, alive = [], []

    def spy(values, gradients, *rest, **options):
        alive.append(sum(reference() is not None for reference in made))
        made.append(weakref.ref(gradients[0]))
        return adamw(values, gradients, *rest, **options)

    monkeypatch.setattr(adamw_bf16, "adamw", spy)
    optimizer.prepare(1e-3)
    assert alive == [0, 0, 0, 0]


def test_in_float32_it_is_the_masters_whose_live_weights_change_only_on_commit():
    """With their norm, their clip, and decay of matrices alone."""
    model, theirs = (nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(2))
    theirs.load_state_dict(model.state_dict())
    settings, stats = {"weight_decay": 0.5, "max_grad_norm": 0.5}, []
    ours = RoundedAdamW(model.named_parameters(), seed=0, **settings)
    for network, optimizer in ((model, ours), (theirs, MasterAdamW(theirs.named_parameters(), **settings))):
        before = [parameter.detach().clone() for parameter in network.parameters()]
        sum(parameter.square().sum() + parameter.sum() for parameter in network.parameters()).backward()
        stats.append(optimizer.prepare(0.1))
        assert all(map(torch.equal, network.parameters(), before))
        with pytest.raises(TrainingError, match="prepare without optim_commit"):
            optimizer.prepare(0.1)
        optimizer.commit()
        assert not any(map(torch.equal, network.parameters(), before))
    assert all(map(torch.equal, model.parameters(), theirs.parameters()))
    assert stats[0] == stats[1]
    assert stats[0].clipped
    with pytest.raises(TrainingError, match="without optim_prepare"):
        ours.commit()


def test_an_interrupted_run_is_the_same_bit_for_bit(make_learner, make_batch, tmp_path):
    def learner():
        return make_learner(dtype="bfloat16", kind=RoundedAdamW, seed=7, weight_decay=0.1)

    found = check_interruption(learner, make_batch, tmp_path)
    assert found["weight.model.embed_tokens.weight"].dtype == torch.bfloat16


def test_the_state_of_masters_is_refused_and_nothing_changes():
    model = bfloat16_model(1.0)
    masters = MasterAdamW(model.named_parameters())
    step(masters, model, 1.0, 1e-2)
    fresh = bfloat16_model(2.0)
    optimizer = RoundedAdamW(fresh.named_parameters(), seed=0)
    with pytest.raises(TrainingError, match=r"another optimizer's: of weight it has exp_avg, .*training\.optimizer"):
        optimizer.load_state(masters.state())
    assert (fresh.weight == 2.0).all()
    assert optimizer.step == 0


def test_each_parameter_and_each_step_is_rounded_by_noise_of_its_own():
    def run(start=0, seed=1):
        model = nn.ModuleDict({name: bfloat16_model(1.0) for name in "ab"})
        optimizer = RoundedAdamW(model.named_parameters(), seed=seed)
        optimizer.step = start
        sum(own.weight.float().sum() for own in model.values()).backward()
        apply(optimizer, 1e-3)
        return [own.weight.detach() for own in model.values()]

    a, b = run()
    later, _ = run(start=1)
    other, _ = run(seed=2)
    assert not any(torch.equal(a, each) for each in (b, later, other))
    again, _ = run()
    assert torch.equal(a, again)
    for weights in (a, b, later):
        assert len(weights.unique()) == 2


def test_parameters_without_a_gradient_stay_and_keep_no_state():
    model = nn.ModuleDict({name: bfloat16_model(1.0, (4, 4)) for name in "abc"})
    optimizer = RoundedAdamW(model.named_parameters(), seed=1)
    (model["a"].weight.sum() + model["c"].weight.sum()).backward()
    apply(optimizer, 0.5)
    assert [bool((own.weight == 1.0).all()) for own in model.values()] == [False, True, False]
    state = optimizer.state()
    assert [name for name in state if name.startswith("updates")] == ["updates.a.weight", "updates.c.weight"]
    assert state["updates.a.weight"] == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_that_are_stored_by_columns_become_the_same(dtype):
    torch.manual_seed(0)
    start, gradients = torch.randn(4, 6), [torch.randn(4, 6) for _ in range(2)]
    found = []
    for by_columns in (False, True):
        live = start.to(dtype).t().contiguous().t() if by_columns else start.to(dtype, copy=True)
        model = nn.ParameterDict({"weight": nn.Parameter(live)})
        assert model["weight"].is_contiguous() != by_columns
        optimizer = RoundedAdamW(model.named_parameters(), seed=2, weight_decay=0.5, max_grad_norm=1e9)
        for gradient in gradients:
            (model["weight"].float() * gradient).sum().backward()
            apply(optimizer, 0.1)
        found.append({name: tensor.clone() for name, tensor in optimizer.state().items()})
    torch.testing.assert_close(found[1], found[0])
