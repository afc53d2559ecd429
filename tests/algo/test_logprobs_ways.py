"""What logits on a GPU go through, on a CPU: tensors that say that they are on a GPU, and the kernels in torch."""

import sys
from types import ModuleType

import pytest
import torch

from slipstream import algo
from slipstream.algo import logprobs as module
from slipstream.algo.logprobs import HeadLogits, greedy_tokens, processed_logprobs, token_statistics

IDS = torch.tensor([3, 0, 5, 5, 1])
MM = torch.mm


class OnGpu(torch.Tensor):
    is_cuda = True


class Nothing(torch.autograd.Function):
    """Has no gradient."""

    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


def product(left, right, *, out_dtype):
    """With float32 outputs, which a CPU does not have."""
    return MM(left.float(), right.float()).to(out_dtype)


@pytest.fixture
def kernels(monkeypatch):
    """Of each call: the number of rows and whether they are kept, or which of the gradients are given."""
    calls = []

    def forward(logits, ids, temperature, kept=None):
        calls.append((len(logits), kept is not None))
        rows = torch.arange(len(ids))
        logs = (logits.float() / temperature).log_softmax(-1)
        lse = (logits.float() / temperature).logsumexp(-1)
        if kept is not None:
            kept.copy_(logits)
            lse = (kept.float() / temperature).logsumexp(-1)
        return logs[rows, ids], torch.special.entr(logs.exp()).sum(-1), lse, logits.argmax(-1)

    def backward(logits, ids, lse, entropy, of_logprobs, of_entropy, temperature):
        calls.append((of_logprobs is not None, of_entropy is not None))
        probs = (logits.float() / temperature - lse[:, None]).exp()
        found = torch.zeros_like(probs)
        if of_logprobs is not None:
            found += (torch.nn.functional.one_hot(ids, logits.shape[1]) - probs) * of_logprobs[:, None]
        if of_entropy is not None:
            found += -probs * (probs.log() + entropy[:, None]) * of_entropy[:, None]
        return (found / temperature).to(logits.dtype)

    made = ModuleType("logprobs_triton")
    made.forward, made.backward = forward, backward
    monkeypatch.setitem(sys.modules, "slipstream.algo.logprobs_triton", made)
    monkeypatch.setattr(algo, "logprobs_triton", made, raising=False)
    monkeypatch.setattr(torch, "mm", product)
    return calls


def leaves(dtype=torch.bfloat16):
    """The inputs of a head and its weight, for eight tokens."""
    generator = torch.Generator().manual_seed(0)
    made = (torch.randn(size, 4, generator=generator).to(dtype) for size in (5, 8))
    return [each.as_subclass(OnGpu).requires_grad_() for each in made]


