"""What a batch's rows say of its rollouts: nothing is left out uncounted."""

import math
from types import SimpleNamespace

from slipstream import records
from slipstream.envs.rewards.functions import _as_verl_score
from slipstream.trainer.batch_trainer import BatchTrainer
from slipstream.trainer.metrics import rollout_metrics


def batch_of(*metrics):
    rollouts = [
        records.Rollout(f"{i}", "task", "group", [], reward=1.0, outcome="done", metrics=each)
        for i, each in enumerate(metrics)
    ]
    return records.Batch(0, records.Version(0, 0), rollouts, dropped={"reward_error": 2})


def test_metrics_that_are_no_finite_numbers_are_counted_and_the_others_averaged():
    found = rollout_metrics(batch_of({"a": 1.0, "b": math.nan}, {"a": math.inf, "b": 4.0}, {"a": 3.0}))
    assert (found["reward/a"], found["reward/b"], found["reward/non_finite"]) == (2.0, 4.0, 2.0)
    assert found["dropped/reward_error"] == 2.0


def test_where_all_are_numbers_there_is_nothing_to_count():
    assert "reward/non_finite" not in rollout_metrics(batch_of({"a": 1.0}))


def test_those_that_a_reward_function_of_verl_gave_are_counted_too():
    score = _as_verl_score({"score": 1.0, "acc": math.nan, "other": math.inf, "good": 2.0, "text": "nan"})
    assert score.metrics == {"good": 2.0, "non_finite": 2.0}
    found = rollout_metrics(batch_of(score.metrics, {"good": 4.0}, score.metrics))
    assert (found["reward/good"], found["reward/non_finite"]) == (8 / 3, 4.0)


def test_the_staleness_of_each_task_is_over_its_tokens():
    def of(source, *spans):
        sequence = records.Sequence([1] * 4, [True] * 4, versions=[records.VersionSpan(*span) for span in spans])
        return records.Rollout("r", "t", "g", [sequence], reward=1.0, outcome="done", source=source)

    rollouts = [of("a", (0, "0.7")), of("b", (0, "0.5"), (1, "0.6")), of("b", (0, "0.7"))]
    counts = {f"task/{name}/{key}": 1.0 for name in "ab" for key in ("drawn_groups", "signal_groups")}
    found = rollout_metrics(records.Batch(7, records.Version(0, 7), rollouts, metrics=counts))
    assert (found["task/a/staleness"], found["task/b/staleness"]) == (0.0, 5 / 8)


def test_what_only_some_optimizer_steps_of_a_batch_measure_is_averaged_over_those():
    rows = iter([({"a": 1.0}, True), ({"a": 3.0, "mismatch/at_position_64": 5.0}, True), ({"a": 9.0}, False)])
    training = SimpleNamespace(updates_per_batch=3, epochs_per_batch=1)
    trainer = SimpleNamespace(
        config=SimpleNamespace(training=training),
        on_optimizer_steps=lambda number: None,
        optimizer_step=lambda step, number, may_be_zero: next(rows),
    )
    found = BatchTrainer.optimizer_steps(trainer, [(0, None), (1, None), (2, None)], 0)
    assert found == ({"a": 2.0, "mismatch/at_position_64": 5.0}, 1)
