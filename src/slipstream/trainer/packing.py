"""From sequences to micro-batches of tensors.

Guarantees: every trainable token of every sequence appears exactly once. A sequence is never split. Tokens after the
last trainable one influence no loss and are left out. A prompt of several sequences in a micro-batch, or its common
beginning, is computed once if this is faster. The number of micro-batches changes rounding only: the step gives the
divisors.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress
from typing import TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from slipstream import records
from slipstream.algo.balancing import pack, pack_evenly, split
from slipstream.algo.prefixes import common_prefix, prefix_groups
from slipstream.errors import TrainingError
from slipstream.trainer.attention.row_images import RowImage, RowImages
from slipstream.trainer.attention.row_layout import SegmentLayout, segment_layout, to_device
from slipstream.trainer.distributed.context import ContextGroup, RowShard, shard_targets, shard_tokens
from slipstream.trainer.experts.row_choices import RowChoices, RowExperts

T = TypeVar("T")
_DTYPES: dict[records.StreamType, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "int64": torch.int64,
}
_NAMES: dict[torch.dtype, records.StreamType] = {dtype: name for name, dtype in _DTYPES.items()}
_LONGEST_SHARING = 256
"""Longest sequence with a shared prompt on a CPU, in tokens beyond three times this prompt. A longer one is faster
alone: the causal attention kernel skips masked positions, the kernel with an explicit mask does not (measured with a
model of 0.8 million parameters)."""
_MIN_SAVED = 0.2
"""Different prompts share their beginning if this saves at least this fraction of the group's tokens: each
continuation's attention then reads keys from two places."""
_MOST_KEYS = 8
"""Most keys gathered by a group of different prompts, as a multiple of its tokens: each continuation reads the shared
keys again, and they take memory in every attention layer."""
_SILENT_SAMPLE = 8
"""One in this many rollouts of advantage 0 is computed all the same, for the metrics."""


@dataclass
class StepBatch:
    """The sequences of one optimizer step, with the objective's inputs for each."""

    sequences: list[records.Sequence]
    advantages: list[float] | None = None
    """One for each sequence; its own per-token advantages, if any, replace it."""
    silent: list[records.Sequence] = field(default_factory=list[records.Sequence])
    """Uncomputed sequences of gradient exactly 0; they count in the loss's divisor."""
    rollout_tokens: list[int] | None = None
    """Per sequence, the trainable tokens of its whole rollout. None: each sequence is a rollout."""
    num_further: int = 0
    """Sequences with a trainable token beyond the first of each rollout."""

    def only(self, places: list[int]) -> StepBatch:
        """The sequences at `places`, with their advantages and rollout tokens."""

        def of(values: list[T] | None) -> list[T] | None:
            return None if values is None else [values[place] for place in places]

        sequences = [self.sequences[place] for place in places]
        return StepBatch(sequences, of(self.advantages), rollout_tokens=of(self.rollout_tokens))

    def fill(self, name: str, values: Sequence[Tensor]) -> None:
        """Give each sequence a stream, `[N]` or `[N, k]`. The records of others stay as they are."""
        self.sequences = [
            msgspec.structs.replace(sequence, streams={**sequence.streams, name: stream_of(own)})
            for sequence, own in zip(self.sequences, values, strict=True)
        ]

    def has(self, name: str) -> bool:
        """Whether all sequences have the stream `name`."""
        return all(name in sequence.streams for sequence in self.sequences)

    @property
    def num_tokens(self) -> int:
        """Trainable tokens."""
        return sum(sequence.num_trainable for sequence in (*self.sequences, *self.silent))

    @property
    def num_computed(self) -> int:
        """Trainable tokens of the computed sequences."""
        return sum(sequence.num_trainable for sequence in self.sequences)

    @property
    def has_signal(self) -> bool:
        """Whether any sequence has a nonzero advantage or a teacher's log-probabilities; without, the policy gradient
        is exactly 0."""
        own = any(any(sequence.values("advantages") or ()) for sequence in self.sequences)
        return own or any(self.advantages or ()) or any("teacher_logprobs" in s.streams for s in self.sequences)

    @property
    def num_sequences(self) -> int:
        """Sequences with at least one trainable token."""
        return sum(any(sequence.mask) for sequence in (*self.sequences, *self.silent))

    @property
    def num_rollouts(self) -> int:
        """Rollouts with at least one trainable token."""
        return self.num_sequences - self.num_further


