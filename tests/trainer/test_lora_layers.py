"""Adapters of small networks: what a layer computes, which layers are chosen, and under which names."""

import pytest
import torch
from torch import nn

from slipstream.errors import ConfigError
from slipstream.trainer.model.lora import (
    Adapter,
    DoraLinear,
    LoraLinear,
    blank_adapter,
    rate_in_adapter,
    target_layers,
    unreached_parameters,
)
from slipstream.weights.adapter_folder import AdapterConfig


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4, bias=False)
        self.experts = nn.Parameter(torch.zeros(3, 2, 4))

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layers = nn.Embedding(5, 4), nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 5)
        self.table = nn.Parameter(torch.zeros(2, 7))

    def get_output_embeddings(self):
        return self.head

    def forward(self, tokens):
        states = self.embed(tokens)
        for layer in self.layers:
            states = layer(states)
        return self.head(states)


def attached(*targets, network=None, dora=False):
    torch.manual_seed(0)
    network = Network() if network is None else network
    adapter = Adapter.attach(network, AdapterConfig(2, 3.0, targets, "", dora=dora))
    with torch.no_grad():
        for layer in adapter.layers.values():
            layer.lora_B.normal_()
            if dora:
                layer.lora_magnitude.mul_(1 + torch.rand(len(layer.lora_magnitude)))
    return network, adapter


@pytest.mark.parametrize("kind", [LoraLinear, DoraLinear])
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_computes_what_its_merged_weight_does(kind, bias):
    torch.manual_seed(0)
    base = nn.Linear(5, 3, bias=bias)
    layer, x = kind(base, 2, 1.5), torch.randn(4, 5)
    torch.testing.assert_close(layer(x), base(x))
    with torch.no_grad():
        layer.lora_B.normal_()
        if kind is DoraLinear:
            layer.lora_magnitude.copy_(torch.tensor([1.0, 2.0, 3.0]))
    summed = base.weight + 1.5 * layer.lora_B @ layer.lora_A
    if kind is DoraLinear:
        summed = summed * (torch.tensor([1.0, 2.0, 3.0]) / summed.norm(dim=1))[:, None]
    torch.testing.assert_close(layer.merged_weight(), summed)
    torch.testing.assert_close(layer(x), nn.functional.linear(x, summed, base.bias), atol=1e-5, rtol=1e-5)
    assert layer.weight is base.weight
    assert layer.bias is base.bias
    layer.enabled = False
    assert torch.equal(layer(x), base(x))


@pytest.mark.parametrize("kind", [LoraLinear, DoraLinear])
def test_an_adapter_lies_where_its_layer_does(kind):
    layer = kind(nn.Linear(5, 3, device="meta", dtype=torch.bfloat16), 2, 1.5)
    assert {(each.device.type, each.dtype) for each in layer.parameters()} == {("meta", torch.bfloat16)}


def test_the_first_matrix_is_drawn_uniformly_as_by_peft():
    torch.manual_seed(0)
    drawn = LoraLinear(nn.Linear(100, 3), 200, 1.5).lora_A
    assert 0.0999 < drawn.abs().max() <= 0.1
    assert drawn.std().item() == pytest.approx(0.1 / 3**0.5, rel=0.02)


def test_merging_rounds_once():
    torch.manual_seed(0)
    layer = LoraLinear(nn.Linear(40, 30, dtype=torch.bfloat16), 4, 0.7)
    with torch.no_grad():
        layer.lora_B.normal_(std=0.1)
    exact = layer.weight.double() + 0.7 * layer.lora_B.double() @ layer.lora_A.double()
    off = (layer.merged_weight().double() - exact).abs() / exact.abs()
    assert layer.merged_weight().dtype == torch.bfloat16
    assert off.max() <= 2**-8


def test_only_the_chosen_layers_are_trained():
    network, adapter = attached("1.up", "down")
    assert list(adapter.layers) == ["layers.0.down", "layers.1.up", "layers.1.down"]
    assert adapter.config.target_modules == ("1.up", "down")
    prefix = "base_model.model.layers."
    assert adapter.shapes() == {
        f"{prefix}0.down.lora_A.weight": (2, 6),
        f"{prefix}0.down.lora_B.weight": (4, 2),
        f"{prefix}1.up.lora_A.weight": (2, 4),
        f"{prefix}1.up.lora_B.weight": (6, 2),
        f"{prefix}1.down.lora_A.weight": (2, 6),
        f"{prefix}1.down.lora_B.weight": (4, 2),
    }
    assert adapter.num_parameters == 20 + 20 + 20
    trained = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
    assert trained == {f"{layer}.lora_{half}" for layer in adapter.layers for half in "AB"}
    assert adapter.of_tower == frozenset()


