"""The kernel that makes log-probabilities on a GPU gives what torch gives, and so does its gradient."""

import os
import subprocess
import sys

import pytest
import torch

from slipstream.algo.logprobs import HeadLogits, token_statistics


def check(device: str) -> None:
    """Against torch's own log-softmax in float64, differentiated by autograd."""
    from slipstream.algo import logprobs_triton

    torch.manual_seed(0)
    for dtype, vocabulary, temperature in ((torch.float32, 5000, 0.7), (torch.bfloat16, 4099, 1.0)):
        wide_NV = (torch.randn(6, vocabulary + 3, dtype=torch.float64) * 3).to(dtype)
        wide_NV[1, 5:200] = -torch.inf  # ... which a model's own mask may have put there
        wide_NV[2] += 60.0
        wide_NV[3, torch.tensor([4098, 2600, 5])] = wide_NV[3].max() + 1  # three that are likeliest
        logits_NV = wide_NV.to(device)[:, :vocabulary]
        ids_N = torch.tensor([0, 3, 17, vocabulary - 1, 9, 300]).to(device)
        exact_NV = logits_NV.double().cpu().requires_grad_()
        log_NV = (exact_NV / temperature).log_softmax(-1)
        chosen_N = log_NV.gather(-1, ids_N.cpu()[:, None])[:, 0]
        entropies_N = torch.special.entr(log_NV.exp()).sum(-1)
        logprobs_N, entropy_N, lse_N, greedy_N = logprobs_triton.forward(logits_NV, ids_N, temperature)
        torch.testing.assert_close(logprobs_N.double().cpu(), chosen_N.detach(), atol=3e-5, rtol=1e-6)
        torch.testing.assert_close(entropy_N.double().cpu(), entropies_N.detach(), atol=3e-5, rtol=1e-5)
        first_N = torch.stack([(line == line.max()).nonzero()[0, 0] for line in logits_NV.float().cpu()])
        assert torch.equal(greedy_N.cpu(), first_N)
        grads_N = torch.randn(2, 6, dtype=torch.float64)
        for of_logprobs, of_entropy in ((True, True), (True, False), (False, True)):
            wanted_N = of_logprobs * grads_N[0] * chosen_N + of_entropy * grads_N[1] * _entropy(exact_NV, temperature)
            (expected_NV,) = torch.autograd.grad(wanted_N.sum(), exact_NV, retain_graph=True)
            found_NV = logprobs_triton.backward(
                *(logits_NV, ids_N, lse_N, entropy_N),
                grads_N[0].float().to(device) if of_logprobs else None,
                grads_N[1].float().to(device) if of_entropy else None,
                temperature,
            )
            assert found_NV.dtype == dtype
            bound = 1e-5 if dtype == torch.float32 else 8e-3  # the interpreter cuts off where a GPU rounds
            torch.testing.assert_close(found_NV.double().cpu(), expected_NV, atol=1e-5, rtol=bound)


def check_kept(device: str) -> None:
    """Float32 logits that are kept in bfloat16: values of the former, a gradient of the latter."""
    from slipstream.algo import logprobs_triton

    torch.manual_seed(1)
    wide_NV, ids_N = torch.randn(4, 4099).mul(9).to(device), torch.tensor([0, 17, 4098, 5]).to(device)
    kept_NV = torch.empty(wide_NV.shape, dtype=torch.bfloat16, device=device)
    plain = logprobs_triton.forward(wide_NV, ids_N, 0.7)
    found = logprobs_triton.forward(wide_NV, ids_N, 0.7, kept_NV)
    for place in (0, 1, 3):
        assert torch.equal(found[place], plain[place])
    step = 2**-7 if device == "cpu" else 2**-8  # the interpreter cuts off where a GPU rounds
    torch.testing.assert_close(kept_NV.float(), wide_NV, atol=0.0, rtol=step)
    rounded_NV = kept_NV.double() / 0.7
    torch.testing.assert_close(found[2].double(), rounded_NV.logsumexp(-1), atol=3e-5, rtol=1e-6)
    gradient_NV = logprobs_triton.backward(kept_NV, ids_N, found[2], found[1], torch.ones(4, device=device), None, 0.7)
    expected_NV = torch.nn.functional.one_hot(ids_N, 4099) - rounded_NV.softmax(-1)
    torch.testing.assert_close(gradient_NV.double(), expected_NV / 0.7, atol=1e-5, rtol=8e-3)


def _entropy(logits_NV: torch.Tensor, temperature: float) -> torch.Tensor:
    """Differentiable where a logit is -inf, too."""
    log_NV = (logits_NV / temperature).log_softmax(-1)
    finite_NV = log_NV.masked_fill(torch.isinf(log_NV), 0.0)
    return -(log_NV.exp() * finite_NV).sum(-1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is run as it is where there is a CUDA device")
def test_the_kernels_in_tritons_interpreter():
    """In a process of its own: whether Triton interprets is settled when it is first imported."""
    subprocess.run([sys.executable, __file__], env={**os.environ, "TRITON_INTERPRET": "1"}, check=True, timeout=400)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernels_on_a_gpu():
    check("cuda")
    check_kept("cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lazy_logits_on_a_gpu(dtype):
    """Values and gradients, against float64, in several chunks; and without a backward pass nothing is kept."""
    torch.manual_seed(2)
    hidden_ND, weight_VD = (
        torch.randn(700, 64, device="cuda").to(dtype),
        torch.randn(300_000, 64, device="cuda").to(dtype),
    )
    ids_N, factors_N = torch.randint(300_000, (700,), device="cuda"), torch.randn(700, device="cuda")
    found = []
    for wide in (False, True):
        h, w = (
            each.to(torch.float64 if wide else dtype, copy=True).requires_grad_() for each in (hidden_ND, weight_VD)
        )
        if wide:
            logprobs_N = (h[:64] @ w.t()).log_softmax(-1).gather(-1, ids_N[:64, None])[:, 0]
            (factors_N[:64] * logprobs_N).sum().backward()
        else:
            logprobs_N, _, greedy_N = token_statistics(HeadLogits(h, w), ids_N)
            (factors_N[:64] * logprobs_N[:64]).sum().backward()
            assert torch.equal(greedy_N[:9], (hidden_ND[:9].float() @ weight_VD.float().t()).argmax(-1))
        found.append((logprobs_N[:64].double().detach(), h.grad[:64].double(), w.grad.double()))
        del h, w, logprobs_N
    (ours, of_hidden, of_weight), (wanted, wanted_hidden, wanted_weight) = found
    torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=1e-5)
    for gradient, exact in ((of_hidden, wanted_hidden), (of_weight, wanted_weight)):
        assert (gradient - exact).norm() < 0.03 * exact.norm()
    with torch.no_grad():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        token_statistics(HeadLogits(hidden_ND, weight_VD), ids_N)
        in_chunk = 4 * 2**24 * 4  # float32 logits of the rows that are computed together
        assert torch.cuda.max_memory_allocated() - before < 1.1 * in_chunk


if __name__ == "__main__":
    check("cpu")
    check_kept("cpu")
