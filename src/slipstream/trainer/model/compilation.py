"""Compiling a model's layers, with a trial that tells whether the compiler can.

It also decides how weight gradients are summed (`fused_weight_gradients.py`). Guarantees: after a trial that
failed, here or on another rank, the layers compute as they did before; nothing is left in the gradients. Over ranks no
collective waits for one whose compiler failed: the trial's forward passes, which gather the layers, are those of the
layers as they come, and what is compiled is tried beside them, each layer by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from slipstream import records
from slipstream.trainer.batching import MicroBatch, StepBatch, micro_batches
from slipstream.trainer.learner import deterministic_on_cpu
from slipstream.trainer.model import fused_weight_gradients
from slipstream.trainer.model.layers import configure_layers, decoder_layers
from slipstream.trainer.model.policy import PolicyModel
from slipstream.trainer.model.vision_towers import text_config

_TRIAL_LENGTHS = ((40, 24), (24, 16))
"""Prompt and completion of the sequences of two rows: a length that differs shows whether any length will do."""
_RECOMPILE_LIMIT = 32
"""For so many kinds of calls a layer may be compiled: with gradients and without, a row of one token, an adapter that
is off, each for policy and critic. Beyond its own limit of 8 torch would compute layers as they come, without a word,
and that needs more memory than was planned."""


_log = logging.getLogger(__name__)


def compile_layers(
    model: PolicyModel,
    agree: Callable[[str], str] | None = None,
    *,
    in_products: bool | None = None,
    row_tokens: int = 0,
) -> str:
    """Compile the layers of `model` and have each compute parts of two small rows, with and without gradients. Returns
    why not, in one line, where the compiler fails; otherwise nothing. Over ranks, which all must call it, `agree` makes
    of what went wrong on each what all of them return.

    Call it once the network is complete, adapter included, and spread over ranks, and before an optimizer waits for
    gradients. `in_products`: whether products of linear layers add up the gradients of their weights; None: in one
    process, where that is made for the device and the compiler can do it; True: on any device, for tests. With
    `row_tokens` a row of that length is trained on too: for long ones the compiler fuses otherwise, and would begin
    again in the first step.
    """
    network, count = model.network, 0
    if in_products or (in_products is None and agree is None):
        count = fused_weight_gradients.fuse_accumulation(network, anywhere=in_products is True)
    problem = _compile(model, agree, row_tokens)
    if problem and count:
        fused_weight_gradients.unfuse_accumulation(network)
        reason, problem = problem, _compile(model, agree, row_tokens)
        if not problem:
            _log.warning("gradients are added up apart from the products that make them (%s)", reason)
    elif count:
        _log.info("the gradients of %d matrices are added up by the products that make them", count)
    return problem


def _compile(model: PolicyModel, agree: Callable[[str], str] | None, row_tokens: int) -> str:
    before = model.layers
    compiler: Any = torch._dynamo.config
    # So is torch's usual setting; what makes them last is where they lie (`launch.caches`).
    torch._inductor.config.fx_graph_cache = True
    torch._functorch.config.enable_autograd_cache = True
    compiler.recompile_limit = max(compiler.recompile_limit, _RECOMPILE_LIMIT)
    problems: list[str] = []
    try:
        model.layers = replace(before, compiled=True)
        layers = decoder_layers(model.network)
        plain = [layer.forward for layer in layers]
        configure_layers(model.network, model.layers)
        compiled = [layer.forward for layer in layers]
    except Exception as error:  # noqa: BLE001 - whatever a compiler may raise
        problems.append(_told(error))
        layers, plain, compiled = [], [], []
        configure_layers(model.network, before)
    for layer, own, tried in zip(layers, plain, compiled, strict=True):
        layer.forward = _with_trial(layer, own, tried, problems)
    try:
        for prompt, completion in _TRIAL_LENGTHS:
            for row in _rows(model, prompt, completion):
                with torch.no_grad():
                    model.logits(row)
                with deterministic_on_cpu(model.device):
                    model.logits(row)
        length = min(row_tokens, model.max_model_len or row_tokens)
        if length > 1:
            for row in _rows(model, length - 1, 1, row_tokens // length):
                with deterministic_on_cpu(model.device):
                    model.logits(row)
        summing = [each for layer in layers for each in fused_weight_gradients.fused_layers(layer)]
        if missed := sum(layer.weight.grad is None for layer in summing):
            problems.append(f"the products of {missed} of {len(summing)} linear layers gave their weights no gradient")
    finally:
        for layer, tried in zip(layers, compiled, strict=True):
            layer.forward = tried
        for parameter in model.network.parameters():
            parameter.grad = None
    problem = "".join(problems[:1])
    if agree is not None:
        problem = agree(problem)
    if problem:
        model.layers = before
        configure_layers(model.network, before)
    return problem


def _told(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"


def _with_trial(
    layer: nn.Module, own: Callable[..., Any], tried: Callable[..., Any], problems: list[str]
) -> Callable[..., Any]:
    """The layer's `own` forward, beside which `tried` computes the same, and its backward pass where there is to be
    one, until the first of `problems`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not problems:
            try:
                outputs = _requiring_grad(tried(*args, **kwargs))
                inputs = _requiring_grad([args, kwargs, list(layer.parameters())])
                if torch.is_grad_enabled() and inputs:  # below the first adapter nothing wants a gradient
                    # Up to the layer's inputs, where ranks would begin to add up what they have.
                    torch.autograd.grad(outputs, inputs, [torch.ones_like(each) for each in outputs], allow_unused=True)
            except Exception as error:  # noqa: BLE001 - whatever a compiler, or the compiler that it calls, may raise
                problems.append(_told(error))
        return own(*args, **kwargs)

    return call


def _requiring_grad(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.requires_grad]


def _rows(model: PolicyModel, prompt: int, completion: int, number: int = 2) -> Iterator[MicroBatch]:
    """So many sequences of one length, packed into one row if the model packs."""
    mask = [place >= prompt for place in range(prompt + completion)]
    vocabulary = int(text_config(model.config).vocab_size)
    sequences = [
        records.Sequence([(7 * place + each) % vocabulary for place in range(len(mask))], mask)
        for each in range(number)
    ]
    return iter(micro_batches(StepBatch(sequences), number * len(mask), packing=model.packing, device=model.device))