def test_all_linear_is_spelled_out_without_the_head():
    _, adapter = attached("all-linear")
    assert list(adapter.layers) == ["layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down"]
    assert adapter.config.target_modules == ("down", "up")


def test_an_end_that_other_modules_have_too_is_made_longer():
    parts = {name: nn.ModuleDict({"up": kind}) for name, kind in (("a", nn.Linear(2, 2)), ("b", nn.ReLU()))}
    _, adapter = attached("up", network=nn.ModuleDict({"x": nn.ModuleDict(parts)}))
    assert adapter.config.target_modules == ("a.up",)
    parts["a"]["up"] = nn.Linear(2, 2)
    network = nn.ModuleDict({"x": nn.ModuleDict(parts), "y": nn.ModuleDict({"a": nn.ModuleDict({"up": nn.ReLU()})})})
    _, adapter = attached("up", network=network)
    assert adapter.config.target_modules == ("x.a.up",)


def test_every_linear_layer_may_be_named():
    network = nn.ModuleDict({"one": nn.Linear(2, 2), "two": nn.Linear(2, 2)})
    assert target_layers(network, ["one", "two"]) == ["one", "two"]
    assert target_layers(nn.ModuleDict({"one": nn.Linear(2, 2)}), ["one"]) == ["one"]
    with pytest.raises(ConfigError, match="ReLU has no linear layers for LoRA: remove"):
        target_layers(nn.ReLU(), "all-linear")


def test_names_that_do_not_fit_are_refused_with_those_that_do():
    for targets, text in (
        (["up", "head"], "the output head: use some of down, up"),
        (["norm"], "use some of down, up"),
    ):
        with pytest.raises(ConfigError, match=text):
            target_layers(Network(), targets)


def test_matrices_that_no_linear_layer_has_are_counted_by_their_names():
    assert unreached_parameters(Network()) == {"table": 14, "experts": 2 * 24}
    assert attached("up")[1].unreached == {"table": 14, "experts": 2 * 24}


def test_switching_is_undone_whatever_happens():
    network, adapter = attached("up", "down")
    tokens = torch.arange(5)
    on = network(tokens)
    with adapter.switched(False):
        off = network(tokens)
        with adapter.switched(True):
            assert torch.equal(network(tokens), on)
        assert torch.equal(network(tokens), off)
    assert not torch.equal(on, off)
    with pytest.raises(ValueError, match="x"), adapter.switched(False):
        raise ValueError("x")
    assert torch.equal(network(tokens), on)


@pytest.mark.parametrize("dora", [False, True])
def test_the_networks_state_has_the_names_of_one_without_adapter(dora):
    network, adapter = attached("up", dora=dora)
    plain, tokens = Network(), torch.arange(5)
    assert ("layers.0.up.lora_magnitude" in network.state_dict()) == dora
    for merged in (True, False):
        state = adapter.model_state(network.state_dict(), merged=merged)
        assert state.keys() == plain.state_dict().keys()
        plain.load_state_dict(state)
        with adapter.switched(merged):
            torch.testing.assert_close(plain(tokens), network(tokens), atol=1e-5, rtol=1e-5)
    assert state["layers.0.up.weight"].data_ptr() == network.layers[0].up.weight.data_ptr(), "the base is no copy"


def test_the_second_matrix_and_magnitudes_have_their_own_rate():
    rates = {kind: rate_in_adapter(16.0, f"layers.0.up.{kind}") for kind in ("lora_A", "lora_B", "lora_magnitude")}
    assert rates == {"lora_A": 1.0, "lora_B": 16.0, "lora_magnitude": 16.0}


def test_an_adapter_for_sizes_has_no_memory(model_folder):
    adapter = blank_adapter(str(model_folder), AdapterConfig(4, 8.0, ("q_proj",), ""))
    assert len(adapter.layers) == 2
    assert {tensor.device.type for _, tensor in adapter.named_weights()} == {"meta"}
