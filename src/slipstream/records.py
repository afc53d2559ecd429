"""Records sent between processes: tasks, rollouts, batches and weight tickets.

Every record is a `msgspec` struct (no pickle), decodes only with its own schema, and holds tokens as they were sampled.

A rollout holds one or more *sequences*. A sequence is one contiguous run of tokens: prompt, sampled tokens and, in
later turns, the environment's tokens between them. `mask` marks the sampled tokens, the only trained ones. If a later
prompt does not begin with the tokens so far (for example because a template drops earlier thinking), the conversation
continues in a new sequence: tokens are never re-made from text.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from itertools import compress
from typing import Any, Literal, TypeVar, cast

import msgspec

SCHEMA_VERSION = 3
"""A batch's. 1 had fields for advantages and the teacher's log-probabilities; it is read."""

StreamType = Literal["float64", "float32", "int64"]
_CODES: dict[StreamType, Literal["d", "f", "q"]] = {"float64": "d", "float32": "f", "int64": "q"}
Role = Literal["system", "user", "assistant", "tool"]
Outcome = Literal[
    "done",  # ended by itself; trained on
    "truncated",  # met the token limit; trained on unless the run says otherwise
    "reward_error",  # the reward raised; never trained on
    "reward_timeout",  # the reward was killed at its deadline; never trained on
    "engine_error",  # the engine failed or refused the request; never trained on
    "environment_error",  # the environment raised; never trained on
    "prompt_mismatch",  # the engine expanded a prompt with images to other tokens; never trained on
    "no_tokens",  # ended before the policy's first turn; neither graded nor trained on, and no failure
    "cancelled",
]
Stop = Literal[
    "answer",  # the policy ended its last turn by itself
    "turn_limit",  # the environment's largest number of turns
    "tool_limit",  # the largest number of tool calls
    "length",  # a turn met its token limit
    "context_full",  # the conversation left no room for another turn, or for the rest of one
    "timeout",  # the environment took too long between two turns
    "error",  # the environment, its reward or the engine failed
    "cancelled",
]
"""Why an episode ended."""
AbortCause = Literal[
    "",  # not aborted, or nobody says why: never tried again
    "aborted",  # vLLM dropped it
    "refused",  # the engine was out of service, before it began or when it could have answered
    "late",  # its deadline passed
    "invalid",  # vLLM cannot compute it: a prompt longer than the context, a parameter out of range; never tried again
]
"""Why a request has no completion."""
NON_FINITE = "non_finite"
"""Metric of a rollout or batch: how many metrics were left out because they were not finite."""
TRAINABLE_OUTCOMES: frozenset[str] = frozenset({"done", "truncated"})
REQUEST_HEADER = "x-slipstream-request"
"""HTTP header with the number of an agent's request in its episode."""
IMAGE_MARK = "<image>"
"""Stands in a message's content at the place of each of its images."""


class Version(msgspec.Struct, frozen=True, order=True):
    """One version of the policy's weights. `lineage` counts resumes: after a crash a step may be repeated with another
    result. `digest` is the digest of all parameter fingerprints; empty while unknown."""

    lineage: int
    step: int
    digest: str = ""

    @property
    def name(self) -> str:
        """Short form used in file names and spans, for example `0.12`."""
        return f"{self.lineage}.{self.step}"


class Media(msgspec.Struct, frozen=True):
    """A reference to an image, video or audio clip: the bytes are at `uri`, with the digest `sha256`."""

    kind: Literal["image", "video", "audio"]
    uri: str
    """The absolute path of a file, or a `data:` URI."""
    sha256: str
    start: int = 0
    """Index of the first placeholder token in the sequence."""
    num_tokens: int = 0
    """Number of placeholder tokens, without gaps."""
    width: int = 0
    """In pixels, as it was read."""
    height: int = 0
    grid: tuple[int, int, int] = (0, 0, 0)
    """Frames, rows and columns of the placeholder tokens; zeros if positions do not depend on them."""
    sees_itself: bool = False
    """Whether all of its tokens attend to one another, also forwards."""


