"""The training objectives, supervised cross-entropy and policy gradients, as sums over micro-batches.

An objective computes the divisors of a whole optimizer step before any backward pass (`counts`), one micro-batch's
contribution to the loss and sums for metrics (`terms`), and the step's metrics from all sums (`summarize`). So the
split of a step into micro-batches and ranks changes rounding only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from slipstream import records
from slipstream.algo.algorithm import Algorithm, algorithm_of, loss_of
from slipstream.algo.importance_sampling import (
    Weighting,
    difference_means,
    difference_sums,
    importance_weights,
    log_ratio_histogram,
    ratio_quantiles,
    ratio_shares,
)
from slipstream.algo.logprobs import Logits, processed_logprobs, token_statistics
from slipstream.algo.surrogate_losses import LossInputs, Streams, kl_estimate, token_weights
from slipstream.config.planned import PlannedRL
from slipstream.config.schema import TeacherConfig
from slipstream.errors import TrainingError
from slipstream.trainer.model.policy import PolicyModel
from slipstream.trainer.packing import MicroBatch, StepBatch
from slipstream.trainer.teacher_term import TeacherTerm


class Objective(Protocol):
    """A loss as a sum over micro-batches."""

    @property
    def ignores_silent(self) -> bool:
        """Whether sequences of advantage 0 have a gradient of exactly 0."""
        ...

    def counts(self, batch: StepBatch) -> dict[str, float]:
        """Compute the divisors of the whole optimizer step."""
        ...

    def terms(
        self, model: PolicyModel, micro: MicroBatch, divisors: dict[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute this micro-batch's contribution to the loss, a scalar for `backward`, and detached sums of any
        shape."""
        ...

    def idle(self, model: PolicyModel, blank: MicroBatch, divisors: dict[str, float]) -> Tensor:
        """Outputs of as many forward passes as `terms` makes of a row, for a rank without one."""
        ...

    def summarize(self, sums: dict[str, Tensor], divisors: dict[str, float]) -> dict[str, float]:
        """Compute the step's metrics from the sums over all micro-batches, float64 on the CPU."""
        ...


TERM = "term:"
"""Begins the `OneForward.chosen` of a further loss."""


class OneForward:
    """An objective of one forward pass a row."""

    chosen = ""
    """The name of a loss in place of the run's; other ranks find the objective by it."""

    def idle(self, model: PolicyModel, blank: MicroBatch, divisors: dict[str, float]) -> Tensor:
        """See `Objective`."""
        logits = model.logits(blank)
        return logits if isinstance(logits, Tensor) else processed_logprobs(logits, blank.target_ids_N)[0]


