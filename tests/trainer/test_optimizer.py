import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from slipstream.errors import TrainingError
from slipstream.trainer.optim.base import MasterAdamW, learning_rate_at


def weighted_sum(model, weight):
    """A loss whose gradient is `weight` for each parameter."""
    return sum((parameter * weight).sum() for parameter in model.parameters())


@pytest.mark.parametrize("clip", [1e9, 0.5])
def test_equals_torchs_adamw(clip):
    generator = torch.Generator().manual_seed(0)
    ours, theirs = nn.Linear(5, 3), nn.Linear(5, 3)
    theirs.load_state_dict(ours.state_dict())
    mine = MasterAdamW(ours.named_parameters(), weight_decay=0.1, max_grad_norm=clip)
    reference = torch.optim.AdamW(
        [{"params": [theirs.weight]}, {"params": [theirs.bias], "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        weight_decay=0.1,
    )
    for step in range(5):
        inputs = torch.randn(7, 5, generator=generator)
        for model in (ours, theirs):
            model(inputs).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), clip)
        for group in reference.param_groups:
            group["lr"] = 0.01 * (step + 1)
        reference.step()
        reference.zero_grad()
        stats = mine.prepare(0.01 * (step + 1))
        mine.commit()
        assert stats.grad_norm == pytest.approx(norm.item(), rel=1e-6)
        assert stats.clipped == (norm.item() > clip)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


def test_live_weights_change_only_on_commit():
    model = nn.Linear(4, 4)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = MasterAdamW(model.named_parameters())
    weighted_sum(model, 1.0).backward()
    optimizer.prepare(0.1)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    optimizer.commit()
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    with pytest.raises(TrainingError, match="without optim_prepare"):
        optimizer.commit()


def test_updates_below_bfloat16s_resolution_add_up():
    model = nn.Linear(8, 8, bias=False).to(torch.bfloat16)
    nn.init.ones_(model.weight)
    optimizer = MasterAdamW(model.named_parameters())
    for step in range(4000):
        weighted_sum(model, 1.0).backward()
        optimizer.prepare(1e-6)
        optimizer.commit()
        if step == 0:
            assert (model.weight == 1.0).all(), "one such update is far below bfloat16's resolution of 0.004"
    # float32 just below 1 has steps of 6e-8: each update of 1e-6 is rounded by at most half of that.
    assert (optimizer.masters()["weight"] - (1.0 - 4e-3)).abs().max() < 4000 * 3e-8
    assert (model.weight == torch.tensor(1.0 - 4e-3, dtype=torch.bfloat16)).all()
    assert (model.weight < 1.0).all()


def test_bfloat16_gradients_are_accumulated_in_float32():
    model = nn.Linear(2, 2, bias=False).to(torch.bfloat16)
    optimizer = MasterAdamW(model.named_parameters())
    weighted_sum(model, 1.0).backward()
    for _ in range(64):
        weighted_sum(model, 0.001).backward()
    assert model.weight.grad is None
    gradient = optimizer.masters()["weight"].grad
    # In bfloat16 1 + 0.001 is 1: all 64 would be lost.
    torch.testing.assert_close(gradient, torch.full((2, 2), 1.064), atol=5e-4, rtol=0.0)


def test_a_tied_parameter_has_one_master_with_the_whole_gradient():
    model = nn.ModuleDict({"embed": nn.Embedding(3, 3), "head": nn.Linear(3, 3, bias=False)})
    model["head"].weight = model["embed"].weight
    optimizer = MasterAdamW(model.named_parameters(remove_duplicate=False))
    assert list(optimizer.masters()) == ["embed.weight"]
    (model["embed"].weight.sum() + 2 * model["head"].weight.sum()).backward()
    assert (optimizer.masters()["embed.weight"].grad == 3.0).all()


def test_vectors_are_not_decayed():
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    optimizer = MasterAdamW(model.named_parameters(), weight_decay=0.5)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    # Far below AdamW's eps, so that decay is all that moves a weight.
    weighted_sum(model, 1e-15).backward()
    optimizer.prepare(0.1)
    optimizer.commit()
    for name, parameter in model.named_parameters():
        factor = 0.95 if parameter.ndim > 1 else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor)


