"""Log-probabilities by value where rules, rows or gradients are few, and those of an LM head that is applied lazily."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.algo import logprobs as module
from slipstream.algo.logprobs import (
    HeadLogits,
    greedy_tokens,
    kept_tokens,
    processed_logits,
    processed_logprobs,
    token_logprobs,
    token_statistics,
)

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
        logprobs, entropy = token_logprobs(HeadLogits(hidden, weight), IDS)
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
        torch.testing.assert_close((logprobs, entropy), token_logprobs(logits, IDS))


def test_no_rows_have_no_tokens():
    hidden, weight = head()
    lazy = HeadLogits(hidden[:0], weight)
    greedy = greedy_tokens(lazy)
    assert (greedy.shape, greedy.dtype) == ((0,), torch.long)
    for logits in (lazy, torch.empty(0, 6)):
        assert [len(found) for found in token_logprobs(logits, IDS[:0])] == [0, 0]


def test_what_nobody_asks_for_has_no_gradient():
    hidden, weight = head()
    plain = torch.randn(5, 6, requires_grad=True)
    for logits, leaves in ((HeadLogits(hidden, weight), (hidden, weight)), (plain, (plain,))):
        logprobs, entropy = token_logprobs(logits, IDS)
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
        found = token_logprobs(logits, IDS)[wanted].sum()
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
    logprobs, entropy = token_logprobs(logits, torch.tensor([1]))
    assert logprobs.item() == pytest.approx(math.log(0.25))
    assert entropy.item() == pytest.approx(1.5 * math.log(2))
    _, warm = processed_logprobs(torch.tensor([[2.0, 0.0]]), torch.tensor([0]), temperature=1e6)
    assert warm.item() == pytest.approx(math.log(2))
