"""Advantages of a user's function for a complete group (`algorithm.credit`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from functools import partial
from itertools import islice
from typing import Any

from slipstream.algo.custom import user_function
from slipstream.config.recipes import BUILT_IN
from slipstream.config.user_code import place_of
from slipstream.errors import ConfigError, TrainingError, one_line
from slipstream.records import TRAINABLE_OUTCOMES, Rollout, Sequence, Stream, TurnSpan

GroupCredit = Callable[[Collection[Rollout]], None]


def group_credit(name: str | None) -> GroupCredit | None:
    """Writes the advantages of the function `name` to the rollouts of a group. None for a built-in credit."""
    if name is None or name in BUILT_IN["credit"]:
        return None
    return partial(_write, name, user_function("credit", name))


def check_credit(name: str | None) -> None:
    """Try the function on a made-up group of three. Raises ConfigError."""
    if (credit := group_credit(name)) is not None:
        try:
            credit(_made_up())
        except TrainingError as error:
            raise ConfigError(f"{error} (it was tried on three made-up rollouts)") from error


def _made_up() -> list[Rollout]:
    """Two answers and an episode of two turns with a call of a tool."""
    answer, other = Sequence([1, 2, 3], [False, True, True]), Sequence([1, 4], [False, True])
    episode = Sequence([1, 5, 6, 7, 8], [False, True, False, False, True])
    for sequence in (answer, other, episode):
        sequence.logprobs = [-0.5 * trained for trained in sequence.mask]
    spans = [TurnSpan(0, 1, 2), TurnSpan(0, 4, 5)]
    rollouts = [
        Rollout("0.0.0", "t", "0.0", [answer], 1.0, "done", {"in_place": 1.0}, "yes", stop="answer"),
        Rollout("0.0.1", "t", "0.0", [other], 0.0, "truncated", {"in_place": 0.0}, "no", stop="length"),
        Rollout("0.0.2", "t", "0.0", [episode], 0.5, "done", {"tool_calls": 1.0}, "yes", num_turns=2, turn_spans=spans),
    ]
    for rollout in rollouts[:2]:
        rollout.turn_spans = [TurnSpan(0, 1, len(rollout.sequences[0]))]
    return rollouts


def _write(name: str, function: Callable[[list[Rollout]], Any], group: Collection[Rollout]) -> None:
    """Raises TrainingError for an exception in the function, and for unusable values."""
    usable = [rollout for rollout in group if rollout.outcome in TRAINABLE_OUTCOMES]
    if not usable:
        return
    try:
        each = [_tokens_of(rollout, value) for rollout, value in zip(usable, function(usable), strict=True)]
    except Exception as error:  # the user's code, whatever it raises
        where = f"on the group {usable[0].group_id} ({place_of(error)})"
        raise TrainingError(f"algorithm.credit: {name} raised {one_line(error)} {where}: correct it") from error
    for rollout, tokens in zip(usable, each, strict=True):
        given = iter(tokens)
        for sequence in rollout.sequences:
            sequence.streams["advantages"] = Stream.of(islice(given, sequence.num_trainable))


def _tokens_of(rollout: Rollout, value: float | Iterable[float]) -> list[float]:
    """The advantage of each sampled token, over all sequences. Raises ValueError for another number of them."""
    tokens = [*value] if isinstance(value, Iterable) else [value] * rollout.num_sampled
    found = [float(each) for each in tokens]
    if len(found) != rollout.num_sampled:
        raise ValueError(f"{len(found)} advantages for the {rollout.num_sampled} sampled tokens of {rollout.id}")
    if not all(map(math.isfinite, found)):
        raise ValueError(f"the advantages of {rollout.id} are not finite")
    return found
