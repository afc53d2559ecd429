"""A plan in the making: what was set, what is known, and what was derived from both so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from slipstream.config import Derived, RunConfig, with_values
from slipstream.launch.plan.facts import Facts


@dataclass
class Draft:
    """A plan in the making."""

    original: RunConfig
    facts: Facts
    derived: list[Derived] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def on_cpu(self) -> bool:
        """Whether there is no GPU."""
        return self.facts.num_gpus == 0

    def __getitem__(self, path: str) -> Any:
        """What `section.key` was set or derived to; `auto` where neither."""
        for item in self.derived:
            if item.name == path:
                return item.value
        section, name = path.split(".")
        return getattr(getattr(self.original, section), name)

    def derive(self, path: str, value: Any, reason: str) -> None:
        """From now on `section.key` is `value`."""
        self.derived.append(Derived(path, value, reason))

    def derive_auto(self, path: str, value: Any, reason: str) -> None:
        """The same, unless it was set."""
        if self[path] == "auto":
            self.derive(path, value, reason)

    def config(self) -> RunConfig:
        """The config with all that was derived."""
        return with_values(self.original, {item.name: item.value for item in self.derived})
