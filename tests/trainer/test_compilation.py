"""Trials of compiled layers, with a compiler that gives back what it was given, or fails."""

import logging

import pytest
import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config

from slipstream.trainer.model import fused_weight_gradients
from slipstream.trainer.model.compilation import compile_layers, row_lengths
from slipstream.trainer.model.layers import LayerOptions, decoder_layers
from slipstream.trainer.model.policy import PolicyModel


@pytest.fixture
def model(model_folder, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda forward, **_: forward)
    return PolicyModel.load(model_folder, checked=False)


def fails(*_, **__):
    raise RuntimeError("no C++ compiler\nhere")


@pytest.mark.parametrize(
    ("asked", "alone", "fused"),
    [(None, True, [False]), (None, False, []), (False, True, []), (True, True, [True]), (True, False, [True])],
)
def test_gradients_are_fused_in_a_single_process_or_where_that_is_asked_for(asked, alone, fused, model, monkeypatch):
    heard = []

    def fuse(network, *, anywhere=False):
        assert network is model.network
        heard.append(anywhere)
        return 0

    monkeypatch.setattr(fused_weight_gradients, "fuse_accumulation", fuse)
    assert compile_layers(model, None if alone else str, in_products=asked) == ""
    assert heard == fused
    assert model.layers.compiled


def test_how_many_matrices_are_fused_is_said(model, caplog):
    with caplog.at_level(logging.INFO):
        assert compile_layers(model, in_products=True) == ""
    assert caplog.messages == ["the gradients of 14 matrices are accumulated by the products that make them"]
    assert all(parameter.grad is None for parameter in model.network.parameters())


def test_without_fused_gradients_nothing_is_said(model, caplog):
    with caplog.at_level(logging.INFO):
        assert compile_layers(model, in_products=False) == ""
    assert caplog.messages == []


def test_an_error_of_another_rank_undoes_it_here(model):
    own = []
    assert compile_layers(model, lambda problem: own.append(problem) or "rank 1: no compiler") == "rank 1: no compiler"
    assert own == [""]
    assert model.layers == LayerOptions()
    for layer in decoder_layers(model.network):
        assert layer.forward == type(layer).forward.__get__(layer)


def test_of_a_ranks_problems_the_first_is_told(model, monkeypatch):
    """A layer that does not run gives no gradients either; and the trial is made again without fused ones."""
    own = []
    monkeypatch.setattr(torch, "compile", lambda forward, **_: fails)
    assert compile_layers(model, lambda problem: own.append(problem) or problem, in_products=True) == own[1]
    assert own == ["RuntimeError: no C++ compiler here"] * 2
    assert fused_weight_gradients.fused_layers(model.network) == []
    assert not model.layers.compiled


def test_a_compiler_that_fails_at_once_leaves_no_layer_half_done(model, monkeypatch):
    made = []

    def compiler(forward, **_):
        made.append(forward)
        return fails if len(made) == 1 else fails()

    monkeypatch.setattr(torch, "compile", compiler)
    assert "no C++ compiler here" in compile_layers(model)
    assert len(made) == 2
    assert model.layers == LayerOptions()
    for layer in decoder_layers(model.network):
        assert layer.forward == type(layer).forward.__get__(layer)


@pytest.mark.parametrize("limit", [8, 100])
def test_graphs_are_cached_and_layers_have_as_many_as_they_need(limit, model):
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
        torch._dynamo.config.patch(recompile_limit=limit),
    ):
        compile_layers(model)
        assert torch._inductor.config.fx_graph_cache
        assert torch._functorch.config.enable_autograd_cache
        found = torch._dynamo.config.recompile_limit
    assert found == 100 if limit == 100 else found > limit


def test_a_trial_has_rows_of_two_lengths_with_and_without_gradients(model, monkeypatch):
    seen, logits = [], model.logits
    monkeypatch.setattr(
        model, "logits", lambda row: (seen.append((row.counts, torch.is_grad_enabled())), logits(row))[1]
    )
    assert compile_layers(model) == ""
    assert seen == [([24] * 2, False), ([24] * 2, True), ([16] * 2, False), ([16] * 2, True)]
    seen.clear()
    assert compile_layers(model, row_tokens=150) == ""
    assert seen[4:] == [([1], False), ([1], True)]


def test_on_a_cpu_the_longest_row_is_tried_if_the_trial_has_none_like_it():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert [row_lengths(longest, cpu) for longest in (0, 128, 129, 5000)] == [[], [], [129], [5000]]
    assert row_lengths(200, gpu) == [200, 168, 141]


def test_compiled_layers_run_backwards_in_the_trial(model, monkeypatch):
    """To find what only fails there."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, states):
            return states.clone()

        @staticmethod
        def backward(ctx, grad):
            fails()

    monkeypatch.setattr(
        torch, "compile", lambda forward, **_: lambda *args, **more: Fails.apply(forward(*args, **more))
    )
    assert "no C++ compiler here" in compile_layers(model)
    assert not model.layers.compiled
