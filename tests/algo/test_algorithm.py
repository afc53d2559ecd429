"""A class of hooks: it replaces what it defines, and its errors are sentences that name file, hook and line."""

import pytest
import torch
from tests.algo.problem import make_problem
from tests.algo.test_group_credit import group_of, trained

from slipstream import Algorithm
from slipstream.algo.algorithm import algorithm_of, check_reads, custom_metrics, write_credit
from slipstream.algo.trial import check_algorithm
from slipstream.config.recipes import resolved
from slipstream.config.schema import RLConfig
from slipstream.errors import ConfigError, TrainingError

OWN = '''
import torch
from slipstream import Algorithm, Stream
class Nothing(Algorithm):
    """Every hook is the recipe's."""
class Half(Algorithm):
    def __init__(self, factor=0.5):
        self.factor = factor
    def loss(self, inputs):
        return self.factor * super().loss(inputs).loss_N
class Hinted(Algorithm):
    def credit(self, group):
        for rollout in group:
            for sequence in rollout.sequences:
                sequence.streams["hint"] = Stream.of([0.5] * 2 * sequence.num_trainable, "float32", 2)
        return [rollout.reward for rollout in group]
    def loss(self, inputs):
        return -(inputs.streams["hint"].sum(1) * inputs.advantages_N) * inputs.logprobs_N
class Read(Algorithm):
    reads = ("old_logprobs", "reference_logprobs", "theirs")
    def credit_batch(self, rollouts):
        return [sum(rollout.sequences[0].values("reference_logprobs")) for rollout in rollouts]
    def metrics(self, rollouts):
        return {"rollouts": len(rollouts)}
    def loss(self, inputs):
        return -(inputs.streams["reference_logprobs"] + inputs.streams["theirs"]) * inputs.logprobs_N
class Undeclared(Algorithm):
    def loss(self, inputs):
        return -inputs.streams["mine"] * inputs.logprobs_N
class NoMetrics(Algorithm):
    def metrics(self, rollouts):
        return [1.0]
class NotANumber(Algorithm):
    def loss(self, inputs):
        return inputs.logprobs_N * float("nan")
class Short(Algorithm):
    def loss(self, inputs):
        return inputs.logprobs_N[:2]
class Detached(Algorithm):
    def loss(self, inputs):
        return inputs.logprobs_N.detach()
class Raises(Algorithm):
    def credit_batch(self, rollouts):
        return rollouts[0].nothing
class Few(Algorithm):
    def credit_batch(self, rollouts):
        return [[1.0]] * len(rollouts)
class Taken(Algorithm):
    def __init__(self, best_of=2):
        pass
class Typo(Algorithm):
    reads = ("reference_logprob",)
class Credit(Algorithm):
    def credit(self, group):
        return [1.0] * len(group)
class Unsolved(Algorithm):
    def credit(self, group):
        return None if any(rollout.reward for rollout in group) else group.nothing
class Streams(Algorithm):
    def credit(self, group):
        group[0].sequences[0].put("mine", [1.0] * len(group[0].sequences[0]))
class Other:
    pass
'''


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN)

    def settings(name, **fields):
        return resolved(RLConfig(hooks=f"{path}:{name}", **fields))

    return settings


def test_what_a_class_leaves_out_is_the_recipes(own):
    nothing, group = algorithm_of(own("Nothing")), group_of(1.0, 0.0)
    assert not any(nothing.defines(hook) for hook in ("credit", "credit_batch", "loss", "metrics"))
    check_algorithm(own("Nothing"))
    write_credit(nothing, "credit", group)
    write_credit(nothing, "credit_batch", group)
    assert (trained(group), custom_metrics(nothing, group)) == (trained(group_of(1.0, 0.0)), {})
    problem = make_problem()
    value, gradients, _ = problem.ours(own("Nothing"))
    expected = problem.ours(RLConfig())
    assert value == expected[0]
    assert torch.equal(gradients, expected[1])


@pytest.mark.parametrize(("arguments", "factor"), [({}, 0.5), ({"factor": 2.0}, 2.0)])
def test_a_loss_may_change_the_recipes(own, arguments, factor):
    settings, problem = own("Half", arguments=arguments), make_problem()
    check_algorithm(settings)
    value, gradients, _ = problem.ours(settings)
    expected = problem.ours(RLConfig())
    assert value == pytest.approx(factor * expected[0])
    torch.testing.assert_close(gradients, factor * expected[1])


