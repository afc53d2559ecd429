"""The tables [environment.mixture.NAME]: several tasks in one run."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from slipstream.config import bounds
from slipstream.config.bounds import Section

MIXTURE = "mixture"
"""`environment.name` of a mixture."""
PartName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
"""It is part of the names of metrics."""


class MixturePart(Section):
    """One task of a mixture. All other settings of [environment] hold for every part."""

    name: str
    """As `environment.name`; no mixture itself."""
    weight: bounds.Factor = 1.0
    """A group of completions is for this part with the probability weight / sum of all weights."""
    settings: dict[str, Any] = {}
    """As `environment.settings`."""
    system_prompt: str | None = None
    """As `environment.system_prompt`, in its place. Not set: that one."""
    num_train_tasks: bounds.Items | None = None
    """Size of the part's training set, with an order of its own; it repeats in a fresh shuffle when it is used
    up. Not set: all rows of a file, 10,000 of a program's tasks."""
    group_size: bounds.GroupSize | None = None
    """Completions for each prompt, at most `algorithm.group_size`. Not set: as many."""
    max_tokens: bounds.Tokens | None = None
    """Longest completion, at most `sampling.max_tokens`. Not set: as many tokens."""
    max_turns: bounds.Items | None = None
    """As `environment.max_turns`. Not set: `auto`."""
    tools: bounds.Texts = ()
    """As `environment.tools`."""
    python: str = ""
    """As `environment.python`."""
