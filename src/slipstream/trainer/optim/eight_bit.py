"""AdamW with moments of 8 bits (arXiv 2110.02861), by bitsandbytes, on fp32 masters.

Every 256 numbers share a scale; parameters of fewer than 4,096 keep their moments in fp32. Six bytes a parameter less.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from bitsandbytes.optim import AdamW8bit
from torch import Tensor

from slipstream.trainer.optim.library_adamw import LibraryAdamW

_SMALLEST = 4096
"""Parameters of fewer numbers have moments in fp32."""


class MasterAdamW8bit(LibraryAdamW):
    """AdamW over fp32 copies, with its moments in blocks of 8-bit numbers. Vectors are not decayed."""

    rule = staticmethod(partial(AdamW8bit, min_8bit_size=_SMALLEST))

    def state(self) -> dict[str, Tensor]:
        """See the base; the library's tables, which all parameters share, are then each one's own."""
        tensors = super().state()
        return {path: tensor.clone() if path.startswith("qmap") else tensor for path, tensor in tensors.items()}

    def _is_foreign(self, memory: Mapping[str, Tensor]) -> bool:
        return "absmax1" not in memory and memory["state1"].numel() >= _SMALLEST
