"""The learner: a model, its optimizer, and the primitives that any training loop is made of.

`forward`, `forward_backward`, `optim_prepare`, `optim_commit`, `named_weights`, `save`, `load`. Guarantees:
live weights change only in `optim_commit` (and `load`); a batch without a trainable token is refused;
training continues bit for bit after `save` and `load`. Who calls, when, and with what rate is left to the
loop.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream import records
from slipstream.errors import TrainingError
from slipstream.trainer.batching import MicroBatch, StepBatch, micro_batches
from slipstream.trainer.model import PolicyModel
from slipstream.trainer.objectives import Objective, sampled_logprobs
from slipstream.trainer.optimizer import Optimizer, OptimStats
from slipstream.weights.adapter import write_adapter_folder
from slipstream.weights.files import write_model_folder
from slipstream.weights.fingerprint import describe

TENSORS_FILE = "learner.safetensors"
FACTS_FILE = "learner.json"
GIB = 1 << 30
_UNPROCESSED = records.SamplingParams(max_tokens=1)


@dataclass(frozen=True)
class Scores:
    """What a model says of each sequence's trainable tokens, float32 on the CPU, one tensor a sequence."""

    logprobs: list[Tensor]
    entropies: list[Tensor]


@contextmanager
def one_order_of_sums(device: torch.device) -> Generator[None]:
    """On a CPU, the same bits every time: where completions share the end of a prompt, its gradient is a sum over them,
    which torch's threads otherwise add up in whatever order they come."""
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


@torch.no_grad()
def score(
    model: PolicyModel,
    sequences: Sequence[records.Sequence],
    sampling: records.SamplingParams = _UNPROCESSED,
    *,
    micro_batch_tokens: int,
) -> Scores:
    """Log-probabilities and entropies under `sampling`, without gradients; for any model, a frozen one
    too."""
    empty = torch.zeros(0)
    scores = Scores([empty] * len(sequences), [empty] * len(sequences))
    found: list[tuple[MicroBatch, tuple[Tensor, Tensor]]] = []
    batch = StepBatch(list(sequences))
    for micro in micro_batches(batch, micro_batch_tokens, packing=model.packing, device=model.device):
        found.append((micro, sampled_logprobs(model.logits(micro), micro.target_ids_N, sampling)))
    # Read when all is under way: a GPU would wait otherwise, row by row.
    for micro, pair in found:
        for values_N, target in zip(pair, (scores.logprobs, scores.entropies), strict=True):
            for index, values in zip(micro.sequences, values_N.cpu().split(micro.counts), strict=True):
                target[index] = values.clone()
    return scores


def memory_metrics(device: torch.device, planned_bytes: int | None) -> dict[str, float]:
    """The most that this process had on its GPU so far, what its allocator held for it, and what was planned; nothing
    on a CPU, where the interpreter and its libraries are most of a process."""
    if device.type != "cuda":
        return {}
    peaks = {"peak": torch.cuda.max_memory_allocated(device), "held": torch.cuda.max_memory_reserved(device)}
    if planned_bytes is not None:
        peaks["planned"] = planned_bytes
    return {f"memory/trainer_{name}_gib": value / GIB for name, value in peaks.items()}


