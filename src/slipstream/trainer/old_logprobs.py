"""Log-probabilities to compare with the policy's: old ones, the denominator of the importance ratio, and the reference
model's, for the KL term.

With `algorithm.old_policy = "engine"` the engine returned the old ones with the rollout; with "trainer"
the weights recompute them here, before the batch's first optimizer step (AReaL, arXiv 2505.24298, has both).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice

from torch import Tensor

from slipstream import records
from slipstream.algo.surrogate_losses import kl_estimate
from slipstream.config.planned import PlannedRL
from slipstream.config.schema import KLEstimator
from slipstream.trainer.learner import Learner, Scorer
from slipstream.trainer.packing import StepBatch, stream_of


def fill_logprobs(
    steps: Sequence[StepBatch],
    algorithm: PlannedRL,
    learner: Learner,
    reference: Scorer | None,
    sampling: records.SamplingParams,
) -> None:
    """Set the log-probabilities to compare with the policy's in the loss: the reference model's for a KL term in the
    loss, and with `old_policy = "trainer"` the current weights', the denominator of the PPO ratio."""
    different = {id(step): step for step in steps}.values()  # epochs repeat the same objects
    for step in different:
        if reference is not None and not _kl_in_reward(algorithm) and not step.has("reference_logprobs"):
            step.fill("reference_logprobs", reference.forward(step.sequences, sampling).logprobs)
    # A single update needs none: its ratio is 1 by construction.
    if algorithm.old_policy == "trainer" and len(steps) > 1 and not all(step.has("old_logprobs") for step in steps):
        for step in different:
            step.fill("old_logprobs", learner.forward(step.sequences, sampling).logprobs)


def fill_read(
    batch: records.Batch,
    names: Collection[str],
    learner: Learner,
    reference: Scorer | None,
    sampling: records.SamplingParams,
) -> None:
    """Write the log-probabilities called `names`, for the hooks of an algorithm, to streams of the sequences."""
    sequences = [sequence for rollout in batch.rollouts for sequence in rollout.sequences]
    models: dict[str, Scorer | None] = {"old_logprobs": learner, "reference_logprobs": reference}
    for name, model in models.items():
        if name in names and model is not None:
            for sequence, values in zip(sequences, model.forward(sequences, sampling).logprobs, strict=True):
                sequence.streams[name] = stream_of(values)


def reward_kl_penalties(
    batch: records.Batch,
    algorithm: PlannedRL,
    learner: Learner,
    reference: Scorer | None,
    sampling: records.SamplingParams,
) -> tuple[list[list[Tensor]] | None, dict[str, float]]:
    """With `kl_in = "reward"`: `kl_coef * KL(policy || reference)` of each trainable token, by rollout and sequence,
    float64 `[N]`, for credit assignment to subtract from the rewards; and metrics. None otherwise."""
    if not _kl_in_reward(algorithm) or reference is None:
        return None, {}
    sequences = [sequence for rollout in batch.rollouts for sequence in rollout.sequences]
    ours = learner.forward(sequences, sampling).logprobs
    theirs = reference.forward(sequences, sampling).logprobs
    penalties, mean = kl_penalties_of(batch, ours, theirs, algorithm.arguments.kl_estimator, algorithm.kl_coef)
    return penalties, {"train/kl_reference": mean}


def kl_penalties_of(
    batch: records.Batch, ours: Sequence[Tensor], theirs: Sequence[Tensor], kind: KLEstimator, coef: float
) -> tuple[list[list[Tensor]], float]:
    """KL penalties `coef * KL` of each trainable token, by rollout and sequence, float64 `[N]`; and the mean KL per
    token, in nats. `ours` and `theirs`: each sequence's log-probabilities `[N]` by the policy and by the reference."""
    divergences = [kl_estimate(a, b, kind).double() for a, b in zip(ours, theirs, strict=True)]
    mean = sum(each.sum().item() for each in divergences) / max(1, sum(map(len, divergences)))
    each = (coef * divergence for divergence in divergences)
    return [list(islice(each, len(rollout.sequences))) for rollout in batch.rollouts], mean


def _kl_in_reward(algorithm: PlannedRL) -> bool:
    """Whether the KL term is subtracted from the rewards rather than added to the loss."""
    return algorithm.kl_coef > 0 and algorithm.arguments.kl_in == "reward"
