"""The policy as environments see it; records the tokens of a conversation. No network: the generating function is
passed in.

Trained tokens are the sampled tokens, never re-made from text. If a turn's prompt begins with all tokens of an earlier
sequence, that sequence is extended: the environment's tokens with mask False, then the sampled tokens with mask True.
Otherwise a new sequence begins: the template drops earlier thinking, say, or sampled text tokenizes differently.
Prefixes are compared as tokens, never as text.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from slipstream.envs.answers import THINK_CLOSE, THINK_OPEN
from slipstream.envs.base import Address, ContextFull, Reply, ToolResult
from slipstream.envs.tools.schemas import with_tools
from slipstream.errors import EngineError, IntegrityError
from slipstream.records import Completion, ExpertChoices, Media, Message, ToolCall, TurnSpan, VersionSpan
from slipstream.records import Sequence as TokenSequence

# Most tokens searched at a prompt's end for "<think>" and the white space after it.
_TAIL_TOKENS = 16
_WINDOW_TOKENS = 64


class Tokenizer(Protocol):
    """The methods of `data.chat_template.ChatTokenizer` needed for a conversation."""

    def render(self, messages: Sequence[Message]) -> list[int]:
        """Tokens of a conversation, up to the start of the assistant's next turn."""
        ...

    def place_images(self, messages: Sequence[Message], token_ids: Sequence[int]) -> tuple[Media, ...]:
        """The images of a conversation with images, and their places in its tokens."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, without special tokens."""
        ...

    def decode_turn(self, token_ids: Sequence[int]) -> tuple[str, str]:
        """A sampled turn's text, as `decode`, and its text with special tokens, except for its end token."""
        ...


class Prompt(NamedTuple):
    """A rendered conversation."""

    token_ids: list[int]
    """Several episodes may share them: they are never changed."""
    opens_thinking: bool
    """Whether it ends with `<think>`, appended by some templates: the graded text must include it."""
    media: tuple[Media, ...] = ()
    """Its images, with their places in the tokens."""


