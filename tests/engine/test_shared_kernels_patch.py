"""The patch of `model.shared_kernels`: it finds what it changes in the installed vLLM, and both samplers hand on the
trainer's log-probabilities of the logits themselves."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import gelu, silu
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from vllm.model_executor.layers import activation, layernorm
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.v1.attention.backends import flash_attn
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample import sampler as second

from slipstream.algo import logprobs_triton
from slipstream.inference.plugin.patches import shared_kernels
from slipstream.inference.plugin.patches.patch_table import Absent
from slipstream.shared_kernels import CannotShareKernels, products

from .test_sampled_logprobs import metadata


@pytest.fixture
def patched(monkeypatch):
    """vLLM with the patch, until the test ends. The kernel of log-probabilities gives the logits that it gets."""

    def given(logits, ids, temperature):
        assert (logits.is_contiguous(), temperature) == (True, 1.0)
        return (logits.gather(-1, ids.long()[:, None])[:, 0],)

    monkeypatch.setattr(shared_kernels, "setattr", monkeypatch.setattr, raising=False)
    monkeypatch.setattr(logprobs_triton, "forward", given)
    # vLLM for CPUs lacks it.
    monkeypatch.setattr(flash_attn, "flash_attn_varlen_func", lambda **given: given, raising=False)
    monkeypatch.setattr(products, "pin_products", lambda: None)  # torch for CPUs has no cuBLASLt
    shared_kernels.share_operations()


def test_attention_takes_the_kernels_for_many_queries(patched):
    one_piece = {"num_splits": 1, "scheduler_metadata": None, "max_seqlen_k": 700, "window_size": None}
    given = {"causal": True, "num_splits": 32, "scheduler_metadata": "a plan", "max_seqlen_k": 700}
    assert flash_attn.flash_attn_varlen_func(max_seqlen_q=1, **given) == given | one_piece | {"max_seqlen_q": 128}
    found = flash_attn.flash_attn_varlen_func(max_seqlen_q=500, max_seqlen_k=700, window_size=[-1, -1])
    assert found == {"max_seqlen_q": 500} | one_piece


def test_windows_that_leave_out_nothing_are_none_and_others_are_refused(patched):
    found = flash_attn.flash_attn_varlen_func(max_seqlen_q=1, max_seqlen_k=512, window_size=[511, 0])
    assert found["window_size"] is None
    with pytest.raises(CannotShareKernels, match="513 tokens of context are more than a sliding window of 512"):
        flash_attn.flash_attn_varlen_func(max_seqlen_q=1, max_seqlen_k=513, window_size=[511, 0])


def test_norms_and_gates_are_those_of_the_models(patched):
    """Each class of vLLM's computes what transformers has in its place."""
    x, residual, weight = torch.randn(5, 64), torch.randn(5, 64), torch.randn(64)
    norm = SimpleNamespace(weight=weight, variance_epsilon=1e-6)
    for kind, of_transformers in ((layernorm.RMSNorm, LlamaRMSNorm), (layernorm.GemmaRMSNorm, Gemma3RMSNorm)):
        theirs = of_transformers(64, 1e-6)
        theirs.weight.data = weight
        torch.testing.assert_close(kind.forward(norm, x), theirs(x))
        output, total = kind.forward(norm, x, residual)
        torch.testing.assert_close(output, theirs(x + residual))
        assert torch.equal(total, x + residual)
    left, up = x.chunk(2, -1)
    torch.testing.assert_close(activation.SiluAndMul.forward(None, x), silu(left) * up)
    tanh, erf = (SimpleNamespace(approximate=name) for name in ("tanh", "none"))
    torch.testing.assert_close(activation.GeluAndMul.forward(tanh, x), gelu(left, approximate="tanh") * up)
    with pytest.raises(ValueError, match="GELU's approximation is none, and only tanh is known"):
        activation.GeluAndMul.forward(erf, x)


def test_positions_turn_the_halves_of_each_head_and_products_are_plain(patched):
    generator = torch.Generator().manual_seed(0)
    angles = torch.rand(9, 3, generator=generator)
    layer = SimpleNamespace(cos_sin_cache=torch.cat([angles.cos(), angles.sin()], -1), head_size=6)
    query, key = torch.randn(2, 12, generator=generator), torch.randn(2, 6, generator=generator)
    turned = RotaryEmbedding.forward(layer, torch.tensor([7, 2]), query, key)
    for given, found in zip((query, key), turned, strict=True):
        heads = given.reshape(2, -1, 2, 3)
        numbers = torch.complex(heads[:, :, 0], heads[:, :, 1]) * torch.polar(torch.ones(2, 3), angles[[7, 2]])[:, None]
        torch.testing.assert_close(found, torch.cat([numbers.real, numbers.imag], -1).flatten(1))
    layer, x = SimpleNamespace(weight=torch.tensor([[1.0, 2.0]])), torch.tensor([[3.0, 4.0]])
    assert UnquantizedLinearMethod.apply(None, layer, x, torch.tensor([0.5])).tolist() == [[11.5]]


@pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logprobs"])
def test_the_first_sampler_normalizes_once(patched, mode):
    logits = torch.randn(5, 211) * 3 + 7
    found = Sampler(mode)(logits.clone(), metadata(5, seeds=True))
    drawn = found.sampled_token_ids.long()
    assert torch.equal(found.logprobs_tensors.logprobs, logits.gather(-1, drawn))


def test_the_second_sampler_takes_the_kernel_too(patched):
    logits, ids = torch.randn(5, 256)[:, :211], torch.arange(5)  # vLLM pads vocabularies to multiples of 64
    assert torch.equal(second.compute_topk_scores(logits, 0, ids).logprobs[:, 0], logits[range(5), range(5)])


def test_a_vllm_that_lacks_a_part_is_told():
    with pytest.raises(Absent, match=r"Sampler\.other"):
        shared_kernels._replace("vllm.v1.sample.sampler", "Sampler", "other", lambda plain: plain)
