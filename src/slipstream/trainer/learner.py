"""The learner: a model, its optimizer, and the primitives of a training loop.

`forward`, `forward_backward`, `optim_prepare`, `optim_commit`, `named_weights`, `save`, `load`. Guarantees: live
weights change only in `optim_commit` (and `load`); a batch without a trainable token is refused; training continues bit
for bit after `save` and `load`. The loop decides when to call them, and the learning rate."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from slipstream import records
from slipstream.config.bounds import GIB
from slipstream.errors import TrainingError, one_line
from slipstream.trainer.checkpoints.state_files import STATE_PREFIX, read_state, write_state
from slipstream.trainer.experts.replay import share_that_differs
from slipstream.trainer.loss import Objective, sampled_logprobs
from slipstream.trainer.model.policy import Form, PolicyModel
from slipstream.trainer.optim.base import Optimizer, OptimStats
from slipstream.trainer.packing import MicroBatch, StepBatch, dummy_micro_batch, micro_batches
from slipstream.weights.adapter_folder import write_adapter_folder
from slipstream.weights.base import NamedWeights
from slipstream.weights.fingerprint import describe
from slipstream.weights.model_files import write_model_folder
from slipstream.weights.shards import held

UNPROCESSED = records.SamplingParams(max_tokens=1)
"""Temperature 1 and no filter: log-probabilities of the logits as they are."""


@dataclass(frozen=True)
class Scores:
    """Per sequence, float32 on the CPU, `[N]`: of its N trainable tokens the log-probabilities and entropies, in
    nats."""

    logprobs: list[Tensor]
    entropies: list[Tensor]


@contextmanager
def deterministic_on_cpu(device: torch.device) -> Generator[None]:
    """Make the sums of a backward pass on a CPU deterministic. Completions with a shared prompt contribute to the
    gradient of its last token, and torch's threads otherwise add these up in any order. No effect on other devices."""
    if device.type != "cpu":
        yield
        return
    flags: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled()
    warns, fills = torch.is_deterministic_algorithms_warn_only_enabled(), flags.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    flags.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
        flags.fill_uninitialized_memory = fills


def score(
    model: PolicyModel,
    sequences: Sequence[records.Sequence],
    sampling: records.SamplingParams = UNPROCESSED,
    *,
    micro_batch_tokens: int,
) -> Scores:
    """Compute log-probabilities and entropies under `sampling`, without gradients, by any model."""
    return Scores(*predicted(model, sequences, sampling, micro_batch_tokens))


@torch.no_grad()
def predicted(
    model: PolicyModel,
    sequences: Sequence[records.Sequence],
    sampling: records.SamplingParams | None,
    micro_batch_tokens: int,
) -> list[list[Tensor]]:
    """By kind of prediction (see `row_predictions`) one tensor `[N]` for each sequence, by any model."""
    rows = micro_batches(StepBatch(list(sequences)), micro_batch_tokens, packing=model.packing, device=model.device)
    found = row_predictions(model, rows, sampling)
    return [[found[index][kind] for index in range(len(sequences))] for kind in range(1 if sampling is None else 2)]


@torch.no_grad()
def row_predictions(
    model: PolicyModel, rows: Iterable[MicroBatch | None], sampling: records.SamplingParams | None
) -> dict[int, tuple[Tensor, ...]]:
    """Per sequence index of the step batch, float32 on the CPU, `[N]` each: with `sampling` log-probabilities and
    entropies of the trainable tokens, without it a critic's values. For a None row the model computes a dummy
    micro-batch."""
    found: dict[int, tuple[Tensor, ...]] = defaultdict(lambda: (torch.zeros(0),) * (1 if sampling is None else 2))
    computed: list[tuple[MicroBatch, tuple[Tensor, ...]]] = []
    for micro in rows:
        if micro is None:
            model.logits(dummy_micro_batch(model.device, model.context))
            continue
        logits = model.logits(micro)
        if sampling is None:
            assert isinstance(logits, Tensor)
            values = (logits[:, 0],)
        else:
            values = sampled_logprobs(logits, micro.target_ids_N, sampling)
        computed.append((micro, values))
    # Copied after all rows are launched: reading results row by row would stall the GPU.
    for micro, values in computed:
        split = zip(*(each_N.cpu().split(micro.counts) for each_N in values), strict=True)
        for index, parts in zip(micro.sequences, split, strict=True):
            found[index] = tuple(part.clone() for part in parts)
    return found


@dataclass
class Sums:
    """Sums over the micro-batches of a step; `values` on the device, float64."""

    values: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    num_micro_batches: int = 0
    num_row_tokens: int = 0
    longest_row: int = 0

    def add(self, other: Sums) -> None:
        """Add the sums of further rows."""
        for name, value in other.values.items():
            self.values[name] = self.values[name] + value if name in self.values else value
        self.num_micro_batches += other.num_micro_batches
        self.num_row_tokens += other.num_row_tokens
        self.longest_row = max(self.longest_row, other.longest_row)


