"""The policy as environments see it; records the tokens of a conversation. No network: the generating function is
passed in.

Trained tokens are the sampled tokens, never re-made from text. If a turn's prompt begins with all tokens of an earlier
sequence, that sequence is extended: the environment's tokens with mask False, then the sampled tokens with mask True.
Otherwise (a template that drops earlier thinking, text that tokenizes differently from how it was sampled) a new
sequence begins. Prefixes are compared as tokens, never as text.
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

# Most tokens searched at a prompt's end for "<think>" and the white space after it.
_TAIL_TOKENS = 16
_WINDOW_TOKENS = 64


class Tokenizer(Protocol):
    """The methods of `data.chat_template.ChatTokenizer` that a conversation needs."""

    def render(self, messages: Sequence[Message]) -> list[int]:
        """Tokens of a conversation, up to the start of the assistant's next turn."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, without special tokens."""
        ...


class RecordingPolicy:
    """Sends turns to the engine and records every token of one episode."""

    def __init__(self, generate: Callable[[list[int]], Awaitable[Completion]], tokenizer: Tokenizer) -> None:
        self._generate = generate
        self._tokenizer = tokenizer
        self.sequences: list[TokenSequence] = []
        """The tokens so far, see `records.Sequence`."""
        self.num_turns = 0
        self.conversation: list[Message] = []
        """All messages of the last turn, its reply included."""
        self.truncated = False
        """Whether any turn reached its token limit."""
        self._is_closed = False
        self.num_thinking = 0
        """Thinking tokens of the turn with the most."""

    def close(self) -> None:
        """Ends the episode: no tokens can be added while it is graded and trained on."""
        self._is_closed = True

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("the episode is over: end the tasks that talk to the policy before `run` returns")

    async def chat(self, messages: Sequence[Message]) -> Reply:
        """See `base.Policy`. Raises `EngineError` if the engine aborted the request."""
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
        # Some templates append `<think>` to the prompt; the graded text must include it.
        if self._tokenizer.decode(prompt_ids[-_TAIL_TOKENS:]).rstrip().endswith(THINK_OPEN):
            text = THINK_OPEN + text
        self.conversation = [*messages, Message("assistant", text)]
        self.num_thinking = max(self.num_thinking, num_thinking(text, completion.token_ids, self._tokenizer))
        return Reply(text, completion.finish_reason)


def num_thinking(text: str, token_ids: list[int], tokenizer: Tokenizer) -> int:
    """Number of a turn's sampled tokens before the end of its last `</think>`; all of them if it never closes. `text`
    is the decoded turn, with a `<think>` that the template opened."""
    before, _, after = text.rpartition(THINK_CLOSE)
    if THINK_OPEN in after:
        return len(token_ids)
    if not before and not text.startswith(THINK_CLOSE):
        return 0
    # The answer after it is short compared with the thinking: decode only the tokens around it.
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
    """Adds a turn to `sequences` in place: to the latest sequence that is a prefix of the prompt, otherwise to a new
    one."""
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
