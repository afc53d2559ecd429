"""The section [first_token]. It is read by every command, so it imports neither torch nor transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from slipstream.plugins import Factor, MethodSection, Problems

if TYPE_CHECKING:  # the section is a part of it
    from slipstream.plugins import RunConfig


class FirstToken(MethodSection):
    """SFT on the environment's answers, whose first token has a weight of its own."""

    implementation: ClassVar[str] = "first_token.method:WeightedFirst"

    weight: Factor = 2.0
    """Weight of the first token of an answer; that of the others is 1."""

    def problems(self, config: RunConfig) -> Problems:
        """See `MethodSection`."""
        if config.environment is None:
            yield "first_token", "[first_token] needs an environment with answers: set environment.name"
