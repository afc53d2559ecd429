"""Groups of rollouts in a session: the forms of `train`'s data, and the groups not trained on yet."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, cast

from slipstream.errors import ConfigError
from slipstream.records import Rollout
from slipstream.records import Sequence as TokenSequence

Trained = Iterable[Rollout] | Iterable[TokenSequence] | Iterable[Iterable[Rollout]]
"""Rollouts, groups of rollouts, or sequences."""


def as_rollouts(data: Trained, step: int, *, needs_advantages: bool = False) -> list[Rollout]:
    """The rollouts in `data`, flat; a sequence becomes one of its own. `needs_advantages`: of such sequences. Raises
    ConfigError for anything else."""
    found: list[Rollout] = []
    for number, each in enumerate(_flat(data)):
        if isinstance(each, Rollout):
            each.reward = _number(each)
            found.append(each)
            continue
        if needs_advantages and "advantages" not in each.streams:
            raise ConfigError(
                f'sequence {number} has no stream "advantages": pass its rollout, call s.credit(groups), or set it by '
                'sequence.put("advantages", [...])'
            )
        name = f"{step}.given.{number}"
        found.append(Rollout(name, name, name, [each], reward=0.0, outcome="done"))
    if not found:
        raise ConfigError("there is nothing to train on: give at least one rollout or sequence")
    return found


def _number(rollout: Rollout) -> float:
    """The rollout's reward as a float: the caller may have set a number of NumPy or torch. Raises ConfigError for
    anything else, and for one that is not finite."""
    given: Any = rollout.reward
    try:
        number = math.nan if isinstance(given, str | bytes) else float(given)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"rollout {rollout.id} has the reward {given!r:.80}: give a finite number")
    return number


def _flat(data: Any) -> list[Rollout | TokenSequence]:
    if isinstance(data, Rollout | TokenSequence):
        return [data]
    if isinstance(data, str | bytes | dict) or not isinstance(data, Iterable):
        raise ConfigError(f"{type(data).__name__} is nothing to train on: give rollouts, groups or sequences")
    return [each for item in cast("Iterable[Any]", data) for each in _flat(item)]


class Groups:
    """The groups not trained on yet. A group is found by the tokens of any of its sequences, so that a
    sequence may be a changed copy."""

    def __init__(self) -> None:
        self._groups: dict[str, tuple[int, list[Rollout]]] = {}
        self._group_of: dict[int, str] = {}
        """By the identity of a list of tokens. It lives as long as the group here."""

    def add(self, groups: Sequence[list[Rollout]], version: int) -> None:
        """Groups by the weights of step `version`."""
        for group in groups:
            self._groups[group[0].group_id] = (version, [*group])
            for rollout in group:
                self._group_of |= {id(sequence.token_ids): rollout.group_id for sequence in rollout.sequences}

    def take(self, rollouts: Sequence[Rollout]) -> list[str]:
        """The groups of these rollouts are trained on; their names."""
        names = [rollout.group_id for rollout in rollouts]
        names += [self._group_of.get(id(each.token_ids), "") for rollout in rollouts for each in rollout.sequences]
        found = [name for name in dict.fromkeys(names) if name in self._groups]
        for name in found:
            self._forget(name)
        return found

    def take_older(self, oldest: int) -> list[list[Rollout]]:
        """Groups of versions before `oldest`."""
        return [self._forget(name) for name, (version, _) in [*self._groups.items()] if version < oldest]

    def take_all(self) -> list[list[Rollout]]:
        """All groups."""
        return [self._forget(name) for name in [*self._groups]]

    def _forget(self, name: str) -> list[Rollout]:
        _, group = self._groups.pop(name)
        for rollout in group:
            for sequence in rollout.sequences:
                self._group_of.pop(id(sequence.token_ids), None)
        return group
