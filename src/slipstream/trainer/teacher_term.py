"""The teacher's part of a policy's loss: advantages from the sampled tokens alone, or the divergence over its likeliest
tokens (`teacher.top_k`)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from slipstream.algo.divergences import tail_logprob, top_divergence
from slipstream.algo.logprobs import Logits, logprobs_at
from slipstream.algo.surrogate_losses import kl_estimate
from slipstream.config.schema import TeacherConfig
from slipstream.errors import TrainingError
from slipstream.trainer.packing import MicroBatch


@dataclass(frozen=True)
class TeacherTerm:
    """With `top_k`: `coef` times the divergence `jsd_beta` of the policy's distribution from the teacher's, over these
    tokens and all others as one more outcome. Without: a token's advantage is raised by `coef * (teacher - old)`; over
    tokens of the policy, on average, the gradient of the reverse KL divergence."""

    config: TeacherConfig
    temperature: float

    def advantages(self, micro: MicroBatch, advantages_N: Tensor, old_N: Tensor) -> Tensor:
        """With the teacher's part, if it has one there. Raises TrainingError for sequences without scores."""
        teacher_N = _stream(micro, "teacher_logprobs")
        return advantages_N if self.config.top_k else advantages_N + self.config.coef * (teacher_N - old_N.detach())

    def loss(self, micro: MicroBatch, logits: Logits) -> tuple[Tensor, dict[str, Tensor]] | None:
        """The term of each token, `[N]`, and sums for metrics; None without `top_k`."""
        if not self.config.top_k:
            return None
        names = ("teacher_top_logprobs", "teacher_top_ids")
        # A stream of width 1 is `[N]`.
        teacher_NK, ids_NK = (_stream(micro, name).view(len(micro.target_ids_N), -1) for name in names)
        student_NK = logprobs_at(logits, ids_NK, self.temperature)
        # The student's are float64 in references only.
        divergence_N = top_divergence(student_NK, teacher_NK.to(student_NK.dtype), self.config.jsd_beta)
        sums = {
            "teacher/divergence": divergence_N.detach().sum(),
            "teacher/tail": tail_logprob(teacher_NK).exp().sum(),
            "teacher/policy_tail": tail_logprob(student_NK.detach()).exp().sum(),
        }
        return self.config.coef * divergence_N, sums

    def sums(self, micro: MicroBatch, old_N: Tensor) -> dict[str, Tensor]:
        """Sums for metrics of the distance of the old policy from its teacher: the reverse KL by k1 and k3."""
        teacher_N = micro.streams["teacher_logprobs"]
        return {
            "teacher/kl": kl_estimate(old_N, teacher_N, "k1").sum(),
            "teacher/kl_k3": kl_estimate(old_N, teacher_N, "k3").clamp(max=math.exp(20.0)).sum(),
            "teacher/logprob": teacher_N.sum(),
            "teacher/abs_difference": (teacher_N - old_N).abs().sum(),
        }


def _stream(micro: MicroBatch, name: str) -> Tensor:
    if (values := micro.streams.get(name)) is None:
        raise TrainingError(f"a sequence has no {name} of the teacher: every rollout must be scored")
    return values
