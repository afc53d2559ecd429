"""The engine's choices of experts for the tokens of a packed row, as a tensor.

A shared prefix has the choices of its group's first sequence: the row holds this one's tokens. The engine computes a
prompt once for all completions of a group, unless new weights came in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream import records
from slipstream.errors import TrainingError
from slipstream.trainer.attention.row_layout import to_device

MISSING = -1
"""In place of an expert's id at positions without a choice."""


@dataclass(frozen=True)
class RowExperts:
    """The choices of a row of T tokens, in L layers of K experts a token."""

    ids_TLK: Tensor
    """int16; `MISSING` if nothing is known, for all layers and experts of a token at once."""
    highest: int
    """The highest id; known here, as reading it from a GPU would wait for it."""


class RowChoices:
    """Collects the choices of a row's segments."""

    def __init__(self) -> None:
        self._parts: list[tuple[records.ExpertChoices | None, int, int]] = []

    def add(self, sequence: records.Sequence, start: int, end: int) -> None:
        """Tokens `start` to `end` of a sequence, the next ones of the row."""
        self._parts.append((sequence.experts, start, end))

    def experts(self, device: torch.device | str) -> RowExperts | None:
        """None if no token of the row has a choice. Raises `TrainingError` for records that contradict themselves or
        one another."""
        shapes = {(given.num_layers, given.per_token) for given, _, _ in self._parts if given is not None}
        if not shapes:
            return None
        if len(shapes) > 1:
            found = " and ".join(f"{layers} layers of {number}" for layers, number in sorted(shapes))
            raise TrainingError(f"the engine's choices of experts are for {found} in one batch: they are of two models")
        (shape,) = shapes
        row = np.full((sum(end - start for _, start, end in self._parts), *shape), MISSING, np.int16)
        place, highest = 0, MISSING
        for given, start, end in self._parts:
            if given is not None:
                own = decoded(given)[start:end]
                row[place : place + len(own)] = own
                highest = max(highest, int(own.max(initial=MISSING)))
            place += end - start
        return RowExperts(to_device(torch.from_numpy(row), device), highest)


def decoded(choices: records.ExpertChoices) -> Any:
    """The ids `[tokens, L, K]`, a view of the record's bytes. Raises `TrainingError` if they are no such array."""
    if not choices.token_bytes or len(choices.data) % choices.token_bytes:
        raise TrainingError(
            f"a sequence has {len(choices.data)} bytes of experts, which are not {choices.num_layers} layers of "
            f"{choices.per_token} ids of {choices.width} bytes for each token: the batch is damaged, make it again"
        )
    ids = np.frombuffer(choices.data, f"<u{choices.width}")
    return ids.reshape(-1, choices.num_layers, choices.per_token).astype(np.int16, copy=False)