class ToolCall(msgspec.Struct, frozen=True):
    """One call of a tool, as the policy wrote it. `error`: why it cannot be read; it has no arguments then."""

    name: str
    arguments: dict[str, Any] = {}
    id: str = ""
    error: str = ""

    def as_chat(self) -> dict[str, Any]:
        """Its dictionary in `tool_calls`, as chat templates expect it."""
        call: dict[str, Any] = {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}
        return {"id": self.id, **call} if self.id else call


class Message(msgspec.Struct, frozen=True):
    """One chat message."""

    role: Role
    content: str
    media: tuple[Media, ...] = ()
    """Its images, one for each `IMAGE_MARK` in the content; without any, the mark is plain text."""
    tool_calls: tuple[dict[str, Any], ...] = ()
    tool_call_id: str = ""
    extra: dict[str, Any] = {}
    """Other fields (`reasoning_content`, `name`) for the chat template; JSON types."""
    tools: tuple[dict[str, Any], ...] = ()
    """On a conversation's first message: its tools, as JSON schemas."""
    carries_loss: bool = True
    """False: SFT masks it out."""

    def __hash__(self) -> int:
        return hash((self.role, self.content))

    def as_chat(self) -> dict[str, Any]:
        """Its dictionary, as chat templates expect it."""
        content = _content_parts(self.content) if self.media else self.content
        chat: dict[str, Any] = {"role": self.role, "content": content, **self.extra}
        if self.tool_calls:
            chat["tool_calls"] = list(self.tool_calls)
        if self.tool_call_id:
            chat["tool_call_id"] = self.tool_call_id
        return chat


def _content_parts(content: str) -> list[dict[str, str]]:
    """The parts of a content with images, as chat templates expect them."""
    parts: list[dict[str, str]] = []
    for place, text in enumerate(content.split(IMAGE_MARK)):
        parts += [{"type": "image"}] if place else []
        parts += [{"type": "text", "text": text}] if text else []
    return parts


class Task(msgspec.Struct, frozen=True):
    """One task: the prompt, and data for the reward to grade a completion."""

    id: str
    prompt: tuple[Message, ...]
    answer: str | None = None
    """The gold answer, if the environment has one: the SFT target, and the control of `env test`."""
    info: dict[str, Any] = {}
    """Further data for the reward; JSON types."""
    part: str = ""
    """Its part of a mixture; empty without a mixture."""

    @property
    def source(self) -> str:
        """Its group in metrics and validation: `part/data_source`, its part of a mixture and its data set
        (`data_source`, as in verl's rows). Only one of them if it lacks the other; empty without both."""
        return "/".join(filter(None, (self.part, str(self.info.get("data_source") or ""))))


class TurnSpan(msgspec.Struct, frozen=True, array_like=True):
    """The sampled tokens of one turn: `[start, end)` of sequence number `sequence` of a rollout."""

    sequence: int
    start: int
    end: int


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Sampled tokens from index `start` on were generated by the weights of `version`."""

    start: int
    version: str


class ExpertChoices(msgspec.Struct, frozen=True, array_like=True):
    """Experts chosen by the engine's routers for the first tokens of a sequence, in an MoE model. `data`: ids of
    `width` bytes, little-endian, token by token, `per_token` of each layer; a layer without experts has zeros."""

    data: bytes
    num_layers: int
    per_token: int
    width: Literal[1, 2] = 1

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's ids."""
        return self.num_layers * self.per_token * self.width

    def __len__(self) -> int:
        return len(self.data) // max(1, self.token_bytes)


