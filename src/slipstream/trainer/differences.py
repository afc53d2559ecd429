"""How far the log-probabilities of engine and trainer are apart for the same tokens."""

from __future__ import annotations

import math
import statistics

from torch import Tensor

from slipstream import records
from slipstream.errors import TrainingError


def worst_mean(differences: list[list[float]], num_engines: int) -> float:
    """The largest mean of an engine; `differences` are as many sequences of each, one engine after the other."""
    each = -(-len(differences) // num_engines)
    parts = [differences[start : start + each] for start in range(0, len(differences), each)]
    means = [statistics.fmean(value for values in part for value in values) for part in parts]
    return next((mean for mean in means if math.isnan(mean)), max(means))


def differences_of(sequence: records.Sequence, logprobs: Tensor) -> list[float]:
    """Absolute differences between a sequence's behaviour log-probabilities and the trainer's."""
    if sequence.logprobs is None:
        raise TrainingError("the engine's probe came without log-probabilities: it must return those of sampled tokens")
    theirs = [value for value, trained in zip(sequence.logprobs, sequence.mask, strict=True) if trained]
    return [abs(a - b) for a, b in zip(theirs, logprobs.tolist(), strict=True)]
