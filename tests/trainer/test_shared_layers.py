"""`run.exact`: the operations that trainer and engine share, and a network that computes with them."""

from __future__ import annotations

import copy
import os
import subprocess
import sys

import pytest
import torch
import transformers
from torch.nn.functional import gelu, silu

from slipstream.errors import ConfigError
from slipstream.shared_kernels import flash3, operations
from slipstream.trainer.attention import flash4, packed
from slipstream.trainer.attention.row_layout import segment_layout
from slipstream.trainer.model.compilation import compile_layers
from slipstream.trainer.model.policy import PolicyModel
from slipstream.trainer.model.shared_layers import share_kernels

ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]
EPSILON = 1e-6


def rms_norm(x, weight, offset=0.0):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON) * (weight + offset)


def rotated(x, cosine, sine):
    first, second = x.chunk(2, -1)
    turned = torch.cat([-second, first], -1)
    return x * cosine[:, None] + turned * sine[:, None]


def angles(rows, width, device):
    phase = torch.randn(rows, width // 2, device=device, dtype=torch.float64).repeat(1, 2)
    return phase.cos(), phase.sin()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [64, 576, 1536])
def test_each_operation_and_its_gradients_are_those_of_float64(device, width):
    torch.manual_seed(0)
    x, up, pulled = (torch.randn(37, width, device=device) for _ in range(3))
    weight = torch.randn(width, device=device)
    cosine, sine = angles(37, 64, device)
    heads = x.view(37, -1, 64)
    cases = {
        "norm": (lambda a, b: operations.differentiable_norm(a, b, EPSILON), rms_norm, (x, weight), pulled),
        "Gemma's norm": (
            lambda a, b: operations.differentiable_norm(a, b, EPSILON, 1.0),
            lambda a, b: rms_norm(a, b, 1.0),
            (x, weight),
            pulled,
        ),
        "gate": (operations.differentiable_gate, lambda a, b: silu(a) * b, (x, up), pulled),
        "GEGLU": (
            lambda a, b: operations.differentiable_gate(a, b, True),
            lambda a, b: gelu(a, approximate="tanh") * b,
            (x, up),
            pulled,
        ),
        "rotate": (
            lambda a: operations.differentiable_rotate(a, cosine.float(), sine.float()),
            lambda a: rotated(a, cosine, sine),
            (heads,),
            pulled.view(heads.shape),
        ),
    }
    for name, (ours, exact, inputs, gradient) in cases.items():
        own = [each.clone().requires_grad_() for each in inputs]
        reference = [each.double().requires_grad_() for each in inputs]
        output, expected = ours(*own), exact(*reference)
        torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-6, msg=name)
        found = torch.autograd.grad(output, own, gradient)
        for mine, theirs in zip(found, torch.autograd.grad(expected, reference, gradient.double()), strict=True):
            torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-5, msg=name)


def check_kernels():
    """Against the same formulas by torch, for widths that are no powers of 2."""
    from slipstream.shared_kernels import kernels

    torch.manual_seed(0)
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 8e-3)):  # the interpreter cuts off where a GPU rounds
        x, up, pulled = (torch.randn(5, 1100).to(dtype) for _ in range(3))
        weight, residual = torch.randn(1100).to(dtype), torch.randn(5, 1100)
        pairs = []
        for offset in (0.0, 1.0):
            for added in (None, residual):
                ours = kernels.norm(x, weight, EPSILON, added, offset)
                pairs += zip(ours, operations.norm(x, weight, EPSILON, added, offset), strict=True)
            own, gain = x.clone().requires_grad_(), weight.clone().requires_grad_()
            output = operations.differentiable_norm(own, gain, EPSILON, offset)
            gradients = torch.autograd.grad(output, (own, gain), pulled)
            pairs += zip(kernels.norm_backward(pulled, x, weight, EPSILON, offset), gradients, strict=True)
        halves = torch.cat([x, up], -1).chunk(2, -1)
        for is_gelu in (False, True):
            pairs += [(kernels.gate(*halves, is_gelu), operations.gate(x, up, is_gelu))]
            own, other = x.clone().requires_grad_(), up.clone().requires_grad_()
            gradients = torch.autograd.grad(operations.differentiable_gate(own, other, is_gelu), (own, other), pulled)
            pairs += zip(kernels.gate_backward(pulled, x, up, is_gelu), gradients, strict=True)
        cosine, sine = (each.to(dtype) for each in angles(5, 20, "cpu"))
        heads = torch.randn(5, 9, 20).to(dtype)
        for backward in (False, True):
            turned = [each.rotate(heads, cosine, sine, backward=backward) for each in (kernels, operations)]
            pairs.append(tuple(turned))
        for ours, theirs in pairs:
            if ours is theirs is None:
                continue
            torch.testing.assert_close(ours.float(), theirs.float(), atol=1e-5, rtol=bound)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is run as it is where there is a CUDA device")
