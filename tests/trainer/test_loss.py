"""What an objective says of a step, by value: each metric against sums over tokens written out."""

import math
from types import SimpleNamespace

import pytest
import torch
from tests.recipe_settings import rl

from slipstream import records
from slipstream.algo.surrogate_losses import LOSSES
from slipstream.config.recipes import resolved
from slipstream.config.schema import TeacherConfig
from slipstream.errors import TrainingError
from slipstream.trainer.loss import PolicyObjective, SFTObjective
from slipstream.trainer.packing import StepBatch, dummy_micro_batch, micro_batches

OLD, BEHAVIOUR = [-1.0, -2.0, -0.5], [-1.25, -1.5, -0.5]
REFERENCE = [-1.5, -1.0, -0.25]
LOGITS = torch.tensor([[0.0, 1.0, 2.0], [1.0, 0.0, -1.0], [0.5, 0.5, 0.0]], dtype=torch.float64)
"""Of the three targets 0, 1 and 2: of one sequence of two tokens, and one of one."""


class Table:
    """A model whose logits are the same whatever the row."""

    def __init__(self, logits):
        self.given = logits

    def logits(self, micro):
        return self.given


def step_batch(advantages=(2.0, -1.0), behaviour=BEHAVIOUR, **fields):
    sequences = [
        records.Sequence([5, 0, 1], [False, True, True], [0.0, *behaviour[:2]]),
        records.Sequence([6, 2], [False, True], [0.0, behaviour[2]]),
    ]
    old, reference = ([torch.tensor(values[:2]), torch.tensor(values[2:])] for values in (OLD, REFERENCE))
    batch = StepBatch(sequences, list(advantages), **fields)
    batch.fill("old_logprobs", old)
    batch.fill("reference_logprobs", reference)
    return batch


def of(batch, temperature=1.0, max_tokens=4, teacher_coef=None, **config):
    """Loss, metrics and the gradient of the logits."""
    sampling = records.SamplingParams(max_tokens=max_tokens, temperature=temperature)
    teacher = None if teacher_coef is None else TeacherConfig(coef=teacher_coef)
    objective = PolicyObjective(resolved(rl(**config)), sampling, teacher)
    logits = LOGITS.clone().requires_grad_()
    (micro,) = micro_batches(batch, 100)
    divisors = objective.counts(batch)
    loss, sums = objective.terms(Table(logits), micro, divisors)
    loss.backward()
    assert not any(value.requires_grad for value in sums.values())
    return loss.item(), objective.summarize(sums, divisors), logits.grad


def ours(temperature=1.0):
    """Log-probabilities of the targets, and the entropies."""
    found = (LOGITS / temperature).log_softmax(-1)
    entropies = -(found.exp() * found).sum(-1)
    return [found[place, place].item() for place in range(3)], entropies.tolist()


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def near(value):
    return pytest.approx(value, rel=1e-5, abs=1e-6)


