"""The section [preferences]: its settings, and their checks against others."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from slipstream.plugins import Factor, MethodSection, Problems, Rule, without_effect

if TYPE_CHECKING:
    from slipstream.plugins import RunConfig


class PreferencesConfig(MethodSection):
    """Learning from the rows of [data] as pairs of a chosen and a rejected completion, or as completions that are each
    good or bad (docs/preferences.md). The start model is the reference; a reward model has none."""

    implementation: ClassVar[str] = "slipstream_preferences.method:Preferences"

    loss: Literal["sigmoid", "ipo", "hinge", "kto", "reward"] = "sigmoid"
    """For pairs `sigmoid` (DPO), `ipo` (with means over tokens) or `hinge`; for single completions with a label `kto`.
    `reward` makes a reward model of pairs (Bradley-Terry): it scores a conversation at its last token."""
    beta: Factor = 0.1
    """How much it costs to leave the start model."""

    @property
    def reads_reference(self) -> bool:
        """Unless rewards are learned."""
        return self.loss != "reward"

    @property
    def scores(self) -> bool:
        """Whether rewards are learned."""
        return self.loss == "reward"

    @property
    def reads_pairs(self) -> bool:
        """Whether a row is a pair."""
        return self.loss != "kto"

    def inapplicable(self, config: RunConfig) -> dict[str, str]:
        """See `MethodSection`."""
        rules: list[Rule] = [
            (True, "algorithm.train_on", "has no effect under [preferences]: completions are judged as a whole"),
            (self.scores, "preferences.beta", 'has no effect under preferences.loss = "reward"'),
        ]
        return without_effect(rules)

    def problems(self, config: RunConfig) -> Problems:
        """See `MethodSection`."""
        if config.data is None:
            yield "preferences", "[preferences] learns from judged rows, and there are none: give them in data.path"
        elif self.scores:
            yield from self._problems_of_rewards(config)
        elif not self.reads_pairs and config.training.prompts_per_batch == config.training.updates_per_batch:
            each = config.training.prompts_per_batch
            yield (
                f"training.prompts_per_batch = {each} leaves one completion for each optimizer step, and "
                f'preferences.loss = "kto" compares each with another: use at least {2 * each}'
            )
        elif config.data.has_eval and config.environment is not None:
            yield "[preferences] measures held-out rows or the tasks of [environment], not both: remove one of them"

    def _problems_of_rewards(self, config: RunConfig) -> Problems:
        loss = 'preferences.loss = "reward"'
        if config.environment is not None:
            yield "environment", f"{loss} trains a model without answers to evaluate: remove [environment]"
        if config.data is not None and config.data.too_long == "truncate":
            yield f'data.too_long = "truncate" cuts the last token, and {loss} scores there: use "drop" or "error"'
        if config.lora is not None and config.training.ranks > 1:
            yield f"training.ranks = {config.training.ranks} cannot save {loss} with [lora]: use 1, or remove [lora]"
