"""Classes of hooks in whole runs with a scripted engine: over ranks, beside the recipe that they equal, and failing."""

from pathlib import Path

import pytest

from slipstream.config import load_config
from slipstream.errors import ConfigError
from slipstream.launch.prepare import prepare

EXAMPLES = Path(__file__).parents[2] / "examples/algorithms"
TALK = f"{Path(__file__).parent}/talk.py:Talk"
SHORT = ("--evaluation", "false", "--run.save_samples", "1")
HOOKS = "--algorithm.hooks"
FAILING = """
from slipstream import Algorithm
class Late(Algorithm):
    calls = 0
    def {hook}(self, {argument}):
        self.calls += 1
        if self.calls > {calls}:
            {what}
        return {result}
"""


def figures(rows):
    """All that does not depend on the clock."""
    names = ("reward/", "train/", "mismatch/", "custom/", "rollout/")
    return [{name: value for name, value in row.items() if name.startswith(names)} for row in rows]


@pytest.mark.quick("1-*")
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_class_trains_as_the_recipe_that_it_repeats(ranks, scripted, tmp_path):
    common = (*SHORT, "--algorithm.kind", "rloo", "--training.ranks", ranks, "--algorithm.group_size", "4")
    scripted.finish(3, *common, "--algorithm.kl_coef", "0.05")
    expected = figures(scripted.metrics[1:])
    scripted.folder = tmp_path / "own"
    scripted.finish(3, *common, HOOKS, f"{EXAMPLES}/rloo_with_kl.py:RLOO", "--algorithm.arguments.beta", "0.05")
    for row, other in zip(figures(scripted.metrics[1:]), expected, strict=True):
        kl, reported = row.pop("custom/kl"), other.pop("train/kl_reference")
        assert kl == pytest.approx(reported * other["train/num_tokens"] / other["train/num_sequences"], abs=1e-6)
        assert row == pytest.approx(other, rel=1e-5, abs=1e-7)


@pytest.mark.quick("loss-nan*", "credit-*")
@pytest.mark.parametrize(
    ("hook", "argument", "calls", "what", "result", "says"),
    [
        # The trial calls each hook twice. A batch has four groups and one micro-batch.
        (
            "credit",
            "group",
            9,
            "raise KeyError('apple')",
            "[r.reward for r in group]",
            "raised KeyError: 'apple' (line",
        ),
        ("loss", "inputs", 2, "return inputs.logprobs_N * float('nan')", "-inputs.logprobs_N", "gave a loss of nan in"),
        ("loss", "inputs", 2, "return inputs.logprobs_N[1:]", "-inputs.logprobs_N", "returned a tensor of shape"),
        ("metrics", "rollouts", 2, "return 3", "{}", "returned int: return numbers by name"),
    ],
    ids=["credit-raises", "loss-nan", "loss-short", "metrics"],
)
def test_a_hook_that_fails_later_ends_the_run_by_name(hook, argument, calls, what, result, says, scripted, tmp_path):
    (tmp_path / "late.py").write_text(
        FAILING.format(hook=hook, argument=argument, calls=calls, what=what, result=result)
    )
    scripted.fail(("TrainingError", 7), f"late.py:Late.{hook} {says}", *SHORT, HOOKS, f"{tmp_path}/late.py:Late")


def test_the_file_is_in_the_provenance_and_a_wrong_class_is_refused(scripted, run_file, tmp_path):
    (tmp_path / "own.py").write_text("class Other:\n    pass\n")
    with pytest.raises(ConfigError, match=r"own.py:Other is no subclass of slipstream.Algorithm"):
        prepare(load_config(run_file, (HOOKS, f"{tmp_path}/own.py:Other")))
    scripted.finish(1, *SHORT, "--training.steps", "1", HOOKS, f"{EXAMPLES}/rloo_with_kl.py:RLOO")
    assert "rloo_with_kl.py" in (scripted.folder / "provenance.json").read_text()


@pytest.mark.quick("1*")
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_echo_learns_the_environments_tokens_though_rewards_agree(ranks, scripted):
    talk = (
        *SHORT,
        "--environment.name",
        TALK,
        "--training.steps",
        "4",
        "--training.ranks",
        ranks,
    )
    scripted.finish(
        4,
        *talk,
        HOOKS,
        f"{EXAMPLES}/echo.py:Echo",
        "--algorithm.arguments.weight",
        "1.0",
        "--training.learning_rate",
        "3e-3",
    )
    losses = [row["term/echo"] for row in scripted.metrics[1:]]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.95 * losses[0]


@pytest.mark.parametrize("refills", [0, 1])
def test_gold_answers_of_unsolved_tasks_are_learned_unless_dynamic_sampling_drops_them(refills, scripted):
    hooks = (HOOKS, f"{EXAMPLES}/gold_answers.py:GoldAnswers", "--training.learning_rate", "3e-3")
    small = ("--algorithm.group_size", "2", "--algorithm.max_refills", str(refills))
    scripted.finish(4, *SHORT, *hooks, *small, "--training.steps", "4")
    losses = [row["term/gold"] for row in scripted.metrics[1:] if "term/gold" in row]
    if refills:
        assert losses == []
    else:
        assert losses[-1] < losses[0]
    warnings = [event["message"] for event in scripted.events("warning")]
    says = "algorithm.max_refills = 1 leaves out groups whose rewards agree, so algorithm.hooks: "
    assert any(each.startswith(says) for each in warnings) == bool(refills)
