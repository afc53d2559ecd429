"""What every rank does: the commands of rank 0, and how its own share of a model carries them out.

A command is the same for all ranks but for the rows that each one computes. Guarantees: every rank makes the same
number of passes, since one without a row computes a blank one; what the ranks found is added up in their order, in
float64. How commands travel is `launch.ranks`' business.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import msgspec
import torch
from torch import Tensor

from slipstream import records
from slipstream.errors import TrainingError, ZeroGradientError
from slipstream.trainer.batching import Row, StepBatch, ValueTargets, micro_batches_of
from slipstream.trainer.checkpoints.state_files import STATE_PREFIX, read_state, write_shards, write_state
from slipstream.trainer.distributed.engine_memory import WorkerMemory
from slipstream.trainer.distributed.fsdp import RankGroup, saved_of, shard_dim, shard_of
from slipstream.trainer.learner import add_gradients, predictions, random_state, take_state
from slipstream.trainer.model.layers import text_layers
from slipstream.trainer.model.policy import PolicyModel
from slipstream.trainer.objectives import Objective
from slipstream.trainer.optim.base import Optimizer, OptimStats, local_part
from slipstream.weights.adapter_folder import adapter_parameter
from slipstream.weights.fingerprint import fingerprints
from slipstream.weights.fingerprint_torch import Slice
from slipstream.weights.shards import Shard, gathered, place_of


class Packed(msgspec.Struct, frozen=True):
    """A tensor on its way."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, tensor: Tensor) -> Packed:
        """Its numbers."""
        flat = tensor.detach().cpu().contiguous()
        return cls(str(flat.dtype).removeprefix("torch."), tuple(flat.shape), flat.numpy().tobytes())

    def tensor(self) -> Tensor:
        """A copy of what was packed."""
        dtype = getattr(torch, self.dtype)
        if not self.data:
            return torch.zeros(self.shape, dtype=dtype)
        return torch.frombuffer(bytearray(self.data), dtype=dtype).reshape(self.shape)


class Share(msgspec.Struct, frozen=True):
    """One rank's rows of a step, and the sequences in them."""

    sequences: list[records.Sequence]
    rows: list[Row]
    """Families of indices into `sequences`; one row for each pass."""
    advantages: list[float] | None = None
    old_logprobs: list[Packed] | None = None
    reference_logprobs: list[Packed] | None = None
    value_targets: list[tuple[Packed, Packed]] | None = None

    def batch(self) -> StepBatch:
        """The sequences as a step of their own."""
        return StepBatch(
            self.sequences,
            self.advantages,
            _unpacked(self.old_logprobs),
            _unpacked(self.reference_logprobs),
            None
            if (pairs := self.value_targets) is None
            else [ValueTargets(*map(Packed.tensor, pair)) for pair in pairs],
        )


def _unpacked(tensors: list[Packed] | None) -> list[Tensor] | None:
    return None if tensors is None else [packed.tensor() for packed in tensors]


def share_of(batch: StepBatch, rows: Sequence[Row]) -> tuple[Share, list[int]]:
    """What a rank needs to compute `rows` of `batch`, and which sequences of the batch those are."""
    chosen = [index for row in rows for family in row for index in family]
    place = {index: number for number, index in enumerate(chosen)}

    def packed(tensors: list[Tensor] | None) -> list[Packed] | None:
        return None if tensors is None else [Packed.of(tensors[index]) for index in chosen]

    def slim(sequence: records.Sequence) -> records.Sequence:
        return records.Sequence(
            sequence.token_ids,
            sequence.mask,
            sequence.logprobs,
            advantages=sequence.advantages,
            media=sequence.media,
            teacher_logprobs=sequence.teacher_logprobs,
        )

    targets = batch.value_targets
    share = Share(
        [slim(batch.sequences[index]) for index in chosen],
        [[[place[index] for index in family] for family in row] for row in rows],
        None if batch.advantages is None else [batch.advantages[index] for index in chosen],
        packed(batch.old_logprobs),
        packed(batch.reference_logprobs),
        None
        if targets is None
        else [(Packed.of(targets[index].old_values), Packed.of(targets[index].returns)) for index in chosen],
    )
    return share, chosen


class Command(msgspec.Struct, frozen=True, tag=True):
    """Something for every rank to do. `part`: with which model."""

    doing: ClassVar[str] = ""
    """For a sentence: what a rank did not do."""
    part: str


class Score(Command, frozen=True):
    """Say how likely the share's tokens are under `sampling`; without it, the critic's values."""

    doing = "score tokens"
    share: Share
    sampling: records.SamplingParams | None


