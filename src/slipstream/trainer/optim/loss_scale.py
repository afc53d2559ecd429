"""The loss scale of float16 gradients (Micikevicius et al., arXiv 1710.03740, section 3.2).

float16 has 5 bits of exponent: gradients below 6e-8 become zero, above 65,504 infinite. The loss is multiplied by a
power of two, without rounding, and the accumulated fp32 gradient divided by it. A backward pass with an overflow is
repeated at half the scale; after `GROWTH_INTERVAL` steps without one the scale is doubled.
"""

from __future__ import annotations

from torch import Tensor, tensor

FIRST, LARGEST = 2.0**16, 2.0**24
GROWTH_INTERVAL = 1000
"""Optimizer steps; torch's GradScaler uses 2000."""


class LossScale:
    """A factor on the loss: 1 and constant unless `is_needed`."""

    def __init__(self, *, is_needed: bool) -> None:
        self.is_needed = is_needed
        self.value = FIRST if is_needed else 1.0
        self._num_good = 0

    def lower(self) -> bool:
        """After an overflow: halve the scale. False if this does not help, as the loss is not scaled up."""
        if self.value <= 1.0:
            return False
        self.value /= 2.0
        self._num_good = 0
        return True

    def count_good(self) -> None:
        """After a step without an overflow."""
        if not self.is_needed:
            return
        self._num_good += 1
        if self._num_good >= GROWTH_INTERVAL:
            self.value, self._num_good = min(LARGEST, 2.0 * self.value), 0

    def state(self) -> dict[str, Tensor]:
        """State for a resumed run; empty if it is not needed."""
        return {"loss_scale": tensor([self.value, float(self._num_good)])} if self.is_needed else {}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take over the result of `state`, if it is there and needed."""
        if self.is_needed and (saved := tensors.get("loss_scale")) is not None:
            self.value, self._num_good = float(saved[0]), int(saved[1])