def test_the_kernels_in_tritons_interpreter():
    subprocess.run([sys.executable, __file__], env={**os.environ, "TRITON_INTERPRET": "1"}, check=True, timeout=400)


@ON_GPU
@pytest.mark.parametrize("width", [128, 896, 1536, 4096])
def test_a_row_does_not_depend_on_the_others(width):
    torch.manual_seed(0)
    x, residual, up = (torch.randn(500, width, device="cuda").bfloat16() for _ in range(3))
    weight = torch.randn(width, device="cuda").bfloat16()
    cosine, sine = (each.bfloat16() for each in angles(500, 128, "cuda"))
    whole = (
        *operations.norm(x, weight, EPSILON, residual.float()),
        operations.gate(x, up),
        operations.gate(x, up, True),
        operations.rotate(x.view(500, -1, 128), cosine, sine),
    )
    for rows in (slice(0, 1), slice(7, 8), slice(100, 333)):
        part = (
            *operations.norm(x[rows], weight, EPSILON, residual.float()[rows]),
            operations.gate(x[rows], up[rows]),
            operations.gate(x[rows], up[rows], True),
            operations.rotate(x[rows].view(-1, width // 128, 128), cosine[rows], sine[rows]),
        )
        for one, all_rows in zip(part, whole, strict=True):
            assert torch.equal(one, all_rows[rows])
    halves = torch.cat([x, up], -1)
    assert torch.equal(operations.gate(*halves.chunk(2, -1)), whole[2]), "halves of the engine's one matrix"
    total = x.float() + residual.float()
    assert torch.equal(operations.norm(total, weight, EPSILON)[0], whole[0]), "the trainer adds before"


def is_hopper():
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


PRODUCTS = """
import torch
from slipstream.shared_kernels.products import pin_products

pin_products()
torch.manual_seed(0)
cases = [(torch.bfloat16, shape) for shape in ((576, 960), (1536, 576), (1536, 17920), (8960, 1536), (4096, 1024))]
for dtype, (inputs, outputs) in [*cases, (torch.float32, (1536, 151936))]:
    weight = (torch.randn(outputs, inputs, device="cuda") * inputs**-0.5).bfloat16()
    x = torch.randn(4096, inputs, device="cuda").bfloat16()

    def product(rows, part):
        if dtype == torch.float32:
            return torch.mm(rows, part.t(), out_dtype=dtype)
        return torch.nn.functional.linear(rows, part)

    whole, half = product(x, weight), outputs // 2
    for count in (1, 7, 64, 300, 1000):
        assert torch.equal(product(x[:count].contiguous(), weight), whole[:count]), (inputs, outputs, count)
    assert torch.equal(product(x, weight[:half].contiguous()), whole[:, :half]), (inputs, outputs)
"""


@pytest.mark.skipif(not is_hopper(), reason="needs a GPU of compute capability 9")
def test_a_row_of_a_product_does_not_depend_on_the_others():
    """In a process of its own, as products are pinned for good."""
    subprocess.run([sys.executable, "-c", PRODUCTS], check=True, timeout=300)


def small_model(folder, kind, **settings):
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    text = "Text" if kind == "Gemma3" else ""
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, f"{kind}{text}Config")(vocab_size=50, **special, **shape, **heads, **settings)
    network = getattr(transformers, f"{kind}ForCausalLM")(config)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    network.save_pretrained(folder)
    return folder


def check_same(ours, theirs, rtol):
    """Logits and gradients of two networks with the same weights."""
    row = theirs.small_row()
    own, other = ours.logits(row), theirs.logits(row)
    torch.testing.assert_close(own, other, rtol=rtol, atol=rtol)
    gradient = torch.randn_like(other)
    own.backward(gradient)
    other.backward(gradient)
    others = dict(theirs.network.named_parameters())
    for name, mine in ours.network.named_parameters():
        torch.testing.assert_close(mine.grad, others[name].grad, rtol=10 * rtol, atol=rtol, msg=name)


WINDOWS = {
    "Qwen2": {"use_sliding_window": True, "sliding_window": 2, "max_window_layers": 0},
    "Gemma3": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 2},
}


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3", "Gemma3"])
def test_a_network_computes_what_it_computed_before(tmp_path, kind):
    plain = PolicyModel.load(small_model(tmp_path, kind, **WINDOWS.get(kind, {})))
    own = PolicyModel(copy.deepcopy(plain.network), tmp_path)
    share_kernels(own.network)
    check_same(own, plain, 1e-5)


