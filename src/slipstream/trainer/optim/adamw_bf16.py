"""AdamW on bfloat16 weights with stochastic rounding instead of fp32 master weights.

A value between two bfloat16 numbers is rounded up with a probability equal to its fractional position, so that its
expectation is unchanged and small updates are not lost (arXiv 2010.06192). Guarantees: the noise depends only on seed,
step and the parameter's name, so that a resumed run gets the same numbers on the same kind of device. Saves four bytes
per parameter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from slipstream.trainer.optim.base import ADAM_EPSILON, NamedParameters, Optimizer, RateOf, local_tensor, one_rate


def round_to_bfloat16_(values: Tensor, generator: torch.Generator) -> None:
    """Round every element of `values`, float32 and finite, stochastically to one of the two adjacent bfloat16 numbers;
    in place, in float32."""
    # bfloat16 is the upper half of float32: the lower 16 bits are the probability of rounding up.
    bits = values.view(torch.int32)
    bits += torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator)
    bits &= ~0xFFFF


def _has_kernel(live: Tensor) -> bool:
    """Whether the fused kernel computes the update (`triton_kernels.py`)."""
    return live.is_cuda and live.dtype == torch.bfloat16 and live.is_contiguous()


class RoundedAdamW(Optimizer):
    """AdamW with fp32 moments and gradients on weights in their own dtype, bfloat16 ones with stochastic rounding.

    Parameters in float32 are not rounded. Vectors (norms, biases) get no weight decay.
    """

    weights_key = "weight"

    def __init__(
        self,
        named_parameters: NamedParameters,
        *,
        seed: int,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
        rate_of: RateOf = one_rate,
    ) -> None:
        super().__init__(named_parameters, max_grad_norm)
        self._seed = seed
        self._betas, self._weight_decay = betas, weight_decay
        self._rate_of = rate_of
        self._memory: dict[str, dict[str, Any]] = {name: {} for name in self._parameters}
        self._pending: dict[str, Tensor] = {}

    def _make_holder(self, live: Tensor) -> Tensor:
        # Only its `grad` is used: expanded from one element.
        return torch.zeros((), dtype=torch.float32, device=live.device).expand(live.shape)

    @torch.no_grad()
    def _update(self, learning_rate: float) -> None:
        for name, holder in self._holders.items():
            if holder.grad is None:
                continue
            live, memory = local_tensor(self._parameters[name]), self._memory[name]
            if not memory:
                memory["step"] = self._as_step(0, name)
                for key in ("exp_avg", "exp_avg_sq"):
                    memory[key] = torch.zeros(live.shape, dtype=torch.float32, device=live.device)
            if _has_kernel(live):
                self._pending[name] = self._update_by_kernel(name, live, holder.grad, learning_rate)
                holder.grad = None
                continue
            # Torch's fused AdamW reads memory in order: all tensors contiguous, as they are saved.
            values = live.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
            adamw(
                [values],
                [holder.grad.contiguous()],
                [memory["exp_avg"]],
                [memory["exp_avg_sq"]],
                [],
                [memory["step"]],
                fused=values.device.type in ("cpu", "cuda"),
                amsgrad=False,
                beta1=self._betas[0],
                beta2=self._betas[1],
                lr=learning_rate * self._rate_of(name),
                weight_decay=self._weight_decay if live.ndim > 1 else 0.0,
                eps=ADAM_EPSILON,
                maximize=False,
            )
            holder.grad = None
            if live.dtype == torch.bfloat16:
                round_to_bfloat16_(values, torch.Generator(live.device).manual_seed(self._noise(name)))
            self._pending[name] = values.to(live.dtype)

    def _update_by_kernel(self, name: str, live: Tensor, gradient: Tensor, learning_rate: float) -> Tensor:
        """Compute the update by one kernel; returns the new weights."""
        from slipstream.trainer.optim import triton_kernels

        memory = self._memory[name]
        memory["step"] += 1
        return triton_kernels.adamw_bf16_update(
            live,
            gradient.contiguous(),
            memory["exp_avg"],
            memory["exp_avg_sq"],
            updates=int(memory["step"]),
            rate=learning_rate * self._rate_of(name),
            betas=self._betas,
            eps=ADAM_EPSILON,
            weight_decay=self._weight_decay if live.ndim > 1 else 0.0,
            seed=self._noise(name) >> 1,
        )

    def _as_step(self, updates: int, name: str) -> Any:
        # On the CPU, because the kernel's launch reads it and must not synchronize.
        own = local_tensor(self._parameters[name])
        return torch.tensor(float(updates)) if _has_kernel(own) else super()._as_step(updates, name)

    def _noise(self, name: str) -> int:
        """The 32-bit seed of the noise of this step and parameter."""
        digest = hashlib.blake2b(f"{self._seed}/{self.step}/{name}".encode(), digest_size=4).digest()
        return int.from_bytes(digest, "big")

    def _take_values(self) -> Mapping[str, Tensor]:
        values, self._pending = self._pending, {}
        return values

    def _weights(self) -> Mapping[str, Tensor]:
        return self._live

    def _memory_of(self, name: str) -> dict[str, Any]:
        return self._memory[name]

    def _mark_of(self, name: str) -> str:
        return "exp_avg"
