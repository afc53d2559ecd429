"""Checks of [matching], and which of its settings have no effect."""

from __future__ import annotations

from slipstream.config.bounds import Problems, Rule, without_effect
from slipstream.config.schema import RLConfig, RunConfig

_LEAST_TEMPERATURE = 0.01
"""A lower one vLLM would raise to it."""


def matching_inapplicable(config: RunConfig) -> dict[str, str]:
    """Keys of [matching], and others because of it, that have no effect, each with the reason."""
    matching, algorithm = config.matching, config.algorithm
    if matching is None or isinstance(algorithm, RLConfig):
        return {}
    rules: list[Rule] = [
        (True, "algorithm.train_on", "has no effect under [matching], which trains on answers alone"),
        (matching.b_ratio is not None, "matching.pattern", "has no effect while matching.b_ratio is set"),
        (
            matching.softctx_iterations == 1,
            "matching.softctx_unrolled",
            "has no effect while matching.softctx_iterations is 1",
        ),
        (
            matching.soft_ce_weight == 0,
            "matching.soft_ce_sigma",
            "has no effect while matching.soft_ce_weight is 0",
        ),
        (
            not matching.rolls_out,
            "matching.temperature matching.max_invalid",
            "has no effect without a step of channel B",
        ),
        (
            not matching.rolls_out and config.evaluation is None,
            "matching.candidate_top_k matching.maskiou_gate matching.maskiou_resolution matching.fp_cost "
            "matching.fn_cost",
            "has no effect without a step of channel B and without an evaluation",
        ),
    ]
    return without_effect(rules)


def matching_problems(config: RunConfig) -> Problems:
    """A sentence for each combination with [matching] that cannot be run."""
    matching = config.matching
    if matching is None:
        return
    if isinstance(config.algorithm, RLConfig):
        yield (
            "matching",
            f"[matching] applies to sft, not to {config.algorithm.kind}, which trains on rewards: set algorithm.kind = "
            '"sft", or remove it',
        )
        return
    if config.data is not None:
        yield (
            "data.path",
            "[data] and [matching] are both there, and the objects of [matching] come from an environment: set "
            'environment.name = "detection" and environment.settings.path, and remove [data]',
        )
    if config.environment is None:
        yield (
            "matching",
            "[matching] needs an environment whose tasks have objects, and there is none: set environment.name = "
            '"detection" and environment.settings.path',
        )
    elif config.environment.mixture:
        yield "environment.mixture", "[matching] trains on one environment, and there is a mixture: name one of them"
    if config.model.fp32_head is True:
        yield (
            "model.fp32_head = true never has the logits of coordinate tokens as a whole, which [matching] reads: set "
            "it to false"
        )
    if 0.0 < matching.temperature < _LEAST_TEMPERATURE:
        yield (
            f"matching.temperature = {matching.temperature:g} is below {_LEAST_TEMPERATURE}, which vLLM would raise it "
            "to: use 0, which is greedy, or more"
        )