class Stream(msgspec.Struct, frozen=True, array_like=True):
    """Values of a sequence's trained tokens: `width` numbers for each true place of its `mask`. `data`: the numbers,
    little-endian, token by token. float64 becomes float32 in a row of the trainer, not before."""

    data: bytes
    dtype: StreamType = "float64"
    width: int = 1

    @classmethod
    def of(cls, values: Iterable[float], dtype: StreamType = "float64", width: int = 1) -> Stream:
        """A stream of these numbers."""
        return cls(array(_CODES[dtype], values).tobytes(), dtype, width)

    def tolist(self) -> list[float]:
        """All numbers."""
        return list(memoryview(self.data).cast(_CODES[self.dtype]))

    def where(self, mask: Iterable[bool]) -> Stream:
        """The numbers of the tokens at true places of `mask`."""
        size = len(self.data) // max(1, len(self))
        tokens = (self.data[start : start + size] for start in range(0, len(self.data), max(1, size)))
        return Stream(b"".join(compress(tokens, mask)), self.dtype, self.width)

    def __len__(self) -> int:
        return len(self.data) // (array(_CODES[self.dtype]).itemsize * self.width)


class Likeliest(msgspec.Struct, frozen=True, array_like=True):
    """The k likeliest tokens of each place, the likeliest first, and their log-probabilities."""

    token_ids: Stream
    """int64 of width k."""
    logprobs: Stream
    """float32 of width k."""

    @classmethod
    def of(cls, places: Iterable[Mapping[int, float] | None], number: int) -> Likeliest:
        """The `number` likeliest tokens of each place, from log-probabilities of at least as many. A place without any
        has zeros. Raises ValueError for too few."""
        token_ids, logprobs = array("q"), array("f")
        for place in places:
            ranked = sorted(place.items(), key=lambda each: -each[1]) if place is not None else [(0, 0.0)] * number
            if len(ranked) < number:
                raise ValueError(f"{len(ranked)} of the {number} likeliest tokens")
            token_ids.extend(token for token, _ in ranked[:number])
            logprobs.extend(logprob for _, logprob in ranked[:number])
        return cls(Stream(token_ids.tobytes(), "int64", number), Stream(logprobs.tobytes(), "float32", number))

    def where(self, mask: Collection[bool]) -> Likeliest:
        """The tokens at true places of `mask`."""
        return Likeliest(self.token_ids.where(mask), self.logprobs.where(mask))


