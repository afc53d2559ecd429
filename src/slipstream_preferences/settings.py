"""The section [preferences]: its settings, and their checks against others."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from slipstream.plugins import Factor, MethodSection, Problems, Rule, without_effect

if TYPE_CHECKING:
    from slipstream.plugins import RunConfig


class PreferencesConfig(MethodSection):
    """Learning from the rows of [data] as pairs of a chosen and a rejected completion, or as completions that are each
    good or bad (docs/preferences.md). The start model is the reference."""

    implementation: ClassVar[str] = "slipstream_preferences.method:Preferences"

    loss: Literal["sigmoid", "ipo", "hinge", "kto"] = "sigmoid"
    """Of a pair: `sigmoid` is DPO; `ipo` takes means over tokens. Of a single completion with a label: `kto`."""
    beta: Factor = 0.1
    """How much it costs to leave the model that the run starts from."""

    @property
    def reads_reference(self) -> bool:
        """Always."""
        return True

    @property
    def reads_pairs(self) -> bool:
        """Whether a row is a pair."""
        return self.loss != "kto"

    def inapplicable(self, config: RunConfig) -> dict[str, str]:
        """See `MethodSection`."""
        rules: list[Rule] = [
            (True, "algorithm.train_on", "has no effect under [preferences]: completions are judged as a whole"),
        ]
        return without_effect(rules)

    def problems(self, config: RunConfig) -> Problems:
        """See `MethodSection`."""
        if config.data is None:
            yield "preferences", "[preferences] learns from judged rows, and there are none: give them in data.path"
        elif config.data.has_eval and config.environment is not None:
            yield "[preferences] measures held-out rows or the tasks of [environment], not both: remove one of them"
