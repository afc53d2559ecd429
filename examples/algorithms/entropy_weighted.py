"""An entropy-weighted policy gradient: uncertain tokens count more."""

import torch
from torch import Tensor

from slipstream import LossInputs


def loss(inputs: LossInputs) -> Tensor:
    """PPO's clipped loss, weighted by the entropy of each token's distribution over the batch's mean."""
    assert inputs.entropy_N is not None
    entropy_N = inputs.entropy_N.detach()
    ratio_N = torch.exp(inputs.logprobs_N - inputs.old_logprobs_N)
    clipped_N = ratio_N.clamp(1 - inputs.clip_low, 1 + inputs.clip_high)
    surrogate_N = torch.min(ratio_N * inputs.advantages_N, clipped_N * inputs.advantages_N)
    return -surrogate_N * entropy_N / entropy_N.mean().clamp(min=1e-6)
