"""Rank 0's commands: every trainer rank applies them to its shard of a model and of its optimizer.

A command is the same for all ranks, except for each rank's rows. Guarantees: all ranks make the same number of forward
and backward passes (a rank without a row computes a dummy micro-batch): collectives match. Rank 0 sums the ranks'
results in rank order, in float64. `launch.ranks` transports the commands.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import torch
from torch import Tensor

from slipstream import records
from slipstream.errors import TrainingError, ZeroGradientError
from slipstream.trainer.checkpoints.state_files import STATE_PREFIX, read_state, write_shards, write_state
from slipstream.trainer.chosen_loss import objective_of
from slipstream.trainer.distributed.engine_memory import WorkerMemory, shard_like
from slipstream.trainer.distributed.fsdp import RankGroup, saved_tensors, shard_of
from slipstream.trainer.learner import Sums, add_gradients, random_state, restore_state, row_predictions
from slipstream.trainer.loss import Objective, PolicyObjective
from slipstream.trainer.model.layers import text_layers
from slipstream.trainer.model.policy import PolicyModel
from slipstream.trainer.optim.base import Optimizer, OptimStats, local_tensor
from slipstream.trainer.packing import MicroBatch, Row, StepBatch, micro_batches_of
from slipstream.weights.adapter_folder import adapter_parameter
from slipstream.weights.fingerprint import fingerprints
from slipstream.weights.fingerprint_torch import Slice
from slipstream.weights.shards import Shard, gathered, place_of


class RankBatch(msgspec.Struct, frozen=True):
    """One rank's rows of a step batch, and the sequences in them."""

    batch: StepBatch
    rows: list[Row]
    """One row for each pass: prompt groups of indices into the batch's sequences."""


def rank_batch_of(batch: StepBatch, rows: Sequence[Row]) -> tuple[RankBatch, list[int]]:
    """Extract a rank's inputs for `rows` of `batch`; also returns its sequences' indices in the batch."""
    chosen = [index for row in rows for group in row for index in group]
    place = {index: number for number, index in enumerate(chosen)}
    own = batch.only(chosen)
    own.sequences = [msgspec.structs.replace(sequence, versions=[]) for sequence in own.sequences]
    return RankBatch(own, [[[place[index] for index in group] for group in row] for row in rows]), chosen


class Command(msgspec.Struct, frozen=True, tag=True):
    """An order to every rank. `model`: the name of the model, such as policy or critic."""

    doing: ClassVar[str] = ""
    """The verb for error messages."""
    model: str


class Score(Command, frozen=True):
    """Compute log-probabilities and entropies under `sampling`; without `sampling`, a critic's values."""

    doing = "score tokens"
    batch: RankBatch
    sampling: records.SamplingParams | None


class Backward(Command, frozen=True):
    """Accumulate the gradients of the batch."""

    doing = "compute gradients"
    batch: RankBatch
    divisors: dict[str, float]
    loss: str = ""
    """In place of the run's own: see `OneForward.chosen`."""


class Prepare(Command, frozen=True):
    """Clip the gradient and compute the update."""

    doing = "make an update"
    learning_rate: float


class Commit(Command, frozen=True):
    """Write the update to the live weights."""

    doing = "write an update"


class Gather(Command, frozen=True):
    """Gather the full weights on rank 0: of the `model`, its `base` or its `adapter`."""

    doing = "bring the weights together"
    what: str


class Describe(Command, frozen=True):
    """Compute this rank's part of each tensor's fingerprint."""

    doing = "prove the weights"
    what: str


class Save(Command, frozen=True):
    """Write this rank's resume state into the existing `folder`."""

    doing = "save its state"
    folder: str


class Load(Command, frozen=True):
    """Load the resume state in `folder`, written by any number of ranks."""

    doing = "load its state"
    folder: str


class Negate(Command, frozen=True):
    """Change the weights without training, for benchmarks; see `negate`."""

    doing = "change its weights"
    first: int
    stride: int


AnyCommand = Score | Backward | Prepare | Commit | Gather | Describe | Save | Load | Negate


class Answer(msgspec.Struct, frozen=True):
    """The result of a command. With an `error` the rank has exited; `kind` is its exception class."""

    predictions: list[Tensor] = []
    """By kind, of all the rank's sequences."""
    sums: Sums = msgspec.field(default_factory=Sums)
    update: OptimStats | None = None
    num_bytes: int = 0
    """Copied to the engine."""
    fingerprints: list[int] = []
    kind: str = ""
    error: str = ""


