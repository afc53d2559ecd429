"""Learning from judged completions, DPO and KTO: before an optimizer step each completion gets the derivative of the
step's loss in its log-ratio, as the stream `advantages` of its tokens.

A loss of pairs, or of a whole step (KTO's reference point), then needs nothing of how sequences are packed or divided
over ranks: the step's loss is a sum over tokens whose gradient is exactly that of the loss of preferences. It costs one
more forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream import records
from slipstream.algo.preferences import PAIR_LOSSES, derivatives, kto_baseline, kto_loss
from slipstream.config.sft import SFTConfig
from slipstream.trainer.learner import Learner, Scorer
from slipstream.trainer.packing import StepBatch


def weigh(step: StepBatch, algorithm: SFTConfig, learner: Learner, reference: Scorer) -> dict[str, float]:
    """Give each sequence of `step` its stream `advantages`, and return the loss and further metrics.

    `step.advantages` are judgements: above 0 for a chosen or desirable completion. Under `dpo` chosen and rejected
    sequences alternate. `reference`: the start model.
    """
    assert step.advantages is not None
    lengths_S = torch.tensor([sequence.num_trainable for sequence in step.sequences])
    log_ratios_S = _log_ratios(step.sequences, learner, reference)
    is_good_S = torch.tensor([judgement > 0.0 for judgement in step.advantages])
    leaf_S = log_ratios_S.clone().requires_grad_()
    if algorithm.kind == "dpo":
        own_S = leaf_S / lengths_S if algorithm.pair_loss == "ipo" else leaf_S
        loss = PAIR_LOSSES[algorithm.pair_loss](own_S[0::2], own_S[1::2], algorithm.kl_coef).mean()
        margins_P = log_ratios_S[0::2] - log_ratios_S[1::2]
        metrics = {"accuracy": (margins_P > 0).double().mean(), "margin": algorithm.kl_coef * margins_P.mean()}
    else:
        baseline = kto_baseline(_log_ratios(_exchanged(step.sequences), learner, reference))
        loss = kto_loss(leaf_S, is_good_S, baseline, algorithm.kl_coef).mean()
        metrics = {"reference_point": baseline}
    rewards_S = algorithm.kl_coef * log_ratios_S
    for name, chosen_S in (("chosen", is_good_S), ("rejected", ~is_good_S)):
        if chosen_S.any():
            metrics[f"{name}_reward"] = rewards_S[chosen_S].mean()
    weights_S = -derivatives(loss, leaf_S)
    step.fill("advantages", [weight.expand(int(length)) for weight, length in zip(weights_S, lengths_S, strict=True)])
    return {"loss": loss.item()} | {f"preference/{name}": value.item() for name, value in metrics.items()}


def _log_ratios(sequences: Sequence[records.Sequence], learner: Learner, reference: Scorer) -> Tensor:
    """The sum of `log policy - log reference` over the tokens of each sequence, float64 `[S]`."""
    ours, theirs = learner.forward(sequences).logprobs, reference.forward(sequences).logprobs
    return torch.stack([(one.double() - other.double()).sum() for one, other in zip(ours, theirs, strict=True)])


def _exchanged(sequences: Sequence[records.Sequence]) -> list[records.Sequence]:
    """Each prompt with the completion of the next sequence, within the length of the longest."""
    longest, starts = max(map(len, sequences)), [sequence.mask.index(True) for sequence in sequences]
    found: list[records.Sequence] = []
    for place, sequence in enumerate(sequences):
        start, after = starts[place], (place + 1) % len(sequences)
        # A prompt of full length leaves no room for any completion.
        prompt = sequence.token_ids[: min(start, longest - 1)]
        mask = [False] * len(prompt) + sequences[after].mask[starts[after] :]
        token_ids = prompt + sequences[after].token_ids[starts[after] :]
        images = [image for image in sequence.media if image.start + image.num_tokens <= len(prompt)]
        found.append(records.Sequence(token_ids[:longest], mask[:longest], media=images))
    return found