@dataclass
class MicroBatch:
    """One packed row `[1, T]` of segments: whole sequences, and shared prefixes with their continuations. N trainable
    tokens, S sequences."""

    token_ids_T: Tensor
    position_ids_T: Tensor
    layout: SegmentLayout
    predict_index_N: Tensor
    """Row position of the logits for each target; the last token of a shared prefix occurs repeatedly."""
    target_ids_N: Tensor
    sequence_index_N: Tensor
    """Sequence of each target, 0 to S - 1."""
    sequences: list[int]
    """Each sequence's index in the step batch."""
    counts: list[int]
    """Trainable tokens of each sequence."""
    streams: dict[str, Tensor]
    """Per-token values by name, `[N]` or `[N, k]`: the streams common to all sequences of the row, `behaviour_logprobs`
    and `advantages` among them. Float32 or int64."""
    rollout_tokens_S: Tensor | None = None
    """Trainable tokens of each sequence's rollout, float32. None: each sequence is a rollout."""
    images: Sequence[RowImage] = ()
    """In the row's order. A shared prefix has its images once; their pixels are the model's business, since several
    rows of a step may have the same image."""
    rotary_ids_3T: Tensor | None = None
    """Frame, row and column positions (mRoPE), if the row has images; `position_ids_T` then count tokens."""
    experts: RowExperts | None = None
    """The engine's, under `model.replay_experts`."""
    shard: RowShard | None = None
    """This rank's part of the row. None: all of it."""

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Token ids and positions `[T]`, and the predicting positions `[N]`, of this rank's shard or the whole row."""
        if (own := self.shard) is None:
            return self.token_ids_T, self.position_ids_T, self.predict_index_N
        return self.token_ids_T[own.tokens], self.position_ids_T[own.tokens], own.predict_index_M

    @property
    def num_sequences(self) -> int:
        """S."""
        return len(self.sequences)


@dataclass(frozen=True)
class _Targets:
    """A sequence's trainable tokens; a row holds the tokens before the last of them."""

    mask: list[bool]
    prompt: int
    """Number of tokens before the first trainable one. Sequences can share them."""
    length: int
    """Number of tokens before the last trainable one; 0 without trainable tokens."""

    @cached_property
    def positions(self) -> list[int]:
        """Indices of the trainable tokens. Computed lazily: while rank 0 splits rows, the other ranks wait."""
        return list(compress(range(len(self.mask)), self.mask))


def _targets(sequence: records.Sequence) -> _Targets:
    mask = sequence.mask
    if True not in mask:
        return _Targets(mask, 0, 0)
    if mask[0]:
        raise TrainingError("a sequence's first token is marked trainable, but nothing comes before it: mask it out")
    return _Targets(mask, mask.index(True), len(mask) - 1 - mask[::-1].index(True))


Row = list[list[int]]
"""A micro-batch as prompt groups: each lists the indices in the step batch of sequences with a shared prompt."""


def micro_batches(
    batch: StepBatch,
    max_tokens: int,
    *,
    packing: bool = True,
    device: torch.device | str = "cpu",
    context: ContextGroup | None = None,
) -> Iterable[MicroBatch]:
    """Yield micro-batches of at most `max_tokens` tokens and as many predictions; without `packing`, one sequence each.

    They are built lazily. Sequences without a trainable token are left out; a longer sequence is a micro-batch alone.
    `context`: the ranks of each.
    """
    targets = [_targets(sequence) for sequence in batch.sequences]
    used = [index for index, target in enumerate(targets) if target.length]
    if packing:
        groups = _prompt_groups(batch, targets, used, max_tokens, device)
        rows = pack([_cost(batch, targets, group) for group in groups], max_tokens)
    else:
        groups = [[index] for index in used]
        rows = [[place] for place in range(len(groups))]
    for row in rows:
        yield _micro_batch(batch, [groups[place] for place in row], targets, device, context)


