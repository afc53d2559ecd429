import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.trainer.steps import apply
from torch import nn

from slipstream.errors import TrainingError, ZeroGradientError
from slipstream.trainer import optim
from slipstream.trainer.optim.adamw_bf16 import RoundedAdamW
from slipstream.trainer.optim.base import MasterAdamW, OptimStats, add_gradient_, fused_adamw, learning_rate_at
from slipstream.trainer.optim.loss_scale import FIRST, LossScale
from slipstream.trainer.optim.muon import MasterMuon


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


def test_updates_below_bfloat16s_resolution_add_up():
    model = nn.Linear(8, 8, bias=False).to(torch.bfloat16)
    nn.init.ones_(model.weight)
    optimizer = MasterAdamW(model.named_parameters())
    for step in range(1000):
        weighted_sum(model, 1.0).backward()
        apply(optimizer, 4e-6)
        if step == 0:
            assert (model.weight == 1.0).all(), "one such update is far below bfloat16's resolution of 0.004"
    # float32 just below 1 has steps of 6e-8: each update of 4e-6 is rounded by at most half of that.
    assert (optimizer.masters()["weight"] - (1.0 - 4e-3)).abs().max() < 1000 * 3e-8
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
    optimizer.sums_over_ranks = lambda own: [math.nan] if len(own) == 1 else [own[0], own[1] + 3]
    with pytest.raises(TrainingError, match=r"3 of 4 values of bad\.weight are NaN or infinite"):
        optimizer.prepare(0.1)


@pytest.mark.parametrize(
    ("weight", "problem"),
    [
        (0.0, "step 0 has a gradient that is zero or not finite: it is zero"),
        (None, "step 0 has a gradient that is zero or not finite: it is zero"),
        (3e38, "has a gradient whose norm is inf: lower the learning rate"),
    ],
)
def test_a_gradient_that_is_zero_or_of_a_norm_beyond_float32_is_refused(weight, problem):
    model = nn.Linear(2, 2)
    optimizer = MasterAdamW(model.named_parameters())
    if weight is not None:
        weighted_sum(model, weight).backward()
    with pytest.raises(TrainingError, match=problem):
        optimizer.prepare(0.1)


def test_state_of_another_model_is_refused():
    state = MasterAdamW(nn.Linear(2, 2).named_parameters()).state()
    with pytest.raises(TrainingError, match="bias is in only one of them"):
        MasterAdamW(nn.Linear(2, 2, bias=False).named_parameters()).load_state(state)


def test_a_parameter_without_gradient_in_some_steps_goes_on_as_it_was():
    def step(model, optimizer, both):
        (model[0].weight.square().sum() + (model[1].weight.square().sum() if both else 0.0)).backward()
        apply(optimizer, 0.1)

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


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ({"schedule": "linear", "warmup_steps": 2, "num_steps": 6}, dict(enumerate((0.5, 1, 1, 0.75, 0.5, 0.25, 0)))),
        ({"schedule": "linear", "num_steps": 6}, {9: 0.0}),
        ({"schedule": "linear", "warmup_steps": 0, "num_steps": 4}, {0: 1.0}),
        ({"schedule": "linear", "warmup_steps": 3, "num_steps": 3}, {3: 1.0}),
        ({"schedule": "linear", "num_steps": 1}, {0: 1.0, 1: 0.0}),
        ({"num_steps": 1}, {0: 1.0, 1: 1.0}),
        ({"schedule": "cosine", "warmup_steps": 2, "num_steps": 6}, {4: 0.5}),
        ({"schedule": "cosine", "num_steps": 6}, {99: 0.0}),
        ({"schedule": "cosine", "num_steps": 3}, {1: 0.75}),
    ],
)
def test_schedules_by_value(settings, rates):
    found = {step: learning_rate_at(step, peak=2.0, **settings) / 2 for step in rates}
    assert found == (rates if settings.get("schedule") != "cosine" else pytest.approx(rates))


def test_clipping_is_to_the_norm_and_told():
    for weight, is_clipped in ((0.5, False), (0.75, True)):  # of norms 1 and 1.5
        model = nn.Linear(2, 2, bias=False)
        optimizer = MasterAdamW(model.named_parameters(), max_grad_norm=1.0)
        weighted_sum(model, weight).backward()
        assert optimizer.prepare(0.25) == OptimStats(0.25, 2 * weight, is_clipped, 1.0, False, 0)
        optimizer.commit()
        # Adam's first mean is a tenth of the gradient.
        torch.testing.assert_close(optimizer.state()["exp_avg.weight"], torch.full((2, 2), 0.05))
        assert model.weight.grad is None
        assert optimizer.masters()["weight"].grad is None


