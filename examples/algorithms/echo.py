"""ECHO: GRPO, and a cross-entropy on the environment's tokens, so that the policy learns to predict its tools."""

import msgspec

from slipstream import Algorithm, LossTerm, Sequence


class Echo(Algorithm):
    """Adds `weight` times the mean cross-entropy of the environment's tokens. Every group teaches, solved or not."""

    def __init__(self, weight: float = 0.05) -> None:
        self.weight = weight

    def terms(self, sequences: list[Sequence]) -> list[LossTerm]:
        """The tokens after the policy's first one that it did not sample."""
        theirs = [msgspec.structs.replace(each, mask=environment_mask(each.mask), streams={}) for each in sequences]
        return [LossTerm("echo", theirs, self.weight)]


def environment_mask(sampled: list[bool]) -> list[bool]:
    """True for the tokens of the environment's turns. The prompt is left out."""
    first = sampled.index(True) if True in sampled else len(sampled)
    return [place > first and not own for place, own in enumerate(sampled)]
