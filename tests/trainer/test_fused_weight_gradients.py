"""Gradients that are added up by the products that make them are those of float64, wherever a layer is used; and where
they cannot be, the ordinary way is taken, and said."""

import copy
import logging
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from test_critic import CLIP, make_critic, make_targets, plain  # noqa: F401
from test_ragged_attention import kernels  # noqa: F401
from tests.trainer.plain import loss_and_gradients
from tests.trainer.plain import plain as by_transformers
from tests.trainer.steps import check_interruption, learner_of
from torch import nn
from transformers import AutoModelForCausalLM

from slipstream.errors import TrainingError, ZeroGradientError
from slipstream.trainer.critic import ValueObjective
from slipstream.trainer.learner import Learner
from slipstream.trainer.loss import SFTObjective
from slipstream.trainer.model import fused_weight_gradients, layers
from slipstream.trainer.model.compilation import compile_layers
from slipstream.trainer.model.fused_weight_gradients import (
    AccumulatingLinear,
    fuse_accumulation,
    fused_layers,
)
from slipstream.trainer.model.layers import LayerOptions, configure_layers
from slipstream.trainer.model.policy import PolicyModel
from slipstream.trainer.optim.adamw_bf16 import RoundedAdamW
from slipstream.trainer.optim.base import MasterAdamW
from slipstream.trainer.optim.bitsandbytes import MasterAdamW8bit, MasterPagedAdamW
from slipstream.trainer.optim.muon import MasterMuon
from slipstream.trainer.packing import micro_batches

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def folder_of(model_folder, save_model, tmp_path):
    """A small model with a tied head and none, or with a head of its own, and biases."""

    def find(tied):
        return model_folder if tied else save_model(tmp_path / "untied", "Qwen2", tie_word_embeddings=False)

    return find


def exact(folder, batch):
    """Loss and gradients in float64."""
    return loss_and_gradients(by_transformers(folder, torch.float64), batch.sequences)


def holders(learner):
    return {name: holder.grad for name, holder in learner.optimizer._holders.items()}


def check(learner, gradients):
    found = holders(learner)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert found[name].dtype == torch.float32
        torch.testing.assert_close(
            found[name], gradient.float(), atol=5e-6, rtol=5e-5, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert all(parameter.grad is None for parameter in learner.model.network.parameters())


def in_products(learner):
    assert fuse_accumulation(learner.model.network, anywhere=True)
    return learner


def small(batch):
    """Words that every model here has."""
    for sequence in batch.sequences:
        sequence.token_ids[:] = [token % 64 for token in sequence.token_ids]
    return batch


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("checkpointing", [False, True, "selective"])
def test_sums_are_those_of_float64(tied, checkpointing, folder_of, make_learner, make_batch):
    folder, batch = folder_of(tied), small(make_batch(advantages=False))
    learner = make_learner(150, folder=folder, checkpointing=checkpointing)
    assert fuse_accumulation(learner.model.network, anywhere=True) == (14 if tied else 15)
    loss, gradients = exact(folder, batch)
    metrics = learner.forward_backward(batch, SFTObjective())
    assert metrics["num_micro_batches"] > 1
    assert metrics["loss"] == pytest.approx(loss, abs=1e-5)
    check(learner, gradients)


@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.full)])
@pytest.mark.usefixtures("kernels")
@pytest.mark.full
def test_compiled_layers_are_one_graph_for_all(checkpointing, folder_of, make_batch, fresh_compiler):
    folder = folder_of(False)
    model = PolicyModel.load(folder, checkpointing=checkpointing)
    assert compile_layers(model, in_products=True) == ""
    assert len(fused_layers(model.network)) == 15
    assert all(parameter.grad is None for parameter in model.network.parameters())
    assert sum(fresh_compiler["graph_break"].values()) == 0
    learner = learner_of(model, 150)
    fresh_compiler.clear()
    for seed, number in enumerate((9, 2)):
        batch = small(make_batch(number, seed, advantages=False))
        learner.optimizer.discard_gradients()
        learner.forward_backward(batch, SFTObjective())
        check(learner, exact(folder, batch)[1])
    assert fresh_compiler["stats"]["unique_graphs"] == 0, "the trial's graphs do for every layer and length"