def test_all_metrics_of_a_policy_gradient():
    logprobs, entropies = ours()
    loss, metrics, _ = of(step_batch(), importance_sampling="truncated", importance_cap=1.2, kl_coef=0.5, kl_in="loss")
    weights = [min(math.exp(old - given), 1.2) for old, given in zip(OLD, BEHAVIOUR, strict=True)]
    assert metrics["loss"] == loss
    assert (metrics["num_tokens"], metrics["num_sequences"], metrics["silent_fraction"]) == (3.0, 2.0, 0.0)
    assert metrics["entropy"] == near(mean(entropies))
    assert metrics["ratio"] == near(mean(math.exp(a - b) for a, b in zip(logprobs, OLD, strict=True)))
    assert metrics["importance_weight"] == near(mean(weights))
    assert metrics["importance_capped_fraction"] == near(1 / 3)
    assert metrics["mismatch/abs_logprob_diff"] == near((0.25 + 0.5 + 0.0) / 3)
    assert metrics["mismatch/kl"] == near(
        mean(math.exp(o - b) - 1 - (o - b) for o, b in zip(OLD, BEHAVIOUR, strict=True))
    )
    differences = [reference - own for reference, own in zip(REFERENCE, logprobs, strict=True)]
    assert metrics["kl_reference"] == near(mean(math.exp(each) - 1 - each for each in differences))
    away = [math.exp(own - given) for own, given in zip(logprobs, BEHAVIOUR, strict=True)]
    assert metrics["effective_sample_size"] == near(sum(away) ** 2 / (3 * sum(each**2 for each in away)))
    assert not any(name.startswith(("off_policy", "teacher")) for name in metrics)
    # The tokens' places are 1, 2 and 1; the engine's probabilities e**-1.25, e**-1.5 and e**-0.5.
    assert metrics["mismatch/at_position_0"] == near(0.25)
    assert metrics["mismatch/at_probability_0.1"] == near(0.375)
    assert metrics["mismatch/at_probability_0.5"] == near(0.0)
    for prefix in ("", "mismatch/"):
        assert 0.0 < metrics[f"{prefix}ratio_p01"] <= metrics[f"{prefix}ratio_p99"]
    assert metrics["ratio_p99"] == pytest.approx(
        math.exp(max(a - b for a, b in zip(logprobs, OLD, strict=True))), rel=0.2
    )
    assert metrics["mismatch/ratio_p99"] == pytest.approx(math.exp(0.25), rel=0.2)
    assert metrics["mismatch/ratio_p01"] == pytest.approx(math.exp(-0.5), rel=0.2)
    shares = {name.removeprefix("mismatch/") for name in metrics if name.startswith("mismatch/ratio_")}
    assert shares == {name for name in metrics if name.startswith("ratio_")}


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize(("normalize", "divisor"), [("token", 3), ("sequence", None), ("constant", 8)])
def test_the_loss_and_what_it_is_divided_by(normalize, divisor, temperature):
    config = {
        "importance_sampling": "none",
        "entropy_coef": 0.25,
        "kl_coef": 0.5,
        "kl_in": "loss",
        "kl_estimator": "k2",
    }
    loss, _, _ = of(step_batch(), temperature, normalize=normalize, loss="policy_gradient", **config)
    logprobs, entropies = ours(temperature)
    terms = [
        -advantage * math.exp(own - old) + 0.5 * (own - reference) ** 2 / 2
        for own, old, reference, advantage in zip(logprobs, OLD, REFERENCE, (2.0, 2.0, -1.0), strict=True)
    ]
    expected = sum(terms) / divisor if divisor else ((terms[0] + terms[1]) / 2 + terms[2]) / 2
    assert loss == near(expected - 0.25 * mean(entropies))


def test_silent_sequences_count_in_the_divisors_only():
    batch = step_batch(silent=[records.Sequence([1, 2, 3, 4], [False, True, True, True])])
    _, metrics, _ = of(batch, importance_sampling="none")
    _, alone, _ = of(step_batch(), importance_sampling="none")
    assert (metrics["num_tokens"], metrics["num_sequences"], metrics["silent_fraction"]) == (6.0, 3.0, 0.5)
    assert metrics["loss"] == near(alone["loss"] / 2)
    assert metrics["entropy"] == alone["entropy"]
    assert metrics["effective_sample_size"] == alone["effective_sample_size"]


def test_the_old_policy_is_the_engines_where_asked():
    logprobs, _ = ours()
    _, metrics, _ = of(step_batch(), old_policy="engine", importance_sampling="none")
    assert metrics["ratio"] == near(mean(math.exp(a - b) for a, b in zip(logprobs, BEHAVIOUR, strict=True)))
    assert metrics["mismatch/abs_logprob_diff"] == 0.0
    batch = step_batch()
    batch.sequences[1].logprobs = None
    with pytest.raises(TrainingError, match="a sequence has none: ask the engine for them or set"):
        of(batch, old_policy="engine", importance_sampling="none")
    _, metrics, _ = of(batch, importance_sampling="none")
    assert not any(name.startswith(("mismatch", "effective")) for name in metrics)


