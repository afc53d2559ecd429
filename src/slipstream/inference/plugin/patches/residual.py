"""Patches vLLM's RMS norms to add up the layers' outputs in float32, as the trainer does (`model.fp32_residual`).

vLLM's models hand a layer's output and the residual stream to the next norm together; it adds them and returns both.
The sum comes back in float32 here, and stays so from norm to norm. The norm's own output, the input of
matrix products, is rounded once. Under torch.compile this becomes part of the fused kernels.

Changed: `RMSNorm.forward`, `GemmaRMSNorm.forward`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slipstream.inference.plugin.patches.patch_table import Absent


def add_in_float32() -> None:
    """Patch both norms."""
    from vllm.model_executor.layers import layernorm

    for name, offset in (("RMSNorm", 0.0), ("GemmaRMSNorm", 1.0)):
        kind = getattr(layernorm, name, None)
        if kind is None or not hasattr(kind, "forward_native"):
            raise Absent(f"layernorm.{name}")
        _patch(kind, offset)


def _patch(kind: Any, offset: float) -> None:
    plain = kind.forward

    def forward(self: Any, x: Tensor, residual: Tensor | None = None) -> Any:
        if residual is None or getattr(self, "variance_size_override", None) is not None:
            return plain(self, x, residual)
        total = x.float() + residual.float()
        scaled = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (scaled * (self.weight.float() + offset)).to(x.dtype), total

    kind.forward = forward
