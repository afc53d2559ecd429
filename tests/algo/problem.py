"""One optimizer step that every loss is tried on: sequences, what is known of their tokens, and leaf logits."""

from dataclasses import dataclass

import torch

from slipstream import records
from slipstream.algo.logprobs import processed_logprobs
from slipstream.config.recipes import resolved
from slipstream.trainer.loss import PolicyObjective
from slipstream.trainer.packing import StepBatch, micro_batches

LENGTHS = (3, 1, 5, 4, 2, 6)
VOCABULARY = 12
MAX_TOKENS = 8


class FixedPolicy:
    """Gives each token the logits that were drawn for it, wherever its sequence was packed."""

    def __init__(self, logits_of_sequence):
        self.logits_of_sequence = logits_of_sequence

    def logits(self, micro):
        return torch.cat([self.logits_of_sequence[index] for index in micro.sequences])


@dataclass
class Problem:
    batch: StepBatch
    logits: list
    """Of each sequence, `[length, VOCABULARY]`, float64 leaves."""

    def ours(self, config, *, max_tokens=12, packing=True):
        """Loss, gradients of the logits and metrics by the objective, over micro-batches."""
        logits = [logits.detach().float().requires_grad_() for logits in self.logits]
        objective = PolicyObjective(resolved(config), records.SamplingParams(max_tokens=MAX_TOKENS))
        divisors = objective.counts(self.batch)
        total, sums = 0.0, {}
        for micro in micro_batches(self.batch, max_tokens, packing=packing):
            loss, own = objective.terms(FixedPolicy(logits), micro, divisors)
            loss.backward()
            total += loss.item()
            for name, value in own.items():
                sums[name] = sums.get(name, 0.0) + value.double()
        gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in logits]
        return total, torch.cat(gradients).double(), objective.summarize(sums, divisors)


def stream(batch, name):
    """Each sequence's values."""
    return [torch.tensor(sequence.values(name)) for sequence in batch.sequences]


def make_problem():
    """Ratios from a tenth to ten, advantages of both signs."""
    generator = torch.Generator().manual_seed(5)

    def noisy(logprobs_N, size):
        return logprobs_N + size * torch.randn(logprobs_N.shape, generator=generator)

    batch, all_logits, old, reference = StepBatch([], []), [], [], []
    for length in LENGTHS:
        logits_NV = torch.randn(length, VOCABULARY, generator=generator)
        target_ids_N = torch.randint(VOCABULARY, (length,), generator=generator)
        logprobs_N, _ = processed_logprobs(logits_NV, target_ids_N)
        behaviour = noisy(logprobs_N, 0.5).tolist()
        batch.sequences.append(
            records.Sequence([1, 2, *target_ids_N.tolist()], [False] * 2 + [True] * length, [0.0] * 2 + behaviour)
        )
        batch.advantages.append(torch.randn((), generator=generator).item())
        old.append(noisy(logprobs_N, 0.5))
        reference.append(noisy(logprobs_N, 0.5))
        all_logits.append(logits_NV.double().requires_grad_())
    batch.fill("old_logprobs", old)
    batch.fill("reference_logprobs", reference)
    return Problem(batch, all_logits)
