"""DAPO's dynamic sampling through the whole loop, with a scripted engine."""

import re

import pytest

from slipstream.runlog.ledger import balance
from slipstream.weights.fingerprint import describe
from slipstream.weights.model_files import read_model_folder

from .conftest import learned

DAPO = ("--algorithm.kind", "dapo", "--evaluation", "false", "--training.steps", "4")


@pytest.fixture
def every_third(scripted):
    """Only every third task has rewards that differ."""

    def answer(prompt_ids, seed):
        number = int(re.findall(r"\d+", scripted._tokenizer.decode(prompt_ids))[-1])
        return scripted.letter(prompt_ids, seed) if number % 3 == 0 else scripted.say("a")

    return answer


@pytest.mark.parametrize("staleness", ["0", "1"])
def test_every_batch_gets_its_groups(staleness, scripted, every_third):
    report = scripted.run(*DAPO, "--training.staleness", staleness, script=every_third)
    assert (report.status, report.step) == ("finished", 4), scripted.error
    for row in scripted.metrics[1:]:
        assert row["reward/signal_fraction"] == 1.0
        assert row["rollout/groups"] == 4.0
        assert row["rollout/num"] == 16.0
        assert row["dropped/no_signal"] + row.get("dropped/surplus", 0.0) == 4 * (row["rollout/drawn_groups"] - 4)
        assert row["reward/drawn_mean"] > row["reward/mean"], "what was left out was right"
        assert row["staleness/max"] <= int(staleness)
    assert any(row["rollout/refilled_groups"] for row in scripted.metrics[1:])
    found, drawn = balance(scripted.folder), sum(row["rollout/drawn_groups"] for row in scripted.metrics[1:])
    assert (found.num("trained"), found.num("dropped"), found.num_open) == (16, drawn - 16, 0)


@pytest.mark.full
def test_a_resumed_run_draws_the_same(scripted, every_third, tmp_path):
    undisturbed = scripted.folder
    scripted.run(*DAPO, script=every_third)
    scripted.folder = tmp_path / "again"
    scripted.run(*DAPO, "--training.steps", "2", script=every_third)
    scripted.run(*DAPO, "--run.folder", str(scripted.folder), resume=True, script=every_third)
    assert learned(undisturbed) == learned(scripted.folder)
    last = "checkpoints/step-000004/weights"
    assert describe(read_model_folder(undisturbed / last)) == describe(read_model_folder(scripted.folder / last))


def test_the_bound_ends_it_and_a_batch_without_signal_is_skipped(scripted):
    report = scripted.run(*DAPO, "--algorithm.max_refills", "1", "--run.max_steps_without_signal", "3",
                          script=lambda prompt_ids, seed: scripted.say("a"))  # fmt: skip
    assert report.status == "failed"
    assert "no group had any reward variance in 3 consecutive steps" in str(scripted.error)
    row = scripted.metrics[1]
    assert (row["train/skipped"], row["rollout/refills"], row["rollout/drawn_groups"]) == (1.0, 1.0, 8.0)
    assert row["dropped/no_signal"] == 16.0
