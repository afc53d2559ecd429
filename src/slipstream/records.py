"""What crosses a process boundary: tasks, rollouts, batches and weight tickets.

Guarantees: every record is a plain `msgspec` struct (no pickle), decodes only with the schema it was
written with, and carries tokens exactly as they were sampled. Nothing here imports anything heavy.

A rollout holds one or more *sequences*. A sequence is one unbroken run of tokens: prompt, sampled tokens
and, in later turns, the environment's tokens between them; `mask` says which were sampled and are
trained on. When a later prompt does not begin with the tokens so far (a template that drops earlier
thinking, say), the conversation continues in a new sequence: tokens are never re-made from text.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec

SCHEMA_VERSION = 1

Role = Literal["system", "user", "assistant", "tool"]
Outcome = Literal[
    "done",  # ended by itself; trained on
    "truncated",  # met the token limit; trained on unless the run says otherwise
    "reward_error",  # the reward raised; never trained on
    "reward_timeout",  # the reward was killed at its deadline; never trained on
    "engine_error",  # the engine failed or refused the request; never trained on
    "environment_error",  # the environment raised; never trained on
    "cancelled",
]
NON_FINITE = "non_finite"
"""The metric of a rollout, or of a batch, that counts metrics which were no finite numbers and were left out."""
TRAINABLE_OUTCOMES: frozenset[str] = frozenset({"done", "truncated"})


class Version(msgspec.Struct, frozen=True, order=True):
    """One state of the policy's weights.

    `lineage` counts resumes: after a crash the same step may be made again and differ. `digest` is the
    digest of all parameter fingerprints, empty while unknown.
    """

    lineage: int
    step: int
    digest: str = ""

    @property
    def name(self) -> str:
        """Short form used in file names and spans, for example `0.12`."""
        return f"{self.lineage}.{self.step}"


class Media(msgspec.Struct, frozen=True):
    """A reference to an image, video or audio clip; the bytes stay where `uri` says, `sha256` proves them."""

    kind: Literal["image", "video", "audio"]
    uri: str
    sha256: str
    start: int = 0
    """Index of the first placeholder token in the sequence."""
    num_tokens: int = 0


class Message(msgspec.Struct, frozen=True):
    """One chat message."""

    role: Role
    content: str
    media: tuple[Media, ...] = ()
    tool_calls: tuple[dict[str, Any], ...] = ()
    tool_call_id: str = ""
    extra: dict[str, Any] = {}
    """Its other fields (`reasoning_content`, `name`), for the chat template; made of JSON types."""
    tools: tuple[dict[str, Any], ...] = ()
    """Of a conversation's first message: the functions that may be called in it, as JSON schemas."""
    carries_loss: bool = True
    """False: SFT does not train on it."""

    def __hash__(self) -> int:
        return hash((self.role, self.content))

    def as_chat(self) -> dict[str, Any]:
        """The dictionary that chat templates expect."""
        chat: dict[str, Any] = {"role": self.role, "content": self.content, **self.extra}
        if self.tool_calls:
            chat["tool_calls"] = list(self.tool_calls)
        if self.tool_call_id:
            chat["tool_call_id"] = self.tool_call_id
        return chat


class Task(msgspec.Struct, frozen=True):
    """One problem: what the policy is asked and what the reward needs to judge the answer."""

    id: str
    prompt: tuple[Message, ...]
    answer: str | None = None
    """The gold answer, if the environment knows one: the SFT target and the `env test` control."""
    info: dict[str, Any] = {}
    """Anything else that the reward reads; must be made of JSON types."""


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """From token index `start` on, the sampled tokens were made by the weights called `version`."""

    start: int
    version: str


