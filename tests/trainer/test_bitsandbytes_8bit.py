"""AdamW with 8-bit moments, against torch's AdamW."""

import pytest
import torch
from tests.trainer.steps import apply, check_interruption, side_by_side
from torch import nn

from slipstream.errors import TrainingError
from slipstream.trainer.optim.base import MasterAdamW
from slipstream.trainer.optim.bitsandbytes import MasterAdamW8bit, MasterPagedAdamW


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


def test_an_interrupted_run_is_the_same_bit_for_bit(make_learner, make_batch, tmp_path):
    check_interruption(lambda: make_learner(kind=MasterAdamW8bit, weight_decay=0.1), make_batch, tmp_path)
    with pytest.raises(TrainingError, match=r"another optimizer's: .*state1.* exp_avg are needed"):
        make_learner().load(tmp_path)


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
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
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
