import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.algo import logprobs as module
from slipstream.algo.logprobs import (
    HeadLogits,
    greedy_tokens,
    kept_tokens,
    processed_logits,
    processed_logprobs,
    token_statistics,
)

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
    logprobs, entropy = processed_logprobs(ours, ids)
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
    logprobs, entropy = processed_logprobs(logits, torch.tensor([1, 2, 3]))
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


IDS = torch.tensor([3, 0, 5, 5, 1])


def head(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 4, generator=generator, dtype=torch.float64).to(dtype)
    return hidden.requires_grad_(), torch.randn(6, 4, generator=generator, dtype=torch.float64).to(
        dtype
    ).requires_grad_()


def test_each_rule_keeps_what_lies_on_its_bound():
    probs = torch.tensor([[0.5, 0.25, 0.125, 0.125]], dtype=torch.float64)
    for rules, kept in (
        ({"min_p": 0.5}, [True, True, False, False]),
        ({"top_k": 3}, [True, True, True, True]),  # a tie
        ({"top_k": 2}, [True, True, False, False]),
        ({"top_k": 4}, [True] * 4),
        ({"top_p": 0.8}, [True, True, False, True]),
        ({"top_p": 0.0}, [True, False, False, False]),
        ({}, [True] * 4),
    ):
        found = kept_tokens(probs.log(), **rules)
        assert sorted(found[0].tolist()) == sorted(kept), rules
        assert found[0, :2].tolist() == kept[:2]


@pytest.mark.parametrize(
    ("top_p", "num_kept"), [(0.0, 1), (0.25, 1), (0.3, 2), (0.5, 2), (0.75, 3), (0.9, 4), (1.0, 4)]
)
def test_the_smallest_go_while_together_they_are_no_more_than_the_rest(top_p, num_kept):
    assert kept_tokens(torch.zeros(1, 4), top_p=top_p).sum() == num_kept


def test_without_a_rule_tokens_that_are_never_sampled_stay():
    logits = torch.tensor([[0.0, -1e4, -torch.inf]])
    assert kept_tokens(logits).tolist() == [[True] * 3]
    assert kept_tokens(logits, top_k=2).tolist() == [[True, True, False]]
    assert kept_tokens(logits, min_p=1e-3).tolist() == [[True, False, False]]
    assert kept_tokens(logits, top_p=0.9999).tolist() == [[True, False, False]]


def test_logits_that_all_stay_are_not_copied():
    logits = torch.randn(2, 3, dtype=torch.bfloat16)
    assert processed_logits(logits) is logits
    assert processed_logits(logits, temperature=2.0).dtype == torch.float32
    assert torch.equal(processed_logits(logits, temperature=2.0), logits.float() / 2)
    assert processed_logits(logits, top_k=1).dtype == torch.float32