class Prompts:
    """Renders the prompts of episodes with the same first conversation, such as a group's: its prompt is rendered
    once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._first: tuple[tuple[Message, ...], Prompt] | None = None

    def of(self, messages: Sequence[Message]) -> Prompt:
        """The prompt for the turn after `messages`."""
        conversation = tuple(messages)
        if self._first is not None and self._first[0] == conversation:
            return self._first[1]
        token_ids = self._tokenizer.render(messages)
        tail = self._tokenizer.decode(token_ids[-_TAIL_TOKENS:])
        media: tuple[Media, ...] = ()
        if any(message.media for message in messages):
            media = self._tokenizer.place_images(messages, token_ids)
        prompt = Prompt(token_ids, tail.rstrip().endswith(THINK_OPEN), media)
        if self._first is None:
            self._first = conversation, prompt
        return prompt


class RecordingPolicy:
    """Sends turns to the engine and records every token of one episode.

    `generate(prompt_ids, max_tokens, tools, media)` samples a turn; `max_tokens` None: the run's own limit; `media`:
    the prompt's images.
    `task_prompt`: the task's messages. Their tools and images also apply to equal messages written by `run`.
    `context_length`, in tokens, bounds a prompt and its turn together. `call_tool` runs a call of a tool.
    `prompts`: shared with other episodes, or this episode's own.
    """

    def __init__(
        self,
        generate: Callable[
            [list[int], int | None, tuple[dict[str, Any], ...], tuple[Media, ...]], Awaitable[Completion]
        ],
        tokenizer: Tokenizer,
        *,
        task_prompt: Sequence[Message] = (),
        context_length: int | None = None,
        call_tool: Callable[[ToolCall], Awaitable[ToolResult]],
        prompts: Prompts | None = None,
    ) -> None:
        self._generate = generate
        self._tokenizer = tokenizer
        self._context_length = context_length
        self._call_tool = call_tool
        self._prompts = prompts or Prompts(tokenizer)
        self._tools = _tools_of(task_prompt)
        self._known: dict[Message, Message] = {}
        """Messages with images, fields or special tokens, by their role and text alone."""
        for message in task_prompt:
            self._know(msgspec.structs.replace(message, tools=()))
        self.state: Any = None
        self.address: Address | None = None
        """See `base.Policy`; this one too."""
        self.sequences: list[TokenSequence] = []
        """The tokens so far, see `records.Sequence`."""
        self.spans: list[TurnSpan] = []
        """The sampled tokens of each turn, in the order of the turns' ends."""
        self.conversation: list[Message] = []
        """All messages of the last turn, its reply included."""
        self.truncated = False
        """Whether any turn reached its token limit."""
        self.num_thinking = 0
        """Thinking tokens of the turn with the most."""
        self.num_tool_calls = 0
        self.num_tool_failures = 0
        self.tool_error = ""
        """For people: the first details of a failed tool."""
        self._sampled: list[list[int]] = []
        self._texts: dict[str, str] = {}
        """Each turn's text, by its content in the next conversation."""
        self._is_closed = False

    @property
    def num_turns(self) -> int:
        """Turns so far."""
        return len(self.spans)

    @property
    def last_text(self) -> str:
        """The policy's last turn; empty before the first."""
        return self.conversation[-1].content if self.conversation else ""

    def close(self) -> None:
        """Ends the episode: no tokens can be added during grading and training. Raises `IntegrityError` if the tokens
        to train on differ from the sampled ones, turn by turn."""
        self._is_closed = True
        check_recorded(self.sequences, self.spans, self._sampled)

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("the episode is over: end the tasks that talk to the policy before `run` returns")

    def _know(self, message: Message, text: str | None = None) -> None:
        bare = Message(message.role, message.content if text is None else text)
        if bare != message:
            self._known[bare] = message

    def _completed(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None) -> list[Message]:
        """The conversation with the parts `run` need not repeat: the task's tools, the images and other fields of the
        task's messages, the special tokens of earlier turns."""
        if tools is None:
            tools = _tools_of(messages) or self._tools
        bare = [msgspec.structs.replace(message, tools=()) if message.tools else message for message in messages]
        return list(with_tools([self._known.get(message, message) for message in bare], tools))

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> Reply:
        """See `base.Policy`. Raises `EngineError` if the engine aborted the request."""
        self._check_open()
        messages = self._completed(messages, tools)
        prompt_ids, opens_thinking, media = self._prompts.of(messages)
        if self._context_length is not None and len(prompt_ids) >= self._context_length:
            self._keep_full(messages)
            raise ContextFull(
                f"the conversation has {len(prompt_ids)} tokens after {self.num_turns} turns, and "
                f"inference.max_model_len = {self._context_length}"
            )
        completion = await self._generate(prompt_ids, max_tokens, _tools_of(messages), media)
        self._check_open()
        if completion.finish_reason == "abort":
            raise EngineError(f"request {completion.id} was aborted after {len(completion.token_ids)} tokens")
        self.spans.append(record_turn(self.sequences, prompt_ids, completion, media))
        self._sampled.append(completion.token_ids)
        self.truncated |= completion.finish_reason == "length"
        # From the tokens, stop strings included: rewards and later turns see the sampled text.
        text, whole = self._tokenizer.decode_turn(completion.token_ids)
        if opens_thinking:
            text, whole = THINK_OPEN + text, THINK_OPEN + whole
        self._texts |= {whole: text, text: text}
        self.conversation = [*messages, Message("assistant", text)]
        self.num_thinking = max(self.num_thinking, num_thinking(text, completion.token_ids, self._tokenizer))
        content = text if completion.content is None else completion.content
        calls, sizes = tuple(completion.tool_calls), (len(prompt_ids), len(completion.token_ids))
        reply = Reply(text, completion.finish_reason, calls, content, *sizes, whole=whole)
        self._know(reply.message, text)
        return reply

    def record(self, prompt_ids: list[int], completion: Completion, messages: Sequence[Message], most: int) -> None:
        """Takes an agent's turn after `messages`; one of `most` tokens was cut."""
        self._check_open()
        media = self._placed(prompt_ids, messages) if any(message.media for message in messages) else ()
        self.spans.append(record_turn(self.sequences, prompt_ids, completion, media))
        self._sampled.append(completion.token_ids)
        self.truncated |= completion.finish_reason == "length" and len(completion.token_ids) >= most
        text, _ = self._tokenizer.decode_turn(completion.token_ids)
        if self._tokenizer.decode(prompt_ids[-_TAIL_TOKENS:]).rstrip().endswith(THINK_OPEN):
            text = THINK_OPEN + text
        self.conversation = [*messages, Message("assistant", text)]
        self.num_thinking = max(self.num_thinking, num_thinking(text, completion.token_ids, self._tokenizer))

    def _placed(self, prompt_ids: list[int], messages: Sequence[Message]) -> tuple[Media, ...]:
        """The images of a prompt as the engine used it. Raises `IntegrityError` for other tokens than the trainer
        counts."""
        try:
            media = self._tokenizer.place_images(messages, prompt_ids)
        except ValueError:
            media = ()
        kinds = {prompt_ids[image.start] for image in media}
        is_filled = all(set(prompt_ids[each.start : each.start + each.num_tokens]) <= kinds for each in media)
        if not media or not is_filled or sum(map(prompt_ids.count, kinds)) != sum(each.num_tokens for each in media):
            raise IntegrityError(
                "the engine used other tokens for an agent's images than the trainer counts: give both the same image "
                "processor, and no mm_processor_kwargs in inference.options"
            )
        return media

    def _keep_full(self, messages: Sequence[Message]) -> None:
        """Makes the conversation without room the last one, up to its last turn, if it has any. If the episode ends
        here, it is graded by this one; a sub-agent may have spoken since."""
        said = [
            place for place, each in enumerate(messages) if each.role == "assistant" and each.content in self._texts
        ]
        if said:
            last = messages[said[-1]]
            self.conversation = [*messages[: said[-1]], Message("assistant", self._texts[last.content])]

    async def call_tool(self, call: ToolCall) -> ToolResult:
        """See `base.Policy`."""
        self._check_open()
        result = ToolResult(call.error, "arguments") if call.error else await self._call_tool(call)
        self.num_tool_calls += 1
        self.num_tool_failures += bool(result.failure)
        if result.failure and result.details:
            self.tool_error = self.tool_error or f"tool {call.name:.80}:\n{result.details}"
        return result