def test_the_loss_is_tried_with_the_streams_of_credit_and_those_that_it_reads(own):
    check_algorithm(own("Hinted"))
    check_algorithm(own("Read"))
    read = algorithm_of(own("Read"))
    group = group_of(1.0, 0.0)
    for rollout in group:
        rollout.sequences[0].put("reference_logprobs", [-0.5] * len(rollout.sequences[0]))
    write_credit(read, "credit_batch", group)
    assert trained(group)[0] == [[-0.5], [-1.0, -1.0]]
    assert custom_metrics(read, group) == {"custom/rollouts": 2.0}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Undeclared", "Undeclared.loss raised LookupError: there is no stream 'mine'"),
        ("NoMetrics", "NoMetrics.metrics returned list: return numbers by name"),
        ("NotANumber", "NotANumber.loss returned [nan, nan, nan, nan, nan, nan] for finite inputs"),
        ("Short", "Short.loss returned a tensor of shape [2] for 6 tokens"),
        ("Detached", "Detached.loss returned a loss without a gradient"),
        (
            "Raises",
            "Raises.credit_batch raised AttributeError: 'Rollout' object has no attribute 'nothing' (line",
        ),
        ("Few", "Few.credit_batch: ValueError: 1 advantages for the 3 sampled tokens of 0.0.0 (group 0.0)"),
        ("Unsolved", "Unsolved.credit raised AttributeError: 'list' object has no attribute 'nothing' (line"),
        ("Typo", "Typo.reads names 'reference_logprob': did you mean 'reference_logprobs'?"),
        ("Other", "is no subclass of slipstream.Algorithm"),
        ("Missing", "has no class 'Missing'"),
    ],
)
def test_what_is_wrong_is_found_before_a_run(own, name, says):
    with pytest.raises(ConfigError) as error:
        check_algorithm(own(name))
    assert says in str(error.value)
    assert str(error.value).startswith("algorithm.hooks")
    assert "\n" not in str(error.value)


def test_arguments_that_it_does_not_take_and_two_that_give_advantages(own):
    with pytest.raises(ConfigError, match=r"Half cannot be made with algorithm.arguments = {'a': 1} "):
        check_algorithm(own("Half", arguments={"a": 1}))
    with pytest.raises(ConfigError, match=r"Taken takes best_of, and .* is the recipe's: rename it"):
        check_algorithm(own("Taken"))
    for fields, says in (
        ({"advantage": "gae"}, "algorithm.advantage = 'gae' does, too"),
        ({"kl_coef": 0.1, "arguments": {"kl_in": "reward"}}, "a KL term in the reward would change them"),
    ):
        with pytest.raises(ConfigError, match=says):
            check_algorithm(own("Credit", **fields))


def test_a_credit_without_advantages_leaves_the_recipes(own):
    check_algorithm(own("Streams", kl_coef=0.1, arguments={"kl_in": "reward"}))


def test_a_stream_has_a_value_for_each_token():
    with pytest.raises(ValueError, match=r"argument 2 is (longer|shorter)"):
        group_of(1.0)[0].sequences[0].put("mine", [1.0] * 99)


def test_errors_in_training_name_file_hook_and_line(own):
    problem = make_problem()
    with pytest.raises(TrainingError, match=r"own.py:Short.loss returned a tensor of shape \[2\] for"):
        problem.ours(own("Short"))
    with pytest.raises(TrainingError, match=r"own.py:Undeclared.loss raised LookupError: .* \(line \d+ of .*own.py\)"):
        problem.ours(own("Undeclared"))


def test_a_stream_that_no_rollout_has_is_named(own):
    read, group = algorithm_of(own("Read")), group_of(1.0)
    for name in ("old_logprobs", "reference_logprobs"):
        group[0].sequences[0].put(name, [-0.5] * len(group[0].sequences[0]))
    with pytest.raises(TrainingError, match=r"own.py:Read.reads names 'theirs', and rollouts have old_logprobs, ref"):
        check_reads(read, group)


def test_without_a_class_functions_are_hooks():
    plain = algorithm_of(resolved(RLConfig()))
    assert type(plain) is Algorithm