@pytest.mark.parametrize("rules", [{}, {"temperature": 0.7}, {"temperature": 2.0, "top_k": 3}])
@pytest.mark.parametrize("chunk", [1, 12, 10**6])
@pytest.mark.parametrize("wanted", ["both", "logprobs", "entropy"])
def test_a_lazy_head_is_the_head(rules, chunk, wanted, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", chunk)
    found = []
    for is_lazy in (True, False):
        hidden, weight = head()
        logits = HeadLogits(hidden, weight) if is_lazy else hidden @ weight.t()
        logprobs, entropy = processed_logprobs(logits, IDS, **rules)
        assert logprobs.dtype == entropy.dtype == torch.float64
        loss = {"both": 2 * logprobs.sum() - entropy @ torch.arange(5.0).double()}
        loss |= {"logprobs": logprobs.square().sum(), "entropy": entropy.square().sum()}
        found.append((logprobs, entropy, *torch.autograd.grad(loss[wanted], (hidden, weight))))
    for lazy, plain in zip(*found, strict=True):
        torch.testing.assert_close(lazy, plain, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rules", [{}, {"temperature": 0.5}, {"temperature": 3.0, "top_k": 3, "min_p": 0.01}])
@pytest.mark.parametrize("place", [0, 1])
def test_gradients_are_the_slopes_of_the_values(rules, place):
    hidden, weight = head()
    assert torch.autograd.gradcheck(
        lambda h, w: processed_logprobs(HeadLogits(h, w), IDS, **rules)[place], (hidden, weight)
    )
    assert torch.autograd.gradcheck(
        lambda logits: processed_logprobs(logits, IDS, **rules)[place], (hidden @ weight.t()).detach().requires_grad_()
    )


def test_gradients_of_a_head_go_where_they_are_wanted_in_their_dtype():
    for is_trained in ((True, False), (False, True)):
        hidden, weight = head(torch.bfloat16)
        hidden.requires_grad_(is_trained[0])
        weight.requires_grad_(is_trained[1])
        logprobs, entropy = processed_logprobs(HeadLogits(hidden, weight), IDS)
        assert logprobs.dtype == entropy.dtype == torch.float32
        logprobs.sum().backward()
        assert (hidden.grad is not None, weight.grad is not None) == is_trained
        for leaf in (hidden, weight):
            assert leaf.grad is None or (leaf.grad.dtype == torch.bfloat16 and leaf.grad.abs().sum() > 0)


def test_the_most_likely_tokens_come_with_the_rest():
    hidden, weight = head()
    wanted = (hidden @ weight.t()).argmax(-1)
    for logits in (HeadLogits(hidden, weight), (hidden @ weight.t()).detach()):
        logprobs, entropy, greedy = token_statistics(logits, IDS)
        assert torch.equal(greedy, wanted)
        assert torch.equal(greedy_tokens(logits), wanted)
        torch.testing.assert_close((logprobs, entropy), processed_logprobs(logits, IDS))


def test_no_rows_have_no_tokens():
    hidden, weight = head()
    lazy = HeadLogits(hidden[:0], weight)
    greedy = greedy_tokens(lazy)
    assert (greedy.shape, greedy.dtype) == ((0,), torch.long)
    for logits in (lazy, torch.empty(0, 6)):
        assert [len(found) for found in processed_logprobs(logits, IDS[:0])] == [0, 0]


def test_what_nobody_asks_for_has_no_gradient():
    hidden, weight = head()
    plain = torch.randn(5, 6, requires_grad=True)
    for logits, leaves in ((HeadLogits(hidden, weight), (hidden, weight)), (plain, (plain,))):
        logprobs, entropy = processed_logprobs(logits, IDS)
        (first,) = torch.autograd.grad(logprobs.sum(), leaves[0], retain_graph=True)
        (second,) = torch.autograd.grad(entropy.sum(), leaves[0])
        assert first.shape == second.shape
        assert not torch.allclose(first, second)


class Called(TorchDispatchMode):
    """Names of the operations that run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_lazy", [True, False])
def test_the_gradient_of_log_probabilities_alone_takes_no_entropies(is_lazy):
    hidden, weight = head()
    logits = HeadLogits(hidden, weight) if is_lazy else hidden @ weight.t()
    for wanted in (0, 1):
        found = processed_logprobs(logits, IDS)[wanted].sum()
        with Called() as called:
            found.backward(retain_graph=True)
        assert ("special_entr.default" in called.names) == (wanted == 1)
        assert "exp_.default" in called.names


@pytest.mark.parametrize(
    ("num_rows", "num_tokens", "sizes"),
    [
        (3, 2**24 + 1, [1, 1, 1]),
        (3, 2**23 + 1, [1, 1, 1]),
        (5, 2**23, [2, 2, 1]),
        (250, 150_000, [111, 111, 28]),
        (2**24 + 3, 1, [2**24, 3]),
        (0, 7, []),
    ],
)
def test_rows_that_are_computed_together_take_64_mib(num_rows, num_tokens, sizes):
    """As float32 logits; one row may take more."""
    lazy = HeadLogits(torch.empty(1, 1).expand(num_rows, 1), torch.empty(1, 1).expand(num_tokens, 1))
    chunks = list(lazy.chunks())
    found = [len(range(num_rows)[rows]) for rows in chunks]
    assert found == sizes
    assert [rows.start for rows in chunks] == [sum(sizes[:number]) for number in range(len(sizes))]


def test_entropy_by_value():
    logits = torch.tensor([[0.5, 0.25, 0.25, 0.0]]).log()
    logprobs, entropy = processed_logprobs(logits, torch.tensor([1]))
    assert logprobs.item() == pytest.approx(math.log(0.25))
    assert entropy.item() == pytest.approx(1.5 * math.log(2))
    _, warm = processed_logprobs(torch.tensor([[2.0, 0.0]]), torch.tensor([0]), temperature=1e6)
    assert warm.item() == pytest.approx(math.log(2))
