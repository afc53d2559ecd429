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
    lengths = [sequence.num_trainable for sequence in step.sequences]
    leaf_S = _log_ratios(step.sequences, learner, reference).requires_grad_()
    loss, metrics = _judged(step.sequences, step.advantages, leaf_S, algorithm, learner, reference)
    weights_S = -derivatives(loss, leaf_S)
    step.fill("advantages", [weight.expand(length) for weight, length in zip(weights_S, lengths, strict=True)])
    return {"loss": loss.item()} | {f"preference/{name}": value for name, value in metrics.items()}


def held_out_preferences(
    sequences: Sequence[records.Sequence],
    judgements: Sequence[float],
    algorithm: SFTConfig,
    learner: Learner,
    reference: Scorer,
) -> dict[str, float]:
    """The same loss and metrics of held-out completions, without a gradient."""
    log_ratios_S = _log_ratios(sequences, learner, reference)
    loss, metrics = _judged(sequences, judgements, log_ratios_S, algorithm, learner, reference)
    return {"eval/loss": loss.item()} | {f"eval/preference_{name}": value for name, value in metrics.items()}


def _judged(
    sequences: Sequence[records.Sequence],
    judgements: Sequence[float],
    log_ratios_S: Tensor,
    algorithm: SFTConfig,
    learner: Learner,
    reference: Scorer,
) -> tuple[Tensor, dict[str, float]]:
    """The mean loss, differentiable in `log_ratios_S`, and further metrics."""
    is_good_S, known_S = torch.tensor([judgement > 0.0 for judgement in judgements]), log_ratios_S.detach()
    if algorithm.kind == "dpo":
        own_S = log_ratios_S
        if algorithm.pair_loss == "ipo":
            own_S = log_ratios_S / torch.tensor([sequence.num_trainable for sequence in sequences])
        loss = PAIR_LOSSES[algorithm.pair_loss](own_S[0::2], own_S[1::2], algorithm.kl_coef).mean()
        margins_P = known_S[0::2] - known_S[1::2]
        metrics = {"accuracy": (margins_P > 0).double().mean(), "margin": algorithm.kl_coef * margins_P.mean()}
    else:
        baseline = kto_baseline(_log_ratios(_exchanged(sequences), learner, reference))
        loss = kto_loss(log_ratios_S, is_good_S, baseline, algorithm.kl_coef).mean()
        metrics = {"reference_point": baseline}
    for name, chosen_S in (("chosen", is_good_S), ("rejected", ~is_good_S)):
        if chosen_S.any():
            metrics[f"{name}_reward"] = algorithm.kl_coef * known_S[chosen_S].mean()
    return loss, {name: value.item() for name, value in metrics.items()}


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
