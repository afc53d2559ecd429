"""Before an optimizer step each completion gets the derivative of the step's loss in its log-ratio, or in its score, as
the stream `advantages` of its tokens.

A loss of pairs, or of a whole step (KTO's reference point), then needs nothing of how sequences are packed or divided
over ranks: the step's loss is a sum over tokens whose gradient is exactly that of the loss of preferences. It costs one
more forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.errors import DataError
from slipstream.plugins import Examples, Learner, Scorer, StepBatch
from slipstream.records import Sequence as TokenSequence
from slipstream_preferences.losses import PAIR_LOSSES, bradley_terry_loss, derivatives, kto_baseline, kto_loss
from slipstream_preferences.settings import PreferencesConfig


def weigh(step: StepBatch, section: PreferencesConfig, learner: Learner, reference: Scorer | None) -> dict[str, float]:
    """Give each sequence of `step` its stream `advantages`, and return the loss and further metrics.

    `step.advantages` are rewards: above 0 for a chosen or desirable completion. Of pairs, chosen and rejected sequences
    alternate. `reference`: the start model; None for a reward model.
    """
    assert step.advantages is not None
    lengths = [sequence.num_trainable for sequence in step.sequences]
    leaf_S = _numbers(step.sequences, learner, reference).requires_grad_()
    loss, metrics = _judged(step.sequences, step.advantages, leaf_S, section, learner, reference)
    weights_S = -derivatives(loss, leaf_S)
    step.fill("advantages", [weight.expand(length) for weight, length in zip(weights_S, lengths, strict=True)])
    return {"loss": loss.item()} | {f"preference/{name}": value for name, value in metrics.items()}


def held_out_metrics(
    examples: Examples, section: PreferencesConfig, learner: Learner, reference: Scorer | None
) -> dict[str, float]:
    """The same loss and metrics of held-out completions, without a gradient."""
    sequences = [*examples]
    loss, metrics = _judged(
        sequences, examples.rewards, _numbers(sequences, learner, reference), section, learner, reference
    )
    return {"eval/loss": loss.item()} | {f"eval/preference_{name}": value for name, value in metrics.items()}


def _judged(
    sequences: Sequence[TokenSequence],
    rewards: Sequence[float],
    numbers_S: Tensor,
    section: PreferencesConfig,
    learner: Learner,
    reference: Scorer | None,
) -> tuple[Tensor, dict[str, float]]:
    """The mean loss, differentiable in `numbers_S`, and further metrics."""
    beta = 1.0 if section.scores else section.beta
    is_good_S, known_S = torch.tensor([reward > 0.0 for reward in rewards]), numbers_S.detach()
    if section.reads_pairs:
        own_S = numbers_S
        if section.loss == "ipo":
            own_S = numbers_S / torch.tensor([sequence.num_trainable for sequence in sequences])
        if section.scores:
            loss = bradley_terry_loss(own_S[0::2], own_S[1::2]).mean()
        else:
            loss = PAIR_LOSSES[section.loss](own_S[0::2], own_S[1::2], beta).mean()
        margins_P = known_S[0::2] - known_S[1::2]
        metrics = {"accuracy": (margins_P > 0).double().mean(), "margin": beta * margins_P.mean()}
    else:
        if len(sequences) == 1:
            raise DataError(
                'preferences.loss = "kto" compares each completion of an optimizer step, or of the held-out rows, with '
                "another one, and here there is one alone: give more rows"
            )
        baseline = kto_baseline(_numbers(_exchanged(sequences), learner, reference))
        loss = kto_loss(numbers_S, is_good_S, baseline, beta).mean()
        metrics = {"reference_point": baseline}
    for name, chosen_S in (("chosen", is_good_S), ("rejected", ~is_good_S)):
        if chosen_S.any():
            metrics[f"{name}_reward"] = beta * known_S[chosen_S].mean()
    return loss, {name: value.item() for name, value in metrics.items()}


def _numbers(sequences: Sequence[TokenSequence], learner: Learner, reference: Scorer | None) -> Tensor:
    """The sum of `log policy - log reference` over the tokens of each sequence, or its score, float64 `[S]`."""
    if reference is None:
        return torch.cat(learner.values(sequences)).double()
    ours, theirs = learner.forward(sequences).logprobs, reference.forward(sequences).logprobs
    return torch.stack([(one.double() - other.double()).sum() for one, other in zip(ours, theirs, strict=True)])


def _exchanged(sequences: Sequence[TokenSequence]) -> list[TokenSequence]:
    """Each prompt with the completion of the next sequence, within the length of the longest."""
    longest, starts = max(map(len, sequences)), [sequence.mask.index(True) for sequence in sequences]
    found: list[TokenSequence] = []
    for place, sequence in enumerate(sequences):
        start, after = starts[place], (place + 1) % len(sequences)
        # A prompt of full length leaves no room for any completion.
        prompt = sequence.token_ids[: min(start, longest - 1)]
        mask = [False] * len(prompt) + sequences[after].mask[starts[after] :]
        token_ids = prompt + sequences[after].token_ids[starts[after] :]
        images = [image for image in sequence.media if image.start + image.num_tokens <= len(prompt)]
        found.append(TokenSequence(token_ids[:longest], mask[:longest], media=images))
    return found
