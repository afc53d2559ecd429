"""Tools that do what no tool should, and group rewards; workers load them from this file."""

import asyncio
import time

import hostile  # beside this file, which makes it importable in a worker

from slipstream.envs import Score, SingleTurn
from slipstream.records import Task


def act(mode: str) -> object:
    """Does what `hostile` does for this text."""
    return hostile.reward(None, mode)


def hang_once(task: Task) -> str:
    """Hangs."""
    time.sleep(3000)
    return task.id


async def wait(seconds: float, text: str = "") -> str:
    """Waits beside others."""
    await asyncio.sleep(seconds)
    return text


def add(a: int, b: int = 1) -> int:
    """Adds."""
    return a + b


def whose(task: Task, question: str) -> dict[str, str]:
    """Says which task it was called for."""
    return {"task": task.id, "question": question}


def much(length: int) -> str:
    """A long text."""
    return "\ud83d" + "é" * length


def unwritable() -> object:
    """Returns what cannot be written as text."""

    class Unwritable:
        def __str__(self):
            raise ValueError("never")

    return Unwritable()


class Hostile(SingleTurn):
    tools = (act, hang_once, wait, add, whose, much, unwritable)
    scores_groups = True

    def tasks(self, split, num_tasks):
        return []

    def reward(self, task, completion):
        return hostile.reward(task, completion)

    def score_episode(self, task, episode):
        if episode.completion == "messages":
            return Score(float(len(episode.messages)), {"turns": float(episode.num_turns)}, (0.5, 1.5))
        if episode.completion == "turns that are not finite":
            return Score(1.0, {}, (0.5, float("nan")))
        return super().score_episode(task, episode)

    def score_group(self, task, episodes):
        mode = episodes[0].completion
        if mode == "ranks":
            order = sorted(range(len(episodes)), key=lambda place: len(episodes[place].completion))
            return [{"reward": float(order.index(place)), "place": place} for place in range(len(episodes))]
        if mode == "later":
            return self._later(episodes)
        values = [1.0] * len(episodes)
        return {
            "short": values[1:],
            "long": [*values, 1.0],
            "one": 1.0,
            "none": None,
            "text": "1" * len(episodes),
            "mapping": dict.fromkeys(range(len(episodes)), 1.0),
            "nan": [*values[1:], float("nan")],
            "nested": [values] * len(episodes),
        }.get(mode) or hostile.reward(task, mode)

    async def _later(self, episodes):
        await asyncio.sleep(0.05)
        return tuple(Score(float(place)) for place in range(len(episodes)))
