"""Checks of the settings of a mixture."""

from __future__ import annotations

from slipstream.config.bounds import Problems
from slipstream.config.mixture import MIXTURE, MixturePart
from slipstream.config.recipes import resolved
from slipstream.config.schema import RLConfig, RunConfig

_OF_PARTS = ("settings", "python", "tools", "max_turns", "num_train_tasks")
"""Keys of [environment] that each part has for itself."""


def mixture_inapplicable(config: RunConfig) -> dict[str, str]:
    """Keys of [environment] that have no effect with a mixture, or without one, each with the reason."""
    environment, algorithm = config.environment, config.algorithm
    if environment is None:
        return {}
    if environment.name != MIXTURE:
        reason = f'has no effect without environment.name = "{MIXTURE}"'
        return dict.fromkeys(("environment.mixture", "environment.curriculum"), reason)
    found = {f"environment.{name}": "has no effect on a mixture, whose parts have it each" for name in _OF_PARTS}
    if not isinstance(algorithm, RLConfig):
        found["environment.curriculum"] = "applies to grpo, not to sft, which samples nothing to train on"
        for name in environment.mixture:
            found[f"environment.mixture.{name}.group_size"] = "applies to grpo, not to sft"
    return found


def mixture_problems(config: RunConfig) -> Problems:
    """A sentence for each combination of a mixture's settings that cannot be run."""
    environment = config.environment
    if environment is None or environment.name != MIXTURE:
        return
    if not environment.mixture:
        yield f'environment.name = "{MIXTURE}" has no parts: write [environment.mixture.NAME] and its name for each'
    for name, part in environment.mixture.items():
        yield from _part(f"environment.mixture.{name}", part, config)


def _part(path: str, part: MixturePart, config: RunConfig) -> Problems:
    if not part.name.strip() or part.name == MIXTURE:
        yield f'{path}.name = "{part.name}" is no task: give reasoning_gym/<task>, rows or path/to/file.py:Class'
    if part.system_prompt == "":
        yield (
            f'{path}.system_prompt = "" is empty: leave it out, and where this part is to have none, give the others '
            "theirs instead of environment.system_prompt"
        )
    if part.system_prompt and part.name.startswith("verifiers/"):
        yield f"{path}.system_prompt does not reach {part.name}, which writes its own messages: set it in its settings"
    most, algorithm = config.sampling.max_tokens, config.algorithm
    buffer = resolved(algorithm).arguments.overlong_buffer if isinstance(algorithm, RLConfig) else 0.0
    if part.max_tokens is not None and buffer:
        yield (
            f"{path}.max_tokens = {part.max_tokens} is not what algorithm.arguments.overlong_buffer measures length "
            "by, which is sampling.max_tokens: set algorithm.arguments.overlong_buffer = 0, or leave it out"
        )
    if part.max_tokens is not None and most != "auto" and part.max_tokens > most:
        yield (
            f"{path}.max_tokens = {part.max_tokens} is more than sampling.max_tokens = {most}, the most of all parts: "
            "raise that one, or lower this"
        )
    if part.group_size is None or not isinstance(algorithm, RLConfig):
        return
    least = max(algorithm.arguments.best_of or 1, 2 if algorithm.group_size > 1 else 1)
    if not least <= part.group_size <= algorithm.group_size:
        yield (
            f"{path}.group_size = {part.group_size} must be {least} to {algorithm.group_size}, the largest of all "
            "parts (algorithm.group_size): change one of them"
        )
