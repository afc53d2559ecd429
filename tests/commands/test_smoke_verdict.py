"""The verdict of `slipstream smoke`, by the run's metrics."""

import pytest

from slipstream.commands.smoke import trial_of

STEP = {"train/loss": 0.1, "train/grad_norm": 2.0, "probe/abs_logprob_diff": 1e-6}


@pytest.mark.parametrize(
    ("rows", "error", "problem"),
    [
        ([{}, STEP, STEP | {"train/loss": None, "train/skipped": 1.0}], "", ""),
        ([{}, {"train/loss": None, "train/skipped": 1.0}], "", "no step was trained"),
        ([STEP | {"train/loss": float("nan")}], "", "not finite"),
        ([STEP | {"train/grad_norm": 0.0}], "", "gradient"),
        ([], "the engine did not start", "it ended with: the engine did not start"),
    ],
)
def test_the_verdict_on_a_run_without_channels(rows, error, problem):
    found = trial_of(rows, error)
    assert any(problem in text for text in found.problems) == bool(problem)
    if not problem:
        assert (found.num_steps, found.loss, found.grad_norm, found.probe) == (2, 0.1, 2.0, 1e-6)