def plain(values, temperature=1.0):
    """Log-probabilities and entropies of float32 logits of these leaves, or of these logits, by autograd."""
    wide = [each.detach().as_subclass(torch.Tensor).float().requires_grad_() for each in values]
    logs = ((wide[0] @ wide[1].t() if len(wide) == 2 else wide[0]) / temperature).log_softmax(-1)
    return wide, logs[torch.arange(5), IDS], -(logs.exp() * logs).sum(-1), logs.argmax(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_rows_of_a_head_are_kept_for_its_gradients(temperature, kernels, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 4)  # a row is a fourth of eight
    hidden, weight = leaves()
    wide, *wanted, greedy = plain((hidden, weight), temperature)
    lazy = HeadLogits(hidden, weight)
    found = processed_logprobs(lazy, IDS, temperature)
    torch.testing.assert_close([each.as_subclass(torch.Tensor) for each in found], wanted)
    assert kernels == [(2, True), (2, True), (1, True)]
    (2 * found[0].sum() - found[1].sum()).backward()
    (2 * wanted[0].sum() - wanted[1].sum()).backward()
    assert kernels[3:] == [(True, True)]
    for leaf, exact in zip((hidden, weight), wide, strict=True):
        assert leaf.grad.dtype == torch.bfloat16
        torch.testing.assert_close(leaf.grad.as_subclass(torch.Tensor).float(), exact.grad, rtol=0.05, atol=0.05)
    with torch.no_grad():
        assert torch.equal(token_statistics(lazy, IDS)[2], greedy)
    assert kernels[4:] == [(2, False), (2, False), (1, False)]


@pytest.mark.parametrize("is_trained", [(True, False), (False, True)])
@pytest.mark.parametrize("place", [0, 1])
def test_only_gradients_that_are_wanted_are_made(is_trained, place, kernels):
    made = leaves()
    for leaf, yes in zip(made, is_trained, strict=True):
        leaf.requires_grad_(yes)
    processed_logprobs(HeadLogits(*made), IDS)[place].sum().backward()
    assert kernels == [(5, True), (place == 0, place == 1)]
    assert tuple(leaf.grad is not None for leaf in made) == is_trained


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logits_themselves_are_the_kernels(dtype, kernels):
    logits = torch.randn(5, 6, generator=torch.Generator().manual_seed(0)).to(dtype).as_subclass(OnGpu)
    (wide,), *wanted, greedy = plain([logits], 2.0)
    leaf = logits.detach().clone().requires_grad_()
    found = processed_logprobs(leaf, IDS, 2.0)
    torch.testing.assert_close([each.as_subclass(torch.Tensor) for each in found], wanted)
    (found[0] - found[1]).sum().backward()
    (wanted[0] - wanted[1]).sum().backward()
    assert kernels == [(5, False), (True, True)]
    torch.testing.assert_close(leaf.grad.as_subclass(torch.Tensor).float(), wide.grad, rtol=0.02, atol=0.01)
    assert torch.equal(token_statistics(leaf, IDS)[2], greedy)


@pytest.mark.parametrize(
    ("dtypes", "num_rows", "rules", "is_theirs"),
    [
        ((torch.bfloat16, torch.bfloat16), 5, {}, True),
        ((torch.float16, torch.float16), 1, {"temperature": 2.0}, True),
        ((torch.bfloat16, torch.bfloat16), 0, {}, False),
        ((torch.bfloat16, torch.bfloat16), 5, {"top_k": 2}, False),
        ((torch.bfloat16, torch.bfloat16), 5, {"top_p": 0.5}, False),
        ((torch.bfloat16, torch.bfloat16), 5, {"min_p": 0.1}, False),
        ((torch.float32, torch.float32), 5, {}, False),
    ],
)
def test_other_heads_are_not_the_kernels(dtypes, num_rows, rules, is_theirs, kernels):
    hidden, weight = (leaf.detach().to(dtype) for leaf, dtype in zip(leaves(), dtypes, strict=True))
    logprobs, _ = processed_logprobs(HeadLogits(hidden[:num_rows], weight), IDS[:num_rows], **rules)
    assert (len(logprobs), bool(kernels)) == (num_rows, is_theirs)
    exact = hidden.float() @ weight.float().t()
    wanted, _ = processed_logprobs(exact[:num_rows].as_subclass(torch.Tensor).double(), IDS[:num_rows], **rules)
    torch.testing.assert_close(logprobs.as_subclass(torch.Tensor).double(), wanted, atol=1e-5, rtol=1e-5)


def test_heads_of_two_types_and_wide_or_restricted_logits_are_not_the_kernels(kernels):
    narrow, wide = leaves()[0].detach(), leaves(torch.float32)[1].detach()
    assert not HeadLogits(narrow, wide).has_kernel((1.0, 0, 1.0, 0.0))
    assert not HeadLogits(narrow.as_subclass(torch.Tensor), narrow).has_kernel((1.0, 0, 1.0, 0.0))
    logits = torch.randn(5, 6, generator=torch.Generator().manual_seed(0)).as_subclass(OnGpu)
    for each, rules in ((logits.double(), {}), (logits, {"top_k": 2}), (logits[:0], {})):
        processed_logprobs(each, IDS[: len(each)], **rules)
    assert torch.equal(token_statistics(logits.double(), IDS)[2], logits.argmax(-1))
    assert kernels == []


def test_a_head_that_is_not_the_kernels_is_computed_in_larger_chunks(kernels):
    hidden, weight = torch.empty(1, 1).expand(300, 1), torch.empty(1, 1).expand(2**20, 1)
    assert [len(range(300)[rows]) for rows in HeadLogits(hidden, weight).chunks()] == [16] * 18 + [12]
    assert [len(range(300)[rows]) for rows in HeadLogits(hidden, weight.as_subclass(OnGpu)).chunks()] == [128, 128, 44]
    hidden, weight = leaves()
    logprobs, _ = processed_logprobs(HeadLogits(hidden, weight), IDS, top_k=8)
    wide, wanted, _, greedy = plain((hidden, weight))
    torch.testing.assert_close(logprobs.as_subclass(torch.Tensor), wanted)
    logprobs.sum().backward()
    wanted.sum().backward()
    for leaf, exact in zip((hidden, weight), wide, strict=True):
        torch.testing.assert_close(leaf.grad.as_subclass(torch.Tensor).float(), exact.grad, rtol=0.05, atol=0.05)
    assert torch.equal(greedy_tokens(HeadLogits(hidden, weight)), greedy)
    assert kernels == []


@pytest.mark.parametrize("way", ["kernels", "logits", "lazy", "kept"])
def test_without_a_gradient_of_either_result_there_is_none(way, kernels):
    hidden, weight = leaves(torch.bfloat16 if way == "kept" else torch.float32)
    logits = torch.randn(5, 6).as_subclass(OnGpu if way == "kernels" else torch.Tensor).requires_grad_()
    found = processed_logprobs(HeadLogits(hidden, weight) if way in ("lazy", "kept") else logits, IDS)
    sum(Nothing.apply(each).sum() for each in found).backward()
    assert (hidden.grad, weight.grad, logits.grad) == (None, None, None)
    assert len(kernels) == (way in ("kernels", "kept"))
