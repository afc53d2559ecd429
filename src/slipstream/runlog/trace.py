"""Traces a kept rollout: each token to the version that sampled it, its digest and the files that hold it; and the
rollout to the batch and update it was trained in. Reads the run folder only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from slipstream.errors import ConfigError, DataError
from slipstream.records import TurnSpan
from slipstream.runlog.files import Row, whole_lines
from slipstream.runlog.record import RunRecord
from slipstream.runlog.samples import are_ranges, sample_id


@dataclass(frozen=True)
class VersionTrace:
    """One version of the weights."""

    name: str
    digest: str
    """Digest of all parameter fingerprints; empty if the run did not record it."""
    verified: bool
    """The engine proved that it held exactly these weights when it began to serve them."""
    held_by: str
    """Folder below the run's, or the start model, that holds these weights; empty if none does."""
    note: str = ""
    """How to obtain weights that no folder holds."""


@dataclass(frozen=True)
class SpanTrace:
    """Consecutive sampled tokens of one version."""

    sequence: int
    start: int
    end: int
    """Positions in the sequence, prompt tokens included; `end` is exclusive."""
    first: int
    """Index of the first of them among all sampled tokens of the rollout, from 0."""
    version: str
    mean_logprob: float | None
    request: int
    """Number of their turn, or of an agent's request, from 0."""


@dataclass(frozen=True)
class TokenTrace:
    """One sampled token."""

    number: int
    sequence: int
    position: int
    token_id: int
    logprob: float | None
    version: str
    request: int


@dataclass(frozen=True)
class Trace:
    """One kept rollout."""

    id: str
    task: str
    split: str
    """`train` or `eval`."""
    step: int
    """Step of its batch, from 0; for a held-out rollout, the evaluated version."""
    lineage: int
    reward: float | None
    outcome: str
    advantage: float | None
    carries_loss: bool | None
    """None if the run did not record it."""
    update: str
    """The version that its batch made, such as `0.3`; empty if it made none."""
    loss: float | None
    """Loss of that batch."""
    num_sampled: int
    spans: tuple[SpanTrace, ...]
    versions: tuple[VersionTrace, ...]
    token: TokenTrace | None = None
    note: str = ""


class _Tokens(msgspec.Struct):
    token_ids: list[int]
    sampled: list[tuple[int, int]]
    versions: list[tuple[int, str]] = []
    logprobs: list[float] = []


class _Place(msgspec.Struct):
    step: int
    lineage: int
    id: str = ""
    split: str = "train"


class _Sample(_Place):
    task: str = ""
    reward: float | None = None
    outcome: str = ""
    version: str = ""
    advantage: float | None = None
    carries_loss: bool | None = None
    sequences: list[_Tokens] = []
    turn_spans: list[TurnSpan] = []


def trace(record: RunRecord, wanted: str, token: int | None = None) -> Trace:
    """Traces the sample with the id `wanted`, see `sample_id`; with `token`, also the sampled token of that index.
    Raises ConfigError if there is none."""
    folder = record.summary.folder
    sample = _with_tokens(_find(_samples(record), wanted, folder), folder / "samples.jsonl")
    spans, tokens = _follow(sample)
    if token is not None and not 0 <= token < len(tokens):
        there = f"0 to {len(tokens) - 1}" if tokens else "none"
        raise ConfigError(f"sample {wanted} has no sampled token {token}: there are {there}")
    names = dict.fromkeys(span.version for span in spans) or {sample.version: None}
    row = next((row for row in record.rows if row["step"] == sample.step + 1), {}) if sample.split == "train" else {}
    was_trained = bool(row) and not row.get("train/skipped")
    return Trace(
        id=sample.id,
        task=sample.task,
        split=sample.split,
        step=sample.step,
        lineage=sample.lineage,
        reward=sample.reward,
        outcome=sample.outcome,
        advantage=sample.advantage,
        carries_loss=sample.carries_loss,
        update=f"{sample.lineage}.{sample.step + 1}" if was_trained else "",
        loss=row.get("train/loss") if was_trained else None,
        num_sampled=len(tokens),
        spans=tuple(spans),
        versions=tuple(_version(record, name) for name in names if name),
        token=tokens[token] if token is not None else None,
        note="" if sample.sequences else "its tokens were not kept: all that is known is the version of its batch",
    )


def _samples(record: RunRecord) -> dict[str, _Sample]:
    """Samples by id."""
    try:
        found = [msgspec.convert(sample, _Sample) for sample in record.samples]
    except msgspec.ValidationError as error:
        path = record.summary.folder / "samples.jsonl"
        raise DataError(f"{path} has a line that is no sample of ours ({error}): remove that line") from error
    for sample in found:
        sample.id = sample_id(sample.id, sample.step)
    return {sample.id: sample for sample in found}


def _find(samples: dict[str, _Sample], wanted: str, folder: Path) -> _Sample:
    if wanted in samples:
        return samples[wanted]
    if not samples:
        raise ConfigError(f"{folder} kept no sample: name a run of reinforcement learning that has made a step")
    raise ConfigError(
        f"{folder} kept no sample {wanted}: name one of {_some(list(samples))}, as samples.jsonl and slipstream report "
        "have them (run.save_samples says how many are kept)"
    )