def test_the_norm_of_all_ranks_decides():
    model = nn.Linear(2, 2, bias=False)
    optimizer = MasterAdamW(model.named_parameters(), max_grad_norm=1.0)
    optimizer.sums_over_ranks = lambda own: [4.0 * each for each in own]
    weighted_sum(model, 0.5).backward()
    stats = optimizer.prepare(0.1)
    assert (stats.grad_norm, stats.clipped) == (2.0, True)
    optimizer.sums_over_ranks = lambda own: [0.0]
    optimizer.commit()
    weighted_sum(model, 0.5).backward()
    with pytest.raises(ZeroGradientError, match="optimizer step 1 has a gradient that is zero"):
        optimizer.prepare(0.1)


@pytest.mark.parametrize("kind", [MasterAdamW, MasterMuon, RoundedAdamW])
def test_a_parameters_rate_is_a_multiple_of_the_learning_rate(kind):
    moved = {}
    for factor in (1.0, 0.25):
        torch.manual_seed(0)
        model = nn.ModuleDict({"one": nn.Linear(4, 4), "other": nn.Linear(4, 4)})
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        settings = {"rate_of": lambda name, factor=factor: factor if name.startswith("other") else 1.0}
        if kind is RoundedAdamW:
            settings["seed"] = 0
        arguments = (model.named_parameters(), model) if kind is MasterMuon else (model.named_parameters(),)
        optimizer = kind(*arguments, **settings)
        sum(parameter.square().sum() for parameter in model.parameters()).backward()
        apply(optimizer, 0.1)
        moved[factor] = {name: parameter.detach() - before[name] for name, parameter in model.named_parameters()}
    for name, change in moved[1.0].items():
        torch.testing.assert_close(moved[0.25][name], change * (0.25 if name.startswith("other") else 1.0))
        assert change.abs().max() > 0


def test_state_is_not_asked_for_between_the_halves_of_a_step():
    model = nn.Linear(2, 2)
    optimizer = MasterAdamW(model.named_parameters())
    state = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    weighted_sum(model, 1.0).backward()
    optimizer.prepare(0.1)
    with pytest.raises(TrainingError, match="asked for between optim_prepare and optim_commit"):
        optimizer.state()
    optimizer.load_state(state)
    assert optimizer.step == 0
    weighted_sum(model, 1.0).backward()
    optimizer.load_state(state)
    with pytest.raises(ZeroGradientError):
        optimizer.prepare(0.1)
    assert torch.equal(optimizer.state()["master.weight"], state["master.weight"])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            lambda state: state.pop("master.weight"),
            "another optimizer's: of weight it has exp_avg, exp_avg_sq, ",
        ),
        (
            lambda state: state.pop("exp_avg.weight"),
            "another optimizer's: of weight it has exp_avg_sq, master, u",
        ),
        (
            lambda state: state.update({"master.weight": torch.zeros(3, 2)}),
            r"shape \[3, 2\] there and \[2, 2\]",
        ),
        (
            lambda state: state.update({"exp_avg.weight": torch.zeros(3, 2)}),
            r"shape \[3, 2\] there and \[2, 2\]",
        ),
        (
            lambda state: state.update({"exp_avg_sq.weight": torch.zeros(2, 2, dtype=torch.int8)}),
            "exp_avg_sq of weight in torch.int8",
        ),
        (
            lambda state: state.update({"master.weight": torch.zeros(2, 2, dtype=torch.int64)}),
            "master of weight in torch.int64",
        ),
        (lambda state: state.pop("step"), "has no step"),
    ],
)
def test_state_that_does_not_fit_is_refused_and_nothing_changes(change, problem):
    models = [nn.Linear(2, 2) for _ in range(2)]
    first, second = (MasterAdamW(model.named_parameters()) for model in models)
    weighted_sum(models[0], 1.0).backward()
    apply(first, 0.1)
    state, before = dict(first.state()), models[1].weight.detach().clone()
    change(state)
    with pytest.raises(TrainingError, match=problem):
        second.load_state(state)
    assert (second.step, torch.equal(models[1].weight, before)) == (0, True)
    second.load_state(first.state())
    assert (second.step, torch.equal(models[1].weight, models[0].weight)) == (1, True)
    assert second.state()["exp_avg.bias"] is not first.state()["exp_avg.bias"]


