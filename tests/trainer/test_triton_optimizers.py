"""The kernels of optimizers: AdamW with stochastic rounding against torch's in float32, and sums of gradients."""

import math
import os
import subprocess
import sys

import pytest
import torch


def check_sums(device: str) -> None:
    """As torch adds them up, to the bit."""
    from slipstream.trainer.optim import triton_kernels

    torch.manual_seed(0)
    for shape in ((1,), (4096,), (37, 1021)):
        total = torch.randn(shape, device=device)
        part = torch.randn(shape, device=device).bfloat16()
        expected = total + part.float()
        triton_kernels.accumulate_(total, part)
        assert torch.equal(total, expected)


def check(device: str) -> None:
    from slipstream.trainer.optim import triton_kernels

    torch.manual_seed(0)
    options = {"betas": (0.9, 0.95), "eps": 1e-8}
    for shape in ((1,), (2048,), (37, 121)):
        live = torch.randn(shape, device=device).bfloat16()
        exact = live.float().requires_grad_()
        reference = torch.optim.AdamW([exact], lr=1e-2, weight_decay=0.1, **options)
        mean, square = torch.zeros_like(exact.detach()), torch.zeros_like(exact.detach())
        values = live
        for updates in (1, 2, 3):
            with torch.no_grad():
                exact.copy_(values)
            exact.grad = torch.randn(shape, device=device)
            reference.step()
            found = [
                triton_kernels.adamw_bf16_update(
                    values, exact.grad, *moments, updates=updates, rate=1e-2, weight_decay=0.1, seed=seed, **options
                )
                for seed, moments in ((5, (mean.clone(), square.clone())), (6, (mean.clone(), square.clone())))
            ]
            values = triton_kernels.adamw_bf16_update(
                values, exact.grad, mean, square, updates=updates, rate=1e-2, weight_decay=0.1, seed=5, **options
            )
            assert torch.equal(values, found[0])
            assert len(live) == 1 or not torch.equal(values, found[1])
            torch.testing.assert_close(mean, reference.state[exact]["exp_avg"], atol=1e-7, rtol=1e-5)
            torch.testing.assert_close(square, reference.state[exact]["exp_avg_sq"], atol=1e-7, rtol=1e-5)
            # One of the two neighbours: less than a step of bfloat16 away.
            step = torch.exp2(torch.frexp(exact.detach().cpu()).exponent.float() - 8)
            assert ((values.float() - exact.detach()).abs().cpu() <= step * 1.001 + 1e-7).all()
    # A NaN of all ones, as GPUs make it, would become -0 when noise is added to it.
    damaged = torch.full((500,), 0x7FFFFFFF, dtype=torch.int32, device=device).view(torch.float32)
    clean = torch.zeros((3, 500), device=device)
    made = triton_kernels.adamw_bf16_update(
        clean[0].bfloat16(), damaged, *clean[1:], updates=1, rate=1e-2, weight_decay=0.0, seed=1, **options
    )
    assert made.isnan().all()
    num = 40_000
    live = torch.full((num,), 1.0, device=device).bfloat16()
    # An update of about 0.3 steps of bfloat16 below 1, which is 1/256; every place has noise of its own.
    gradient, zeros = torch.ones(num, device=device), torch.zeros((2, num), device=device)
    rate, found = 0.3 / 256, []
    for seed in (1, (1 << 31) - 1):
        made = triton_kernels.adamw_bf16_update(
            live, gradient, *zeros.clone(), updates=1, rate=rate, weight_decay=0.0, seed=seed, **options
        )
        assert set(made.unique().tolist()) == {1.0, 1.0 - 1 / 256}
        found.append(made != 1.0)
        assert abs(found[-1].double().mean().item() - 0.3) < 5 * math.sqrt(0.21 / num)
    for one, other in ((found[0], found[1]), (found[0][1:], found[0][:-1]), (found[0][512:], found[0][:-512])):
        both = (one & other).double().mean().item()
        assert abs(both - 0.09) < 5 * math.sqrt(0.09 * 0.91 / len(one)), "noise is of each place and seed"


def check_optimizer(device: str) -> None:
    """What uses it: the same moments as by torch's rule, and a resumed one makes the same numbers."""
    from slipstream.trainer.optim import adamw_bf16

    has_kernel = adamw_bf16._has_kernel
    gradients = [torch.randn(24, 40, device=device) for _ in range(4)]

    def make(uses: bool) -> tuple[torch.nn.Linear, adamw_bf16.RoundedAdamW]:
        adamw_bf16._has_kernel = lambda live: uses
        torch.manual_seed(0)
        model = torch.nn.Linear(40, 24, bias=False, device=device, dtype=torch.bfloat16)
        return model, adamw_bf16.RoundedAdamW(model.named_parameters(), seed=3, weight_decay=0.1, max_grad_norm=1e9)

    def train(model: torch.nn.Linear, optimizer: adamw_bf16.RoundedAdamW, some: list[torch.Tensor]) -> torch.Tensor:
        for gradient in some:
            (model.weight.float() * gradient).sum().backward()
            optimizer.prepare(1e-3)
            optimizer.commit()
        return model.weight.detach().clone()

    try:
        plain_model, plain = make(False)
        exact = train(plain_model, plain, gradients)
        model, optimizer = make(True)
        train(model, optimizer, gradients[:2])
        state = {name: tensor.clone() for name, tensor in optimizer.state().items()}
        values = train(model, optimizer, gradients[2:])
        for name in ("exp_avg.weight", "exp_avg_sq.weight"):
            torch.testing.assert_close(optimizer.state()[name], plain.state()[name], atol=1e-7, rtol=1e-5)
        assert int(optimizer.state()["updates.weight"]) == 4
        assert (values.float() - exact.float()).abs().max() < 4e-3
        assert not torch.equal(values, exact), "noise of another generator"
        again_model, again = make(True)
        again.load_state(state)
        assert torch.equal(train(again_model, again, gradients[2:]), values)
    finally:
        adamw_bf16._has_kernel = has_kernel


@pytest.mark.skipif(torch.cuda.is_available(), reason="is run as it is where there is a CUDA device")
def test_the_kernel_in_tritons_interpreter():
    """In a process of its own: whether Triton interprets is settled when it is first imported."""
    subprocess.run([sys.executable, __file__], env={**os.environ, "TRITON_INTERPRET": "1"}, check=True, timeout=300)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernel_on_a_gpu():
    check_sums("cuda")
    check("cuda")
    check_optimizer("cuda")


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
    check_sums("cpu")
    check("cpu")
    check_optimizer("cpu")
