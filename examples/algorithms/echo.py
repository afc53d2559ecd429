"""ECHO: beside the policy gradient, a second loss on the environment's tokens, which the policy learns to predict.

python examples/algorithms/echo.py examples/environments/calculator_rl.toml --folder runs/echo
"""

import argparse
import copy

import torch
from torch import Tensor

import slipstream

WEIGHT = 0.1


def with_environment(sequence: slipstream.Sequence) -> slipstream.Sequence:
    """A copy with the tokens after the first answer in its mask. The stream `told` marks the environment's."""
    advantages = iter(sequence.streams["advantages"].tolist())
    first = sequence.mask.index(True)
    wider = copy.copy(sequence)
    wider.mask = [place >= first for place in range(len(sequence))]
    wider.logprobs, wider.streams = None, {}  # the engine has none of tokens it did not sample
    wider.put("advantages", [next(advantages) if sampled else 0.0 for sampled in sequence.mask])
    wider.put("told", [float(not sampled) for sampled in sequence.mask])
    return wider


def loss(inputs: slipstream.LossInputs) -> Tensor:
    """PPO's clipped loss of sampled tokens, and the cross-entropy of the environment's."""
    told_N = inputs.streams["told"]
    ratio_N = torch.exp(inputs.logprobs_N - inputs.old_logprobs_N)
    clipped_N = ratio_N.clamp(1 - inputs.clip_low, 1 + inputs.clip_high)
    surrogate_N = torch.min(ratio_N * inputs.advantages_N, clipped_N * inputs.advantages_N)
    return torch.where(told_N > 0, -WEIGHT * inputs.logprobs_N, -surrogate_N)


def main(run_file: str, folder: str) -> None:
    with slipstream.session(run_file, folder=folder, algorithm={"importance_sampling": "none"}) as s:
        for groups in s.stream():
            s.credit(groups)
            sequences = [sequence for group in groups for rollout in group for sequence in rollout.sequences]
            metrics = s.train([with_environment(sequence) for sequence in sequences], loss)
            s.sync()
            print(f"step {s.step}: {metrics['train/num_tokens']:.0f} tokens, loss {metrics['train/loss']:.3f}")
        s.save()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("run_file")
    parser.add_argument("--folder")
    main(**vars(parser.parse_args()))
