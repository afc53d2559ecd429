"""Batches for supervised fine-tuning: conversations whose assistant turns are the targets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from slipstream.records import Batch, Message, Rollout, Version
from slipstream.records import Sequence as TokenSequence


class _Tokenizer(Protocol):
    def training_tokens(self, messages: Sequence[Message], train_on: Literal["last", "all"]) -> TokenSequence:
        """Tokens of a conversation; the mask marks those of the assistant."""
        ...


class SFTReader:
    """Reads batches of conversations in a seeded order; the batch of a step depends on the step alone, so that resuming
    needs no state."""

    def __init__(
        self,
        conversations: Sequence[Sequence[Message]],
        tokenizer: _Tokenizer,
        items_of_step: Callable[[int], list[int]],
        *,
        train_on: Literal["last", "all"],
    ) -> None:
        self._conversations = conversations
        self._tokenizer = tokenizer
        self._items_of_step = items_of_step
        self._train_on: Literal["last", "all"] = train_on

    def take(self, step: int) -> Batch:
        """See the loop's `Reader`."""
        rollouts: list[Rollout] = []
        for index, item in enumerate(self._items_of_step(step)):
            sequence = self._tokenizer.training_tokens(self._conversations[item], self._train_on)
            name = f"{step}.{index}"
            rollouts.append(Rollout(name, str(item), name, [sequence], reward=0.0, outcome="done"))
        return Batch(step, Version(0, step), rollouts)
