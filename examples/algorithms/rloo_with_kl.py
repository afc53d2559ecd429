"""RLOO with a KL penalty in the reward, as a class: it reads the log-probabilities of the initial model."""

from collections import defaultdict

from slipstream import Algorithm, Rollout


def penalty(rollout: Rollout) -> float:
    """The log-ratio of policy and initial model, summed over the sampled tokens."""
    policy, initial = ([sum(each.values(name)) for each in rollout.sequences] for name in RLOO.reads)
    return sum(policy) - sum(initial)


class RLOO(Algorithm):
    """The other completions of a prompt are the baseline (arXiv 2402.14740)."""

    reads = ("old_logprobs", "reference_logprobs")

    def __init__(self, beta: float = 0.05) -> None:
        self.beta = beta

    def credit_batch(self, rollouts: list[Rollout]) -> list[float]:
        """Reward less penalty, minus the mean of the group's other completions."""
        groups: defaultdict[str, list[float]] = defaultdict(list)
        scores = [rollout.reward - self.beta * penalty(rollout) for rollout in rollouts]
        for rollout, score in zip(rollouts, scores, strict=True):
            groups[rollout.group_id].append(score)
        return [
            score - (sum(groups[rollout.group_id]) - score) / max(1, len(groups[rollout.group_id]) - 1)
            for rollout, score in zip(rollouts, scores, strict=True)
        ]

    def metrics(self, rollouts: list[Rollout]) -> dict[str, float]:
        """The mean penalty of a completion, in nats."""
        return {"kl": sum(map(penalty, rollouts)) / max(1, len(rollouts))}
