"""Rows of judged completions: pairs, and single ones with a label.

Guarantees: the completions of a pair differ and follow the same prompt; a prompt's messages carry no loss; an unusable
row raises a `DataError` with its file, number and column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from slipstream.errors import DataError
from slipstream.plugins import PROMPTS, Columns, Conversation, Judged, Row, plain_conversation
from slipstream.records import Message

_LABELS = ("label", "kto_tag")
_PAIR = '{"prompt": ..., "chosen": ..., "rejected": ...}'
_LABELLED = '{"prompt": ..., "completion": ..., "label": true or false}'


def pair(row: Row, columns: Columns) -> tuple[Judged, set[str]]:
    """The chosen conversation of a row with reward 1, the rejected one beside it with 0, and the columns read."""
    where, values = row.where, row.values
    if missing := [name for name in ("chosen", "rejected") if values.get(name) is None]:
        keys = ", ".join(sorted(values)) or "none"
        raise DataError(f"{where} has no {' and no '.join(missing)}, but the keys {keys}: give {_PAIR}")
    has_prompt = bool(columns.prompt) or any(values.get(name) is not None for name in PROMPTS)
    is_whole = any(_is_whole(row, name) for name in ("chosen", "rejected"))
    if not (is_whole or has_prompt):
        raise DataError(f"{where} has completions and no prompt: give {_PAIR}, or whole conversations in both")
    both: list[Conversation] = []
    read = {columns.prompt or next((name for name in PROMPTS if name in values), "")}
    for name in ("chosen", "rejected"):
        of_one = replace(columns, messages=name if is_whole else "", answer="" if is_whole else name)
        turns, used = plain_conversation(row, of_one, is_judged=True)
        both, read = [*both, turns], read | used
    num_shared = next((place for place, (one, other) in enumerate(zip(*both, strict=False)) if one != other), -1)
    if num_shared < 0:
        how = "chosen and rejected are equal" if both[0] == both[1] else "one of chosen and rejected begins the other"
        raise DataError(f"{where}: {how}: give two that differ")
    if not num_shared:
        raise DataError(f"{where}: chosen and rejected begin with different messages: give both the same prompt")
    chosen, rejected = (_masked(turns, num_shared, where) for turns in both)
    judged = Judged(chosen)
    judged.others, judged.rewards = (rejected,), (1.0, 0.0)
    return judged, read


def labelled(row: Row, columns: Columns) -> tuple[Judged, set[str]]:
    """The conversation of a row with reward 1 where its label is true, else 0, and the columns read."""
    name = next((name for name in _LABELS if row.values.get(name) is not None), "")
    label = row.values.get(name)
    if label not in (True, False):
        keys = ", ".join(sorted(row.values)) or "none"
        found = f"{name} = {label!r:.60}" if name else f"no label, but the keys {keys}"
        raise DataError(f"{row.where} has {found}: give {_LABELLED}")
    turns, read = plain_conversation(row, columns, is_judged=True)
    after = max((place + 1 for place, turn in enumerate(turns) if turn.role == "user"), default=0)
    judged = Judged(_masked(turns, after, row.where))
    judged.rewards = (float(label),)
    return judged, read | {name}


def _is_whole(row: Row, name: str) -> bool:
    """Whether the column has a conversation with its prompt, not a completion alone."""
    if not isinstance(row.values[name], list):
        return False
    turns, _ = plain_conversation(row, Columns(messages=name), is_judged=True)
    return next((turn.role for turn in turns if turn.role != "system"), "assistant") != "assistant"


def _masked(turns: Sequence[Message], num_before: int, where: str) -> Conversation:
    """The conversation; its messages after the first `num_before` alone carry loss."""
    if not any(turn.role == "assistant" and turn.carries_loss for turn in turns[num_before:]):
        raise DataError(f"{where}: a completion has no assistant message: add one, or remove the row")
    return tuple(
        turn if place >= num_before else msgspec.structs.replace(turn, carries_loss=False)
        for place, turn in enumerate(turns)
    )