def _with_tokens(sample: _Sample, path: Path) -> _Sample:
    """The sample with the tokens in its line."""
    same = msgspec.json.Decoder(_Place)
    place = _Place(sample.step, sample.lineage, sample.id, sample.split)
    for number, line in whole_lines(path):
        try:
            found = same.decode(line)
            found.id = sample_id(found.id, found.step)
            if found == place:
                return msgspec.structs.replace(msgspec.json.decode(line, type=_Sample), id=found.id)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if sample.id.encode() in line:
                raise DataError(f"{path}, line {number} is no sample of ours ({error}): remove that line") from error
    return sample


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _follow(sample: _Sample) -> tuple[list[SpanTrace], list[TokenTrace]]:
    """Every sampled token with its version, and the spans of tokens with one version."""
    spans: list[SpanTrace] = []
    tokens: list[TokenTrace] = []
    for number, sequence in enumerate(sample.sequences):
        starts = [*sequence.versions, (len(sequence.token_ids), "")]
        logprobs = iter(sequence.logprobs)
        if not are_ranges(sequence.sampled, len(sequence.token_ids)):
            raise DataError(f"sample {sample.id} has sampled tokens that it does not hold: remove its line")
        for begin, end in sequence.sampled:
            for position in range(begin, end):
                makers = [name for start, name in starts if start <= position]
                version = makers[-1] if makers else sample.version
                token_id = sequence.token_ids[position]
                asked = _request_of(sample.turn_spans, number, position)
                logprob = next(logprobs, None)
                tokens.append(TokenTrace(len(tokens), number, position, token_id, logprob, version, asked))
    begin = 0
    for number, token in enumerate(tokens):
        after = tokens[number + 1] if number + 1 < len(tokens) else None
        expected = (token.sequence, token.position + 1, token.version, token.request)
        if after is None or (after.sequence, after.position, after.version, after.request) != expected:
            part = tokens[begin : number + 1]
            known = [one.logprob for one in part if one.logprob is not None]
            mean = sum(known) / len(known) if known else None
            place = (token.sequence, part[0].position, token.position + 1)
            spans.append(SpanTrace(*place, begin, token.version, mean, token.request))
            begin = number + 1
    return spans, tokens


def _request_of(spans: Sequence[TurnSpan], sequence: int, position: int) -> int:
    own = (n for n, span in enumerate(spans) if span.sequence == sequence and span.start <= position < span.end)
    return next(own, 0)


def _version(record: RunRecord, name: str) -> VersionTrace:
    published = [event for event in record.events if event["kind"] == "publish" and event.get("version") == name]
    digest = str(published[-1].get("digest", "")) if published else ""
    verified = any(
        event["kind"] == "apply" and event.get("version") == name and event.get("digest") == digest
        for event in record.events
    )
    held_by = _holder(record, name, digest)
    return VersionTrace(name, digest, verified, held_by, "" if held_by else _how_to_get(record, name))


_WHOLE = ("model.safetensors", "adapter_model.safetensors")
"""File of a published version that can be deployed by itself."""


def _holder(record: RunRecord, name: str, digest: str) -> str:
    folder = record.summary.folder
    lineage, _, step = name.partition(".")
    # A resumed lineage begins with the weights of the checkpoint that it was resumed from.
    resumed = {
        f"checkpoints/{event['checkpoint']}"
        for event in record.events
        if event["kind"] == "resume" and (str(event["lineage"]), str(event["step"])) == (lineage, step)
        if event.get("checkpoint")
    }
    for path, event in _checkpoints(record).items():
        same = digest and event.get("digest") == digest
        if same or path in resumed or (str(event["lineage"]), str(event.get("step"))) == (lineage, step):
            return path
    # Other folders hold only the changes since the previous version.
    if any((folder / "weights" / name / file).is_file() for file in _WHOLE):
        return f"weights/{name}"
    if name == "0.0":
        return next((setting.value.strip('"') for setting in record.settings if setting.name == "model.path"), "")
    return ""


def _checkpoints(record: RunRecord) -> dict[str, Row]:
    """Existing checkpoints by folder, each with the event of its writing."""
    found = {str(event.get("path")): event for event in record.events if event["kind"] == "checkpoint"}
    folder = record.summary.folder
    return {path: event for path, event in found.items() if (folder / path / "manifest.json").is_file()}


def _how_to_get(record: RunRecord, name: str) -> str:
    number = name.partition(".")[2]
    step = int(number) if number.isdecimal() else 0
    before = [
        (event["step"], path)
        for path, event in _checkpoints(record).items()
        if isinstance(event.get("step"), int) and event["step"] < step
    ]
    near = f"; the nearest before it is {max(before)[1]}" if before else ""
    return f"no folder holds it any more{near}: a run with run.checkpoint_every = 1 and more keep_weights keeps it"