def _tools_of(messages: Sequence[Message]) -> tuple[dict[str, Any], ...]:
    return next((message.tools for message in messages if message.tools), ())


def following(prompt: Sequence[Message], conversation: Sequence[Message]) -> list[Message]:
    """The messages of a conversation beyond the task's, also if `run` wrote its own in place of the task's."""
    pairs = enumerate(zip(conversation, prompt, strict=False))
    same = next((n for n, (a, b) in pairs if (a.role, a.content) != (b.role, b.content)), len(prompt))
    return list(conversation[same:])


def check_recorded(
    sequences: Sequence[TokenSequence], spans: Sequence[TurnSpan], sampled: Sequence[Sequence[int]]
) -> None:
    """Raises `IntegrityError` unless the tokens to train on are exactly `sampled`, turn by turn."""
    for number, (span, tokens) in enumerate(zip(spans, sampled, strict=True)):
        sequence = sequences[span.sequence]
        place = slice(span.start, span.end)
        if sequence.token_ids[place] != list(tokens) or not all(sequence.mask[place]):
            raise IntegrityError(f"the tokens recorded for turn {number} are not those that the engine sampled")
    num_trained, num_sampled = sum(s.num_trainable for s in sequences), sum(len(tokens) for tokens in sampled)
    if num_trained != num_sampled:
        raise IntegrityError(f"{num_trained} tokens are marked as sampled, and the engine sampled {num_sampled}")


def num_thinking(text: str, token_ids: list[int], tokenizer: Tokenizer) -> int:
    """Number of a turn's sampled tokens before the end of its last `</think>`; all of them if it never closes. `text`
    is the decoded turn, with a `<think>` opened by the template."""
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


def record_turn(
    sequences: list[TokenSequence], prompt_ids: list[int], completion: Completion, media: Sequence[Media] = ()
) -> TurnSpan:
    """Adds a turn to `sequences` in place: to the latest sequence that is a prefix of the prompt, images included,
    otherwise to a new one. Returns the span of its sampled tokens."""
    logprobs = completion.logprobs
    if logprobs is not None and len(logprobs) != len(completion.token_ids):
        raise IntegrityError(
            f"the engine gave {len(logprobs)} log-probabilities for {len(completion.token_ids)} tokens "
            f"of request {completion.id}"
        )
    numbers = range(len(sequences) - 1, -1, -1)
    place = next((i for i in numbers if _continues(prompt_ids, media, sequences[i])), len(sequences))
    if place == len(sequences):
        sequences.append(TokenSequence([], [], []))
    sequence = sequences[place]
    given = prompt_ids[len(sequence) :]
    start = len(prompt_ids)
    sequence.token_ids = [*prompt_ids, *completion.token_ids]
    sequence.media = list(media)
    # Earlier turns keep the experts of their sampling, even if the engine has computed their tokens again since.
    sequence.experts = _joined(sequence.experts, completion.experts) if sequence.experts else completion.experts
    sequence.mask += [False] * len(given) + [True] * len(completion.token_ids)
    if logprobs is None or sequence.logprobs is None:
        sequence.logprobs = None
    else:
        sequence.logprobs += [0.0] * len(given) + logprobs
    for span in completion.versions:
        if not sequence.versions or sequence.versions[-1].version != span.version:
            sequence.versions = [*sequence.versions, VersionSpan(start + span.start, span.version)]
    return TurnSpan(place, start, len(sequence))


def _continues(prompt_ids: list[int], media: Sequence[Media], sequence: TokenSequence) -> bool:
    """Whether a prompt begins with a sequence."""
    pictures = [image.sha256 for image in sequence.media]
    return prompt_ids[: len(sequence)] == sequence.token_ids and pictures == [
        image.sha256 for image in media[: len(pictures)]
    ]


def _joined(choices: ExpertChoices, later: ExpertChoices | None) -> ExpertChoices:
    """`choices`, extended for later tokens by those of a later turn, which begins with the same tokens."""
    if later is None or later.token_bytes != choices.token_bytes or len(later) <= len(choices):
        return choices
    return msgspec.structs.replace(choices, data=choices.data + later.data[len(choices.data) :])
