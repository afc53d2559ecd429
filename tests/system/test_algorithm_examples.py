"""examples/algorithms with real vLLM: rewards alternate, and a new model learns from each."""

from pathlib import Path

import pytest

from slipstream.runlog import read_metrics

from .test_real_runs import COIN, check_run

pytestmark = pytest.mark.engine

EXAMPLES = Path(__file__).parents[2] / "examples/algorithms"
CREDIT, LOSS, HOOKS = "--algorithm.credit", "--algorithm.loss", "--algorithm.hooks"
TALK = ("--environment.name", f"{Path(__file__).parent}/talk.py:Talk", "--environment.settings", "{}")


@pytest.mark.quick("length_aware*")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param((CREDIT, f"{EXAMPLES}/length_aware.py:credit"), id="length_aware"),
        pytest.param(
            (CREDIT, f"{EXAMPLES}/expert_iteration.py:credit", LOSS, f"{EXAMPLES}/expert_iteration.py:loss"),
            id="expert_iteration",
        ),
        pytest.param((LOSS, f"{EXAMPLES}/entropy_weighted.py:loss"), id="entropy_weighted"),
        pytest.param((HOOKS, f"{EXAMPLES}/rloo_with_kl.py:RLOO"), id="rloo_with_kl"),
        pytest.param((HOOKS, f"{EXAMPLES}/echo.py:Echo", *TALK), id="echo"),
        pytest.param((HOOKS, f"{EXAMPLES}/gold_answers.py:GoldAnswers"), id="gold_answers"),
    ],
)
def test_it_trains(command, run_file, tmp_path, options):
    folder = tmp_path / "run"
    command("train", run_file, *COIN, *options, "--run.folder", folder).ok()
    check_run(folder, steps=3)
    assert all(row["train/grad_norm"] > 0 for row in read_metrics(folder)[1:])
