"""Methods of plug-ins: each is a section of the run file and another way of supervised training.

A package names the class of its section, a `MethodSection`, in the group `slipstream.methods` of entry points, under
the section's name. It is read, checked, planned and described like any other section. `implementation` names the class
of the heavy half, an `orchestrator.method.Method`.
"""

from __future__ import annotations

import importlib.metadata
import warnings
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from slipstream.config.bounds import Problems, Section
from slipstream.errors import one_line

if TYPE_CHECKING:
    from collections.abc import Mapping

GROUP = "slipstream.methods"
_OF_THIS_WHEEL = {
    "matching": "slipstream_matching.settings:MatchingConfig",
    "preferences": "slipstream_preferences.settings:PreferencesConfig",
}
"""Found without installed metadata: a source tree has none."""


class MethodSection(Section):
    """Base of the section of a method. Pure: it imports neither torch nor transformers."""

    implementation: ClassVar[str]
    """`module:Class` of its `Method`."""

    def problems(self, config: Any) -> Problems:
        """A sentence for each impossible combination with other settings of the `RunConfig`."""
        yield from ()

    def inapplicable(self, config: Any) -> dict[str, str]:
        """Keys without an effect in this `RunConfig`, its own or others, each with the reason."""
        return {}

    @property
    def reads_reference(self) -> bool:
        """Whether the run keeps the start model as a reference."""
        return False

    @property
    def scores(self) -> bool:
        """Whether the model has a head with one number, as a reward model, in the place of its LM head."""
        return False

    @property
    def rolls_out(self) -> bool:
        """Whether any step trains on rollouts of the engine."""
        return False

    def rolls_out_at(self, step: int) -> bool:
        """Whether the update `step -> step + 1` trains on rollouts by the weights before it: a function of the number
        alone."""
        return False

    @property
    def draws_at(self) -> float | None:
        """Temperature of its rollouts, and the default of evaluations; None: `sampling.temperature`."""
        return None

    def notes(self, steps: int) -> list[tuple[str, float, str]]:
        """Numbers for the plan of a run of so many steps: name, value, and how it comes about."""
        return []


@cache
def method_sections() -> Mapping[str, type[MethodSection]]:
    """The sections of all installed methods by name. One that cannot be loaded is left out with a warning."""
    points = importlib.metadata.entry_points(group=GROUP)
    named = {point.name: point.value for point in points} | _OF_THIS_WHEEL
    found: dict[str, type[MethodSection]] = {}
    for name, value in named.items():
        try:
            section: type[MethodSection] = loaded(value)
        except Exception as error:  # noqa: BLE001 - a package's code, whatever it raises
            warnings.warn(f"the section [{name}] of {value} cannot be loaded: {one_line(error)}", stacklevel=2)
        else:
            found[name] = section
    return found


def loaded(value: str) -> Any:
    """The object at `module:name`."""
    module, _, name = value.partition(":")
    return getattr(import_module(module), name)