class Learner:
    """Trains `model` with `optimizer`; `micro_batch_tokens` bounds memory and changes only rounding. `planned_bytes`:
    what the plan expects it to take at most, to be told beside what it took."""

    def __init__(
        self,
        model: PolicyModel,
        optimizer: Optimizer,
        *,
        micro_batch_tokens: int = 4096,
        planned_bytes: int | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.micro_batch_tokens = micro_batch_tokens
        self.planned_bytes = planned_bytes

    @property
    def step(self) -> int:
        """Optimizer steps made so far."""
        return self.optimizer.step

    def forward(
        self,
        sequences: Sequence[records.Sequence],
        sampling: records.SamplingParams = _UNPROCESSED,
        *,
        micro_batch_tokens: int | None = None,
    ) -> Scores:
        """Log-probabilities and entropies of trainable tokens by the live weights."""
        return score(self.model, sequences, sampling, micro_batch_tokens=micro_batch_tokens or self.micro_batch_tokens)

    def fill_old_logprobs(self, steps: Sequence[StepBatch], sampling: records.SamplingParams) -> None:
        """Fix the ratio's denominator of a batch that makes several updates: call before the first of them.

        A single update needs none: the ratio is 1 by construction.
        """
        if len(steps) > 1:
            for step in {id(step): step for step in steps}.values():
                step.old_logprobs = self.forward(step.sequences, sampling).logprobs

    def forward_backward(self, batch: StepBatch, objective: Objective) -> dict[str, float]:
        """Add the gradient of the step's loss to what is accumulated; returns the objective's metrics."""
        if not any(sequence.num_trainable for sequence in batch.sequences):
            raise TrainingError(
                f"the batch of optimizer step {self.step} has {len(batch.sequences)} sequences and no "
                "trainable token: check the masks and which outcomes are trained on"
            )
        divisors = objective.counts(batch)
        totals: dict[str, Tensor] = {}
        num_rows = num_row_tokens = 0
        for micro in micro_batches(
            batch, self.micro_batch_tokens, packing=self.model.packing, device=self.model.device
        ):
            # Both passes: compiled layers want one setting for the two.
            with one_order_of_sums(self.model.device):
                loss, sums = objective.terms(self.model, micro, divisors)
                loss.backward()
            for key, value in sums.items():
                # On the device: reading a number here would make a GPU wait.
                totals[key] = totals[key] + value.double() if key in totals else value.double()
            num_rows += 1
            num_row_tokens += len(micro.token_ids_T)
        metrics = objective.summarize({key: value.cpu() for key, value in totals.items()}, divisors)
        rows = {"num_micro_batches": float(num_rows), "num_row_tokens": float(num_row_tokens)}
        return {**metrics, **rows, **memory_metrics(self.model.device, self.planned_bytes)}

    def optim_prepare(self, learning_rate: float) -> OptimStats:
        """Clip the accumulated gradient and make the update; see Optimizer.prepare."""
        return self.optimizer.prepare(learning_rate)

    def optim_commit(self) -> None:
        """Write the new values to the live weights."""
        self.optimizer.commit()

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Live tensors of the whole model under their Hugging Face names; an adapter is merged into them."""
        return self.model.named_weights()

    def write_weights(self, folder: Path, source: Path) -> tuple[records.ParameterSpec, ...]:
        """Make `folder` what can be deployed: a model with the other files of `source`, or the adapter alone. Returns
        what must be in it, with the fingerprints of the live weights."""
        adapter = self.model.adapter
        weights = list(self.named_weights() if adapter is None else adapter.named_weights())
        if adapter is None:
            write_model_folder(folder, weights, source, durable=True)
        else:
            write_adapter_folder(folder, weights, adapter.config, durable=True)
        return describe(weights)

    def save(self, folder: Path) -> None:
        """Write the resume state into `folder`: the optimizer's, step and random generators; no pickle."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"optimizer.{name}": tensor for name, tensor in self.optimizer.state().items()}
        tensors["rng.cpu"] = torch.get_rng_state()
        if self.model.device.type == "cuda":
            tensors["rng.cuda"] = torch.cuda.get_rng_state(self.model.device)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / TENSORS_FILE)
        (folder / FACTS_FILE).write_text(json.dumps({"step": self.step, "torch": torch.__version__}))

    def load(self, folder: Path) -> None:
        """Take over what `save` wrote, live weights included."""
        tensors = load_file(folder / TENSORS_FILE)
        prefix = "optimizer."
        self.optimizer.load_state({n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)})
        torch.set_rng_state(tensors["rng.cpu"])
        if "rng.cuda" in tensors and self.model.device.type == "cuda":
            torch.cuda.set_rng_state(tensors["rng.cuda"], self.model.device)
