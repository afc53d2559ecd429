"""The verdict of `slipstream smoke` on the channels of rollout matching, by the runs' metrics."""

import pytest

from slipstream_matching.smoke import Health, Limits, across, health_of


def row(channel, loss=1.0, invalid=0, truncated=0, any_match=0.5):
    found = {"stage2/channel_a": float(channel == "A"), "stage2/channel_b": float(channel == "B"), "train/loss": loss}
    if channel == "B":
        found |= {"rollout/num_samples": 10.0, "stage2/invalid_rollout": float(invalid)}
        found |= {"rollout/parse_truncated": float(truncated), "rollout/sample_any_match_rate": any_match}
    return found


EVALUATED = {"step": 0, "eval/f1": 0.1}


def test_a_healthy_run():
    found = health_of("ab", [EVALUATED, row("A"), row("B", 2.0, invalid=1, truncated=3)], Limits())
    assert not found.problems
    assert (found.num_steps, found.loss_a, found.loss_b) == (2, 1.0, 2.0)
    assert (found.invalid_rate, found.truncated_rate, found.any_match_rate) == (0.1, 0.3, 0.5)


@pytest.mark.parametrize(
    ("channels", "rows", "problem"),
    [
        ("b_only", [row("B", invalid=10, any_match=0.0)], "100 % of rollouts are invalid, more than 10 %"),
        ("b_only", [row("B", truncated=4)], "40 % of rollouts are truncated, more than 30 %"),
        ("b_only", [row("B", any_match=0.0)], "no rollout matches any true object"),
        ("ab", [row("A", 0.22), row("B", 20.07)], "are not of one order"),
        ("ab", [row("A", 20.0), row("B", 0.5)], "are not of one order"),
        ("ab", [row("A")], "no step was trained by channel B"),
        ("a_only", [], "no step was trained by channel A"),
        ("a_only", [row("A", float("nan"))], "not finite"),
        ("a_only", [row("A", None)], "not finite"),
    ],
)
def test_what_speaks_against_a_run(channels, rows, problem):
    found = health_of(channels, rows, Limits())
    assert any(problem in text for text in found.problems)


def test_an_error_is_the_problem_itself():
    problems = health_of("ab", [], Limits(), "the engine did not start").problems
    assert problems == ("it ended with: the engine did not start",)


def test_losses_of_two_runs_are_compared():
    runs = [Health("a_only", 4, loss_a=0.2), Health("b_only", 4, loss_b=19.6)]
    assert "not of one order" in across(runs)[0]
    assert across(runs[:1]) == []
    assert across([Health("a_only", 4, loss_a=1.0), Health("b_only", 4, loss_b=3.0)]) == []


def test_the_run_that_hid_behind_a_green_smoke():
    """Losses 0.22, 0.14, 20.07, 1.21, 0.55, 19.62 by A, A, B, A, A, B, both rollouts of B invalid."""
    losses = (0.22, 0.14, 20.07, 1.21, 0.55, 19.62)
    rows = [row("AAB"[place % 3], loss, invalid=10, any_match=0.0) for place, loss in enumerate(losses)]
    assert len(health_of("ab", rows, Limits()).problems) == 3
