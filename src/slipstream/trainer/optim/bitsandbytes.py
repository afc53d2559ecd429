"""AdamW of the bitsandbytes library on fp32 master weights: with 8-bit optimizer states, with paged ones, or both.

8-bit states (arXiv 2110.02861) are quantized in blocks of 256 values, each with its own scale; parameters with fewer
than 4,096 elements keep fp32 states. This saves six bytes per parameter. Paged states, of parameters with 100,000
elements or more, lie in CUDA managed memory: the driver moves pages to host memory under memory pressure and back for
the update. On a CPU they are ordinary tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from bitsandbytes.optim import AdamW8bit, PagedAdamW8bit, PagedAdamW32bit
from torch import Tensor

from slipstream.trainer.optim.base import MasterAdamW

_MIN_8BIT_ELEMENTS = 4096
"""Parameters with fewer elements keep fp32 states."""


class _BitsandbytesAdamW(MasterAdamW):
    """AdamW over fp32 master weights, computed by a `rule` of the library."""

    mark = "state1"

    def _as_step(self, updates: int, name: str) -> int:
        return updates


class MasterAdamW8bit(_BitsandbytesAdamW):
    """AdamW with 8-bit optimizer states, quantized in blocks."""

    rule = staticmethod(partial(AdamW8bit, min_8bit_size=_MIN_8BIT_ELEMENTS))

    def state(self) -> dict[str, Tensor]:
        """See the base. The library shares its quantization tables among all parameters: each gets a copy."""
        tensors = super().state()
        return {path: tensor.clone() if path.startswith("qmap") else tensor for path, tensor in tensors.items()}

    def _is_foreign(self, memory: Mapping[str, Tensor]) -> bool:
        return "absmax1" not in memory and memory["state1"].numel() >= _MIN_8BIT_ELEMENTS


class _PagedAdamW(_BitsandbytesAdamW):
    """Loaded optimizer states too are in CUDA managed memory."""

    def _placed(self, key: str, value: Tensor, name: str) -> Tensor:
        if key not in ("state1", "state2"):
            return super()._placed(key, value, name)
        rule: Any = self._rule_of[name][0]
        buffer: Tensor = rule.get_state_buffer(self._holders[name], dtype=value.dtype)
        return buffer.copy_(value)


class MasterPagedAdamW(_PagedAdamW):
    """AdamW with fp32 optimizer states in CUDA managed memory."""

    rule = PagedAdamW32bit

    def _is_foreign(self, memory: Mapping[str, Tensor]) -> bool:
        return "absmax1" in memory


class MasterPagedAdamW8bit(_PagedAdamW, MasterAdamW8bit):
    """AdamW with 8-bit optimizer states in CUDA managed memory; the blocks' scales are not."""

    rule = staticmethod(partial(PagedAdamW8bit, min_8bit_size=_MIN_8BIT_ELEMENTS))
