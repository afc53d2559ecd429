"""What the patch of `model.shared_kernels` puts in the place of vLLM's operations; with plain classes as vLLM's."""

from types import SimpleNamespace

import pytest
import torch

import slipstream.algo
from slipstream.inference.plugin.patches import shared_kernels
from slipstream.inference.plugin.patches.patch_table import SHARED_KERNELS, Absent, NotNeeded
from slipstream.shared_kernels import CannotShareKernels, products

from .fakes import put


class Layer:
    """Any of vLLM's."""

    def forward(self):
        """Is replaced."""

    def apply(self):
        """Is replaced."""


class Sampler:
    def __init__(self, mode):
        self.logprobs_mode, self.topk_topp_sampler = mode, SimpleNamespace(logprobs_mode=mode)

    @staticmethod
    def compute_logprobs(logits):
        return "vLLM's"

    @staticmethod
    def gather_logprobs(logprobs, number, ids):
        return "vLLM's", logprobs, number, ids


@pytest.fixture
def vllm(monkeypatch):
    """Modules of vLLM; the kernel of log-probabilities gives the logits that it gets."""

    def fresh(kind):
        return type(kind.__name__, (), dict(vars(kind)))

    def logits_of(logits, ids, temperature):
        assert (logits.is_contiguous(), temperature) == (True, 1.0)
        return (logits.gather(-1, ids[:, None])[:, 0], "entropies")

    pinned = []
    layers = {
        "layernorm": ("RMSNorm", "GemmaRMSNorm"),
        "activation": ("SiluAndMul", "GeluAndMul"),
        "rotary_embedding__base": ("RotaryEmbedding",),
        "linear": ("UnquantizedLinearMethod",),
    }
    found = put(
        monkeypatch,
        **{f"model_executor__layers__{name}": {each: fresh(Layer) for each in kinds} for name, kinds in layers.items()},
        v1__attention__backends__flash_attn={"flash_attn_varlen_func": lambda *given, **options: (given, options)},
        v1__outputs={"LogprobsTensors": lambda *fields: fields},
        v1__sample__sampler={"Sampler": fresh(Sampler)},
        v1__worker__gpu__sample__sampler={
            "compute_topk_scores": lambda *given, **options: ("vLLM's", *given, options),
        },
    )
    monkeypatch.setattr(slipstream.algo, "logprobs_triton", SimpleNamespace(forward=logits_of), raising=False)
    monkeypatch.setattr(products, "pin_products", lambda: pinned.append(1))
    monkeypatch.setenv(SHARED_KERNELS, "1")
    found.pinned = pinned
    return found


def test_the_products_are_pinned_only_where_kernels_are_shared(vllm, monkeypatch):
    shared_kernels.share_operations()
    assert vllm.pinned == [1]
    monkeypatch.delenv(SHARED_KERNELS)
    with pytest.raises(NotNeeded, match="shared_kernels is off"):
        shared_kernels.share_operations()
    assert vllm.pinned == [1]


def test_positions_turn_the_halves_of_each_head(vllm):
    shared_kernels.share_operations()
    generator = torch.Generator().manual_seed(0)
    angles = torch.rand(9, 3, generator=generator)
    layer = SimpleNamespace(cos_sin_cache=torch.cat([angles.cos(), angles.sin()], -1), head_size=6)
    query, key = torch.randn(2, 12, generator=generator), torch.randn(2, 6, generator=generator)
    rotate = vllm.model_executor.layers.rotary_embedding.base.RotaryEmbedding.forward
    found = rotate(layer, torch.tensor([[7, 2]]), query, key, "offsets of other versions")
    for given, turned in zip((query, key), found, strict=True):
        heads = given.reshape(2, -1, 2, 3)
        numbers = torch.complex(heads[:, :, 0], heads[:, :, 1]) * torch.polar(torch.ones(2, 3), angles[[7, 2]])[:, None]
        torch.testing.assert_close(turned, torch.cat([numbers.real, numbers.imag], -1).flatten(1))
    alone, none = rotate(layer, torch.tensor([7, 2]), query)
    assert none is None
    assert torch.equal(alone, found[0])


