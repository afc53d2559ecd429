"""Rows of judged completions: pairs for DPO, single ones with a label for KTO.

Guarantees: the completions of a pair differ and follow the same prompt; a prompt's messages carry no loss; an unusable
row raises a `DataError` with its file, number and column.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from slipstream.data.conversations import PROMPTS as _PROMPTS
from slipstream.data.conversations import Columns, Conversation, completed, first_of, plain_conversation, turns_of
from slipstream.data.readers import Row
from slipstream.errors import DataError
from slipstream.records import Message

Kind = Literal["dpo", "kto"]
_LABELS = ("label", "kto_tag")
_PAIR = '{"prompt": ..., "chosen": ..., "rejected": ...}'
_LABELLED = '{"prompt": ..., "completion": ..., "label": true or false}'


class Judged(tuple[Message, ...]):
    """A conversation with a judgement of its completion; it equals the conversation without one."""

    rejected: Conversation | None = None
    """The worse conversation of a pair."""
    is_desirable: bool = True

    @property
    def parts(self) -> tuple[Conversation, ...]:
        """The conversations to train on, the better one first."""
        return (tuple(self),) if self.rejected is None else (tuple(self), self.rejected)


def rewards_of(conversation: Sequence[Message]) -> tuple[float, ...]:
    """A reward for each of its parts: 1 for a chosen or desirable one, 0 for all others."""
    if not isinstance(conversation, Judged):
        return (0.0,)
    return (1.0, 0.0) if conversation.rejected is not None else (float(conversation.is_desirable),)


def parts_of(conversations: Iterable[Sequence[Message]]) -> list[Sequence[Message]]:
    """All conversations, with the rejected ones of pairs."""
    return [part for each in conversations for part in (each.parts if isinstance(each, Judged) else (each,))]


def judged_conversation(row: Row, columns: Columns, kind: Kind) -> tuple[Judged, set[str]]:
    """Build the judged conversation of a row, and name the columns used."""
    return _pair(row, columns) if kind == "dpo" else _labelled(row, columns)


def _pair(row: Row, columns: Columns) -> tuple[Judged, set[str]]:
    where, values = row.where, row.values
    if missing := [name for name in ("chosen", "rejected") if values.get(name) is None]:
        keys = ", ".join(sorted(values)) or "none"
        raise DataError(f"{where} has no {' and no '.join(missing)}, but the keys {keys}: give {_PAIR}")
    column = columns.prompt or first_of(values, _PROMPTS)
    both = [turns_of(values[name], name, "assistant", row) for name in ("chosen", "rejected")]
    if all(turns[0].role == "assistant" for turns in both):
        if not column:
            raise DataError(f"{where} has completions and no prompt: give {_PAIR}, or whole conversations in both")
        prompt = turns_of(row.values.get(column), column, "user", row)
        both = [[*prompt, *turns] for turns in both]
    num_shared = next((place for place, (one, other) in enumerate(zip(*both, strict=False)) if one != other), -1)
    if num_shared < 0:
        raise DataError(f"{where}: one of chosen and rejected is the beginning of the other: give two that differ")
    if not num_shared:
        raise DataError(f"{where}: chosen and rejected begin with different messages: give both the same prompt")
    chosen, rejected = (_masked(completed(turns, row), turns[num_shared:], where) for turns in both)
    judged = Judged(chosen)
    judged.rejected = rejected
    return judged, {column, "chosen", "rejected"}


def _labelled(row: Row, columns: Columns) -> tuple[Judged, set[str]]:
    name = first_of(row.values, _LABELS)
    label = row.values.get(name)
    if label not in (True, False):
        keys = ", ".join(sorted(row.values)) or "none"
        found = f"{name} = {label!r:.60}" if name else f"no label, but the keys {keys}"
        raise DataError(f"{row.where} has {found}: give {_LABELLED}")
    turns, read = plain_conversation(row, columns, is_judged=True)
    after = max((place + 1 for place, turn in enumerate(turns) if turn.role == "user"), default=0)
    judged = Judged(_masked([*turns], turns[after:], row.where))
    judged.is_desirable = bool(label)
    return judged, read | {name}


def _masked(turns: list[Message], completion: Sequence[Message], where: str) -> Conversation:
    """The conversation; its last messages, the `completion`, alone carry loss."""
    num_before = len(turns) - len(completion)
    if not any(turn.role == "assistant" and turn.carries_loss for turn in completion):
        raise DataError(f"{where}: a completion has no assistant message: add one, or remove the row")
    return tuple(
        turn if place >= num_before else msgspec.structs.replace(turn, carries_loss=False)
        for place, turn in enumerate(turns)
    )
