"""AdamW whose moments may leave the GPU, by bitsandbytes, on fp32 masters.

The moments of parameters of 100,000 numbers and more are in CUDA's managed memory: the driver moves pages to the CPU
when the GPU has too little room, and back for the update. On a CPU they are ordinary tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bitsandbytes.optim import PagedAdamW32bit
from torch import Tensor

from slipstream.trainer.optim.library_adamw import LibraryAdamW


class MasterPagedAdamW(LibraryAdamW):
    """AdamW over fp32 copies, with fp32 moments in managed memory. Vectors are not decayed."""

    rule = PagedAdamW32bit

    def _is_foreign(self, memory: Mapping[str, Tensor]) -> bool:
        return "absmax1" in memory

    def _placed(self, key: str, value: Tensor, name: str) -> Tensor:
        if key not in ("state1", "state2"):
            return super()._placed(key, value, name)
        rule: Any = self._rules[self._rule_of[name]][0]
        buffer: Tensor = rule.get_state_buffer(self._holders[name], dtype=value.dtype)
        return buffer.copy_(value)
