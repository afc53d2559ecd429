"""AdamW with moments of 8 bits (arXiv 2110.02861), by bitsandbytes, on fp32 masters.

Every 256 numbers share a scale; parameters of fewer than 4,096 keep their moments in fp32. Six bytes a parameter less.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from bitsandbytes.optim import AdamW8bit
from torch import Tensor

from slipstream.trainer.optimizer import MasterOptimizer, NamedParameters, RateOf, one_rate

_SMALLEST = 4096
"""Parameters of fewer numbers have moments in fp32."""


class MasterAdamW8bit(MasterOptimizer):
    """AdamW over fp32 copies, with its moments in blocks of 8-bit numbers. Vectors are not decayed."""

    def __init__(
        self,
        named_parameters: NamedParameters,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
        rate_of: RateOf = one_rate,
    ) -> None:
        super().__init__(named_parameters, max_grad_norm, rate_of)
        make: Any = partial(AdamW8bit, betas=betas, min_8bit_size=_SMALLEST)
        self._add_rule(make, "state1", self._holders.keys(), weight_decay)

    def state(self) -> dict[str, Tensor]:
        """See the base; the library's tables, which all parameters share, are then each one's own."""
        tensors = super().state()
        return {path: tensor.clone() if path.startswith("qmap") else tensor for path, tensor in tensors.items()}

    def _is_foreign(self, memory: Mapping[str, Tensor]) -> bool:
        return "absmax1" not in memory and memory["state1"].numel() >= _SMALLEST

    def _as_step(self, updates: int, name: str) -> int:
        return updates