@pytest.mark.full
@pytest.mark.usefixtures("fresh_compiler", "kernels")
def test_compiled_layers_keep_what_they_keep_without(monkeypatch, folder_of, make_batch):
    """As the compiler divides forward and backward; the plan counts no other."""
    monkeypatch.setattr(layers, "COMPILER", "aot_eager_decomp_partition")
    (row,) = micro_batches(small(make_batch(1, advantages=False)), 10_000)
    kept = []
    for way in (True, False):
        model, seen = PolicyModel.load(folder_of(False), "bfloat16"), {}
        own = {parameter.data_ptr() for parameter in model.network.parameters()}
        if way:
            fuse_accumulation(model.network, anywhere=True)
        configure_layers(model.network, LayerOptions(compiled=True))

        def keep(tensor, own=own, seen=seen):
            if tensor.data_ptr() not in own and tensor.ndim:
                seen[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model.logits(row)
        kept.append(sum(tensor.untyped_storage().nbytes() for tensor in seen.values()))
    assert kept[0] == kept[1] > 0


class Repeating(nn.Module):
    """Uses one linear layer three times, twice for the same."""

    def __init__(self):
        super().__init__()
        self.norm, self.own = nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, x):
        y = self.norm(x)
        return x + self.own(y) + self.own(y) + self.own(y.square())


def repeating_gradients(compiler, rows):
    torch.manual_seed(0)
    network = nn.ModuleList([Repeating() for _ in range(2)])
    wanted = copy.deepcopy(network).double()
    assert fuse_accumulation(network, anywhere=True) == 2
    optimizer = MasterAdamW(network.named_parameters())
    for layer in network if compiler else ():
        layer.forward = torch.compile(layer.forward, dynamic=True, backend=compiler)
    for row in rows:
        for each in (network, wanted):
            states = row.to(next(each.parameters()).dtype)
            for layer in each:
                states = layer(states)
            states.square().mean().backward()
    for name, parameter in wanted.named_parameters():
        torch.testing.assert_close(optimizer.masters()[name].grad, parameter.grad.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("compiler", [None, "aot_eager"])
@pytest.mark.usefixtures("fresh_compiler")
def test_a_layer_that_is_used_several_times_adds_all_of_them(compiler):
    """Also where a compiler sees that two of them are the same."""
    repeating_gradients(compiler, [torch.randn(1, length, 6, requires_grad=True) for length in (5, 9)])


@pytest.mark.full
def test_the_compiler_that_runs_take_adds_all_of_them(fresh_compiler):
    """Half a minute of a C++ compiler."""
    repeating_gradients("inductor", [torch.randn(1, length, 6, requires_grad=True) for length in (5, 9, 7)])
    assert fresh_compiler["stats"]["unique_graphs"] == 1


def test_sums_are_rounded_to_fp32_only():
    torch.manual_seed(0)
    off = {}
    for way in ("in products", "apart"):
        layer = nn.Sequential(nn.Linear(48, 32, bias=False)).bfloat16()
        if way == "in products":
            fuse_accumulation(layer, anywhere=True)
        optimizer = MasterAdamW(layer.named_parameters())
        expected = torch.zeros(32, 48, dtype=torch.float64)
        for _ in range(5):
            states = torch.randn(1, 300, 48).bfloat16().requires_grad_()
            grad = torch.randn(1, 300, 32).bfloat16()
            layer(states).backward(grad)
            expected += grad[0].double().T @ states[0].double()
            torch.testing.assert_close(states.grad, grad @ layer[0].weight)
        off[way] = ((optimizer.masters()["0.weight"].grad - expected).norm() / expected.norm()).item()
    assert off["in products"] < 1e-6
    assert off["apart"] > 1e-3


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [MasterAdamW, RoundedAdamW, MasterMuon, MasterAdamW8bit, MasterPagedAdamW])
def test_every_optimizer_takes_the_sums(kind, dtype, model_folder, make_batch):
    """And after its step they are gone."""
    batch, found = make_batch(advantages=False), []
    for way in ("in products", "apart"):
        model = PolicyModel.load(model_folder, dtype)
        more = {RoundedAdamW: {"seed": 0}, MasterMuon: {"network": model.network}}.get(kind, {})
        learner = Learner(model, kind(model.network.named_parameters(), **more), micro_batch_tokens=150)
        if way == "in products":
            in_products(learner)
        learner.forward_backward(batch, SFTObjective())
        found.append(holders(learner))
        stats = learner.optim_prepare(1e-3)
        assert all(gradient is None for gradient in holders(learner).values())
        learner.optim_commit()
        norm = math.sqrt(sum(float(gradient.double().norm()) ** 2 for gradient in found[-1].values()))
        clip = min(1.0, 1.0 / (stats.grad_norm + 1e-6))
        assert norm == pytest.approx(stats.grad_norm * clip, rel=1e-4), "what was held, clipped"
    for name, gradient in found[1].items():
        off = (found[0][name] - gradient).norm() / gradient.norm()
        assert off < (1e-5 if dtype == "float32" else 3e-2), name