def test_ratios_without_bound_stay_finite():
    """Sums of squares included; where all are equally far away, all count."""
    _, metrics, _ = of(step_batch(behaviour=[-500.0] * 3), importance_sampling="none")
    assert metrics["effective_sample_size"] == near(1.0)
    assert metrics["mismatch/kl"] == near(math.exp(20.0))
    _, metrics, _ = of(step_batch(behaviour=[500.0] * 3), importance_sampling="none")
    assert metrics["effective_sample_size"] == near(1.0)
    taught = step_batch(advantages=(0.0, 0.0))
    taught.fill("old_logprobs", [torch.full((2,), -500.0), torch.full((1,), -500.0)])
    for sequence in taught.sequences:
        sequence.put("teacher_logprobs", [0.0] * len(sequence))
    _, metrics, _ = of(taught, importance_sampling="none", old_policy="trainer", teacher_coef=1.0)
    assert metrics["teacher/kl_k3"] == near(math.exp(20.0))


def test_the_clip_of_a_configuration_is_used():
    """Tokens of ratios above and below the range, whose advantages push them on."""
    logprobs, _ = ours()
    ratios = [math.exp(a - b) for a, b in zip(logprobs, OLD, strict=True)]
    assert (ratios[0] < 0.8, ratios[1] > 1.3, ratios[2] < 0.8) == (True, True, True)
    config = {"importance_sampling": "none", "clip_low": 0.2, "clip_high": 0.3}
    loss, metrics, gradient = of(step_batch((1.0, -1.0)), **config)
    assert loss == near((-ratios[0] - 1.3 + 0.8) / 3)
    assert (metrics["clip_fraction_low"], metrics["clip_fraction_high"]) == (near(1 / 3), near(1 / 3))
    assert gradient.abs().sum(-1).gt(0).tolist() == [True, False, False]
    dual, _, _ = of(step_batch((-1.0, -1.0)), **config, clip_dual=1.1)
    assert dual == near((0.8 + min(ratios[1], 1.1) + 0.8) / 3)


def test_a_teachers_distance_is_told_over_tokens():
    batch = step_batch()
    for sequence, values in zip(batch.sequences, ([0.0, -0.5, -2.5], [0.0, -1.0]), strict=True):
        sequence.put("teacher_logprobs", values)
    logprobs, _ = ours()
    loss, metrics, _ = of(batch, importance_sampling="none", loss="policy_gradient", teacher_coef=0.5)
    apart = [0.5, -0.5, -0.5]
    assert metrics["teacher/kl"] == near(-mean(apart))
    assert metrics["teacher/kl_k3"] == near(mean(math.exp(each) - 1 - each for each in apart))
    assert metrics["teacher/logprob"] == near(-4.0 / 3)
    assert metrics["teacher/abs_difference"] == near(0.5)
    advantages = [2.0 + 0.25, 2.0 - 0.25, -1.0 - 0.25]
    ratios = [math.exp(own - old) for own, old in zip(logprobs, OLD, strict=True)]
    assert loss == near(-mean(a * ratio for a, ratio in zip(advantages, ratios, strict=True)))
    _, metrics, _ = of(batch, importance_sampling="none")
    assert not any(name.startswith("teacher") for name in metrics)


def test_importance_weights_are_bounded_as_set():
    def weight(**config):
        _, metrics, _ = of(step_batch(), **config)
        return metrics["importance_weight"], metrics["importance_capped_fraction"]

    first, second = math.exp(0.25), math.exp(-0.5)
    loss, _, _ = of(step_batch(), loss="policy_gradient", importance_sampling="truncated", importance_cap=2.0)
    ratios = [math.exp(own - old) for own, old in zip(ours()[0], OLD, strict=True)]
    assert loss == near(-(2 * first * ratios[0] + 2 * second * ratios[1] - ratios[2]) / 3)
    assert weight(importance_sampling="masked", importance_cap=1.1, importance_floor=0.5) == (
        near((0.0 + second + 1.0) / 3), near(1 / 3),
    )  # fmt: skip
    assert weight(importance_sampling="masked", importance_cap=1.5, importance_floor=0.7) == (
        near((first + 0.0 + 1.0) / 3), near(1 / 3),
    )  # fmt: skip
    batch = step_batch()
    batch.sequences[0].logprobs = None
    with pytest.raises(TrainingError, match="importance_sampling = 'truncated' needs the engine's"):
        of(batch, importance_sampling="truncated")


