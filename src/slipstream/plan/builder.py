"""Collects a plan: the user's config, the facts, and everything derived from both so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from slipstream.config import Derived, RunConfig, with_values
from slipstream.plan.facts import Facts


@dataclass
class PlanBuilder:
    """Collects derived settings and warnings. `builder["section.key"]` reads what was set or derived."""

    original: RunConfig
    facts: Facts
    derived: list[Derived] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    """Why the run does not fit; the plan goes on without them, to show all of it."""

    @property
    def on_cpu(self) -> bool:
        """Whether there is no GPU."""
        return self.facts.num_gpus == 0

    def __getitem__(self, path: str) -> Any:
        """The value of `section.key`: derived, else as the user set it; `auto` if neither."""
        for item in self.derived:
            if item.name == path:
                return item.value
        return attrgetter(path)(self.original)

    def derive(self, path: str, value: Any, reason: str) -> None:
        """Set `section.key` to `value`."""
        self.derived.append(Derived(path, value, reason))

    def derive_auto(self, path: str, value: Any, reason: str) -> None:
        """Set `section.key` to `value` if it is `auto`."""
        if self[path] == "auto":
            self.derive(path, value, reason)

    def config(self) -> RunConfig:
        """The config with every derived value."""
        return with_values(self.original, {item.name: item.value for item in self.derived})
