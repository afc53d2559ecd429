"""Expert iteration: each prompt's best right answer is trained on as in SFT, and nothing else is."""

from torch import Tensor

from slipstream import LossInputs, Rollout


def credit(group: list[Rollout]) -> list[float]:
    """1 for the shortest of the right answers. A group without one teaches nothing."""
    right = [rollout for rollout in group if rollout.reward >= 1.0]
    best = min(right, key=lambda rollout: rollout.num_sampled, default=None)
    return [float(rollout is best) for rollout in group]


def loss(inputs: LossInputs) -> Tensor:
    """Cross-entropy of the chosen answers."""
    return -inputs.advantages_N * inputs.logprobs_N
