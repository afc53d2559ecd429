"""Groups that are graded together."""

import asyncio

import pytest

from slipstream.envs.base import Episode, RewardFailed, Score
from slipstream.orchestrator.grading import GroupGrades
from slipstream.records import Message, Task
from tests.quick_time import event_loop_policy  # noqa: F401 (a fixture)

TASK = Task("t", (Message("user", "?"),))


class Ranks:
    """A scorer that ranks texts by length and remembers what it was asked."""

    def __init__(self, error=None):
        self.asked, self.error = [], error

    async def score_group(self, task, episodes):
        self.asked.append([episode.completion for episode in episodes])
        if self.error:
            raise self.error
        order = sorted(range(len(episodes)), key=lambda i: len(episodes[i].completion))
        return [Score(float(order.index(i))) for i in range(len(episodes))]


async def test_one_call_in_the_order_of_the_rollouts_whoever_ends_first():
    scorer = Ranks()
    group = GroupGrades(scorer, 4)

    async def rollout(number, text, seconds):
        await asyncio.sleep(seconds)
        if text is None:
            group.places[number].leave(TASK)
            return None
        return (await group.places[number].score(TASK, Episode(text))).reward

    rewards = await asyncio.gather(
        rollout(0, "ccc", 0.03), rollout(1, None, 0.02), rollout(2, "a", 0.0), rollout(3, "bb", 0.01)
    )
    assert rewards == [2.0, None, 0.0, 1.0]
    assert scorer.asked == [["ccc", "a", "bb"]]


async def test_its_failure_is_that_of_each_rollout():
    group = GroupGrades(Ranks(RewardFailed("no")), 2)
    found = await asyncio.gather(*(p.score(TASK, Episode("a")) for p in group.places), return_exceptions=True)
    assert [str(error) for error in found] == ["no", "no"]


async def test_nobody_left_means_no_call_and_a_cancelled_group_leaves_nothing():
    scorer = Ranks()
    group = GroupGrades(scorer, 2)
    for place in group.places:
        place.leave(TASK)
    assert scorer.asked == []

    started = asyncio.Event()

    class Slow(Ranks):
        async def score_group(self, task, episodes):
            started.set()
            await asyncio.sleep(60)

    group = GroupGrades(Slow(), 1)
    waiting = asyncio.create_task(group.places[0].score(TASK, Episode("a")))
    await started.wait()
    group.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