def test_norms_gates_and_products_are_those_of_the_trainer(vllm):
    shared_kernels.share_operations()
    layers = vllm.model_executor.layers
    x, residual, weight = torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 8.0]]), torch.tensor([2.0, 1.0])
    norm = SimpleNamespace(weight=weight, variance_epsilon=0.0)
    for kind, offset in (("RMSNorm", 0.0), ("GemmaRMSNorm", 1.0)):
        forward = getattr(layers.layernorm, kind).forward
        torch.testing.assert_close(forward(norm, x), x / 12.5**0.5 * (weight + offset))
        output, total = forward(norm, x, residual)
        torch.testing.assert_close(output, (x + residual) / 76.5**0.5 * (weight + offset))
        assert total.tolist() == [[3.0, 12.0]]
    left, up = torch.tensor([[[1.0, -2.0, 0.5]]]), torch.tensor([[[3.0, 5.0, -1.0]]])
    both = torch.cat([left, up], -1)
    silu = layers.activation.SiluAndMul.forward(None, both)
    torch.testing.assert_close(silu, torch.nn.functional.silu(left) * up)
    gelu = layers.activation.GeluAndMul.forward(SimpleNamespace(approximate="tanh"), both)
    torch.testing.assert_close(gelu, torch.nn.functional.gelu(left, approximate="tanh") * up)
    apply, layer = layers.linear.UnquantizedLinearMethod.apply, SimpleNamespace(weight=torch.tensor([[1.0, 2.0]]))
    assert apply(None, layer, x).tolist() == [[11.0]]
    assert apply(None, layer, x, torch.tensor([0.5])).tolist() == [[11.5]]


def test_attention_has_the_trainers_blocks_and_no_window_that_leaves_keys_out(vllm):
    shared_kernels.share_operations()
    attend = vllm.v1.attention.backends.flash_attn.flash_attn_varlen_func
    pinned = {"num_splits": 1, "scheduler_metadata": None, "window_size": None}
    for queries, rows, window in ((1, 128, None), (128, 128, (511, 0)), (129, 129, (-1, -1))):
        given = {"max_seqlen_q": queries, "max_seqlen_k": 512, "num_splits": 8, "window_size": window}
        assert attend("q", causal=True, **given) == (("q",), given | pinned | {"max_seqlen_q": rows, "causal": True})
    with pytest.raises(CannotShareKernels, match="512 tokens of context are more than a sliding window of 511"):
        attend(max_seqlen_q=1, max_seqlen_k=512, window_size=(510, 0))


def test_the_first_sampler_gathers_from_logits_and_only_processed_ones_are_handed_on(vllm):
    shared_kernels.share_operations()
    kind = vllm.v1.sample.sampler.Sampler
    for mode, handed_on in (("processed_logprobs", "processed_logits"), ("raw_logprobs", "raw_logprobs")):
        assert kind(mode).topk_topp_sampler.logprobs_mode == handed_on
    logits, ids = torch.tensor([[1.0, 3.0, 9.0], [2.0, 5.0, 9.0]])[:, :2], torch.tensor([1, 0])
    assert kind.compute_logprobs(logits) is logits
    tokens, values, ranks = kind("raw_logprobs").gather_logprobs(logits, 0, ids)
    assert (tokens.dtype, tokens.tolist(), values.tolist()) == (torch.int32, [[1], [0]], [[3.0], [2.0]])
    assert ranks.tolist() == [0, 0]
    _, logprobs, number, chosen = kind.gather_logprobs(logits.half(), 4, ids)
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, -1))
    assert (number, chosen) == (4, ids)


def test_the_second_sampler_leaves_what_needs_more_than_the_sampled_token_to_vllm(vllm):
    shared_kernels.share_operations()
    scores = vllm.v1.worker.gpu.sample.sampler.compute_topk_scores
    logits, ids = torch.tensor([[1.0, 3.0, 9.0], [2.0, 5.0, 9.0]])[:, :2], torch.tensor([1, 0])
    for options in ({}, {"logits_mode": False, "max_per_req_token_ids": 0}):
        tokens, values, ranks, counts = scores(logits, 0, ids, [1, 2], **options)
        assert (tokens.tolist(), values.tolist(), ranks.tolist(), counts) == (
            *([[1], [0]], [[3.0], [2.0]], [0, 0]),
            [1, 2],
        )
    assert scores(logits, 0, ids)[3] is None
    for number, options in ((2, {}), (0, {"logits_mode": True}), (0, {"max_per_req_token_ids": 3})):
        assert scores(logits, number, ids, [1, 2], **options) == ("vLLM's", logits, number, ids, [1, 2], options)


@pytest.mark.parametrize(
    ("module", "owner", "name"),
    [
        ("model_executor.layers.linear", "UnquantizedLinearMethod", ""),
        ("v1.attention.backends.flash_attn", "", "flash_attn_varlen_func"),
        ("v1.sample.sampler", "Sampler", "gather_logprobs"),
        ("v1.worker.gpu.sample.sampler", "", "compute_topk_scores"),
    ],
)
def test_a_part_that_this_vllm_lacks_is_named(module, owner, name, vllm):
    place = vllm
    for part in module.split("."):
        place = getattr(place, part)
    if owner and name:
        place = getattr(place, owner)
    delattr(place, name or owner)
    with pytest.raises(Absent, match=".".join(filter(None, ("vllm", module, owner, name))).replace(".", r"\.")):
        shared_kernels.share_operations()