def even_rows(
    batch: StepBatch, max_tokens: int, parts: int, *, packing: bool = True, device: torch.device | str = "cpu"
) -> list[list[Row]]:
    """The rows of `micro_batches` for `parts` ranks: a list of passes, each with one row for every rank, balanced in
    tokens; a row may be empty."""
    targets = [_targets(sequence) for sequence in batch.sequences]
    used = [index for index, target in enumerate(targets) if target.length]
    costs, groups = [targets[index].length for index in used], [[index] for index in used]
    if packing:
        # A prompt group larger than a rank's part would leave other ranks idle.
        most = min(max_tokens, max(*costs, 1, -(-sum(costs) // parts)))
        groups = _prompt_groups(batch, targets, used, most, device)
        costs = [_cost(batch, targets, group) for group in groups]
    passes = pack_evenly(costs, max_tokens if packing else 1, parts)
    return [[[groups[place] for place in row] for row in step] for step in passes]


def micro_batches_of(
    batch: StepBatch, rows: Iterable[Row], device: torch.device | str = "cpu", context: ContextGroup | None = None
) -> Iterable[MicroBatch | None]:
    """Yield the micro-batches of `rows`, built lazily; None for an empty row. `context`: the ranks of each."""
    targets = [_targets(sequence) for sequence in batch.sequences]
    for row in rows:
        yield _micro_batch(batch, row, targets, device, context) if row else None


def dummy_micro_batch(device: torch.device | str, context: ContextGroup | None = None) -> MicroBatch:
    """A micro-batch of two tokens. A rank without a row computes it, so its collectives match the other ranks'."""
    sequence = records.Sequence([0, 0], [False, True])
    return _micro_batch(StepBatch([sequence]), [[0]], [_targets(sequence)], device, context)


def _prompt_groups(
    batch: StepBatch, targets: list[_Targets], used: list[int], max_tokens: int, device: torch.device | str
) -> list[list[int]]:
    """Group sequences of equal prompts, each group at most `max_tokens` tokens. On a CPU, prompts with a common
    beginning are grouped too, if this saves enough; on a GPU this was not measured. A sequence is a group alone if its
    continuation is too long for the shared part (see `_LONGEST_SHARING`), or if it shares a single token."""
    on_cpu = torch.device(device).type == "cpu"
    alike: dict[tuple[tuple[int, ...], tuple[str, ...]], list[int]] = {}
    for index in used:
        sequence, prompt = batch.sequences[index], targets[index].prompt
        images = tuple(image.sha256 for image in sequence.media if image.start < prompt)
        alike.setdefault((tuple(sequence.token_ids[:prompt]), images), []).append(index)
    alone = [members[0] for members in alike.values() if len(members) == 1]
    # Equal placeholder tokens may stand for different images: prompts with images are shared as wholes only.
    pictured = [[index] for index in alone if batch.sequences[index].media]
    single = [index for index in alone if not batch.sequences[index].media]
    similar = [[index] for index in single]
    if on_cpu:
        prompts = [batch.sequences[index].token_ids[: targets[index].prompt] for index in single]
        similar = [[single[place] for place in group] for group in prefix_groups(prompts)]
    groups: list[list[int]] = []
    for members in (*(members for members in alike.values() if len(members) > 1), *similar, *pictured):
        shared = _shared(batch, targets, members)
        kept = [i for i in members if not on_cpu or targets[i].length <= _LONGEST_SHARING + 3 * shared]
        is_equal = all(targets[index].prompt == shared for index in kept)
        if shared == 1 or (
            not is_equal and (len(kept) - 1) * shared < _MIN_SAVED * sum(targets[index].length for index in kept)
        ):
            kept = []
        alone = set(members).difference(kept)
        groups += [[index] for index in members if index in alone]
        size = len(kept) if is_equal else _most_members([targets[index].length for index in kept], shared)
        for start in range(0, len(kept), max(1, size)):
            some = kept[start : start + size]
            parts = pack([targets[index].length - shared + 1 for index in some], max(1, max_tokens - shared + 1))
            groups += [[some[place] for place in part] for part in parts]
    return groups


def _most_members(lengths: list[int], shared: int) -> int:
    """How many sequences of these lengths may share their first `shared` tokens; see `_MOST_KEYS`."""
    own = sum(length - shared for length in lengths) / max(1, len(lengths))
    if shared <= _MOST_KEYS * own:
        return len(lengths)
    return int(_MOST_KEYS * shared / (shared - _MOST_KEYS * own))


def _shared(batch: StepBatch, targets: list[_Targets], group: list[int]) -> int:
    """Number of tokens shared by a group's sequences: at most their prompts; 0 for one alone."""
    if len(group) == 1:
        return 0
    ids = batch.sequences[group[0]].token_ids[: min(targets[index].prompt for index in group)]
    for index in group[1:]:
        theirs = batch.sequences[index].token_ids
        if theirs[: len(ids)] != ids:
            ids = ids[: common_prefix(ids, theirs)]
    return len(ids)


def _cost(batch: StepBatch, targets: list[_Targets], group: list[int]) -> int:
    """Tokens of a group, at most. The last shared token counts for each member, because it may predict each one's
    first: so a row has no more predictions than its cost."""
    shared = _shared(batch, targets, group)
    return shared - 1 + sum(targets[index].length - shared + 1 for index in group)


def _micro_batch(
    batch: StepBatch,
    groups: list[list[int]],
    all_targets: list[_Targets],
    device: torch.device | str,
    context: ContextGroup | None = None,
) -> MicroBatch:
    token_ids: list[int] = []
    position_ids: list[int] = []
    predict_index: list[int] = []
    target_ids: list[int] = []
    lengths: list[int] = []
    prefixes: list[int | None] = []
    images, choices = RowImages(), RowChoices()

    def add(sequence: records.Sequence, start: int, end: int, prefix: int | None) -> None:
        """A segment: tokens `start` to `end` of a sequence."""
        if start < end:
            images.add(sequence, start, end, len(token_ids))
            choices.add(sequence, start, end)
            token_ids.extend(sequence.token_ids[start:end])
            position_ids.extend(range(start, end))
            lengths.append(end - start)
            prefixes.append(prefix)

    for group in groups:
        origin, segment = len(token_ids), len(lengths)
        shared = _shared(batch, all_targets, group)
        add(batch.sequences[group[0]], 0, shared, None)
        for index in group:
            target, ids = all_targets[index], batch.sequences[index].token_ids
            # Row position of the sequence's beginning, if it included its prefix.
            start = len(token_ids) - shared
            add(batch.sequences[index], shared, target.length, segment if shared else None)
            predict_index += [(start if place > shared else origin) + place - 1 for place in target.positions]
            target_ids += compress(ids, target.mask)
    if context is not None and (missing := -len(token_ids) % context.size):
        # Equal shards: a last segment without targets.
        add(records.Sequence([0] * missing, [False] * missing), 0, missing, None)
    indices = [index for group in groups for index in group]
    own, counts = batch.only(indices), [len(all_targets[index].positions) for index in indices]

    def integers(values: list[int]) -> Tensor:
        """Seven times as fast as torch.tensor: the GPU is idle until a step's first row is built."""
        return to_device(torch.frombuffer(array("q", values), dtype=torch.int64), device)

    shard = None
    if context is not None:
        held = shard_tokens(len(token_ids), context.rank, context.size)
        predicting = torch.tensor(predict_index)
        index = shard_targets(predicting, held)
        own_predicting = to_device(predicting[index] - held.start, device)
        shard = RowShard(context, slice(held.start, held.stop), to_device(index, device), own_predicting)
    tokens, rotary = own.rollout_tokens, images.rotary_ids()
    return MicroBatch(
        token_ids_T=integers(token_ids),
        position_ids_T=integers(position_ids),
        layout=segment_layout(lengths, device, prefixes, images.blocks(), context),
        predict_index_N=integers(predict_index),
        target_ids_N=integers(target_ids),
        sequence_index_N=to_device(torch.from_numpy(np.repeat(np.arange(len(counts)), counts)), device),
        sequences=indices,
        counts=counts,
        streams={name: to_device(values, device) for name, values in _streams(own, counts)},
        rollout_tokens_S=None if tokens is None else to_device(torch.tensor(tokens, dtype=torch.float32), device),
        images=images.found,
        rotary_ids_3T=None if rotary is None else to_device(rotary, device),
        experts=choices.experts(device),
        shard=shard,
    )


def stream_of(values: Tensor) -> records.Stream:
    """The stream of a tensor `[N]` or `[N, k]` of float64, float32 or int64."""
    width = values.shape[1] if values.dim() > 1 else 1
    return records.Stream(values.detach().cpu().contiguous().numpy().tobytes(), _NAMES[values.dtype], width)


def _streams(batch: StepBatch, counts: list[int]) -> Iterator[tuple[str, Tensor]]:
    """The streams common to all sequences, by name; `counts`: targets of each. Raises TrainingError if lengths or
    dtypes do not fit."""
    each = [_with_own(sequence, count) for sequence, count in zip(batch.sequences, counts, strict=True)]
    if batch.advantages is not None:
        given = zip(batch.advantages, counts, each, strict=True)
        each = [{"advantages": records.Stream.of([value] * count)} | streams for value, count, streams in given]
    for name in each[0]:
        found = [streams[name] for streams in each if name in streams]
        if len(found) < len(each):
            continue
        kind, width = found[0].dtype, found[0].width
        kinds = {(stream.dtype, stream.width) for stream in found}
        if len(kinds) > 1 or [*map(len, found)] != counts:
            raise TrainingError(
                f"the stream {name!r} does not fit: its sequences have {[*map(len, found)][:4]} ... values of "
                f"{sorted(kinds)} and {counts[:4]} ... trained tokens"
            )
        joined = torch.frombuffer(bytearray(b"".join(stream.data for stream in found)), dtype=_DTYPES[kind])
        values = joined.float() if kind == "float64" else joined
        yield name, values if width == 1 else values.view(-1, width)


def _with_own(sequence: records.Sequence, count: int) -> dict[str, records.Stream]:
    if sequence.logprobs is None or not count:
        return sequence.streams
    behaviour = records.Stream.of(compress(sequence.logprobs, sequence.mask))
    return {"behaviour_logprobs": behaviour} | sequence.streams


def make_step_batches(
    batch: records.Batch,
    advantages: Sequence[float | None] | None = None,
    *,
    updates_per_batch: int = 1,
    epochs: int = 1,
    carries_loss: Sequence[bool] | None = None,
    ignores_silent: bool = False,
) -> list[StepBatch]:
    """Split a batch into the step batches of its optimizer steps: whole groups over `updates_per_batch` steps, repeated
    `epochs` times.

    `advantages`: one per rollout, None if its tokens have their own. Rollouts with an outcome outside
    `records.TRAINABLE_OUTCOMES`, or with `carries_loss` false, are left out. So are rollouts without a trainable token:
    no step is empty. With `ignores_silent` most rollouts of advantage 0 only count in the divisors
    (`StepBatch.silent`). Epochs repeat the same objects: streams filled in once serve all. Fewer groups than updates
    give fewer steps.
    """
    if advantages is not None and len(advantages) != len(batch.rollouts):
        raise TrainingError(f"{len(advantages)} advantages for {len(batch.rollouts)} rollouts of batch {batch.step}")
    groups: dict[str, list[int]] = {}
    for index, rollout in enumerate(batch.rollouts):
        trained = rollout.outcome in records.TRAINABLE_OUTCOMES and (carries_loss is None or carries_loss[index])
        if trained and rollout.num_sampled:
            groups.setdefault(rollout.group_id, []).append(index)
    members = list(groups.values())
    steps: list[StepBatch] = []
    for part in split(len(members), min(updates_per_batch, len(members))) if members else ():
        step = StepBatch([], None if advantages is None else [])
        num_silent = 0
        rollout_tokens: list[int] = []
        for index in (index for group in part for index in members[group]):
            sequences = batch.rollouts[index].sequences
            step.num_further += sum(any(sequence.mask) for sequence in sequences) - 1
            if (
                ignores_silent
                and advantages is not None
                and not advantages[index]
                and not any(sequence.streams for sequence in sequences)
            ):
                num_silent += 1
                if num_silent % _SILENT_SAMPLE != 1:
                    step.silent += sequences
                    continue
            step.sequences += sequences
            rollout_tokens += [batch.rollouts[index].num_sampled] * len(sequences)
            if advantages is not None and step.advantages is not None:
                step.advantages += [advantages[index] or 0.0] * len(sequences)
        step.rollout_tokens = rollout_tokens if step.num_further else None
        steps.append(step)
    return steps * epochs
