from pathlib import Path

from slipstream.config.schema import EnvironmentConfig
from slipstream.envs.check import check_environment
from slipstream.envs.registry import load_environment
from slipstream.envs.scoring.pool import ScorerPool

EXAMPLE = Path(__file__).parents[2] / "examples/environments/reverse.py"


async def test_the_example_passes_its_check():
    config = EnvironmentConfig(name=str(EXAMPLE), settings={"num_digits": 5})
    env = load_environment(config)
    train, held_out = env.tasks("train", 300), env.tasks("eval", 50)
    assert (len(train), len(held_out)) == (300, 50)
    assert not {task.prompt for task in train} & {task.prompt for task in held_out}
    assert env.tasks("eval", 20) == held_out[:20]
    async with ScorerPool(config) as scorer:
        assert (await check_environment(env, scorer, 50)).passed