def add_gradients(
    model: PolicyModel,
    rows: Iterable[MicroBatch | None],
    objective: Objective,
    divisors: dict[str, float],
    loss_scale: float = 1.0,
) -> Sums:
    """Run forward and backward on each row and accumulate the gradients, of the loss times `loss_scale`; returns the
    sums of the objective's terms. For a None row the rank computes a dummy micro-batch with gradient zero: its
    collectives match."""
    totals = Sums()
    for micro in rows:
        # Around both passes: compiled layers require the same setting in the two.
        with deterministic_on_cpu(model.device):
            if micro is None:
                # Referenced until its backward pass, for its layout.
                blank = dummy_micro_batch(model.device, model.context)
                (objective.idle(model, blank, divisors).float().sum() * 0.0).backward()
                continue
            loss, sums = objective.terms(model, micro, divisors)
            if model.replay is not None:
                sums |= model.replay.counted()
            (loss if loss_scale == 1.0 else loss * loss_scale).backward()
            del loss  # a CUDA graph of the next row must not find this one's autograd nodes
        num_tokens = len(micro.token_ids_T)
        # They stay on the device: reading a number here would synchronize the GPU.
        totals.add(Sums({key: value.double() for key, value in sums.items()}, 1, num_tokens, num_tokens))
    if model.images is not None:
        with deterministic_on_cpu(model.device):
            model.images.backward()
    return totals


class Scorer(Protocol):
    """A source of log-probabilities: a learner, or a frozen reference."""

    def forward(self, sequences: Sequence[records.Sequence], sampling: records.SamplingParams = ...) -> Scores:
        """Compute log-probabilities and entropies of the trainable tokens."""
        ...


@dataclass(frozen=True)
class Reference:
    """A frozen model."""

    predict: Callable[[Sequence[records.Sequence], records.SamplingParams, int], list[list[Tensor]]]
    """See `predicted`; by a possibly sharded model."""
    micro_batch_tokens: int

    def forward(self, sequences: Sequence[records.Sequence], sampling: records.SamplingParams = UNPROCESSED) -> Scores:
        """See `Scorer`."""
        return Scores(*self.predict(sequences, sampling, self.micro_batch_tokens))


def memory_metrics(device: torch.device, planned_bytes: int | None, longest_row: int) -> dict[str, float]:
    """Peak GPU memory of this process in GiB, allocated and reserved, with the planned peak; how often torch's
    allocator has freed its whole cache because of fragmentation (this delays the step); the tokens of the longest row.
    Empty on a CPU: the interpreter and its libraries take most of a process's memory there."""
    if device.type != "cuda":
        return {}
    peaks = {"peak": torch.cuda.max_memory_allocated(device), "held": torch.cuda.max_memory_reserved(device)}
    if planned_bytes is not None:
        peaks["planned"] = planned_bytes
    metrics = {f"memory/trainer_{name}_gib": value / GIB for name, value in peaks.items()}
    retries = torch.cuda.memory_stats(device).get("num_alloc_retries", 0)
    return metrics | {
        "memory/trainer_alloc_retries": float(retries),
        "memory/trainer_row_tokens": float(longest_row),
    }


