"""Reinforcement-learning recipes: each one's values for the fields of [algorithm] that are `auto`.

Pure. The user's fields are never changed, and the result of `resolved` has no `auto`. A recipe is data: no other
code branches on its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, get_args

from slipstream.config.bounds import put
from slipstream.config.planned import PlannedRL
from slipstream.config.schema import AdvantageName, CreditName, LossName, RLConfig

BUILT_IN: dict[str, tuple[str, ...]] = {
    "advantage": get_args(AdvantageName),
    "loss": get_args(LossName),
    "credit": get_args(CreditName),
    "hooks": (),
}
"""Names of built-in functions; any other value is the user's code."""
_GRPO: dict[str, Any] = {
    "advantage": "group_mean",
    "scale_rewards": "std",
    "loss": "clip",
    "normalize": "token",
    "clip_low": 0.2,
    "clip_high": 0.28,
    "arguments.kl_in": "loss",
    "importance_sampling": "truncated",
    "arguments.overlong_buffer": 0.0,
    "max_refills": 0,
}


@dataclass(frozen=True)
class Recipe:
    """A recipe's source, and its differences from `grpo`."""

    source: str
    changes: Mapping[str, Any] = field(default_factory=dict[str, Any])


RECIPES: dict[str, Recipe] = {
    "grpo": Recipe("GRPO, arXiv 2402.03300, with the token mean and the clip of DAPO, arXiv 2503.14476"),
    "dr_grpo": Recipe(
        "Dr. GRPO, arXiv 2503.20783", {"scale_rewards": "none", "normalize": "constant", "clip_high": 0.2}
    ),
    # 4,096 of 20,480 tokens; ten rounds in all, as in verl's recipe of it.
    "dapo": Recipe("DAPO, arXiv 2503.14476", {"arguments.overlong_buffer": 0.2, "max_refills": 9}),
    "gspo": Recipe(
        "GSPO, arXiv 2507.18071", {"loss": "gspo", "normalize": "sequence", "clip_low": 3e-4, "clip_high": 4e-4}
    ),
    # MiniMax-M1 has no lower bound and does not publish the upper one; this is ScaleRL's (arXiv 2510.13786).
    "cispo": Recipe("CISPO, arXiv 2506.13585", {"loss": "cispo", "clip_low": 1.0, "clip_high": 4.0}),
    "rloo": Recipe(
        "RLOO, arXiv 2402.14740",
        {
            "advantage": "leave_one_out",
            "scale_rewards": "none",
            "normalize": "constant",
            "clip_high": 0.2,
            "arguments.kl_in": "reward",
        },
    ),
    "reinforce_pp": Recipe(
        "REINFORCE++, arXiv 2501.03262",
        {"advantage": "batch_mean", "scale_rewards": "whiten", "clip_high": 0.2, "arguments.kl_in": "reward"},
    ),
    "ppo": Recipe(
        "PPO, arXiv 1707.06347, with GAE, arXiv 1506.02438",
        {"advantage": "gae", "scale_rewards": "whiten", "clip_high": 0.2, "arguments.kl_in": "reward"},
    ),
    "distill": Recipe(
        "on-policy distillation, GKD, arXiv 2306.13649, as a policy gradient (Thinking Machines, 2025)",
        {"advantage": "none", "scale_rewards": "none", "loss": "policy_gradient"},
    ),
}


@dataclass(frozen=True)
class Choice:
    """The value in place of an `auto` of [algorithm], and why."""

    name: str
    value: Any
    reason: str


def choices(algorithm: RLConfig) -> Iterator[Choice]:
    """One `Choice` for each field that is `auto`; a field comes after all fields its value depends on."""
    recipe = RECIPES[algorithm.kind]
    values: dict[str, Any] = {}

    def choose(name: str, value: Any, reason: str) -> Iterator[Choice]:
        set_value = attrgetter(name)(algorithm)
        values[name] = value if set_value == "auto" else set_value
        if set_value == "auto":
            is_replaced = algorithm.hooks is not None and name in ("advantage", "scale_rewards", "loss")
            yield Choice(name, value, f"{reason}; unless {algorithm.hooks} has its own" if is_replaced else reason)

    for name, value in (_GRPO | dict(recipe.changes)).items():
        if name == "scale_rewards" and values["advantage"] not in BUILT_IN["advantage"]:
            yield from choose(name, "none", "what your own function returns is not scaled")
        elif name == "scale_rewards" and values["advantage"] == "gae" and value != "whiten":
            yield from choose(name, "whiten", "the usual scale of a critic's advantages")
        elif name == "importance_sampling" and algorithm.old_policy == "engine":
            yield from choose(name, "none", 'the ratio is taken against the engine: old_policy = "engine"')
        else:
            yield from choose(name, value, recipe.source)
    in_reward = values["arguments.kl_in"] == "reward"
    yield from choose(
        "arguments.kl_estimator",
        "k1" if in_reward else "k3",
        "unbiased, as a reward must be" if in_reward else "never negative, and of low variance",
    )
    masks = values["importance_sampling"] == "masked"
    source = "IcePop (Ling team, 2025)" if masks else "the usual bound of truncated importance sampling"
    yield from choose("arguments.importance_cap", 5.0 if masks else 2.0, source)
    yield from choose("arguments.importance_floor", 0.5 if masks else 0.0, source if masks else "no lower bound")


def resolved(algorithm: RLConfig) -> PlannedRL:
    """`algorithm` with every `auto` replaced."""
    values = algorithm.model_dump()
    for choice in choices(algorithm):
        put(values, choice.name, choice.value)
    return PlannedRL.model_validate(values)


def needs_engine_logprobs(algorithm: PlannedRL) -> bool:
    """Whether the loss reads the log-probabilities of the engine's sampling."""
    return algorithm.old_policy == "engine" or algorithm.importance_sampling != "none"
