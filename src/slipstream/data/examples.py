"""The training and held-out sets of SFT: conversations as tokens, made once and kept in memory.

Guarantees: what is held out is never trained on, and which rows that are depends on their text and images alone; every
conversation that is left out or cut is counted by reason.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec

from slipstream.config.sft import TrainOn
from slipstream.data.conversations import Judged, parts_of
from slipstream.errors import DataError
from slipstream.records import Batch, Media, Message, Rollout, Stream, Version
from slipstream.records import Sequence as TokenSequence

if TYPE_CHECKING:
    from slipstream.data.chat_template import ChatTokenizer

Conversation = Sequence[Message]
_THOUGHTS = ("reasoning_content", "reasoning", "thinking", "thoughts")


class Examples(Collection[TokenSequence]):
    """Token sequences with their loss masks, images and streams, in five bytes a token and the bytes of the streams;
    reading one makes it anew."""

    def __init__(self) -> None:
        self._token_ids = array("i")
        self._mask = bytearray()
        self._ends = array("q", [0])
        self.rewards = array("d")
        """Of all, where rows have rewards; otherwise empty."""
        self.row_ends = array("q")
        """After the last sequence of each row; empty where each has one."""
        self._media: dict[int, tuple[Media, ...]] = {}
        self._streams: dict[int, dict[str, Stream]] = {}

    def append(self, sequence: TokenSequence) -> None:
        """Add one at the end."""
        if sequence.media:
            self._media[len(self)] = tuple(sequence.media)
        if sequence.streams:
            self._streams[len(self)] = sequence.streams
        self._token_ids.extend(sequence.token_ids)
        self._mask.extend(sequence.mask)
        self._ends.append(len(self._token_ids))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> TokenSequence:
        start, end = self._ends[index], self._ends[index + 1]
        # "?" is C's bool: several times as fast as a loop.
        mask = cast("list[bool]", memoryview(self._mask[start:end]).cast("?").tolist())
        media, streams = list(self._media.get(index, ())), dict(self._streams.get(index, {}))
        return TokenSequence(self._token_ids[start:end].tolist(), mask, streams=streams, media=media)

    def __iter__(self) -> Iterator[TokenSequence]:
        return (self[index] for index in range(len(self)))

    def __contains__(self, sequence: object) -> bool:
        return any(each == sequence for each in self)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each."""
        return [end - start for start, end in pairwise(self._ends)]

    @property
    def num_trainable(self) -> int:
        """Tokens that carry loss, of all."""
        return sum(self._mask)


class SFTReader:
    """Reads batches of examples in a seeded order; the batch of a step depends on the step alone, so that resuming
    needs no state."""

    def __init__(
        self,
        examples: Examples,
        items_of_step: Callable[[int], list[int]],
    ) -> None:
        self._examples = examples
        self._items_of_step = items_of_step
        self._ends = examples.row_ends or range(1, len(examples) + 1)

    def take(self, step: int) -> Batch:
        """See the loop's `Reader`. The sequences of a row are the rollouts of a group."""
        rollouts: list[Rollout] = []
        for index, item in enumerate(self._items_of_step(step)):
            name, start = f"{step}.{index}", self._ends[item - 1] if item else 0
            for place in range(start, self._ends[item]):
                own = f"{name}.{place - start}" if self._examples.row_ends else name
                reward = self._examples.rewards[place] if self._examples.rewards else 0.0
                rollouts.append(Rollout(own, str(item), name, [self._examples[place]], reward, outcome="done"))
        return Batch(step, Version(0, step), rollouts)


