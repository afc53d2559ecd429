from pathlib import Path

import pytest

from slipstream.config.schema import EnvironmentConfig
from slipstream.envs import Reply
from slipstream.envs.check import check_environment
from slipstream.envs.registry import load_environment
from slipstream.envs.scoring.pool import ScorerPool

EXAMPLES = Path(__file__).parents[2] / "examples/environments"


class Halver:
    """Plays the best strategy; keeps what it was told."""

    def __init__(self, low, high):
        self.low, self.high = low, high
        self.heard = []

    async def chat(self, messages):
        self.heard.append(messages[-1].content)
        if messages[-1].content == "Higher.":
            self.low = int(messages[-2].content) + 1
        elif messages[-1].content == "Lower.":
            self.high = int(messages[-2].content) - 1
        return Reply(str((self.low + self.high) // 2), "stop")


def example(name, **settings):
    config = EnvironmentConfig(name=str(EXAMPLES / name), settings=settings)
    return config, load_environment(config)


async def test_halving_always_wins():
    _, env = example("higher_lower.py")
    for task in env.tasks("train", 50):
        words = task.prompt[0].content.rstrip(".").split()
        policy = Halver(int(words[-3]), int(words[-1]))
        episode = await env.run(task, policy)
        assert episode.completion == task.answer
        assert episode.num_turns == len(policy.heard) <= env.max_turns
        assert env.score(task, episode.completion).reward == 1.0


@pytest.mark.parametrize(("name", "settings"), [("higher_lower.py", {}), ("reverse.py", {"num_digits": 5})])
async def test_it_passes_its_check_and_its_splits_are_disjoint(name, settings):
    config, env = example(name, **settings)
    train, held_out = env.tasks("train", 300), env.tasks("eval", 50)
    assert (len(train), len(held_out)) == (300, 50)
    assert not {task.prompt for task in train} & {task.prompt for task in held_out}
    assert env.tasks("eval", 20) == held_out[:20]
    async with ScorerPool(config) as scorer:
        assert not (await check_environment(env, scorer, 50)).failures
