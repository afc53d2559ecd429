"""What is minimised: supervised cross-entropy and GRPO, as sums over micro-batches.

An objective says by what a whole optimizer step is divided before any backward pass (`counts`), gives one
micro-batch's share of the loss and sums of what is worth measuring (`terms`), and turns the step's sums into
metrics (`summarize`). So a step cut otherwise, or spread over more ranks, changes nothing but rounding.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from slipstream import records
from slipstream.algo.losses import (
    clipped_policy_loss,
    kl_estimate,
    token_weights,
    truncated_importance_weights,
)
from slipstream.algo.sampling import processed_logprobs, token_logprobs
from slipstream.config.schema import GRPOConfig
from slipstream.errors import TrainingError
from slipstream.trainer.batching import MicroBatch, StepBatch
from slipstream.trainer.model import PolicyModel


class Objective(Protocol):
    """A loss whose terms add up over micro-batches."""

    def counts(self, batch: StepBatch) -> dict[str, float]:
        """Divisors over the whole optimizer step."""
        ...

    def terms(
        self, model: PolicyModel, micro: MicroBatch, divisors: dict[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """This micro-batch's share of the loss, a scalar to call backward on, and detached sums."""
        ...

    def summarize(self, sums: dict[str, float], divisors: dict[str, float]) -> dict[str, float]:
        """Metrics of the step from the sums over all its micro-batches."""
        ...


class SFTObjective:
    """Mean cross-entropy over all trainable tokens of the step."""

    def counts(self, batch: StepBatch) -> dict[str, float]:
        """Trainable tokens."""
        return {"tokens": float(batch.num_tokens)}

    def terms(
        self, model: PolicyModel, micro: MicroBatch, divisors: dict[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Negative log-likelihood, in float32."""
        logits_NV = model.logits(micro)
        logprobs_N, entropy_N = token_logprobs(logits_NV, micro.target_ids_N)
        loss = -logprobs_N.sum() / divisors["tokens"]
        with torch.no_grad():
            right = (logits_NV.argmax(-1) == micro.target_ids_N).sum()
        return loss, {"loss": loss.detach(), "entropy": entropy_N.detach().sum(), "token_accuracy": right}

    def summarize(self, sums: dict[str, float], divisors: dict[str, float]) -> dict[str, float]:
        """`loss` in nats a token, `entropy`, `token_accuracy` of greedy prediction."""
        tokens = divisors["tokens"]
        means = {key: value / tokens for key, value in sums.items() if key != "loss"}
        return {"loss": sums["loss"], "num_tokens": tokens, **means}


class GRPOObjective:
    """Clipped policy gradient with truncated importance weights and an optional KL term.

    Log-probabilities are those of the distribution that was sampled from (`sampling`). Per token:
    `importance weight * clipped loss + kl_coef * kl`, averaged as `config.normalize` says.
    """

    def __init__(self, config: GRPOConfig, sampling: records.SamplingParams) -> None:
        self.config = config
        self.sampling = sampling

    def counts(self, batch: StepBatch) -> dict[str, float]:
        """Trainable tokens, sequences that have any, and whichever of them the loss is divided by."""
        tokens, sequences = float(batch.num_tokens), float(batch.num_sequences)
        loss = tokens if self.config.normalize == "token" else sequences
        return {"tokens": tokens, "sequences": sequences, "loss": loss}

    def terms(
        self, model: PolicyModel, micro: MicroBatch, divisors: dict[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See the class; raises TrainingError when advantages or needed log-probabilities are missing."""
        config = self.config
        if micro.advantages_N is None:
            raise TrainingError("a sequence of a GRPO batch has no advantage: give one for each sequence")
        logprobs_N, entropy_N = sampled_logprobs(model.logits(micro), micro.target_ids_N, self.sampling)
        old_N = logprobs_N.detach() if micro.old_logprobs_N is None else micro.old_logprobs_N
        clipped = clipped_policy_loss(logprobs_N, old_N, micro.advantages_N, config.clip_low, config.clip_high)
        weights_N = token_weights(micro.sequence_index_N, micro.num_sequences, config.normalize)
        per_token_N = clipped.loss_N
        sums = {
            "entropy": entropy_N.detach().sum(),
            "ratio": torch.exp(logprobs_N.detach() - old_N).sum(),
            "clip_low": clipped.clipped_low_N.sum(),
            "clip_high": clipped.clipped_high_N.sum(),
        }
        sums |= self._behaviour_sums(micro, logprobs_N.detach(), old_N)
        if config.importance_sampling == "truncated":
            if micro.behaviour_logprobs_N is None:
                raise TrainingError(
                    "importance_sampling = 'truncated' needs the engine's log-probabilities and a sequence "
                    "has none: ask the engine for them or set algorithm.importance_sampling = 'none'"
                )
            importance_N = truncated_importance_weights(old_N, micro.behaviour_logprobs_N, config.importance_cap)
            per_token_N = per_token_N * importance_N
            sums["importance"] = importance_N.sum()
            sums["importance_capped"] = (importance_N >= config.importance_cap).sum()
        if config.kl_coef > 0.0:
            if micro.reference_logprobs_N is None:
                raise TrainingError("kl_coef is above 0 but the batch has no reference log-probabilities")
            kl_N = kl_estimate(logprobs_N, micro.reference_logprobs_N, config.kl_estimator)
            per_token_N = per_token_N + config.kl_coef * kl_N
            sums["kl_reference"] = kl_N.detach().sum()
        loss = (per_token_N * weights_N).sum() / divisors["loss"]
        return loss, {"loss": loss.detach(), **sums}

    def _behaviour_sums(self, micro: MicroBatch, logprobs_N: Tensor, old_N: Tensor) -> dict[str, Tensor]:
        """How far the engine that sampled is from the trainer (old) and from the current weights."""
        if micro.behaviour_logprobs_N is None:
            return {}
        # Beyond e**20 a weight says nothing but "broken", and its square must still be finite.
        ratio_N = (logprobs_N - micro.behaviour_logprobs_N).double().clamp(-20.0, 20.0).exp()
        return {
            "abs_logprob_diff": (old_N - micro.behaviour_logprobs_N).abs().sum(),
            "off_policy": ratio_N.sum(),
            "off_policy_squared": ratio_N.square().sum(),
        }

    def summarize(self, sums: dict[str, float], divisors: dict[str, float]) -> dict[str, float]:
        """Token means, whatever the loss is normalised by; `loss` itself as it was minimised."""
        tokens = divisors["tokens"]
        metrics = {"loss": sums["loss"], "num_tokens": tokens, "num_sequences": divisors["sequences"]}
        names = {
            "entropy": "entropy",
            "ratio": "ratio",
            "clip_low": "clip_fraction_low",
            "clip_high": "clip_fraction_high",
            "importance": "importance_weight",
            "importance_capped": "importance_capped_fraction",
            "kl_reference": "kl_reference",
            "abs_logprob_diff": "mismatch/abs_logprob_diff",
        }
        metrics |= {name: sums[key] / tokens for key, name in names.items() if key in sums}
        if sums.get("off_policy_squared"):
            metrics["effective_sample_size"] = sums["off_policy"] ** 2 / (tokens * sums["off_policy_squared"])
        return metrics


def sampled_logprobs(logits_NV: Tensor, token_ids_N: Tensor, sampling: records.SamplingParams) -> tuple[Tensor, Tensor]:
    """`(logprobs_N, entropy_N)` of the distribution that `sampling` draws from."""
    return processed_logprobs(
        logits_NV, token_ids_N, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
    )
