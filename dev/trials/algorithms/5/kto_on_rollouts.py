"""KTO on rollouts (arXiv 2402.01306, equation 8): a sigmoid loss of answers' log-ratio to the initial model.

The policy's own rollouts are the examples. Their mean log-ratio, an estimate of KL(policy || initial model), is the
reference point z0. The loss of an answer is `weight * (1 - sigmoid(+-beta * (log-ratio - z0)))`. An answer is one token
sequence. With normalize = "sequence" each weighs the same, and importance_sampling = "none" leaves its loss as it is.

slipstream train run.toml --algorithm.hooks kto_on_rollouts.py:KTO --algorithm.kind grpo \
    --algorithm.normalize sequence --algorithm.importance_sampling none
"""

import torch
from torch import Tensor

from slipstream import Algorithm, LossInputs, Rollout


def log_ratio(rollout: Rollout) -> float:
    """Log policy - log initial model, summed over the sampled tokens."""
    policy, initial = ([sum(each.values(name)) for each in rollout.sequences] for name in KTO.reads)
    return sum(policy) - sum(initial)


class KTO(Algorithm):
    """The sign of an advantage says right or wrong, its size is the weight. No group is needed."""

    reads = ("old_logprobs", "reference_logprobs")

    def __init__(self, beta: float = 0.1, threshold: float = 1.0, right: float = 1.0, wrong: float = 1.0) -> None:
        self.beta, self.threshold, self.right, self.wrong = beta, threshold, right, wrong

    def credit_batch(self, rollouts: list[Rollout]) -> list[float]:
        """Before the batch's first update: the labels, and z0 as a stream, since a micro-batch has not all rollouts."""
        z0 = max(0.0, sum(map(log_ratio, rollouts)) / max(1, len(rollouts)))
        for rollout in rollouts:
            for sequence in rollout.sequences:
                sequence.put("reference_point", [z0] * len(sequence))
        return [self.right if rollout.reward >= self.threshold else -self.wrong for rollout in rollouts]

    def loss(self, inputs: LossInputs) -> Tensor:
        """The loss of its whole answer at each token. Its mean over the answer's tokens is again that loss."""
        ratio_N = inputs.logprobs_N - inputs.streams["reference_logprobs"]
        ratio_S = ratio_N.new_zeros(inputs.num_sequences).index_add(0, inputs.sequence_index_N, ratio_N)
        above_N = ratio_S[inputs.sequence_index_N] - inputs.streams["reference_point"]
        label_N = inputs.advantages_N.sign()
        return inputs.advantages_N.abs() * (1 - torch.sigmoid(label_N * self.beta * above_N))

    def metrics(self, rollouts: list[Rollout]) -> dict[str, float]:
        """The mean log-ratios of right and wrong answers, before the step."""
        ratios = [(rollout.reward >= self.threshold, log_ratio(rollout)) for rollout in rollouts]
        right, wrong = ([ratio for label, ratio in ratios if label == wanted] for wanted in (True, False))
        figures = {"right_ratio": right, "wrong_ratio": wrong}
        return {name: sum(values) / len(values) for name, values in figures.items() if values}