class Sequence(msgspec.Struct, forbid_unknown_fields=True):
    """One contiguous run of tokens. All lists have one entry per token."""

    token_ids: list[int]
    mask: list[bool]
    """True for tokens sampled by the policy, to be trained on."""
    logprobs: list[float] | None = None
    """Behaviour log-probability of each sampled token, as processed by the sampler; 0.0 elsewhere."""
    versions: list[VersionSpan] = []
    streams: dict[str, Stream] = {}
    """More values of the trained tokens, by name. `advantages` take precedence over the trainer's own.
    `teacher_logprobs` are of the sampling temperature, and so are the teacher's likeliest tokens, `teacher_top_ids` and
    `teacher_top_logprobs`. A loss reads any of them."""
    media: list[Media] = []
    experts: ExpertChoices | None = None
    """Under `model.replay_experts`; of the first tokens, mostly all but the last."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_trainable(self) -> int:
        """Number of tokens with loss."""
        return self.mask.count(True)

    def values(self, name: str) -> list[float] | None:
        """The numbers of a stream; None without it."""
        return self.streams[name].tolist() if name in self.streams else None

    def put(self, name: str, values: Iterable[float]) -> None:
        """Set a stream to the `values` of the trained tokens. Raises ValueError unless there is one for each token of
        the sequence, trained or not."""
        self.streams[name] = Stream.of(value for value, trained in zip(values, self.mask, strict=True) if trained)

    def ages(self, step: int) -> Counter[int]:
        """Number of sampled tokens by how many versions they are behind `step`."""
        found: Counter[int] = Counter()
        for index, span in enumerate(self.versions):
            end = self.versions[index + 1].start if index + 1 < len(self.versions) else len(self)
            found[step - int(span.version.split(".")[1])] += self.mask[span.start : end].count(True)
        return found


class Rollout(msgspec.Struct, forbid_unknown_fields=True, dict=True):
    """One attempt at one task with its reward: one completion, or one episode of several turns. It has exactly one
    outcome."""

    id: str
    task_id: str
    group_id: str
    sequences: list[Sequence]
    reward: float
    outcome: Outcome
    metrics: dict[str, float] = {}
    """Reward components, and other measurements of the environment."""
    completion: str = ""
    """The graded text, for samples and reports."""
    prompt: str = ""
    """The task's last message, for samples and reports."""
    answer: str = ""
    """The task's gold answer, for samples and reports; empty if it has none."""
    source: str = ""
    """The task's `source`."""
    error: str = ""
    stop: Stop | Literal[""] = ""
    """Why the episode ended; empty in records of earlier versions."""
    num_turns: int = 1
    turn_spans: list[TurnSpan] = []
    """The sampled tokens of each turn, ordered by the turns' ends; empty in records of earlier versions."""
    turn_rewards: list[float] = []
    """A reward for each turn, if the environment gives them; `reward` includes their sum."""
    turns: list[Message] = []
    """The messages after the task's prompt in an episode of several turns, for samples and reports."""
    seconds: float = 0.0
    num_thinking: int = 0
    """Sampled tokens up to the last `</think>`, of the turn with the most; all of a turn without `</think>`."""

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens over all sequences."""
        return sum(sequence.num_trainable for sequence in self.sequences)


class Batch(msgspec.Struct, forbid_unknown_fields=True):
    """The rollouts of one training step: batch k makes version k + 1 (in several optimizer steps under
    `updates_per_batch`); `version` is version k."""

    step: int
    version: Version
    rollouts: list[Rollout]
    dropped: dict[str, int] = {}
    """Rollouts started for this batch but not in it, by reason."""
    metrics: dict[str, float] = {}
    draws: list[int] = []
    """Under `training.order = "ready"`, the draws of the task order used up by this batch."""
    schema: int = SCHEMA_VERSION


class ParameterSpec(msgspec.Struct, frozen=True):
    """One Hugging Face parameter: its shape, dtype (torch's name, `bfloat16`) and fingerprint (hex)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    fingerprint: str


class Patch(msgspec.Struct, frozen=True):
    """The changed elements of one stretch of a parameter: by their positions, or the whole stretch."""

    name: str
    start: int
    """First element of the stretch, in the flattened parameter."""
    length: int
    """Elements in the stretch."""
    encoding: Literal["gaps8", "gaps16", "whole"]
    """Positions as distances from one changed element to the next, of one or two bytes; or no positions and every
    value."""
    num_values: int


class Delta(msgspec.Struct, frozen=True):
    """A version as its difference from another version, the `base`."""

    base: Version
    patches: tuple[Patch, ...]


class Ticket(msgspec.Struct, frozen=True):
    """Announces a version with weights ready to apply."""

    version: Version
    bridge: str
    location: str
    """The bridge's place of the weights: a folder, an adapter, the name of a process group."""
    parameters: tuple[ParameterSpec, ...]
    num_bytes: int = 0
    base: tuple[ParameterSpec, ...] = ()
    """If `parameters` are an adapter's: the frozen base model. The engine must hold it too."""
    delta: Delta | None = None
    """If only changes are sent: the base version and the changes. `parameters` still describe the whole version."""
    changed_fraction: float | None = None
    """Fraction of elements changed since the previous published version; None if they were not compared."""


class ApplyReport(msgspec.Struct, frozen=True):
    """A receiver's report on a ticket. `mismatched` names parameters with differences from the ticket."""

    version: Version
    mismatched: tuple[str, ...] = ()
    unverified: tuple[str, ...] = ()
    transfer_s: float = 0.0
    verify_s: float = 0.0
    num_bytes: int = 0
    stall_s: float = 0.0
    """How long running requests got no token: from the last token before the update to the first after it; 0 if none
    was running."""
    memory_bytes: int = 0
    """Memory allocated on the GPUs of all workers of an engine, as torch counts it; of several engines the most."""

    def and_of(self, base: ApplyReport) -> ApplyReport:
        """Combines the report on an adapter, this one, with the report on its base."""
        return msgspec.structs.replace(
            self,
            mismatched=self.mismatched + base.mismatched,
            unverified=self.unverified + base.unverified,
            verify_s=self.verify_s + base.verify_s,
        )


class SamplingParams(msgspec.Struct, frozen=True):
    """Sampling parameters; behaviour log-probabilities are of the distribution after all of them."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 means no limit."""
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


class GenerateRequest(msgspec.Struct, frozen=True):
    """A request for one completion. `seed` makes sampling reproducible; `timeout_s` cancels the request inside the
    engine."""

    id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    seed: int | None = None
    timeout_s: float = 600.0
    group_id: str = ""
    """Requests of one group share a prompt prefix, prefilled once by the engine."""
    scores_prompt: bool = False
    """Also return the log-probabilities of the prompt's tokens, at `sampling.temperature` over the whole vocabulary."""
    num_likeliest: int = 0
    """With these, so many of the likeliest tokens in the place of each prompt token."""
    is_urgent: bool = False
    """Scheduled before other waiting requests."""
    tools: tuple[dict[str, Any], ...] = ()
    """The conversation's tools as JSON schemas; the completion's calls are then parsed, in the model's own format."""
    images: tuple[bytes, ...] = ()
    """Encoded images (PNG, JPEG), one for each image token of the prompt; vLLM replaces the token by as many as the
    image needs. The completion then has `prompt_ids`."""


class Completion(msgspec.Struct):
    """A completion: tokens, the processed log-probability of each, and their versions of the weights."""

    id: str
    token_ids: list[int]
    logprobs: list[float] | None
    finish_reason: Literal["stop", "length", "abort"]
    versions: list[VersionSpan] = []
    tool_calls: list[ToolCall] = []
    """The calls in it, if the request had tools."""
    content: str | None = None
    """Its text apart from the calls, if the request had tools."""
    error: str = ""
    """Why it was aborted: its deadline passed, or the engine refused it."""
    cause: AbortCause = ""
    """The same for programs."""
    contradiction: str = ""
    """The contradiction in the engine's answer; the engine then answers no further requests."""
    prompt_logprobs: list[float] | None = None
    """Log-probability of each prompt token, if requested; 0.0 for the first, without context."""
    likeliest: Likeliest | None = None
    """The likeliest tokens in the place of each prompt token, if requested; zeros for the first."""
    parser_failure: str = ""
    """The tool parser's exception on it; its calls are then read without the parser, as far as possible."""
    prompt_ids: list[int] | None = None
    """The prompt's tokens as the engine used them, if the request had images."""
    experts: ExpertChoices | None = None
    """For all tokens of prompt and completion but the last, if the engine was asked for them."""


class SessionOpening(msgspec.Struct, frozen=True):
    """Opens a session of an agent in an engine: requests with this `key` are recorded, and sampled by `sampling` with
    seeds made from `seed`."""

    key: str
    sampling: SamplingParams
    seed: int
    is_urgent: bool = False
    template_kwargs: dict[str, Any] = {}
    """Variables of the chat template, unless a request sets them itself."""
    system_prompt: str = ""
    """Precedes a conversation without a system message."""
    names: tuple[str, ...] = ()
    """Names for the model in its requests."""


class SessionTurn(msgspec.Struct, frozen=True):
    """One answer of an engine in a session, as it was sampled."""

    request: int
    """The request's number, as the gateway counts them."""
    prompt_ids: list[int]
    """The prompt's tokens as the engine used them."""
    completion: Completion
    given: list[dict[str, Any]] = []
    """Messages of the request; after the answer of the continued turn, if it continues one."""
    answer: dict[str, Any] = {}
    """The agent's message."""
    continues: int = -1
    """Index of the continued turn among the session's; -1: none."""
    overridden: dict[str, float | str] = {}
    """Sampling values of the request with others in the run; empty for a setting without a short value."""


class EngineHealth(msgspec.Struct, frozen=True):
    """State of a running engine."""

    status: Literal["starting", "ready", "out_of_service"]
    version: Version | None = None
    vllm_version: str = ""
    plugin_version: str = ""
    patches: tuple[str, ...] = ()
    """Active patches to vLLM."""
    patches_left_out: dict[str, str] = {}
    """Inactive patches, and why."""
    reason: str = ""
    num_running: int = 0
    info: dict[str, Any] = {}


RecordT = TypeVar("RecordT")
_KEPT = "encoded"  # a rollout's attribute for its bytes, and no field


def encode(record: msgspec.Struct) -> bytes:
    """MessagePack bytes of a record."""
    return msgspec.msgpack.encode(record)


def without_surrogates(value: Any) -> Any:
    """`value` with every unpaired surrogate in its texts escaped, to be encoded."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        entries = cast("dict[Any, Any]", value).items()
        return {without_surrogates(key): without_surrogates(item) for key, item in entries}
    if isinstance(value, list | tuple):
        items = cast("list[Any] | tuple[Any, ...]", value)
        return type(items)(without_surrogates(item) for item in items)
    if isinstance(value, msgspec.Struct):
        fields = {name: without_surrogates(getattr(value, name)) for name in value.__struct_fields__}
        return msgspec.structs.replace(value, **fields)
    return value


def encode_rollouts(rollouts: Collection[Rollout], *, keep: bool = False) -> bytes:
    """MessagePack bytes of a list of rollouts. With `keep` each keeps its own for `encode_kept`, and must not be
    changed until then; a copy does not have them. Unpaired surrogates, as in the text of a reward's error, are escaped
    in the rollouts too."""
    encoded = [_encoded(rollout) for rollout in rollouts]
    if keep:
        for rollout, data in zip(rollouts, encoded, strict=True):
            vars(rollout)[_KEPT] = data
    return msgspec.msgpack.encode([msgspec.Raw(data) for data in encoded])


def _encoded(rollout: Rollout) -> bytes:
    try:
        return msgspec.msgpack.encode(rollout)
    except UnicodeEncodeError:
        for name in rollout.__struct_fields__:
            setattr(rollout, name, without_surrogates(getattr(rollout, name)))
        return msgspec.msgpack.encode(rollout)


def encode_kept(record: Any) -> bytes:
    """The same bytes as by `encode`. Rollouts with kept bytes in a batch are not encoded again."""
    if isinstance(record, Batch):
        kept: list[Any] = [
            msgspec.Raw(vars(each)[_KEPT]) if vars(each).get(_KEPT) else each for each in record.rollouts
        ]
        record = msgspec.structs.replace(record, rollouts=kept)
    return msgspec.msgpack.encode(record)


def decode(data: bytes, kind: type[RecordT]) -> RecordT:
    """Decodes a record of type `kind`; raises `msgspec.ValidationError` for anything else, and for a batch of another
    schema."""
    if kind is not Batch:
        return msgspec.msgpack.decode(data, type=kind)
    schema = msgspec.msgpack.decode(data, type=_Numbered).schema
    if schema in (1, 2):
        return msgspec.convert(_upgraded(msgspec.msgpack.decode(data), schema), kind)
    if schema != SCHEMA_VERSION:
        raise msgspec.ValidationError(f"a batch of schema {schema}, and this Slipstream reads 1 to {SCHEMA_VERSION}")
    return msgspec.msgpack.decode(data, type=kind)


class _Numbered(msgspec.Struct):
    schema: int = SCHEMA_VERSION


def _upgraded(batch: dict[str, Any], schema: int) -> dict[str, Any]:
    """A batch of schema 1 or 2 as one of today's."""
    for rollout in batch["rollouts"]:
        for sequence in rollout["sequences"]:
            sequence.pop("detection", None)
            if schema == 2:
                continue
            given = {name: sequence.pop(name, None) for name in ("advantages", "teacher_logprobs")}
            sequence["streams"] = {
                name: Stream.of(compress(values, sequence["mask"])) for name, values in given.items() if values
            }
    return batch | {"schema": SCHEMA_VERSION}