class Backward(Command, frozen=True):
    """Add the gradients of the share."""

    doing = "compute gradients"
    share: Share
    divisors: dict[str, float]


class Prepare(Command, frozen=True):
    """Make the update."""

    doing = "make an update"
    learning_rate: float


class Commit(Command, frozen=True):
    """Write it to the live weights."""

    doing = "write an update"


class Gather(Command, frozen=True):
    """Bring the weights together in rank 0: `model`, `base` or `adapter`."""

    doing = "bring the weights together"
    what: str


class Describe(Command, frozen=True):
    """The share of each fingerprint, of the same."""

    doing = "prove the weights"
    what: str


class Save(Command, frozen=True):
    """Write this rank's resume state into `folder`, which is there."""

    doing = "save its state"
    folder: str


class Load(Command, frozen=True):
    """Take over the resume state in `folder`, of however many ranks."""

    doing = "load its state"
    folder: str


class Negate(Command, frozen=True):
    """Make another version without training, for a measurement: see `negate`."""

    doing = "change its weights"
    first: int
    stride: int


class Allocated(Command, frozen=True):
    """Say how many bytes torch has allocated on this rank's GPU."""

    doing = "say what memory it has"


AnyCommand = Score | Backward | Prepare | Commit | Gather | Describe | Save | Load | Negate | Allocated


class Answer(msgspec.Struct, frozen=True):
    """What came of a command; with an `error`, of the `kind` that the exception had, the rank has ended."""

    tensors: dict[str, Packed] = {}
    numbers: list[float] = []
    fingerprints: list[int] = []
    kind: str = ""
    error: str = ""


@torch.no_grad()
def negate(model: PolicyModel, first: int, stride: int) -> None:
    """Change the sign of every `stride`-th column, from `first` on, of what the model would train, or of this rank's
    part of it."""
    for parameter in model.network.parameters():
        if parameter.requires_grad:
            local_part(parameter)[..., first::stride].neg_()