@pytest.mark.parametrize("kind", [MasterAdamW, RoundedAdamW])
def test_an_interrupted_run_is_the_same_bit_for_bit(kind, make_learner, make_batch, tmp_path):
    more = {"seed": 0} if kind is RoundedAdamW else {}

    def learner():
        return in_products(make_learner(150, kind=kind, dtype="bfloat16", **more))

    check_interruption(learner, partial(make_batch, advantages=False), tmp_path)


def test_policy_and_critic_have_sums_of_their_own(model_folder, make_learner, make_critic, make_targets):  # noqa: F811
    critic, policy = make_critic(100), in_products(make_learner(150))
    in_products(critic.learner)
    batch = make_targets()
    value_loss, of_critic = plain(model_folder, batch, critic.learner.model.network.value_head)
    loss, of_policy = exact(model_folder, batch)
    assert policy.forward_backward(batch, SFTObjective())["loss"] == pytest.approx(loss, abs=1e-5)
    assert critic.learner.forward_backward(batch, ValueObjective(CLIP))["loss"] == pytest.approx(value_loss, abs=1e-5)
    check(policy, of_policy)
    check(critic.learner, of_critic)


def test_weights_may_lie_in_other_memory_later(model_folder, make_learner, make_batch):
    """As under single_copy, where they are the engine's, and are written in place."""
    learner, batch = in_products(make_learner(150)), make_batch(advantages=False)
    for parameter in learner.model.network.parameters():
        parameter.data = parameter.data.clone()
    learner.forward_backward(batch, SFTObjective())
    check(learner, exact(model_folder, batch)[1])


def test_only_what_is_trained_and_a_layers_own_is_added_up_so():
    network = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("own", "frozen", "shared", "tied", "replaced")})
    network["tied"].weight = network["shared"].weight
    network["frozen"].requires_grad_(False)
    network["replaced"].forward = lambda input: input
    for dtype in (torch.bfloat16, torch.float32):
        assert fuse_accumulation(network.to(dtype)) == 0, "on a CPU it is slow"
    assert fuse_accumulation(network, anywhere=True) == 1
    assert fused_layers(network) == [network["own"]]
    assert isinstance(network["own"], nn.Linear)
    assert "layer_id" not in "".join(network.state_dict())
    optimizer = MasterAdamW(network.named_parameters())
    states = torch.ones(1, 2, 4)
    with torch.no_grad():
        network["own"](states)
    # No gradient is asked of the input: a compiler could leave the operation out.
    output = network["own"](states)
    assert "_Product" not in type(output.grad_fn).__name__
    output.sum().backward()
    assert (optimizer.masters()["own.weight"].grad == 2.0).all()
    optimizer.discard_gradients()
    network["own"].weight.requires_grad_(False)
    network["own"](states.requires_grad_()).sum().backward()
    assert optimizer.masters()["own.weight"].grad is None


def test_a_copy_and_what_is_put_back_are_ordinary():
    network = nn.Sequential(nn.Linear(4, 4))
    fuse_accumulation(network, anywhere=True)
    copied = copy.deepcopy(network)
    assert type(copied[0]) is nn.Linear
    assert type(network[0]) is AccumulatingLinear
    fused_weight_gradients.unfuse_accumulation(network)
    assert type(network[0]) is nn.Linear
    assert "layer_id" not in network[0].__dict__


def test_without_an_optimizer_gradients_are_where_they_ever_were():
    network = nn.Sequential(nn.Linear(4, 3))
    fuse_accumulation(network, anywhere=True)
    for _ in range(2):
        network(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert (network[0].weight.grad == 4.0).all()
    assert (network[0].bias.grad == 4.0).all()


def test_bad_gradients_are_seen():
    network = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=False))
    fuse_accumulation(network, anywhere=True)
    optimizer = MasterAdamW(network.named_parameters())
    states = torch.ones(1, 2, 3, requires_grad=True)
    (network(states).sum() * 0.0).backward()
    with pytest.raises(ZeroGradientError):
        optimizer.prepare(0.1)
    (network(states).sum() * math.nan).backward()
    with pytest.raises(TrainingError, match=r"step 0 has a gradient that is zero or not finite: 9 of 9 values of 0"):
        optimizer.prepare(0.1)