def encode(message: AnyCommand | Answer) -> bytes:
    """Serialize a message for another process."""
    return msgspec.msgpack.encode(message, enc_hook=_packed)


def decode(data: bytes, kind: Any) -> Any:
    """Deserialize a message of this `kind`, `AnyCommand` or `Answer`. Raises `msgspec.DecodeError`."""
    return msgspec.msgpack.decode(data, type=kind, dec_hook=_unpacked)


def _packed(tensor: Any) -> tuple[str, list[int], bytes]:
    if not isinstance(tensor, Tensor):
        raise NotImplementedError  # msgspec names the type
    flat = tensor.detach().cpu().contiguous()
    return str(flat.dtype).removeprefix("torch."), list(flat.shape), flat.numpy().tobytes()


def _unpacked(_kind: Any, packed: tuple[str, list[int], bytes]) -> Tensor:
    name, shape, data = packed
    dtype = getattr(torch, name)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape) if data else torch.zeros(shape, dtype=dtype)


@torch.no_grad()
def negate(model: PolicyModel, first: int, stride: int) -> None:
    """Flip the sign of every `stride`-th column, starting at `first`, of all trainable parameters, or of this rank's
    shard of them."""
    for parameter in model.network.parameters():
        if parameter.requires_grad:
            local_tensor(parameter)[..., first::stride].neg_()


class Objectives:
    """A rank's objectives by the name of their loss: the run's own, and others of a session."""

    def __init__(self, own: Objective | None = None) -> None:
        self._known = {} if own is None else {"": own}

    def put(self, objective: Objective) -> str:
        """Know an objective; its name."""
        name: str = getattr(objective, "chosen", "")
        self._known[name] = objective
        return name

    def of(self, name: str) -> Objective:
        """The objective, made if it is new."""
        if name not in self._known:
            own = self._known[""]
            assert isinstance(own, PolicyObjective)
            self._known[name] = objective_of(name, own)
        return self._known[name]


