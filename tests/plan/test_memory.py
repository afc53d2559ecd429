"""What a step takes beyond what stays is what the plan counts, as torch's own allocator sees it."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import Gemma2Config, Gemma2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from slipstream.config import with_values
from slipstream.launch.build import build_optimizer
from slipstream.plan import ModelFacts
from slipstream.plan.memory.sizes import (
    activation_bytes_per_token,
    optimizer_bytes,
    training_state_bytes,
    weights_bytes,
)
from slipstream.trainer.model.layers import LayerOptions, configure_layers
from tests.plan.test_plan import GRPO

VOCABULARY, HIDDEN, LAYERS = 20_000, 64, 2
"""Words are the largest matrix by far."""


def most_bytes(work):
    """The most that is allocated at one time during `work` beyond what there was before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    assert changes
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def make(dtype, optimizer="adamw", tied=False):
    """A network and its optimizer."""
    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=4000,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        tie_word_embeddings=tied,
    )
    network = Qwen3ForCausalLM._from_config(shape, dtype=getattr(torch, dtype))
    return network, build_optimizer(with_values(GRPO, {"training.optimizer": optimizer}), network)


def gradients(network, num_tokens):
    """Two rows: with the second there is already a sum of gradients."""
    for _ in range(2):
        network(input_ids=torch.arange(num_tokens)[None]).logits[..., :9].sum().backward()


@pytest.mark.parametrize(
    ("name", "dtype"), [("adamw", "bfloat16"), ("adamw", "float32"), ("adamw_bf16", "bfloat16"), ("muon", "bfloat16")]
)
def test_the_plan_counts_what_is_there_for_a_moment(name, dtype):
    network, optimizer = make(dtype, name)

    def step():
        gradients(network, 2)
        optimizer.prepare(1e-3)
        optimizer.commit()

    step()  # the optimizer's memory is made
    count = network.num_parameters()
    model = ModelFacts(count, HIDDEN, 4000, LAYERS, 2, 1, 32, 256, VOCABULARY, dtype, tied_embeddings=False)
    planned = training_state_bytes(model, dtype, with_reference=False, optimizer=name)
    staying = weights_bytes(model, dtype) + optimizer_bytes(name, count, model) - 4 * count  # but for the gradients
    assert 0.97 * (planned - staying) <= most_bytes(step) <= 1.03 * (planned - staying)


def test_a_tied_head_needs_no_more_while_a_row_is_there():
    peaks = {}
    for tied in (False, True):
        network, _ = make("float32", tied=tied)
        gradients(network, 2)
        peaks[tied] = most_bytes(lambda network=network: gradients(network, 2 * HIDDEN))
    assert peaks[True] == pytest.approx(peaks[False], abs=0.1 * 4 * VOCABULARY * HIDDEN)


@pytest.mark.parametrize(
    ("scores", "dtype", "checkpointing"),
    [
        ("plain", "float32", True),
        ("plain", "bfloat16", False),
        ("plain", "bfloat16", "selective"),
        ("capped", "float32", False),
        ("capped", "float32", "selective"),
        ("capped", "bfloat16", True),
    ],
)
def test_attention_without_a_kernel_takes_what_is_counted(scores, dtype, checkpointing):
    torch.manual_seed(0)
    config, network = {"plain": (Qwen3Config, Qwen3ForCausalLM), "capped": (Gemma2Config, Gemma2ForCausalLM)}[scores]
    layers, heads, tokens = 4, 4, 384
    shape = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    made = network._from_config(config(**shape), dtype=getattr(torch, dtype), attn_implementation="eager").eval()
    configure_layers(made, LayerOptions(checkpointing))

    def work():
        made(input_ids=torch.arange(tokens)[None] % 32, use_cache=False).logits.float().sum().backward()

    work()
    model = ModelFacts(made.num_parameters(), 16, 16, layers, heads, 2, 8, 512, 32, dtype, scores=scores)
    planned = tokens * activation_bytes_per_token(model, dtype, checkpointing=checkpointing, longest=tokens)
    without = tokens * activation_bytes_per_token(model, dtype, checkpointing=checkpointing)
    assert without < 0.2 * planned
    assert 0.8 * planned <= most_bytes(work) <= 1.2 * planned