class Sequence(msgspec.Struct, forbid_unknown_fields=True):
    """One unbroken run of tokens. All lists have one entry per token."""

    token_ids: list[int]
    mask: list[bool]
    """True where the token was sampled by the policy and is to be trained on."""
    logprobs: list[float] | None = None
    """Behaviour log-probability of each sampled token, as processed by the sampler; 0.0 elsewhere."""
    versions: list[VersionSpan] = []
    advantages: list[float] | None = None
    """Per-token advantages, when whoever made the rollout has them; otherwise the trainer makes them."""
    media: list[Media] = []
    teacher_logprobs: list[float] | None = None
    """Under distillation, the teacher's log-probability of each sampled token at the sampling temperature; 0.0
    elsewhere."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_trainable(self) -> int:
        """Number of tokens that carry loss."""
        return sum(self.mask)


class Rollout(msgspec.Struct, forbid_unknown_fields=True):
    """One attempt at one task, ended by exactly one outcome."""

    id: str
    task_id: str
    group_id: str
    sequences: list[Sequence]
    reward: float
    outcome: Outcome
    metrics: dict[str, float] = {}
    """Reward components and anything else the environment measured."""
    completion: str = ""
    """The text that was graded, for samples and reports."""
    prompt: str = ""
    """The task's last message, for the same."""
    answer: str = ""
    """The task's right answer, for the same; empty where it has none."""
    error: str = ""
    num_turns: int = 1
    seconds: float = 0.0
    num_thinking: int = 0
    """Sampled tokens up to the last `</think>`, of the turn that has most; all of a turn that never closes it."""

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens over all sequences."""
        return sum(sequence.num_trainable for sequence in self.sequences)


class Batch(msgspec.Struct, forbid_unknown_fields=True):
    """What makes the update `version.step -> version.step + 1` (or several, see `updates_per_batch`)."""

    step: int
    version: Version
    rollouts: list[Rollout]
    dropped: dict[str, int] = {}
    """Rollouts that were started for this batch and are not in it, by reason."""
    metrics: dict[str, float] = {}
    schema: int = SCHEMA_VERSION


class ParameterSpec(msgspec.Struct, frozen=True):
    """One Hugging Face parameter: its shape, dtype (torch's name, `bfloat16`) and fingerprint (hex)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    fingerprint: str


class Patch(msgspec.Struct, frozen=True):
    """What changed in a stretch of one parameter: elements by their place, or the whole stretch."""

    name: str
    start: int
    """First element of the stretch, in the flattened parameter."""
    length: int
    """Elements in the stretch."""
    encoding: Literal["gaps8", "gaps16", "whole"]
    """Places as the steps from one element to the next, of one byte or two; or none, and every value."""
    num_values: int


class Delta(msgspec.Struct, frozen=True):
    """A version as what differs from another one, the `base`."""

    base: Version
    patches: tuple[Patch, ...]


class Ticket(msgspec.Struct, frozen=True):
    """The announcement that a version's weights can be applied."""

    version: Version
    bridge: str
    location: str
    """Where the bridge left the weights: a folder, an adapter, a group name."""
    parameters: tuple[ParameterSpec, ...]
    num_bytes: int = 0
    base: tuple[ParameterSpec, ...] = ()
    """When `parameters` are an adapter's: the frozen model below it, which the engine must hold too."""
    delta: Delta | None = None
    """When only changes travel: from which version, and which. `parameters` describe the whole version all the same."""
    changed_fraction: float | None = None
    """Part of the elements that differ from the version published before; None where nobody compared them."""


class ApplyReport(msgspec.Struct, frozen=True):
    """What a receiver did with a ticket. `mismatched` names parameters that differ from the ticket."""

    version: Version
    mismatched: tuple[str, ...] = ()
    unverified: tuple[str, ...] = ()
    transfer_s: float = 0.0
    verify_s: float = 0.0
    num_bytes: int = 0
    stall_s: float = 0.0
    """How long requests that were running got no token: from the last one before the update to the first after it; 0
    when none was running."""
    memory_bytes: int = 0
    """What the engine's workers have allocated on their GPUs, as torch counts it."""

    def and_of(self, base: ApplyReport) -> ApplyReport:
        """One report of an adapter, this one, and of the base below it."""
        return msgspec.structs.replace(
            self,
            mismatched=self.mismatched + base.mismatched,
            unverified=self.unverified + base.unverified,
            verify_s=self.verify_s + base.verify_s,
        )


class SamplingParams(msgspec.Struct, frozen=True):
    """How tokens are drawn; behaviour log-probabilities are those of the distribution after all of this."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 means no limit."""
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


class GenerateRequest(msgspec.Struct, frozen=True):
    """Tokens in. `seed` makes the draw reproducible; `timeout_s` cancels the request inside the engine."""

    id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    seed: int | None = None
    timeout_s: float = 600.0
    group_id: str = ""
    """Requests of one group begin alike: the engine that has computed the beginning for one has it for the others."""
    scores_prompt: bool = False
    """Also return the log-probabilities of the prompt's own tokens, at `sampling.temperature` and among all tokens."""
    is_urgent: bool = False
    """Begun before all that are not and wait: somebody waits for the answer who holds up everything else."""
    images: tuple[bytes, ...] = ()
    """Encoded (PNG, JPEG), one for each image token of the prompt; vLLM puts as many tokens there as an image needs."""


class Completion(msgspec.Struct):
    """Tokens out, with the processed log-probability of each sampled token and the versions that made them."""

    id: str
    token_ids: list[int]
    logprobs: list[float] | None
    finish_reason: Literal["stop", "length", "abort"]
    versions: list[VersionSpan] = []
    text: str = ""
    """The decoded completion up to its stop string, when stop strings were asked for; empty otherwise."""
    error: str = ""
    """Why it was aborted: a passed deadline, or the engine's refusal."""
    contradiction: str = ""
    """What of the engine's answer cannot be true; it then answers nobody any more."""
    prompt_logprobs: list[float] | None = None
    """Of each token of the prompt, when they were asked for; 0.0 for the first, before which nothing comes."""


class EngineHealth(msgspec.Struct, frozen=True):
    """What a running engine says of itself."""

    status: Literal["starting", "ready", "out_of_service"]
    version: Version | None = None
    vllm_version: str = ""
    plugin_version: str = ""
    patches: tuple[str, ...] = ()
    """Changes to vLLM that are in force."""
    patches_left_out: dict[str, str] = {}
    """Those that are not, and why."""
    reason: str = ""
    num_running: int = 0
    info: dict[str, Any] = {}


RecordT = TypeVar("RecordT")


def encode(record: msgspec.Struct) -> bytes:
    """MessagePack bytes of a record."""
    return msgspec.msgpack.encode(record)


def decode(data: bytes, kind: type[RecordT]) -> RecordT:
    """The record of type `kind` in `data`; raises `msgspec.ValidationError` when it is something else, or a batch of
    another schema."""
    record = msgspec.msgpack.decode(data, type=kind)
    if isinstance(record, Batch) and record.schema != SCHEMA_VERSION:
        raise msgspec.ValidationError(f"a batch of schema {record.schema}, and this Slipstream reads {SCHEMA_VERSION}")
    return record
