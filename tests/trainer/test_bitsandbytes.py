"""AdamW with 8-bit or paged moments, against torch's AdamW. On a CPU nothing is paged, but where moments are put can be
seen."""

import pytest
import torch
from tests.trainer.steps import apply, check_interruption, side_by_side
from torch import nn

from slipstream.errors import TrainingError
from slipstream.trainer.optim.base import MasterAdamW
from slipstream.trainer.optim.bitsandbytes import MasterAdamW8bit, MasterPagedAdamW, MasterPagedAdamW8bit

pytestmark = pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")


def test_it_follows_adamw_as_closely_as_eight_bits_can():
    kinds = (MasterAdamW8bit, MasterAdamW)
    torch.manual_seed(0)
    start = nn.Linear(128, 128).weight.detach().clone()
    networks, optimizers = side_by_side(kinds, (128, 128), 20, lambda drawn: 0.3 * drawn + 0.1, weight_decay=0.1)
    ours, theirs = (network.weight.detach() - start for network in networks)
    assert 0 < (ours - theirs).norm() < 0.03 * theirs.norm()
    # Few numbers are not worth a table.
    torch.testing.assert_close(networks[0].bias, networks[1].bias, atol=1e-6, rtol=1e-6)
    state = optimizers[0].state()
    assert state["state1.weight"].dtype == state["state2.weight"].dtype == torch.uint8
    assert state["state1.bias"].dtype == torch.float32


def test_from_4096_numbers_on_moments_have_eight_bits_and_each_parameter_tables_of_its_own():
    model = nn.ModuleDict({"at": nn.Linear(64, 64, bias=False), "below": nn.Linear(65, 63, bias=False)})
    model["other"] = nn.Linear(128, 64, bias=False)
    optimizer = MasterAdamW8bit(model.named_parameters())
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    sum(parameter.square().sum() for parameter in model.parameters()).backward()
    apply(optimizer, 1e-2)
    state = optimizer.state()
    kinds = {name.partition(".")[2]: tensor.dtype for name, tensor in state.items() if name.startswith("state1.")}
    assert kinds == {"at.weight": torch.uint8, "below.weight": torch.float32, "other.weight": torch.uint8}
    tables = [tensor.data_ptr() for name, tensor in state.items() if name.startswith("qmap")]
    assert len(set(tables)) == len(tables) == 4
    assert {int(state[f"updates.{name}"]) for name in kinds} == {1}
    assert all(not torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("kind", [MasterAdamW8bit, MasterPagedAdamW])
def test_settings_reach_the_library(kind):
    """Rates of parameters, betas, the clip, and no decay of vectors, as AdamW has them; of few numbers, in float32."""
    networks = []
    for each in (kind, MasterAdamW):
        torch.manual_seed(0)
        network = nn.ModuleDict({"one": nn.Linear(4, 4), "other": nn.Linear(4, 4)})
        optimizer = each(
            network.named_parameters(),
            betas=(0.5, 0.75),
            weight_decay=0.5,
            max_grad_norm=0.25,
            rate_of=lambda name: 0.25 if name.startswith("other") else 1.0,
        )
        for _ in range(3):
            sum(parameter.square().sum() for parameter in network.parameters()).backward()
            assert optimizer.prepare(0.1).clipped
            optimizer.commit()
        networks.append(network)
    for ours, theirs in zip(*(network.parameters() for network in networks), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def test_it_is_adamw():
    kinds = (MasterPagedAdamW, MasterAdamW)
    networks, _ = side_by_side(kinds, (64, 48), 20, lambda drawn: 0.3 * drawn + 0.1, weight_decay=0.1)
    for ours, theirs in zip(networks[0].parameters(), networks[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)


def test_with_eight_bits_it_is_adamw_with_eight_bits():
    kinds = (MasterPagedAdamW8bit, MasterAdamW8bit)
    networks, optimizers = side_by_side(kinds, (128, 128), 4, lambda drawn: drawn, weight_decay=0.1)
    paged, other = (optimizer.state() for optimizer in optimizers)
    assert paged["state1.weight"].dtype == torch.uint8
    assert all(torch.equal(paged[name], other[name]) for name in other)
    assert torch.equal(networks[0].weight, networks[1].weight)


@pytest.mark.parametrize("kinds", [(MasterPagedAdamW, MasterAdamW8bit), (MasterAdamW8bit, MasterPagedAdamW)])
def test_moments_of_the_other_kind_are_refused(kinds):
    networks = [nn.Linear(128, 64) for _ in kinds]
    made, other = (kind(network.named_parameters()) for kind, network in zip(kinds, networks, strict=True))
    networks[0](torch.ones(1, 128)).sum().backward()
    apply(made, 1e-2)
    saved = made.state()
    with pytest.raises(TrainingError, match="another optimizer's"):
        other.load_state(saved)
    made.load_state(saved)


@pytest.mark.parametrize("kind", [MasterAdamW8bit, MasterPagedAdamW, MasterPagedAdamW8bit])
def test_an_interrupted_run_is_the_same_bit_for_bit_and_its_moments_are_where_the_library_wants_them(
    make_learner, make_batch, tmp_path, kind
):
    def load(resumed, folder):
        rule, given = resumed.optimizer._rules[0], []

        def buffer(p, dtype):
            given.append(torch.zeros_like(p, dtype=dtype))
            return given[-1]

        rule.get_state_buffer = buffer
        resumed.load(folder)
        moments = [memory[key] for memory in rule.state.values() for key in ("state1", "state2")]
        assert kind is MasterAdamW8bit or {id(moment) for moment in moments} == {id(one) for one in given}

    check_interruption(lambda: make_learner(kind=kind, weight_decay=0.1), make_batch, tmp_path, load)
    with pytest.raises(TrainingError, match=r"another optimizer's: .*state1.* exp_avg are needed"):
        make_learner().load(tmp_path)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("kinds", [(MasterPagedAdamW, MasterAdamW), (MasterPagedAdamW8bit, MasterAdamW8bit)])
def test_on_a_gpu_its_moments_are_in_managed_memory_and_it_is_adamw(weight_decay, kinds):
    """On GPUs bitsandbytes decays what the update has made, torch what was before it: rate ** 2 * decay a step."""
    rate, steps = 1e-2, 6
    networks = [nn.Linear(512, 512, device="cuda") for _ in range(2)]
    networks[1].load_state_dict(networks[0].state_dict())
    optimizers = [k(n.named_parameters(), weight_decay=weight_decay) for k, n in zip(kinds, networks, strict=True)]
    for number in range(steps):
        gradient = torch.randn(512, 512, device="cuda")
        for network, optimizer in zip(networks, optimizers, strict=True):
            ((network.weight * gradient).sum() + network.bias.sum()).backward()
            apply(optimizer, rate)
        if number == 2:
            optimizers[0].load_state({name: tensor.clone() for name, tensor in optimizers[0].state().items()})
        assert optimizers[0].state()["state1.weight"].is_paged
    allowed = 1e-5 + steps * rate**2 * weight_decay
    torch.testing.assert_close(networks[0].weight, networks[1].weight, atol=allowed, rtol=1e-5)
