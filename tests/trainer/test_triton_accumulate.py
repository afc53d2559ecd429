"""The kernel that adds up gradients on a GPU gives what torch gives, to the bit."""

import os
import subprocess
import sys

import pytest
import torch


def check(device: str) -> None:
    from slipstream.trainer.optim import triton_kernels

    torch.manual_seed(0)
    for shape in ((1,), (4096,), (37, 1021)):
        total = torch.randn(shape, device=device)
        part = torch.randn(shape, device=device).bfloat16()
        expected = total + part.float()
        triton_kernels.accumulate_(total, part)
        assert torch.equal(total, expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is run as it is where there is a CUDA device")
def test_the_kernel_in_tritons_interpreter():
    """In a process of its own: whether Triton interprets is settled when it is first imported."""
    subprocess.run([sys.executable, __file__], env={**os.environ, "TRITON_INTERPRET": "1"}, check=True, timeout=120)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernel_on_a_gpu():
    check("cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_large_gradients_are_added_up_by_it(monkeypatch):
    from slipstream.trainer.optim import base, triton_kernels

    used = []
    monkeypatch.setattr(triton_kernels, "accumulate_", lambda total, part: used.append(total.add_(part)))
    weights = torch.nn.Parameter(torch.zeros(1024, 1024, device="cuda", dtype=torch.bfloat16))
    learner = base.MasterAdamW([("w", weights)])
    for _ in range(2):
        weights.sum().backward()
    assert len(used) == 1
    assert bool((learner.masters()["w"].grad == 2).all())


if __name__ == "__main__":
    check("cpu")