def test_frozen_parameters_stay():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    assert list(MasterAdamW(model.named_parameters()).masters()) == ["1.weight", "1.bias"]
    with pytest.raises(TrainingError, match="no trainable parameter"):
        MasterAdamW(model[0].named_parameters())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_refused_by_name(bad):
    model = nn.ModuleDict({"good": nn.Linear(2, 2, bias=False), "bad": nn.Linear(2, 2, bias=False)})
    optimizer = MasterAdamW(model.named_parameters())
    (model["good"].weight.sum() + model["bad"].weight[0, 0] * bad).backward()
    before = {name: master.clone() for name, master in optimizer.masters().items()}
    with pytest.raises(TrainingError, match=r"step 0 has a gradient that is zero or not finite: .* bad\.weight"):
        optimizer.prepare(0.1)
    assert all(torch.equal(before[name], master) for name, master in optimizer.masters().items())
    assert optimizer.step == 0


def test_a_gradient_that_is_not_finite_on_another_rank_is_named():
    model = nn.ModuleDict({"good": nn.Linear(2, 2, bias=False), "bad": nn.Linear(2, 2, bias=False)})
    optimizer = MasterAdamW(model.named_parameters())
    model["good"].weight.sum().backward()
    optimizer.norm_over_ranks = lambda own: math.nan
    optimizer.sums_over_ranks = lambda own: [here + there for here, there in zip(own, [0, 3], strict=True)]
    with pytest.raises(TrainingError, match=r"3 of 4 values of bad\.weight are NaN or infinite"):
        optimizer.prepare(0.1)


@pytest.mark.parametrize("backward", [True, False])
def test_a_zero_gradient_is_refused(backward):
    model = nn.Linear(2, 2)
    optimizer = MasterAdamW(model.named_parameters())
    if backward:
        weighted_sum(model, 0.0).backward()
    with pytest.raises(TrainingError, match="step 0 has a gradient that is zero or not finite: it is zero"):
        optimizer.prepare(0.1)


def test_state_of_another_model_is_refused():
    state = MasterAdamW(nn.Linear(2, 2).named_parameters()).state()
    with pytest.raises(TrainingError, match="bias is in only one of them"):
        MasterAdamW(nn.Linear(2, 2, bias=False).named_parameters()).load_state(state)


def test_a_parameter_without_gradient_in_some_steps_goes_on_as_it_was():
    def step(model, optimizer, both):
        (model[0].weight.square().sum() + (model[1].weight.square().sum() if both else 0.0)).backward()
        optimizer.prepare(0.1)
        optimizer.commit()

    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)) for _ in range(2)]
    whole, resumed = (MasterAdamW(model.named_parameters()) for model in models)
    for both in (False, True):
        step(models[0], whole, both)
    state = {name: tensor.clone() for name, tensor in whole.state().items()}
    with pytest.raises(TrainingError, match=r"does not say how often 0.weight was updated"):
        resumed.load_state({name: tensor for name, tensor in state.items() if not name.startswith("updates.")})
    resumed.load_state(state)
    for model, optimizer in zip(models, (whole, resumed), strict=True):
        step(model, optimizer, True)
    assert all(torch.equal(tensor, resumed.state()[name]) for name, tensor in whole.state().items())


SCHEDULES = st.sampled_from(["constant", "linear", "cosine"])


@given(SCHEDULES, st.integers(0, 20), st.integers(1, 100))
def test_schedules_rise_then_never_rise_again(schedule, warmup_steps, num_steps):
    rates = [
        learning_rate_at(s, peak=2.0, schedule=schedule, warmup_steps=warmup_steps, num_steps=num_steps)
        for s in range(num_steps)
    ]
    assert all(0.0 < rate <= 2.0 for rate in rates)
    top = min(warmup_steps, num_steps)
    assert rates[:top] == sorted(rates[:top])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    if num_steps > warmup_steps:
        assert rates[warmup_steps] == 2.0


def test_schedules_by_value():
    linear = [learning_rate_at(s, peak=1.0, schedule="linear", warmup_steps=2, num_steps=6) for s in range(7)]
    assert linear == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    assert learning_rate_at(4, peak=1.0, schedule="cosine", warmup_steps=2, num_steps=6) == pytest.approx(0.5)
    assert learning_rate_at(99, peak=1.0, schedule="cosine", num_steps=6) == pytest.approx(0.0)