@dataclass
class Part:
    """One rank's share of a model and, where it is trained, of its optimizer. Every method is a collective."""

    group: RankGroup
    model: PolicyModel
    optimizer: Optimizer | None = None
    objective: Objective | None = None
    memory: WorkerMemory | None = None
    """The engine's, where the model is in it."""
    keeps_whole: bool = False
    """Whether the layers' weights and gradients stay whole from a step's first row to its last."""
    _saved: dict[str, list[tuple[str, Tensor]]] = field(default_factory=dict[str, list[tuple[str, Tensor]]], init=False)
    """What `shards` are parts of."""

    def __post_init__(self) -> None:
        if self.optimizer is not None:
            self.optimizer.norm_over_ranks = self.group.norm
            self.optimizer.sums_over_ranks = self.group.sums

    def do(self, command: AnyCommand) -> Answer:
        """Carry out a command. Raises ZeroGradientError on all ranks alike, which have then lost nothing but that
        gradient; after any other error this rank is not of use."""
        match command:
            case Score():
                return self._score(command.share, command.sampling)
            case Backward():
                return self._backward(command.share, command.divisors)
            case Prepare():
                stats = self.prepare(command.learning_rate)
                return Answer(numbers=[stats.learning_rate, stats.grad_norm, float(stats.clipped)])
            case Commit():
                self._trained.commit()
                self._written()
            case Gather():
                for _ in self.gather(command.what):
                    pass
            case Describe():
                return Answer(fingerprints=self._fingerprints(command.what))
            case Save():
                self._save(Path(command.folder))
            case Load():
                self._load(Path(command.folder))
            case Negate():
                negate(self.model, command.first, command.stride)
                if self.group.device.type == "cuda":
                    torch.cuda.synchronize()
                return Answer(numbers=[self._written()])
            case Allocated():
                return Answer(numbers=[torch.cuda.memory_allocated() if self.group.device.type == "cuda" else 0])
        return Answer()

    @property
    def _trained(self) -> Optimizer:
        assert self.optimizer is not None
        return self.optimizer

    def _score(self, share: Share, sampling: records.SamplingParams | None) -> Answer:
        batch = share.batch()
        found = predictions(self.model, micro_batches_of(batch, share.rows, self.model.device), sampling)
        columns = zip(*(found[index] for index in range(len(batch.sequences))), strict=True)
        return Answer({str(number): Packed.of(torch.cat(column)) for number, column in enumerate(columns)})

    def _backward(self, share: Share, divisors: dict[str, float]) -> Answer:
        assert self.objective is not None
        rows = micro_batches_of(share.batch(), share.rows, self.model.device)
        # The words, which are in no layer, are large, and every pass begins and ends with them.
        whole = [*self.model.roots, *(text_layers(self.model.network) if self.keeps_whole else ())]
        rows = self.group.through_step(whole, rows, len(share.rows))
        sums = add_gradients(self.model, rows, self.objective, divisors)
        tensors = {name: Packed.of(value) for name, value in sums.values.items()}
        return Answer(tensors, [sums.num_micro_batches, sums.num_row_tokens, sums.longest_row])

    def prepare(self, learning_rate: float) -> OptimStats:
        """See `Optimizer.prepare`; a gradient of zero is forgotten."""
        try:
            return self._trained.prepare(learning_rate)
        except ZeroGradientError:
            self._trained.discard_gradients()
            raise

    def shards(self, what: str) -> list[Shard]:
        """This rank's parts of the `model`, its `base` or its `adapter`, under the network's own names; of an adapter
        under PEFT's."""
        if what not in self._saved:  # an update waits for this: the network is asked once
            self._saved[what] = self._find_saved(what)
        return [shard_of(name, tensor) for name, tensor in self._saved[what]]

    def _find_saved(self, what: str) -> list[tuple[str, Tensor]]:
        own = list(saved_of(self.model.network))
        adapter = self.model.adapter
        if adapter is None:
            return own
        names = {f"{layer}.lora_A": adapter_parameter(layer, "A") for layer in adapter.layers}
        names |= {f"{layer}.lora_B": adapter_parameter(layer, "B") for layer in adapter.layers}
        if what != "adapter":
            return [(name, tensor) for name, tensor in own if name not in names]
        return [(names[name], tensor) for name, tensor in own if name in names]

    def stored(self, what: str, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """The tensor called `name` in `shards`, as it is saved and published."""
        if what == "adapter":
            return [(name, tensor)]
        return self.model.stored(name, tensor)

    def gather(self, what: str) -> Generator[tuple[str, Tensor]]:
        """The whole tensors in rank 0, one after another, under the network's own names."""
        yield from gathered(self.shards(what), self.group.rank, self.group.size)

    def _fingerprints(self, what: str) -> list[int]:
        rank, size = self.group.rank, self.group.size
        slices: list[Slice] = []
        for shard in self.shards(what):
            if shard.dim is None and rank:
                # What every rank has counts once.
                slices.append(Slice(shard.part.reshape(-1)[:0]))
            else:
                slices.append(Slice(shard.part, *place_of(shard, rank, size), tuple(shard.part.shape)))
        return fingerprints(slices)

    def _save(self, folder: Path) -> None:
        optimizer, shapes, dims = self._trained, self._shapes(), self._dims()
        alike: dict[str, Tensor] = {}
        shards: dict[str, Tensor] = {}
        for path, tensor in optimizer.state().items():
            name = path.partition(".")[2]
            shape = shapes.get(name)
            if shape is None or not tensor.ndim:
                alike[f"{STATE_PREFIX}{path}"] = tensor
            elif tensor.numel():
                shards[f"{STATE_PREFIX}{path}"] = self.group.as_shard(tensor, shape, dims[name])
        write_shards(folder, shards, self.group.rank)
        if self.group.rank == 0:
            write_state(folder, {**alike, **random_state(self.model.device)}, optimizer.step)

    def _load(self, folder: Path) -> None:
        shapes, dims = self._shapes(), self._dims()
        live = {name: local_part(parameter) for name, parameter in self.model.network.named_parameters()}

        def place(path: str, shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
            name = path.removeprefix(STATE_PREFIX).partition(".")[2]
            if not path.startswith(STATE_PREFIX) or not shape or shapes.get(name) is None:
                return None
            if shapes[name] != shape:
                raise TrainingError(
                    f"the saved optimizer state is for another model: {name} has shape {list(shape)} there and "
                    f"{list(shapes[name])} here"
                )
            return self.group.as_shard(torch.empty_like(live[name], dtype=dtype), shape, dims[name])

        take_state(self._trained, read_state(folder, place), self.model.device)
        self._written()

    def _written(self) -> int:
        """The live weights have changed: how many bytes were copied to an engine's worker for it."""
        memory = self.memory
        if memory is None:
            return 0
        named = self.model.network.named_parameters()
        return memory.write(shard_of(name, parameter) for name, parameter in named if name in memory.apart)

    def _shapes(self) -> dict[str, torch.Size]:
        """Of the whole parameters."""
        return {name: parameter.shape for name, parameter in self.model.network.named_parameters()}

    def _dims(self) -> dict[str, int]:
        """Along which each is dealt out."""
        return {name: shard_dim(parameter) for name, parameter in self.model.network.named_parameters()}
