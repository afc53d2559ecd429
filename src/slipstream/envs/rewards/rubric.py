"""Rubrics: a reward made of weighted parts, each with a metric of its own.

The reward is the sum of weight times part over the parts that apply; as in TRL, a part of None does not. An exception
in a part fails the whole. Each part's reward is the metric of its name, its metrics are `name/metric`, and
`name/not_applicable` is 1 if it does not apply.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Sequence

import msgspec

from slipstream.envs.base import Score
from slipstream.envs.rewards.contract import Checked, NotApplicable, Reward, settled
from slipstream.errors import ConfigError
from slipstream.records import Task


class Part(msgspec.Struct, frozen=True):
    """One part of a rubric."""

    reward: Reward
    weight: float = 1.0
    name: str = ""
    """Name of its metric; empty: the reward's."""


class WeightedParts(Reward):
    """A reward made of parts. Raises ConfigError for non-finite weights and repeated names."""

    def __init__(self, parts: Sequence[Part], setting: str = "rubric") -> None:
        if not parts:
            raise ConfigError(f"{setting} has no part: give at least one")
        self._parts = [msgspec.structs.replace(part, name=part.name or part.reward.name) for part in parts]
        names = [part.name for part in self._parts]
        if twice := next((name for name in names if names.count(name) > 1), ""):
            raise ConfigError(f"{setting} has two parts that are called {twice!r}: give one of them another name")
        for part in self._parts:
            if not math.isfinite(part.weight):
                raise ConfigError(f"{setting}: the weight of {part.name!r} is {part.weight}: give a finite number")
        self.name = "+".join(names)
        self.answer_is_gold = all(part.reward.answer_is_gold for part in parts)
        self.needs_columns = any(part.reward.needs_columns for part in parts)
        self.needs_answers = any(part.reward.needs_answers for part in parts)

    def check(self, rows: Sequence[Checked]) -> None:
        """Every part's check."""
        for part in self._parts:
            part.reward.check(rows)

    def setup_scoring(self) -> None:
        """Every part's `setup_scoring`."""
        for part in self._parts:
            part.reward.setup_scoring()

    def __call__(self, task: Task, completion: str) -> Score | Awaitable[Score]:
        """See the module; a coroutine if a part is one."""
        found: list[Score | Awaitable[Score] | None] = []
        for part in self._parts:
            try:
                found.append(part.reward(task, completion))
            except NotApplicable:
                found.append(None)
        ready = [score for score in found if score is None or isinstance(score, Score)]
        return self._total(ready) if len(ready) == len(found) else self._later(found)

    async def score_applicable(self, task: Task, completions: Sequence[str]) -> list[Score | None]:
        """Each part grades the whole group at once."""
        by_part = await asyncio.gather(*(part.reward.score_applicable(task, completions) for part in self._parts))

        def total(place: int) -> Score | None:
            try:
                return self._total([scores[place] for scores in by_part])
            except NotApplicable:
                return None

        return [total(place) for place in range(len(completions))]

    async def _later(self, coming: Sequence[Score | Awaitable[Score] | None]) -> Score:
        async def one(score: Score | Awaitable[Score] | None) -> Score | None:
            try:
                return None if score is None else await settled(score)
            except NotApplicable:
                return None

        return self._total(await asyncio.gather(*map(one, coming)))

    def _total(self, scores: Sequence[Score | None]) -> Score:
        metrics: dict[str, float] = {}
        reward = 0.0
        for part, score in zip(self._parts, scores, strict=True):
            if score is None:
                metrics[f"{part.name}/not_applicable"] = 1.0
                continue
            reward += part.weight * score.reward
            metrics[part.name] = score.reward
            metrics |= {f"{part.name}/{name}": value for name, value in score.metrics.items()}
        if all(score is None for score in scores):
            raise NotApplicable(f"no part of the rubric {self.name} applies to this completion")
        return Score(reward, metrics)
