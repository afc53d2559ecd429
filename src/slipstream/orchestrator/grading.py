"""Grades the episodes of a group together, if the environment scores groups (`Environment.scores_groups`)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from slipstream.envs.base import Episode, Score, Scorer
from slipstream.records import Task


class GroupGrades:
    """Grades a group in one call, once each of its rollouts has an episode or has left. There is no deadline here: each
    rollout ends by its own, and the call by the scorer's."""

    def __init__(self, scorer: Scorer, size: int) -> None:
        self.places = [Place(self, number) for number in range(size)]
        """One for each rollout."""
        self._scorer = scorer
        self._num_missing = size
        self._episodes: dict[int, Episode] = {}
        self._scores: asyncio.Future[dict[int, Score]] = asyncio.get_running_loop().create_future()
        self._call: asyncio.Task[None] | None = None

    async def score(self, number: int, task: Task, episode: Episode) -> Score:
        """The score of rollout `number`. Raises the error of grading the group."""
        self._episodes[number] = episode
        self.arrived(task)
        return (await asyncio.shield(self._scores))[number]

    def arrived(self, task: Task) -> None:
        """One more rollout has an episode, or will have none."""
        self._num_missing -= 1
        if not self._num_missing and self._episodes:
            self._call = asyncio.get_running_loop().create_task(self._grade(task))

    async def _grade(self, task: Task) -> None:
        numbers = sorted(self._episodes)
        try:
            scores = await self._scorer.score_group(task, [self._episodes[number] for number in numbers])
        except asyncio.CancelledError:
            self._scores.cancel()
            raise
        except Exception as error:  # noqa: BLE001 (each waiting rollout raises it)
            self._scores.set_exception(error)
            self._scores.exception()  # all of them may have been cancelled
        else:
            self._scores.set_result(dict(zip(numbers, scores, strict=True)))

    def cancel(self) -> None:
        """End the call, if it is under way: nobody waits for the scores any more."""
        if self._call is not None:
            self._call.cancel()


@dataclass(frozen=True)
class Place:
    """One rollout's place in a group. It is used exactly once: by `score`, or by `leave`."""

    group: GroupGrades
    number: int

    async def score(self, task: Task, episode: Episode) -> Score:
        """See `Scorer`; waits for the rest of the group."""
        return await self.group.score(self.number, task, episode)

    def leave(self, task: Task) -> None:
        """This rollout has no episode to grade."""
        self.group.arrived(task)