def test_sft_is_told_as_means_over_tokens():
    objective, batch = SFTObjective(), step_batch()
    (micro,) = micro_batches(batch, 100)
    divisors = objective.counts(batch)
    assert divisors == {"tokens": 3.0}
    logits = LOGITS.clone().requires_grad_()
    loss, sums = objective.terms(Table(logits), micro, divisors)
    logprobs, entropies = ours()
    metrics = objective.summarize(sums, divisors)
    assert metrics == {
        "loss": near(-mean(logprobs)), "num_tokens": 3.0, "entropy": near(mean(entropies)), "token_accuracy": 0.0,
    }  # fmt: skip
    right = objective.terms(Table(LOGITS.flip(1)), micro, divisors)[1]["token_accuracy"]
    assert right == 1, "the first target alone has the highest logit"
    assert loss.item() == metrics["loss"]


def test_a_rank_without_a_row_makes_one_forward_pass():
    blank, rows = dummy_micro_batch("cpu"), []
    model = SimpleNamespace(logits=lambda row: rows.append(row) or LOGITS[:1])
    for objective in (SFTObjective(), PolicyObjective(resolved(rl()), records.SamplingParams(max_tokens=1))):
        assert objective.idle(model, blank, {}) is not None
    assert rows == [blank] * 2


def test_differences_are_told_by_the_place_of_the_token_itself():
    size = 66
    sequence = records.Sequence([1] * (size + 1), [False] + [True] * size, [0.0] + [-2.0] * size)
    batch, old = StepBatch([sequence], [1.0]), torch.full((size,), -2.0)
    old[62], old[63] = -1.0, -4.0  # of the tokens at 63 and 64
    batch.fill("old_logprobs", [old])
    objective = PolicyObjective(resolved(rl()), records.SamplingParams(max_tokens=size))
    (micro,) = micro_batches(batch, 100)
    _, sums = objective.terms(Table(torch.zeros(size, 3)), micro, objective.counts(batch))
    metrics = objective.summarize(sums, objective.counts(batch))
    assert metrics["mismatch/at_position_0"] == near(1 / 63)
    assert metrics["mismatch/at_position_64"] == near(2 / 3)


def test_a_loss_gets_all_that_is_known_and_may_return_the_tokens_losses_alone(monkeypatch):
    given = []
    monkeypatch.setitem(LOSSES, "clip", lambda inputs: given.append(inputs) or -inputs.logprobs_N)
    batch = step_batch()
    batch.fill("hints", [torch.tensor([[1, 2], [3, 4]]), torch.tensor([[5, 6]])])
    settings = {"clip_low": 0.1, "clip_high": 0.4, "clip_dual": 3.0}
    loss, metrics, _ = of(batch, loss="clip", importance_sampling="none", **settings)
    logprobs, _ = ours()
    assert loss == near(-mean(logprobs))
    assert metrics["ratio"] == near(mean(math.exp(a - b) for a, b in zip(logprobs, OLD, strict=True)))
    (inputs,) = given
    assert inputs.logprobs_N.tolist() == near(logprobs)
    assert inputs.old_logprobs_N.tolist() == OLD
    assert inputs.streams["behaviour_logprobs"].tolist() == BEHAVIOUR
    assert inputs.streams["reference_logprobs"].tolist() == near(REFERENCE)
    assert inputs.streams["hints"].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert inputs.entropy_N.requires_grad
    assert inputs.advantages_N.tolist() == [2.0, 2.0, -1.0]
    assert (inputs.sequence_index_N.tolist(), inputs.num_sequences) == ([0, 0, 1], 2)
    assert {name: getattr(inputs, name) for name in settings} == settings
