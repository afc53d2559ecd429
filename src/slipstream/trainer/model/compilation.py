"""Compiles a model's decoder layers, with a trial: if the compiler fails, the layers stay eager.

It also enables fused gradient accumulation (`fused_weight_gradients.py`). Guarantees: after a failed trial, on this or
another rank, the layers compute as before, and no gradients are left. No rank waits in a collective for one with a
failed compiler: the trial's passes all-gather and run the eager layers, and each compiled layer runs beside its eager
one.
"""

from __future__ import annotations

import logging
import math
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
from slipstream.errors import one_line
from slipstream.trainer.learner import deterministic_on_cpu
from slipstream.trainer.model import fused_weight_gradients
from slipstream.trainer.model.layers import configure_layers, decoder_layers
from slipstream.trainer.model.policy import PolicyModel
from slipstream.trainer.model.vision_towers import text_config
from slipstream.trainer.packing import MicroBatch, StepBatch, micro_batches

_TRIAL_LENGTHS = ((40, 24), (24, 16))
"""Prompt and completion tokens of the sequences of two rows: the second length tests dynamic shapes."""
_RECOMPILE_LIMIT = 32
"""Compiled variants of a layer: with and without gradients, a row of one token, adapter off, each for policy and
critic. Beyond its default limit of 8 torch silently falls back to eager: this needs more memory than planned."""


_log = logging.getLogger(__name__)


def compile_layers(
    model: PolicyModel,
    agree: Callable[[str], str] | None = None,
    *,
    in_products: bool | None = None,
    row_tokens: int = 0,
) -> str:
    """Compile the layers of `model` and try them on two small rows, with and without gradients. Returns the compiler's
    error on one line if it fails, otherwise an empty string. With several ranks all must call it, and `agree` maps each
    rank's error to the common one.

    Call it when the network is complete, with its adapter and sharded, and before optimizers register for gradients.
    `in_products`: whether to fuse gradient accumulation; None: in a single process, if device and compiler support it;
    True: on any device, for tests. `row_tokens`: also try rows of up to this length. The compiler generates other
    kernels for them, and would otherwise do so in the middle of a step.
    """
    network, count = model.network, 0
    if in_products or (in_products is None and agree is None):
        count = fused_weight_gradients.fuse_accumulation(network, anywhere=in_products is True)
    problem = _compile(model, agree, row_tokens)
    if problem and count:
        fused_weight_gradients.unfuse_accumulation(network)
        reason, problem = problem, _compile(model, agree, row_tokens)
        if not problem:
            _log.warning("weight gradients are accumulated apart from the products that make them (%s)", reason)
    elif count:
        _log.info("the gradients of %d matrices are accumulated by the products that make them", count)
    return problem


def _compile(model: PolicyModel, agree: Callable[[str], str] | None, row_tokens: int) -> str:
    before = model.layers
    compiler: Any = torch._dynamo.config
    # Torch's defaults; their folder makes the caches persistent (`launch.startup.compile_caches`).
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
    except Exception as error:  # noqa: BLE001 - a compiler may raise anything
        problems.append(one_line(error))
        layers, plain, compiled = [], [], []
        configure_layers(model.network, before)
    for layer, own, tried in zip(layers, plain, compiled, strict=True):
        layer.forward = _with_trial(layer, own, tried, problems)
    try:
        trials = [(prompt, completion, 2) for prompt, completion in _TRIAL_LENGTHS]
        for tokens in row_lengths(row_tokens, model.device):
            number = math.ceil(tokens / (model.max_model_len or tokens))
            trials.append((tokens // number - 1, 1, number))
        for row in (row for trial in trials for row in _rows(model, *trial)):
            with torch.no_grad():
                model.logits(row)
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


def row_lengths(longest: int, device: torch.device) -> list[int]:
    """`longest`, and on a GPU lengths below it, each 1.19 times the next. The choice of kernels changes at some
    lengths, by model (torch 2.11, hidden size 1,536: 3,413 and 4,096 tokens). Without a trial the first step with a row
    between two of them waits seconds for its compilation. On a CPU the rows would take longer than this."""
    lengths: list[int] = []
    while longest > 2 * sum(_TRIAL_LENGTHS[0]):
        lengths.append(longest)
        longest = int(longest / 2**0.25) if device.type == "cuda" else 0
    return lengths


def _with_trial(
    layer: nn.Module, own: Callable[..., Any], tried: Callable[..., Any], problems: list[str]
) -> Callable[..., Any]:
    """Wrap the layer's `own` eager forward: each call also runs `tried`, the compiled one, forward and backward, until
    one of `problems` occurred."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not problems:
            try:
                outputs = _requiring_grad(tried(*args, **kwargs))
                inputs = _requiring_grad([args, kwargs, list(layer.parameters())])
                if torch.is_grad_enabled() and inputs:  # layers below the first adapter need no gradient
                    # To the layer's inputs only: gradients of parameters would trigger FSDP2's reduce-scatter.
                    torch.autograd.grad(outputs, inputs, [torch.ones_like(each) for each in outputs], allow_unused=True)
            except Exception as error:  # noqa: BLE001 - a compiler, or one called by it, may raise anything
                problems.append(one_line(error))
        return own(*args, **kwargs)

    return call


def _requiring_grad(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.requires_grad]


def _rows(model: PolicyModel, prompt: int, completion: int, number: int) -> Iterator[MicroBatch]:
    """`number` sequences of one length, packed into one row if the model packs."""
    mask = [place >= prompt for place in range(prompt + completion)]
    vocabulary = int(text_config(model.config).vocab_size)
    sequences = [
        records.Sequence([(7 * place + each) % vocabulary for place in range(len(mask))], mask)
        for each in range(number)
    ]
    # Without a connection: after a compiler's failure a rank would miss the layers' exchanges.
    context = None if model.context is None else model.context.alone()
    most = number * len(mask)
    rows = micro_batches(StepBatch(sequences), most, packing=model.packing, device=model.device, context=context)
    return iter(rows)
