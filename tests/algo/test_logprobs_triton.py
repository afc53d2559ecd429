"""The kernel that makes log-probabilities on a GPU gives what torch gives, and so does its gradient."""

import os
import subprocess
import sys

import pytest
import torch


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


if __name__ == "__main__":
    check("cpu")
