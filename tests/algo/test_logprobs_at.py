"""Log-probabilities of several tokens a row, against the log-softmax of all logits, with their gradients."""

import pytest
import torch

from slipstream.algo import logprobs as module
from slipstream.algo.logprobs import HeadLogits, PartLogits, logprobs_at, processed_logprobs

N, D, V, K = 7, 5, 11, 4
IDS = torch.stack([torch.randperm(V, generator=torch.Generator().manual_seed(row))[:K] for row in range(N)])


@pytest.fixture(params=[2**24, 2 * V])
def chunk(request, monkeypatch):
    """Rows computed together: all, and two."""
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", request.param)


def head(dtype):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, D, dtype=torch.float64, generator=generator) for size in (N, V))
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("way", ["plain", "lazy", "part"])
def test_values_and_gradients(way, temperature, dtype, chunk):
    hidden, weight = head(dtype)
    lazy = way == "lazy"
    logits = HeadLogits(hidden, weight) if lazy else hidden @ weight.t()
    order = torch.arange(N - 1, -1, -1)
    if way == "part":
        logits = PartLogits(logits[order], order, lambda values: values[order.argsort()])
    found = logprobs_at(logits, IDS, temperature)
    pull = torch.randn(N, K, generator=torch.Generator().manual_seed(1)).to(found.dtype)
    ours = torch.autograd.grad((found * pull).sum(), (hidden, weight))
    wide = (hidden.double() @ weight.double().t()) if lazy else (hidden @ weight.t()).double()
    exact = (wide / temperature).log_softmax(-1).gather(-1, IDS)
    theirs = torch.autograd.grad((exact * pull).sum(), (hidden, weight))
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    bound = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1e-5}[dtype]
    torch.testing.assert_close(found.double(), exact, rtol=bound, atol=bound)
    bound = 0.05 if dtype == torch.bfloat16 else bound
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=bound, atol=bound)


def test_of_one_token_it_is_what_the_losses_use():
    hidden, weight = head(torch.float32)
    logits = hidden @ weight.t()
    torch.testing.assert_close(
        logprobs_at(logits, IDS[:, :1], 0.7)[:, 0], processed_logprobs(logits, IDS[:, 0], 0.7)[0]
    )
