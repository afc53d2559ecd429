import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.algo import logprobs as module
from slipstream.algo.logprobs import kept_tokens, processed_logits, processed_logprobs, token_logprobs

PARAMETERS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.5, 0.7, 1.0, 1.3, 2.0]),
        "top_k": st.sampled_from([0, 1, 3, 8, 50]),
        "top_p": st.sampled_from([0.3, 0.9, 0.95, 1.0]),
        "min_p": st.sampled_from([0.0, 0.05, 0.4]),
    }
)


def kept_by_definition(row, temperature, top_k, top_p, min_p):
    """One row, one rule after the other, in plain Python."""

    def softmax(values):
        top = max(values.values())
        exps = {token: math.exp(value - top) for token, value in values.items()}
        return {token: value / sum(exps.values()) for token, value in exps.items()}

    kept = {token: value / temperature for token, value in enumerate(row)}
    probs = softmax(kept)
    kept = {token: kept[token] for token in kept if probs[token] >= min_p * max(probs.values())}
    if 0 < top_k < len(row):
        ordered = sorted(kept.values(), reverse=True)
        bound = ordered[top_k - 1] if top_k <= len(ordered) else -math.inf
        kept = {token: value for token, value in kept.items() if value >= bound}
    probs, dropped, total = softmax(kept), set(), 0.0
    for token in sorted(kept, key=lambda token: kept[token])[:-1]:
        total += probs[token]
        if top_p < 1.0 and total <= 1.0 - top_p:
            dropped.add(token)
    return set(kept) - dropped


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 10_000), PARAMETERS)
def test_kept_set_is_the_engines(seed, parameters):
    logits = torch.randn(4, 12, generator=torch.Generator().manual_seed(seed)) * 2
    processed = processed_logits(logits, **parameters)
    for row, kept in zip(logits.tolist(), torch.isfinite(processed), strict=True):
        assert set(kept.nonzero()[:, 0].tolist()) == kept_by_definition(row, **parameters)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10_000), st.sampled_from([0, 1, 5, 20]), st.sampled_from([0.2, 0.9, 0.99, 1.0]))
def test_top_k_and_top_p_are_vllms_own(seed, top_k, top_p):
    sampler = pytest.importorskip("vllm.v1.sample.ops.topk_topp_sampler")
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(seed)).round(decimals=1)  # with ties
    k = torch.full((6,), top_k) if top_k else None
    p = torch.full((6,), top_p) if top_p < 1.0 else None
    theirs = sampler.apply_top_k_top_p_pytorch(logits.clone(), k, p, allow_cpu_sync=True)
    assert torch.equal(processed_logits(logits, top_k=top_k, top_p=top_p), theirs)


@pytest.mark.parametrize("restricted", [False, True])
def test_logprobs_and_entropy_equal_plain_autograd_with_gradients(restricted):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 9, (5,), generator=generator)
    logits = torch.randn(5, 9, generator=generator, dtype=torch.float64)
    if restricted:
        logits = processed_logprobs_mask(logits, ids)
    ours, plain = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    weight = torch.randn(2, 5, generator=generator, dtype=torch.float64)
    logprobs, entropy = token_logprobs(ours, ids)
    expected = plain.log_softmax(-1)
    finite = expected.masked_fill(~torch.isfinite(expected), 0.0)
    expected_logprobs = expected.gather(-1, ids[:, None])[:, 0]
    expected_entropy = -(expected.exp() * finite).sum(-1)
    torch.testing.assert_close(logprobs, expected_logprobs)
    torch.testing.assert_close(entropy, expected_entropy)
    (logprobs @ weight[0] + entropy @ weight[1]).backward()
    (expected_logprobs @ weight[0] + expected_entropy @ weight[1]).backward()
    assert ours.grad is not None
    torch.testing.assert_close(ours.grad, plain.grad.nan_to_num(0.0))


def processed_logprobs_mask(logits, ids):
    kept = kept_tokens(logits, top_k=4).scatter(-1, ids[:, None], True)
    return logits.masked_fill(~kept, -torch.inf)


def test_half_precision_logits_are_scored_in_float32():
    logits = torch.randn(3, 50, dtype=torch.bfloat16, requires_grad=True)
    logprobs, entropy = token_logprobs(logits, torch.tensor([1, 2, 3]))
    assert logprobs.dtype == entropy.dtype == torch.float32
    exact = logits.detach().double().log_softmax(-1)[torch.arange(3), torch.tensor([1, 2, 3])]
    torch.testing.assert_close(logprobs.double(), exact, atol=1e-5, rtol=0.0)
    logprobs.sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16


def test_a_sampled_token_outside_the_kept_set_is_counted_in():
    logits = torch.tensor([[3.0, 2.0, -9.0]])
    logprobs, _ = processed_logprobs(logits, torch.tensor([2]), top_k=2)
    torch.testing.assert_close(logprobs, logits.log_softmax(-1)[:, 2])
    logprobs, entropy = processed_logprobs(logits, torch.tensor([0]), top_k=1)
    assert logprobs.tolist() == [0.0]
    assert entropy.tolist() == [0.0]


@settings(deadline=None)
@given(st.integers(0, 1000), PARAMETERS)
def test_processed_logprobs_are_finite_for_any_token(seed, parameters):
    generator = torch.Generator().manual_seed(seed)
    logits, ids = torch.randn(8, 20, generator=generator) * 5, torch.randint(0, 20, (8,), generator=generator)
    logprobs, entropy = processed_logprobs(logits, ids, **parameters)
    assert torch.isfinite(logprobs).all()
    assert (entropy >= 0).all()


def test_temperature_zero_is_refused():
    with pytest.raises(ValueError, match="temperature 0"):
        processed_logits(torch.zeros(1, 2), temperature=0.0)


class Largest(TorchDispatchMode):
    """Most elements of any float32 tensor that is made."""

    num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
                self.num_elements = max(self.num_elements, tensor.numel())
        return result


RULES = [{}, {"temperature": 2.0}, {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.01}]


@pytest.mark.parametrize("rules", RULES, ids=["plain", "temperature", "all"])
def test_chunks_of_rows_change_nothing(rules, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    logits, ids = 3 * torch.randn(50, 40, generator=generator), torch.randint(40, (50,), generator=generator)
    found = []
    for num_elements in (10**9, 7 * 40, 1):
        monkeypatch.setattr(module, "_CHUNK_ELEMENTS", num_elements)
        leaf = logits.clone().requires_grad_()
        logprobs, entropy = processed_logprobs(leaf, ids, **rules)
        (gradient,) = torch.autograd.grad((2 * logprobs - 0.3 * entropy).sum(), leaf)
        found.append((logprobs, entropy, gradient))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("rules", RULES, ids=["plain", "temperature", "all"])
def test_entropy_with_its_gradient_never_widens_more_than_a_chunk(rules, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 8 * 40)
    logits = torch.randn(64, 40).bfloat16().requires_grad_()
    with Largest() as largest:
        logprobs, entropy = processed_logprobs(logits, torch.zeros(64, dtype=torch.long), **rules)
        (logprobs.sum() - entropy.sum()).backward()
    assert largest.num_elements == 8 * 40
    assert logits.grad.dtype == torch.bfloat16
