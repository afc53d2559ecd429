"""Whether the chat template renders conversations as the environment continues them: some require alternating user and
assistant, and refuse a tool's message after a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from slipstream.data.examples import holds_thoughts
from slipstream.envs.base import Environment
from slipstream.envs.hosted.apart import plays_own_turns
from slipstream.errors import ConfigError, DataError, one_line
from slipstream.records import Message

if TYPE_CHECKING:
    from slipstream.data.chat_template import ChatTokenizer

_ROUNDS = 2
"""Turns with others after them: a template may refuse the second one only."""


def check_turns(tokenizer: ChatTokenizer, environment: Environment, prompt: Sequence[Message], path: str) -> list[str]:
    """Renders `prompt` with an episode's turns after it. Raises ConfigError if the template refuses or
    leaves out the message after a turn; returns a warning if the environment's own `run` may say something else
    there."""
    if environment.max_turns == 1:
        return []
    between = Message("tool", "1", extra={"name": "tool"}) if environment.tools else Message("user", "1")
    talk = [*prompt, *[Message("assistant", "1"), between] * min(_ROUNDS, environment.max_turns - 1)]
    try:
        tokenizer.render(talk)
        if len(talk) - 1 in tokenizer.unrendered(talk):
            raise DataError("it leaves the text out")
    except DataError as error:
        reason = one_line(error.__cause__) if error.__cause__ else str(error)
        text = (
            f"the chat template of {path} refuses a message of role {between.role} after a turn of the model "
            f"({reason}), which {environment.name} continues with in up to {environment.max_turns} turns"
        )
        if plays_own_turns(environment):
            return [f"{text}, unless its run() says something else"]
        raise ConfigError(f"{text}: use a model whose template renders it, or max_turns = 1 without tools") from error
    return []


def check_gold_turns(environment: Environment | None, conversations: Sequence[Sequence[Message]]) -> list[str]:
    """A warning if SFT imitates gold answers of one turn, and episodes have several."""
    if environment is None or environment.max_turns == 1 or not conversations:
        return []
    if any(sum(message.role == "assistant" for message in each) > 1 for each in conversations):
        return []
    return [
        f"{environment.name} has up to {environment.max_turns} turns, and its gold answers have one: SFT on them shows "
        "the model no later turn; have gold() return all messages that follow the prompt"
    ]


def check_imitated(
    thinks: bool, environment: Environment | None, conversations: Sequence[Sequence[Message]]
) -> list[str]:
    """Warnings of `check_gold_turns`; also if `thinks`, prompts have thinking on, and no answer to imitate thinks."""
    warnings = check_gold_turns(environment, conversations)
    if conversations and thinks and not holds_thoughts(conversations):
        warnings.append(
            f"none of the {len(conversations)} answers to imitate holds a <think>, and the chat template has thinking "
            "on, so the model would learn to answer without it: set model.thinking = false, or give answers with their "
            "thinking"
        )
    return warnings
