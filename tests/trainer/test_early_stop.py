"""When evaluations end a run, and what of it survives a checkpoint."""

import json

import pytest

from slipstream.config import EvaluationConfig
from slipstream.trainer.early_stop import EarlyStop


def observe(watch, accuracies, first=0):
    return [watch.observe(first + n, {"eval/accuracy": value}) for n, value in enumerate(accuracies)]


@pytest.mark.parametrize("config", [None, EvaluationConfig()])
def test_without_settings_a_run_goes_on(config):
    watch = EarlyStop(config)
    observe(watch, [1.0, 0.0, 0.0, 0.0])
    assert (watch.reason, watch.keeps_best) == ("", False)


def test_stop_at():
    watch = EarlyStop(EvaluationConfig(every=1, stop_at=0.5))
    observe(watch, [0.2, 0.49])
    assert watch.reason == ""
    observe(watch, [0.5])
    assert watch.reason == "accuracy 0.5 reached evaluation.stop_at = 0.5"


def test_patience_counts_evaluations_without_a_better_one():
    watch = EarlyStop(EvaluationConfig(every=1, patience=2))
    assert observe(watch, [0.1, 0.3, 0.3, 0.4, 0.2]) == [True, True, False, True, False]
    assert watch.observe(5, {"train/loss": 1.0}) is False
    assert watch.reason == ""
    again = EarlyStop(EvaluationConfig(every=1, patience=2))
    again.load(json.loads(json.dumps(watch.state())))
    for each in (watch, again):
        observe(each, [0.4])
        assert "no better accuracy than 0.4 of step 3 (evaluation.patience = 2)" in each.reason
        assert each.best_step == 3
