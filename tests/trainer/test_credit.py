import pytest

from slipstream import records
from slipstream.config.schema import GRPOConfig
from slipstream.trainer.credit import assign_credit


def batch_of(rewards, group_size):
    rollouts = [
        records.Rollout(f"{i}", "task", f"group {i // group_size}", [], reward=reward, outcome="done")
        for i, reward in enumerate(rewards)
    ]
    return records.Batch(0, records.Version(0, 0), rollouts)


def test_advantages_from_rewards_and_from_right_or_wrong():
    batch = batch_of([0.1, 0.5, 0.9, 1.0, 0.2, 0.3, 0.2, 0.3], 4)
    config = GRPOConfig(scale_rewards="none")
    credit = assign_credit(batch, config, 10)
    assert credit.advantages == pytest.approx([-0.525, -0.125, 0.275, 0.375, -0.05, 0.05, -0.05, 0.05])
    assert credit.metrics["reward/signal_fraction"] == 1.0
    credit = assign_credit(batch, config.model_copy(update={"reward_threshold": 0.9}), 10)
    assert credit.advantages == [-0.5, -0.5, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0]
    assert credit.metrics["reward/signal_fraction"] == 0.5
    assert [rollout.reward for rollout in batch.rollouts][:2] == [0.1, 0.5]
