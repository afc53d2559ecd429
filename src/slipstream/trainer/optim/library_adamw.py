"""What the optimizers of bitsandbytes have in common: its AdamW on fp32 masters."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from slipstream.trainer.optim.base import MasterOptimizer, NamedParameters, RateOf, one_rate


class LibraryAdamW(MasterOptimizer):
    """AdamW over fp32 copies, computed by `rule`. Vectors are not decayed."""

    rule: ClassVar[Any]
    """The library's class, or what makes one of it."""

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
        make: Any = partial(self.rule, betas=betas)
        self._add_rule(make, "state1", self._holders.keys(), weight_decay)

    def _as_step(self, updates: int, name: str) -> int:
        return updates
