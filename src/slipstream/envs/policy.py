"""The policy as an environment sees it, with the book-keeping of its tokens. No network: generation is handed in.

Guarantees: the tokens trained on are the tokens sampled, never re-made from text. When a turn's prompt begins
with all tokens of an earlier sequence, that sequence goes on: the environment's tokens get mask False, then the
sampled ones mask True. When it does not (a template that drops earlier thinking, text that tokenizes otherwise
than it was sampled), a new sequence begins. Prefixes are compared as tokens, never as text.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from slipstream.envs.answers import THINK_CLOSE, THINK_OPEN
from slipstream.envs.base import Reply
from slipstream.errors import EngineError, IntegrityError
from slipstream.records import Completion, Message, VersionSpan
from slipstream.records import Sequence as TokenSequence

# Longest tokenization of "<think>" and the white space after it that is looked for at a prompt's end.
_TAIL_TOKENS = 16
_WINDOW_TOKENS = 64


class Tokenizer(Protocol):
    """The part of `data.chat.ChatTokenizer` that a conversation needs."""

    def render(self, messages: Sequence[Message]) -> list[int]:
        """A conversation's tokens, up to where the assistant is to speak."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, without special tokens."""
        ...


class RecordingPolicy:
    """Talks for the engine and keeps every token. One object for one episode."""

    def __init__(self, generate: Callable[[list[int]], Awaitable[Completion]], tokenizer: Tokenizer) -> None:
        self._generate = generate
        self._tokenizer = tokenizer
        self.sequences: list[TokenSequence] = []
        """What was said so far, see `records.Sequence`."""
        self.num_turns = 0
        self.truncated = False
        """Whether any turn met its token limit."""
        self._is_closed = False
        self.num_thinking = 0
        """Tokens of thinking in the turn that has most of them."""

    def close(self) -> None:
        """The episode is over: its tokens are being graded and trained on, and nothing is added to them."""
        self._is_closed = True

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("the episode is over: end the tasks that talk to the policy before `run` returns")

    async def chat(self, messages: Sequence[Message]) -> Reply:
        """See `base.Policy`. Raises `EngineError` when the engine ended the request before it was finished."""
        self._check_open()
        prompt_ids = self._tokenizer.render(messages)
        completion = await self._generate(prompt_ids)
        self._check_open()
        if completion.finish_reason == "abort":
            raise EngineError(f"request {completion.id} was aborted after {len(completion.token_ids)} tokens")
        record_turn(self.sequences, prompt_ids, completion)
        self.num_turns += 1
        self.truncated |= completion.finish_reason == "length"
        text = completion.text or self._tokenizer.decode(completion.token_ids)
        # Some templates open the thinking themselves; grading must see that it was opened.
        if self._tokenizer.decode(prompt_ids[-_TAIL_TOKENS:]).rstrip().endswith(THINK_OPEN):
            text = THINK_OPEN + text
        self.num_thinking = max(self.num_thinking, num_thinking(text, completion.token_ids, self._tokenizer))
        return Reply(text, completion.finish_reason)


def num_thinking(text: str, token_ids: list[int], tokenizer: Tokenizer) -> int:
    """How many of a turn's sampled tokens come before the end of its last `</think>`; all where it never closes.

    `text`: what they say, with a `<think>` that the template opened.
    """
    before, _, after = text.rpartition(THINK_CLOSE)
    if THINK_OPEN in after:
        return len(token_ids)
    if not before and not text.startswith(THINK_CLOSE):
        return 0
    # The answer behind it is short beside the thinking: only tokens around its place are decoded.
    size = min(_WINDOW_TOKENS, len(token_ids))
    while size < len(token_ids) and THINK_CLOSE not in tokenizer.decode(token_ids[-size:]):
        size = min(2 * size, len(token_ids))
    start = len(token_ids) - size
    num_closed = tokenizer.decode(token_ids[start:]).count(THINK_CLOSE)
    ends = range(start, len(token_ids))
    return start + bisect_left(
        ends, num_closed, key=lambda end: tokenizer.decode(token_ids[start:end]).count(THINK_CLOSE)
    )


def record_turn(sequences: list[TokenSequence], prompt_ids: list[int], completion: Completion) -> None:
    """Add one turn to `sequences`, in place: to the latest one that is a prefix of the prompt, else to a new one."""
    logprobs = completion.logprobs
    if logprobs is not None and len(logprobs) != len(completion.token_ids):
        raise IntegrityError(
            f"the engine gave {len(logprobs)} log-probabilities for {len(completion.token_ids)} tokens "
            f"of request {completion.id}"
        )
    sequence = next((s for s in reversed(sequences) if prompt_ids[: len(s)] == s.token_ids), None)
    if sequence is None:
        sequence = TokenSequence([], [], [])
        sequences.append(sequence)
    given = prompt_ids[len(sequence) :]
    start = len(prompt_ids)
    sequence.token_ids = [*prompt_ids, *completion.token_ids]
    sequence.mask += [False] * len(given) + [True] * len(completion.token_ids)
    if logprobs is None or sequence.logprobs is None:
        sequence.logprobs = None
    else:
        sequence.logprobs += [0.0] * len(given) + logprobs
    for span in completion.versions:
        if not sequence.versions or sequence.versions[-1].version != span.version:
            sequence.versions = [*sequence.versions, VersionSpan(start + span.start, span.version)]