@pytest.mark.full
def test_a_compiled_network_computes_the_same(tmp_path):
    plain = PolicyModel.load(small_model(tmp_path, "Qwen3"))
    share_kernels(plain.network)
    compiled = PolicyModel(copy.deepcopy(plain.network), tmp_path)
    assert compile_layers(compiled) == ""
    row = plain.small_row()
    assert torch.equal(compiled.logits(row), plain.logits(row)), "a compiler fuses nothing that is rounded"
    check_same(compiled, plain, 1e-6)


def test_other_activations_are_refused(tmp_path):
    network = PolicyModel.load(small_model(tmp_path, "Qwen2", hidden_act="relu")).network
    with pytest.raises(ConfigError, match="Qwen2ForCausalLM has relu, and only silu and gelu_pytorch_tanh are known"):
        share_kernels(network)


def test_scaled_rotary_embeddings_are_refused(tmp_path):
    rotary = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    network = PolicyModel.load(small_model(tmp_path, "Llama", rope_parameters=rotary)).network
    with pytest.raises(ConfigError, match="only plain rotary embeddings are known, not linear"):
        share_kernels(network)


@pytest.mark.skipif(not is_hopper(), reason="needs a GPU of compute capability 9")
@pytest.mark.parametrize("window", [0, 700])
@pytest.mark.parametrize(("heads", "key_heads", "size"), [(9, 3, 64), (4, 4, 64), (12, 2, 128), (4, 1, 256)])
def test_the_gradients_of_the_engines_attention_are_those_of_torchs(monkeypatch, heads, key_heads, size, window):
    monkeypatch.setattr(flash3, "_state", {})
    monkeypatch.setattr(flash4, "find", lambda *_: None)
    torch.manual_seed(0)
    layout = segment_layout([200, 1, 70, 300, 17], "cuda", [None, 0, 0, None, 3])
    inputs = [
        torch.randn(sum(layout.lengths), each, size, device="cuda").bfloat16() for each in [heads, *[key_heads] * 2]
    ]
    pulled = torch.randn_like(inputs[0])

    def attend():
        given = [each.clone().requires_grad_() for each in inputs]
        output, _ = packed.ragged_attention(*given, layout.layout_id, size**-0.5, window)
        return output.detach(), *torch.autograd.grad(output, given, pulled)

    expected = attend()
    flash3.enable(heads, key_heads, size)
    for ours, theirs in zip(attend(), expected, strict=True):
        assert float((ours.float() - theirs.float()).norm() / theirs.float().norm()) < 0.02
    with pytest.raises(ConfigError, match="tokens of context are more than a sliding window of 50"):
        packed.ragged_attention(*inputs, layout.layout_id, size**-0.5, 50)


if __name__ == "__main__":
    check_kernels()
