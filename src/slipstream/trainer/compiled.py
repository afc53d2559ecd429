"""Compiling a model's layers, with a trial that tells whether the compiler can.

With it goes how the gradients of their weights are added up (`weight_gradients.py`). Guarantees: after a trial that
failed the layers compute as they did before; nothing is left in the gradients.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
import torch._dynamo

from slipstream import records
from slipstream.algo.sampling import HeadLogits
from slipstream.errors import TrainingError
from slipstream.trainer import weight_gradients
from slipstream.trainer.batching import StepBatch, micro_batches
from slipstream.trainer.layers import dress_layers
from slipstream.trainer.learner import one_order_of_sums
from slipstream.trainer.model import PolicyModel
from slipstream.trainer.towers import text_config

_LENGTHS = ((40, 24), (24, 16))
"""Prompt and completion of the sequences of two rows: a length that differs shows whether any length will do."""
_MOST_KINDS = 32
"""For so many kinds of calls a layer may be compiled: with gradients and without, a row of one token, an adapter that
is off, each for policy and critic. Beyond its own limit of 8 torch would compute layers as they come, without a word,
and that needs more memory than was planned."""


_log = logging.getLogger(__name__)


def compile_layers(model: PolicyModel, *, in_products: bool | None = None) -> str:
    """Compile the layers of `model` and have them compute two small rows, with and without gradients. Returns why not,
    in one line, where the compiler fails; otherwise nothing.

    Call it once the network is complete, adapter included, and before an optimizer waits for gradients. `in_products`:
    whether products of linear layers add up the gradients of their weights; None: where that is made for the device and
    the compiler can do it; True: on any device, for tests.
    """
    network = model.network
    count = 0
    if in_products is not False:
        count = weight_gradients.accumulate_in_products(network, anywhere=in_products is True)
    problem = _compile(model)
    if problem and count:
        weight_gradients.accumulate_apart(network)
        _log.warning("gradients are added up apart from the products that make them (%s)", problem)
        problem = _compile(model)
    elif count:
        _log.info("the gradients of %d matrices are added up by the products that make them", count)
    return problem


def _compile(model: PolicyModel) -> str:
    before = model.layers
    compiler: Any = torch._dynamo.config
    compiler.recompile_limit = max(compiler.recompile_limit, _MOST_KINDS)
    try:
        model.layers = replace(before, compiled=True)
        dress_layers(model.network, model.layers)
        for prompt, completion in _LENGTHS:
            _try(model, prompt, completion)
    except Exception as error:  # noqa: BLE001 - whatever a compiler, or the compiler that it calls, may raise
        model.layers = before
        dress_layers(model.network, before)
        text = " ".join(str(error).split())
        return f"{type(error).__name__}: {text[:200]}"
    finally:
        for parameter in model.network.parameters():
            parameter.grad = None
    return ""


def _try(model: PolicyModel, prompt: int, completion: int) -> None:
    mask = [place >= prompt for place in range(prompt + completion)]
    vocabulary = int(text_config(model.config).vocab_size)
    sequences = [
        records.Sequence([(7 * place + number) % vocabulary for place in range(len(mask))], mask) for number in (0, 1)
    ]
    for row in micro_batches(StepBatch(sequences), 4 * len(mask), packing=model.packing, device=model.device):
        with torch.no_grad():
            model.logits(row)
        with one_order_of_sums(model.device):
            logits = model.logits(row)
            outputs = logits.hidden_ND if isinstance(logits, HeadLogits) else logits
            outputs.float().square().mean().backward()
    layers = weight_gradients.accumulating_layers(model.network)
    if missed := sum(layer.weight.grad is None for layer in layers):
        raise TrainingError(f"the products of {missed} of {len(layers)} linear layers gave their weights no gradient")