def test_a_network_that_is_gone_is_said():
    network = nn.Sequential(nn.Linear(3, 3))
    fuse_accumulation(network, anywhere=True)
    output = network(torch.ones(1, 3, requires_grad=True))
    del network
    with pytest.raises(TrainingError, match="a linear layer is gone before its backward pass"):
        output.sum().backward()


@pytest.mark.parametrize("wrong", ["raises", "is rounded"])
def test_a_trial_that_fails_leaves_the_ordinary_way(wrong, monkeypatch, caplog):
    def product(total, grad, states):
        if wrong == "raises":
            raise NotImplementedError("Could not run\n'aten::mm.dtype'")
        rounded = (grad.T @ states).float()
        return rounded if total is None else total + rounded

    monkeypatch.setattr(fused_weight_gradients, "_has_kernel", lambda weight: True)
    network = nn.Sequential(nn.Linear(4, 4))
    assert fuse_accumulation(network) == 1, "the reference passes it"
    fused_weight_gradients.unfuse_accumulation(network)
    monkeypatch.setattr(fused_weight_gradients, "accumulate_product", product)
    with caplog.at_level(logging.WARNING):
        assert fuse_accumulation(network) == 0
    assert type(network[0]) is nn.Linear
    (record,) = caplog.records
    reason = {"raises": "NotImplementedError: Could not run 'aten::mm.dtype'", "is rounded": "of its norm off"}[wrong]
    assert reason in record.message
    assert "\n" not in record.message


@pytest.mark.usefixtures("fresh_compiler", "kernels")
def test_layers_that_do_not_compile_with_them_are_compiled_without(monkeypatch, model_folder, make_batch, caplog):
    """Here the operation is one that a compiler has left half of out."""
    monkeypatch.setattr(layers, "COMPILER", lambda graph, _: graph.forward)
    half = SimpleNamespace(linear_backward=lambda grad, states, weight, layer_id, call: grad @ weight)
    monkeypatch.setattr(fused_weight_gradients, "_operations", half)
    model, batch = PolicyModel.load(model_folder), make_batch(advantages=False)
    with caplog.at_level(logging.WARNING):
        assert compile_layers(model, in_products=True) == ""
    assert model.layers.compiled
    assert "the products of 14 of 14 linear layers gave their weights no gradient" in caplog.text
    assert fused_layers(model.network) == []
    learner = learner_of(model, 300)
    learner.forward_backward(batch, SFTObjective())
    check(learner, exact(model_folder, batch)[1])


def on_gpu(folder, way):
    model = PolicyModel.load(folder, "bfloat16", "cuda")
    assert compile_layers(model, in_products=way) == ""
    return Learner(model, RoundedAdamW(model.network.named_parameters(), seed=0), micro_batch_tokens=150)


@needs_gpu
def test_on_a_gpu_sums_are_as_near_to_float64(folder_of, make_batch):
    """Compiled, in bfloat16: what a run takes by itself against the ordinary way, from the same rounded weights."""
    folder, batch = folder_of(False), small(make_batch(advantages=False))
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    network.save_pretrained(folder)
    _, gradients = exact(folder, batch)
    off = []
    for way in (None, False):
        learner = on_gpu(folder, way)
        assert len(fused_layers(learner.model.network)) == (15 if way is None else 0)
        learner.forward_backward(batch, SFTObjective())
        found = holders(learner)
        off.append({n: float((found[n].cpu() - g).norm() / g.norm()) for n, g in gradients.items()})
        learner.optim_prepare(1e-3)
        learner.optim_commit()
    for name, gradient in gradients.items():
        assert gradient.ndim < 2 or off[0][name] <= 1.2 * off[1][name] + 2e-3, name


@needs_gpu
def test_on_a_gpu_the_product_adds_to_the_sum_in_place():
    torch.manual_seed(0)
    total, expected = None, torch.zeros(320, 448, dtype=torch.float64, device="cuda")
    for tokens in (500, 1, 77):
        grad = torch.randn(tokens, 320, device="cuda").bfloat16()
        states = torch.randn(448, tokens, device="cuda").bfloat16().T  # in another order
        before, total = total, fused_weight_gradients.accumulate_product(total, grad, states)
        assert before is None or total.data_ptr() == before.data_ptr()
        expected += grad.double().T @ states.double()
        assert float((total - expected).norm() / expected.norm()) < 1e-5
