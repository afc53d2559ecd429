"""AdamW whose moments may leave the GPU, by bitsandbytes, on fp32 masters.

The moments of parameters of 100,000 numbers and more are in CUDA's managed memory: the driver moves pages to the CPU
when the GPU has too little room, and back for the update. On a CPU they are ordinary tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from bitsandbytes.optim import PagedAdamW32bit
from torch import Tensor

from slipstream.trainer.optimizer import MasterOptimizer, NamedParameters, RateOf, one_rate


class MasterPagedAdamW(MasterOptimizer):
    """AdamW over fp32 copies, with fp32 moments in managed memory. Vectors are not decayed."""

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
        make: Any = partial(PagedAdamW32bit, betas=betas)
        self._add_rule(make, "state1", self._holders.keys(), weight_decay)

    def _is_foreign(self, memory: Mapping[str, Tensor]) -> bool:
        return "absmax1" in memory

    def _placed(self, key: str, value: Tensor, name: str) -> Tensor:
        if key not in ("state1", "state2"):
            return super()._placed(key, value, name)
        rule: Any = self._rules[self._rule_of[name]][0]
        buffer: Tensor = rule.get_state_buffer(self._holders[name], dtype=value.dtype)
        return buffer.copy_(value)

    def _as_step(self, updates: int, name: str) -> int:
        return updates