class SFTObjective(OneForward):
    """Mean cross-entropy over all trainable tokens of the step."""

    ignores_silent = False

    def __init__(self, chosen: str = "") -> None:
        """`chosen`: see `OneForward`."""
        self.chosen = chosen

    def counts(self, batch: StepBatch) -> dict[str, float]:
        """Trainable tokens."""
        return {"tokens": float(batch.num_tokens)}

    def terms(
        self, model: PolicyModel, micro: MicroBatch, divisors: dict[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Negative log-likelihood, in float32."""
        logprobs_N, entropy_N, greedy_N = token_statistics(model.logits(micro), micro.target_ids_N)
        loss = -logprobs_N.sum() / divisors["tokens"]
        right = (greedy_N == micro.target_ids_N).sum()
        return loss, {"loss": loss.detach(), "entropy": entropy_N.detach().sum(), "token_accuracy": right}

    def summarize(self, sums: dict[str, Tensor], divisors: dict[str, float]) -> dict[str, float]:
        """`loss` in nats a token, `entropy`, `token_accuracy` of greedy prediction."""
        tokens = divisors["tokens"]
        means = {key: value.item() / tokens for key, value in sums.items() if key != "loss"}
        return {"loss": sums["loss"].item(), "num_tokens": tokens, **means}


class PolicyObjective(OneForward):
    """A policy gradient: the algorithm's loss with importance weights, a KL term and an entropy bonus.

    Log-probabilities are of the sampled distribution (`sampling`). Per token:
    `importance weight * loss + kl_coef * kl`, averaged as `config.normalize` says, less `entropy_coef` times the mean
    entropy of a token, for any normalization of the loss. A teacher changes advantages or adds a term (`TeacherTerm`).
    """

    def __init__(
        self,
        config: PlannedRL,
        sampling: records.SamplingParams,
        teacher: TeacherConfig | None = None,
        algorithm: Algorithm | None = None,
    ) -> None:
        """`teacher`: None without one. `algorithm`: in place of the run's."""
        self.config = config
        self._teacher = None if teacher is None else TeacherTerm(teacher, sampling.temperature)
        self.sampling = sampling
        self.algorithm = algorithm or algorithm_of(config)
        own = any(self.algorithm.defines(hook) for hook in ("credit", "credit_batch", "loss"))
        self._has_advantages = config.advantage != "none" or own or algorithm is not None
        self._has_kl_term = config.kl_coef > 0.0 and config.arguments.kl_in == "loss"

    def with_algorithm(self, algorithm: Algorithm, chosen: str) -> PolicyObjective:
        """The same with another algorithm; `chosen`: see `OneForward`."""
        other = PolicyObjective(self.config, self.sampling, self._teacher and self._teacher.config, algorithm)
        other.chosen = chosen
        return other

    @property
    def ignores_silent(self) -> bool:
        """See `Objective`. True if advantages are the only source of gradients; never for a user's own loss: its
        gradient at advantage 0 is unknown."""
        has_other_terms = self._has_kl_term or self.config.entropy_coef > 0.0 or self._teacher is not None
        has_hooks = self.algorithm.defines("loss") or self.algorithm.defines("terms")
        return not has_hooks and not has_other_terms

    def counts(self, batch: StepBatch) -> dict[str, float]:
        """Trainable tokens, computed ones, sequences with any, and the loss's divisor."""
        tokens, rollouts = float(batch.num_tokens), float(batch.num_rollouts)
        loss = {"token": tokens, "sequence": rollouts, "constant": rollouts * self.sampling.max_tokens}
        return {
            "tokens": tokens,
            "computed": float(batch.num_computed),
            "sequences": float(batch.num_sequences),
            "loss": loss[self.config.normalize],
        }

    def terms(
        self, model: PolicyModel, micro: MicroBatch, divisors: dict[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See the class; raises TrainingError when advantages or needed log-probabilities are missing."""
        config = self.config
        logits = model.logits(micro)
        logprobs_N, entropy_N = sampled_logprobs(logits, micro.target_ids_N, self.sampling)
        inputs = self._inputs(micro, logprobs_N, entropy_N)
        policy = loss_of(self.algorithm, inputs)
        per_token_N, old_N = policy.loss_N, inputs.old_logprobs_N
        sums = {
            "entropy": entropy_N.detach().sum(),
            "logprob": logprobs_N.detach().sum(),
            "old_logprob": old_N.sum(),
            "ratio": torch.exp(policy.log_ratio_N).sum(),
            "ratio_histogram": log_ratio_histogram(policy.log_ratio_N),
            **{name: mask_N.sum() for name, mask_N in policy.counts.items()},
        }
        if self._teacher is not None:
            sums |= self._teacher.sums(micro, old_N)
            if (of_teacher := self._teacher.loss(micro, logits)) is not None:
                per_token_N, teacher_sums = self._with_advantages(per_token_N) + of_teacher[0], of_teacher[1]
                sums |= teacher_sums
        if (behaviour_N := micro.streams.get("behaviour_logprobs")) is not None:
            sums |= _behaviour_sums(behaviour_N, logprobs_N.detach(), old_N)
            places_N = micro.position_ids_T[micro.predict_index_N] + 1
            sums |= difference_sums(old_N - behaviour_N, places_N, behaviour_N)
        if (weighting := config.importance_sampling) != "none":
            importance_N, bounded_N = self._importance(micro, old_N, weighting)
            per_token_N = per_token_N * importance_N
            sums["importance_weight"] = importance_N.sum()
            sums["importance_capped_fraction"] = bounded_N.sum()
        if self._has_kl_term:
            if (reference_N := micro.streams.get("reference_logprobs")) is None:
                raise TrainingError("kl_coef is above 0 but the batch has no reference log-probabilities")
            kl_N = kl_estimate(logprobs_N, reference_N, config.arguments.kl_estimator)
            per_token_N = per_token_N + config.kl_coef * kl_N
            sums["kl_reference"] = kl_N.detach().sum()
        weights_N = token_weights(micro.sequence_index_N, micro.num_sequences, config.normalize, micro.rollout_tokens_S)
        loss = (per_token_N * weights_N).sum() / divisors["loss"]
        if config.entropy_coef > 0.0:
            loss = loss - config.entropy_coef * entropy_N.sum() / divisors["tokens"]
        return loss, {"loss": loss.detach(), **sums}

    def _inputs(self, micro: MicroBatch, logprobs_N: Tensor, entropy_N: Tensor) -> LossInputs:
        config = self.config
        advantages_N, behaviour_N = micro.streams.get("advantages"), micro.streams.get("behaviour_logprobs")
        if advantages_N is None:
            raise TrainingError("a sequence of a GRPO batch has no advantage: give one for each sequence")
        if config.old_policy == "engine":
            if behaviour_N is None:
                raise TrainingError(
                    'old_policy = "engine" needs the engine\'s log-probabilities and a sequence has none: ask the '
                    'engine for them or set algorithm.old_policy = "trainer"'
                )
            old_N = behaviour_N
        else:
            old_N = micro.streams.get("old_logprobs", logprobs_N.detach())
        return LossInputs(
            logprobs_N,
            old_N,
            advantages_N if self._teacher is None else self._teacher.advantages(micro, advantages_N, old_N),
            micro.sequence_index_N,
            micro.num_sequences,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            clip_dual=config.arguments.clip_dual,
            streams=Streams(micro.streams),
            entropy_N=entropy_N,
        )

    def _with_advantages(self, per_token_N: Tensor) -> Tensor:
        """The surrogate loss, without its gradient if this is 0 anyway: it would take as much memory as the logits."""
        return per_token_N if self._has_advantages else per_token_N.detach()

    def _importance(self, micro: MicroBatch, old_N: Tensor, weighting: Weighting) -> tuple[Tensor, Tensor]:
        config = self.config
        if (behaviour_N := micro.streams.get("behaviour_logprobs")) is None:
            raise TrainingError(
                f"importance_sampling = {weighting!r} needs the engine's log-probabilities and a "
                "sequence has none: ask the engine for them or set algorithm.importance_sampling = 'none'"
            )
        return importance_weights(
            old_N,
            behaviour_N,
            micro.sequence_index_N,
            micro.num_sequences,
            weighting,
            config.arguments.importance_floor,
            config.arguments.importance_cap,
        )

    def term(self, method: str) -> Objective:
        """The objective of a `LossTerm` with this `loss`."""
        return TermObjective(self, method)

    def refuse(self, loss: float, number: int) -> None:
        """Raise TrainingError for a user's `loss` without a finite value in optimizer step `number`."""
        if self.algorithm.defines("loss"):
            place = self.algorithm.place("loss")
            raise TrainingError(f"{place} gave a loss of {loss} in optimizer step {number}: return finite numbers")

    def summarize(self, sums: dict[str, Tensor], divisors: dict[str, float]) -> dict[str, float]:
        """Means over the computed tokens, for any normalization of the loss; `loss` itself as it was minimized."""
        tokens = divisors["computed"]
        vectors = {key: sums[key] for key in ("ratio_histogram", "mismatch_histogram") if key in sums}
        numbers = {key: value.item() for key, value in sums.items() if not value.dim()}
        metrics = {
            "loss": numbers["loss"],
            "num_tokens": divisors["tokens"],
            "num_sequences": divisors["sequences"],
            "silent_fraction": 1.0 - tokens / divisors["tokens"],
        }
        hidden = ("loss", "off_policy", "off_policy_squared")
        metrics |= {key: value / tokens for key, value in numbers.items() if key not in hidden}
        if numbers.get("off_policy_squared"):
            metrics["effective_sample_size"] = numbers["off_policy"] ** 2 / (tokens * numbers["off_policy_squared"])
        for key, histogram in vectors.items():
            prefix = "mismatch/" if key == "mismatch_histogram" else ""
            low, high = ratio_quantiles(histogram, (0.01, 0.99))
            metrics |= {f"{prefix}ratio_p01": low, f"{prefix}ratio_p99": high}
            metrics |= {f"{prefix}ratio_{name}": part for name, part in ratio_shares(histogram).items()}
        return metrics | {f"mismatch/{name}": value for name, value in difference_means(sums).items()}


@dataclass(frozen=True)
class TermObjective(OneForward):
    """A further loss of the algorithm's class: `divisors["weight"]` times its mean over the trained tokens, under the
    model's own distribution. Old log-probabilities are the current ones, and advantages 1, without such streams."""

    main: PolicyObjective
    method: str
    """Of the class; empty: cross-entropy."""
    ignores_silent: bool = False

    @property
    def chosen(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """See `OneForward`."""
        return TERM + self.method

    def counts(self, batch: StepBatch) -> dict[str, float]:
        """Trained tokens, and the weight, for the caller to set."""
        return {"tokens": float(batch.num_tokens), "weight": 1.0}

    def terms(
        self, model: PolicyModel, micro: MicroBatch, divisors: dict[str, float]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See `Objective`."""
        logprobs_N, entropy_N = processed_logprobs(model.logits(micro), micro.target_ids_N)
        loss_N = -logprobs_N
        if self.method:
            streams, detached_N = Streams(micro.streams), logprobs_N.detach()
            old_N, advantages_N = streams.get("old_logprobs", detached_N), streams.get("advantages")
            inputs = LossInputs(
                logprobs_N,
                old_N,
                torch.ones_like(detached_N) if advantages_N is None else advantages_N,
                micro.sequence_index_N,
                micro.num_sequences,
                clip_low=self.main.config.clip_low,
                clip_high=self.main.config.clip_high,
                streams=streams,
                entropy_N=entropy_N,
            )
            loss_N = loss_of(self.main.algorithm, inputs, self.method).loss_N
        loss = loss_N.sum() / divisors["tokens"]
        return divisors["weight"] * loss, {"loss": loss.detach()}

    def summarize(self, sums: dict[str, Tensor], divisors: dict[str, float]) -> dict[str, float]:
        """`loss`: the mean, without the weight."""
        return {"loss": sums["loss"].item()}


def _behaviour_sums(behaviour_N: Tensor, logprobs_N: Tensor, old_N: Tensor) -> dict[str, Tensor]:
    """Sums for metrics of the distance of the engine's policy from the trainer's old and current ones."""
    # Clamped at e**20: squares stay finite; ratios so large only mean "broken".
    ratio_N = (logprobs_N - behaviour_N).double().clamp(-20.0, 20.0).exp()
    return {
        "mismatch/abs_logprob_diff": (old_N - behaviour_N).abs().sum(),
        # KL(engine || trainer), on tokens sampled by the engine.
        "mismatch/kl": kl_estimate(behaviour_N, old_N, "k3").clamp(max=math.exp(20.0)).sum(),
        "mismatch_histogram": log_ratio_histogram(old_N - behaviour_N),
        "off_policy": ratio_N.sum(),
        "off_policy_squared": ratio_N.square().sum(),
    }


def sampled_logprobs(logits_NV: Logits, token_ids_N: Tensor, sampling: records.SamplingParams) -> tuple[Tensor, Tensor]:
    """`(logprobs_N, entropy_N)` of the distribution of `sampling`."""
    return processed_logprobs(
        logits_NV, token_ids_N, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
    )