@dataclass
class RankModel:
    """One rank's shard of a model and, if it is trained, of its optimizer. Every method is a collective."""

    group: RankGroup
    model: PolicyModel
    optimizer: Optimizer | None = None
    objectives: Objectives = field(default_factory=Objectives)
    memory: WorkerMemory | None = None
    """The engine worker's memory, if the weights are shared with the engine."""
    keeps_whole: bool = False
    """Whether layers stay unsharded, weights and gradients, from a step's first row to its last."""
    _tensors_of: dict[str, list[tuple[str, Tensor]]] = field(
        default_factory=dict[str, list[tuple[str, Tensor]]], init=False
    )
    """By `what`, the tensors of `shards`."""

    def __post_init__(self) -> None:
        if self.optimizer is not None:
            self.optimizer.sums_over_ranks = self.group.sums

    def do(self, command: AnyCommand) -> Answer:
        """Execute a command. A ZeroGradientError is raised on all ranks alike and discards only this gradient; after
        any other error this rank must not be used."""
        match command:
            case Score():
                return self._score(command.batch, command.sampling)
            case Backward():
                return self._backward(command.batch, command.divisors, self.objectives.of(command.loss))
            case Prepare():
                return Answer(update=self.prepare(command.learning_rate))
            case Commit():
                self._trained.commit()
                self._copy_to_engine()
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
                return Answer(num_bytes=self._copy_to_engine())
        return Answer()

    @property
    def _trained(self) -> Optimizer:
        assert self.optimizer is not None
        return self.optimizer

    def _score(self, share: RankBatch, sampling: records.SamplingParams | None) -> Answer:
        rows = self._micro_batches(share)
        if self.model.has_lazy_logits:
            rows = self.group.rows_gathered(self.model.roots, rows)
        found = row_predictions(self.model, rows, sampling)
        columns = zip(*(found[index] for index in range(len(share.batch.sequences))), strict=True)
        return Answer(list(map(torch.cat, columns)))

    def _micro_batches(self, share: RankBatch) -> Iterable[MicroBatch | None]:
        return micro_batches_of(share.batch, share.rows, self.model.device, self.model.context)

    def _backward(self, share: RankBatch, divisors: dict[str, float], objective: Objective) -> Answer:
        rows = self._micro_batches(share)
        # Embeddings and LM head belong to no layer, are large, and are used at both ends of every pass.
        unsharded = [*self.model.roots, *(text_layers(self.model.network) if self.keeps_whole else ())]
        rows = self.group.rows_unsharded(unsharded, rows, len(share.rows))
        sums = add_gradients(self.model, rows, objective, divisors, self._trained.loss_scale.value)
        sums.values = {name: value.cpu() for name, value in sums.values.items()}
        return Answer(sums=sums)

    def prepare(self, learning_rate: float) -> OptimStats:
        """See `Optimizer.prepare`; a gradient of zero is discarded."""
        try:
            return self._trained.prepare(learning_rate)
        except ZeroGradientError:
            self._trained.discard_gradients()
            raise

    def shards(self, what: str) -> list[Shard]:
        """This rank's shards of the `model`, its `base` or its `adapter`, under the network's names; an adapter's under
        PEFT's."""
        if what not in self._tensors_of:  # cached: every update waits for this
            self._tensors_of[what] = self._find_tensors(what)
        return [shard_of(name, tensor) for name, tensor in self._tensors_of[what]]

    def _find_tensors(self, what: str) -> list[tuple[str, Tensor]]:
        own = list(saved_tensors(self.model.network))
        adapter = self.model.adapter
        if adapter is None:
            return own
        names = {f"{layer}.lora_A": adapter_parameter(layer, "A") for layer in adapter.layers}
        names |= {f"{layer}.lora_B": adapter_parameter(layer, "B") for layer in adapter.layers}
        if what != "adapter":
            return [(name, tensor) for name, tensor in own if name not in names]
        return [(names[name], tensor) for name, tensor in own if name in names]

    def stored(self, what: str, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """The tensor called `name` in `shards`, under its saved and published names and in this layout."""
        if what == "adapter":
            return [(name, tensor)]
        return self.model.stored(name, tensor)

    def gather(self, what: str) -> Generator[tuple[str, Tensor]]:
        """Gather the full tensors on rank 0, one after another, under the network's names."""
        group = self.group
        if group.copy == 0:
            yield from gathered(self.shards(what), group.place, group.num_shards, group.of_copy)

    def _fingerprints(self, what: str) -> list[int]:
        place, size = self.group.place, self.group.num_shards
        slices: list[Slice] = []
        for shard in self.shards(what):
            if self.group.copy or (shard.dim is None and place):
                # Copies and replicated tensors count once.
                slices.append(Slice(shard.part.reshape(-1)[:0]))
            else:
                slices.append(Slice(shard.part, *place_of(shard, place, size), tuple(shard.part.shape)))
        return fingerprints(slices)

    def _save(self, folder: Path) -> None:
        optimizer, parameters = self._trained, dict(self.model.network.named_parameters())
        replicated: dict[str, Tensor] = {}
        shards: dict[str, Tensor] = {}
        for path, tensor in optimizer.state().items():
            parameter = parameters.get(path.partition(".")[2])
            if parameter is None or not tensor.ndim:
                replicated[f"{STATE_PREFIX}{path}"] = tensor
            elif tensor.numel():
                shards[f"{STATE_PREFIX}{path}"] = shard_like(tensor, parameter)
        if self.group.copy == 0:
            write_shards(folder, shards, self.group.place)
        if self.group.rank == 0:
            write_state(folder, {**replicated, **random_state(self.model.device)}, optimizer.step)

    def _load(self, folder: Path) -> None:
        parameters = dict(self.model.network.named_parameters())

        def place(path: str, shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
            name = path.removeprefix(STATE_PREFIX).partition(".")[2]
            parameter = parameters.get(name)
            if not path.startswith(STATE_PREFIX) or not shape or parameter is None:
                return None
            if parameter.shape != shape:
                raise TrainingError(
                    f"the saved optimizer state is for another model: {name} has shape {list(shape)} there and "
                    f"{list(parameter.shape)} here"
                )
            return shard_like(torch.empty_like(local_tensor(parameter), dtype=dtype), parameter)

        restore_state(self._trained, read_state(folder, place), self.model.device)
        self._copy_to_engine()

    def _copy_to_engine(self) -> int:
        """Copy changed weights to the engine's worker, if it shards them differently; returns the number of bytes."""
        memory = self.memory
        if memory is None:
            return 0
        named = self.model.network.named_parameters()
        return memory.write(shard_of(name, parameter) for name, parameter in named if name in memory.copied)