class Learner:
    """Trains `model` with `optimizer`. `micro_batch_tokens` bounds the memory and changes rounding only."""

    def __init__(
        self,
        model: PolicyModel,
        optimizer: Optimizer,
        *,
        micro_batch_tokens: int = 4096,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.micro_batch_tokens = micro_batch_tokens
        self.planned_bytes: int | None = None
        """The plan's estimate of the peak memory, reported beside the actual one."""
        self._longest_row = 0
        self._made: list[tuple[StepBatch, Objective, float]] = []
        """The parts of the gradient so far, to compute it again."""

    @property
    def step(self) -> int:
        """Optimizer steps made so far."""
        return self.optimizer.step

    def forward(
        self,
        sequences: Sequence[records.Sequence],
        sampling: records.SamplingParams = UNPROCESSED,
        *,
        micro_batch_tokens: int | None = None,
    ) -> Scores:
        """Compute log-probabilities and entropies of the trainable tokens by the live weights."""
        return Scores(*self._predict(sequences, sampling, micro_batch_tokens or self.micro_batch_tokens))

    def values(self, sequences: Sequence[records.Sequence]) -> list[Tensor]:
        """Compute a critic's values before each trainable token, `[N]` per sequence."""
        return self._predict(sequences, None, self.micro_batch_tokens)[0]

    def _predict(
        self, sequences: Sequence[records.Sequence], sampling: records.SamplingParams | None, micro_batch_tokens: int
    ) -> list[list[Tensor]]:
        """See `predicted`."""
        return predicted(self.model, sequences, sampling, micro_batch_tokens)

    def forward_backward(self, batch: StepBatch, objective: Objective, weight: float = 1.0) -> dict[str, float]:
        """Accumulate the gradient of the step's loss, or of a further one with this `weight`; returns the objective's
        metrics. Raises TrainingError for a batch without a trainable token."""
        self._made.append((batch, objective, weight))
        if not any(sequence.num_trainable for sequence in batch.sequences):
            raise TrainingError(
                f"the batch of optimizer step {self.step} has {len(batch.sequences)} sequences and no "
                "trainable token: check the masks and which outcomes are trained on"
            )
        divisors = objective.counts(batch)
        if "weight" in divisors:
            divisors["weight"] = weight
        sums = self._add_gradients(batch, objective, divisors)
        values = {key: value.cpu() for key, value in sums.values.items()}
        experts = share_that_differs(values)
        metrics = objective.summarize(values, divisors) | experts
        counts = {"num_micro_batches": float(sums.num_micro_batches), "num_row_tokens": float(sums.num_row_tokens)}
        self._longest_row = max(self._longest_row, sums.longest_row)
        memory = memory_metrics(self.model.device, self.planned_bytes, self._longest_row)
        return {**metrics, **counts, **memory}

    def _add_gradients(self, batch: StepBatch, objective: Objective, divisors: dict[str, float]) -> Sums:
        rows = micro_batches(batch, self.micro_batch_tokens, packing=self.model.packing, device=self.model.device)
        return add_gradients(self.model, rows, objective, divisors, self.optimizer.loss_scale.value)

    def optim_prepare(self, learning_rate: float) -> OptimStats:
        """Clip the accumulated gradient and compute the update; see Optimizer.prepare. After an overflow in float16,
        the backward pass is repeated at a lower loss scale, until there is none."""
        num_overflows, made = 0, self._made
        while (stats := self._prepare(learning_rate)).overflowed:
            num_overflows += 1
            self._made = []
            for batch, objective, weight in made:
                self.forward_backward(batch, objective, weight)
        self._made = []
        return replace(stats, num_overflows=num_overflows)

    def _prepare(self, learning_rate: float) -> OptimStats:
        return self.optimizer.prepare(learning_rate)

    def optim_commit(self) -> None:
        """Write the new values to the live weights."""
        self.optimizer.commit()
        self._weights_changed()

    def _weights_changed(self) -> None:
        if self.model.images is not None:
            self.model.images.clear()

    def named_weights(self) -> NamedWeights:
        """Live tensors of the model under their Hugging Face names, with an adapter merged in."""
        return self.model.named_weights()

    def base_weights(self) -> NamedWeights:
        """The same without the adapter."""
        return self.model.base_weights()

    def adapter_weights(self) -> NamedWeights:
        """Live tensors of the adapter under PEFT's names."""
        assert self.model.adapter is not None
        return self.model.adapter.named_weights()

    def write_weights(self, folder: Path, source: Path) -> tuple[records.ParameterSpec, ...]:
        """Write a deployable folder: the model with the other files of `source`, or the adapter alone. Returns its
        tensors' names and shapes with the fingerprints of the live weights."""
        weights = held(self.deployable())
        write_deployable(folder, weights, self.model.form, source)
        return describe(weights)

    def deployable(self) -> NamedWeights:
        """The live tensors to be written by `write_weights`."""
        return self.named_weights() if self.model.form.adapter is None else self.adapter_weights()

    def state(self) -> dict[str, Tensor]:
        """The resume state by name: the optimizer's, and of the random generators."""
        tensors = {f"{STATE_PREFIX}{name}": tensor for name, tensor in self.optimizer.state().items()}
        return {**tensors, **random_state(self.model.device)}

    def save(self, folder: Path) -> None:
        """Write the resume state into `folder`, without pickle."""
        folder.mkdir(parents=True, exist_ok=True)
        write_state(folder, self.state(), self.step)

    def load(self, folder: Path) -> None:
        """Load the files of `save`, live weights included."""
        restore_state(self.optimizer, read_state(folder), self.model.device)
        self._weights_changed()


def write_deployable(folder: Path, weights: NamedWeights, form: Form, source: Path) -> None:
    """Write `weights` as a model, with the other files of `source`, or as an adapter."""
    if form.adapter is None:
        write_model_folder(folder, weights, source, form.config, durable=True)
    else:
        write_adapter_folder(folder, weights, form.adapter, durable=True)


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The states of this process's random generators."""
    found = {"rng.cpu": torch.get_rng_state()}
    return found | {"rng.cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else found


def restore_state(optimizer: Optimizer, tensors: Mapping[str, Tensor], device: torch.device) -> None:
    """Load saved state, full tensors or this rank's shards, into `optimizer` and the random generators. Raises
    TrainingError if it is no such state."""
    if "rng.cpu" not in tensors:
        raise TrainingError("the saved state has no rng.cpu: resume from another checkpoint")
    optimizer.load_state({n.removeprefix(STATE_PREFIX): t for n, t in tensors.items() if n.startswith(STATE_PREFIX)})
    try:
        torch.set_rng_state(tensors["rng.cpu"])
        if "rng.cuda" in tensors and device.type == "cuda":
            torch.cuda.set_rng_state(tensors["rng.cuda"], device)
    except (RuntimeError, TypeError) as error:
        raise TrainingError(
            f"the saved state of the random generators is none ({one_line(error)}): resume from another checkpoint"
        ) from error