def tokenized(
    conversations: list[Conversation],
    tokenizer: ChatTokenizer,
    train_on: TrainOn,
    limit: int,
    too_long: Literal["drop", "truncate", "error"],
    dropped: dict[str, int],
    *,
    where: Callable[[Conversation], str],
    bound: str = "the limit",
    prefix: str = "",
    tokens: Callable[[Conversation, ChatTokenizer, TrainOn], TokenSequence] | None = None,
) -> tuple[list[Conversation], Examples]:
    """The conversations that can be used, and their tokens.

    One of more than `limit` tokens is dropped, cut to its first `limit`, or a `DataError` that names it by `where`.
    `bound` says in errors what the limit is. `dropped` counts what is dropped or cut, under names that begin with
    `prefix`. `tokens`: in the place of the tokenizer's `training_tokens`.
    """
    kept: list[Conversation] = []
    examples = Examples()

    def count(reason: str) -> None:
        dropped[prefix + reason] = dropped.get(prefix + reason, 0) + 1

    for conversation in conversations:
        parts: list[TokenSequence] = []
        for part in parts_of([conversation]):
            try:
                plain = tokens is None
                sequence = tokenizer.training_tokens(part, train_on) if plain else tokens(part, tokenizer, train_on)
            except DataError as error:
                raise DataError(f"{where(conversation)}: {error}") from error
            if len(sequence) > limit:
                if too_long == "error":
                    raise DataError(
                        f"{where(conversation)} has {len(sequence)} tokens, more than {bound}: shorten it, or set "
                        'data.too_long = "drop" or "truncate"'
                    )
                if too_long == "drop":
                    count("conversation_too_long")
                    break
                sequence = _cut(sequence, limit)
                if not sequence.num_trainable:
                    count(f"conversation whose first {limit} tokens carry no loss")
                    break
                count(f"end of a conversation, beyond {limit} tokens")
            parts.append(sequence)
        else:
            kept.append(conversation)
            for sequence in parts:
                examples.append(sequence)
            if isinstance(conversation, Judged):
                examples.rewards.extend(conversation.rewards)
                examples.row_ends.append(len(examples))
    if conversations and not kept and too_long == "truncate":
        raise DataError(
            f"the first {limit} tokens of all {len(conversations)} conversations carry no loss, and {bound} cuts them "
            "there: raise data.max_length, use shorter prompts, or a model with a longer context"
        )
    if conversations and not kept:
        raise DataError(
            f"every one of the {len(conversations)} conversations is longer than {bound}: use shorter ones, or "
            'set data.too_long = "truncate"'
        )
    return kept, examples


def _cut(sequence: TokenSequence, limit: int) -> TokenSequence:
    """The first `limit` tokens, or fewer where an image would be cut in two."""
    end = next((image.start for image in sequence.media if image.start < limit < image.start + image.num_tokens), limit)
    media = [image for image in sequence.media if image.start < end]
    return TokenSequence(sequence.token_ids[:end], sequence.mask[:end], media=media)


def split_off(conversations: list[Conversation], fraction: float) -> tuple[list[Conversation], list[Conversation]]:
    """Those to train on and those to hold out: about `fraction` of them, each by its own text alone. Raises `DataError`
    where one of the two is empty."""
    parts: tuple[list[Conversation], list[Conversation]] = ([], [])
    for conversation in conversations:
        digest = hashlib.sha256(_text(conversation)).digest()
        parts[int.from_bytes(digest[:8], "big") < fraction * 2**64].append(conversation)
    if not all(parts):
        what = "all" if parts[1] else "none"
        raise DataError(
            f"data.eval_fraction = {fraction:g} holds out {what} of {len(conversations)} rows, each of which is chosen "
            f"by its text: {'lower' if parts[1] else 'raise'} it, or name rows in data.eval_path"
        )
    return parts


def without(conversations: list[Conversation], held_out: Sequence[Conversation]) -> list[Conversation]:
    """The conversations that are not held out. Raises `DataError` if none is left."""
    texts = {_text(conversation) for conversation in held_out}
    kept = [conversation for conversation in conversations if _text(conversation) not in texts]
    if conversations and not kept:
        raise DataError(
            f"every one of the {len(conversations)} rows to train on is also a held-out one: name other rows in "
            "data.eval_path"
        )
    return kept


def holds_thoughts(conversations: Sequence[Conversation]) -> bool:
    """Whether any assistant message has thinking, in its text or in a field of its own."""
    return any(
        message.role == "assistant" and ("<think>" in message.content or any(map(message.extra.get, _THOUGHTS)))
        for conversation in conversations
        for message in conversation
    )


def _text(conversation: Conversation) -> bytes:
    turns: list[list[Any]] = [[turn.role, turn.content, turn.tool_calls, turn.extra] for turn in conversation]
    for turn, message in zip(turns, conversation, strict=True):
        turn += [image.sha256 for image in message.media]
    return msgspec.json.encode(turns)