def test_muon_trains_what_is_no_matrix_as_adamw_does():
    networks = []
    for kind in (MasterAdamW, MasterMuon):
        torch.manual_seed(0)
        network = nn.ModuleDict({"embed": nn.Embedding(5, 4), "norm": nn.LayerNorm(4), "row": nn.Linear(4, 1)})
        arguments = (network,) if kind is MasterMuon else ()
        optimizer = kind(network.named_parameters(), *arguments, weight_decay=0.5)
        for _ in range(2):
            sum((parameter * 1e-4).sum() for parameter in network.parameters()).backward()
            apply(optimizer, 0.1)
        networks.append(network)
    for ours, theirs in zip(*(network.parameters() for network in networks), strict=True):
        assert torch.equal(ours, theirs)


def test_a_loss_scale_falls_to_one_and_begins_to_count_again():
    scale = LossScale(is_needed=True)
    scale.count_good()
    assert scale.lower()
    assert (scale.value, scale.state()["loss_scale"].tolist()) == (FIRST / 2, [FIRST / 2, 0.0])
    scale.value = 2.0
    assert scale.lower()
    assert not scale.lower()
    assert scale.value == 1.0
    constant = LossScale(is_needed=False)
    for _ in range(2000):
        constant.count_good()
    constant.load({"loss_scale": torch.tensor([8.0, 3.0])})
    assert (constant.value, constant.lower()) == (1.0, False)
    scale.load({})
    assert scale.value == 1.0
    scale.load({"loss_scale": torch.tensor([8.0, 3.0])})
    assert scale.state()["loss_scale"].tolist() == [8.0, 3.0]


def test_tiny_gradients_are_clipped_as_torch_does():
    """Of norm 2e-6, beside which the 1e-6 that it adds counts."""
    ours, theirs = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    optimizer = MasterAdamW(ours.named_parameters(), max_grad_norm=1e-6)
    for model in (ours, theirs):
        weighted_sum(model, 1e-6).backward()
    nn.utils.clip_grad_norm_(theirs.parameters(), 1e-6)
    assert optimizer.prepare(0.1).clipped
    optimizer.commit()
    torch.testing.assert_close(optimizer.state()["exp_avg.weight"] * 10, theirs.weight.grad, atol=0.0, rtol=1e-5)


def test_by_default_a_norm_above_one_is_clipped_and_nothing_decays():
    model = nn.Linear(2, 2, bias=False)
    optimizer = MasterAdamW(model.named_parameters())
    weighted_sum(model, 0.75).backward()
    assert optimizer.prepare(0.0).clipped
    assert {group["weight_decay"] for rule in optimizer._rules for group in rule.param_groups} == {0.0}


def test_adamw_is_fused_where_torch_has_that():
    for device, is_fused in (("cpu", True), ("meta", False)):
        weights = nn.Parameter(torch.zeros(2, device=device))
        assert fused_adamw([{"params": [weights]}], betas=(0.9, 0.95)).defaults["fused"] is is_fused


@pytest.mark.parametrize(
    ("change", "by_kernel"),
    [
        ({}, True), ({"size": 3}, False), ({"is_cuda": False}, False), ({"dtype": torch.float32}, False),
        ({"in_order": False}, False), ({"total_in_order": False}, False),
    ],
)  # fmt: skip
def test_large_bfloat16_gradients_of_a_gpu_are_added_by_the_kernel(change, by_kernel, monkeypatch):
    facts = {"size": 4, "is_cuda": True, "dtype": torch.bfloat16, "in_order": True, "total_in_order": True} | change
    used = []
    kernels = SimpleNamespace(MIN_ACCUMULATED=4, accumulate_=lambda total, gradient: used.append(True))
    monkeypatch.setattr(optim, "triton_kernels", kernels, raising=False)
    total = SimpleNamespace(is_contiguous=lambda: facts["total_in_order"], add_=lambda gradient: used.append(False))
    gradient = SimpleNamespace(
        is_cuda=facts["is_cuda"],
        dtype=facts["dtype"],
        numel=lambda: facts["size"],
        is_contiguous=lambda: facts["in_order"],
    )
    add_gradient_(total, gradient)
    assert used == [by_kernel]
