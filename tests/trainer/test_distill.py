"""On-policy distillation: the objective's gradient against that of the exact reverse KL divergence."""

import pytest
import torch
from tests.recipe_settings import rl

from slipstream import records
from slipstream.algo.divergences import divergence, tail_logprob, top_divergence
from slipstream.config.recipes import resolved
from slipstream.config.schema import TeacherConfig
from slipstream.errors import TrainingError
from slipstream.trainer.loss import PolicyObjective
from slipstream.trainer.packing import StepBatch, micro_batches, stream_of

VOCABULARY, POSITIONS = 5, 3


class Table:
    """A policy whose logits at each position are given, whatever came before."""

    def __init__(self, logits_PV):
        self.logits_PV = logits_PV

    def logits(self, micro):
        return torch.cat([self.logits_PV for _ in micro.sequences])


def logits_of(seed):
    generator = torch.Generator().manual_seed(seed)
    return 1.5 * torch.randn(POSITIONS, VOCABULARY, generator=generator, dtype=torch.float64)


def every_sequence():
    """All that can be sampled after a prompt of one token."""
    grids = torch.meshgrid(*[torch.arange(VOCABULARY)] * POSITIONS, indexing="ij")
    return torch.stack([grid.flatten() for grid in grids], -1)


def sequence(tokens, teacher_PV, temperature):
    logprobs = (teacher_PV / temperature).log_softmax(-1)
    scores = [logprobs[place, token].item() for place, token in enumerate(tokens)]
    return records.Sequence(
        [0, *tokens], [False] + [True] * len(tokens), [0.0] * (1 + len(tokens)),
        streams={"teacher_logprobs": records.Stream.of(scores)},
    )  # fmt: skip


def objective(temperature=1.0, coef=1.0, top_k=None, beta=1.0, **algorithm):
    config = rl(kind="distill", importance_sampling="none", **algorithm)
    sampling = records.SamplingParams(max_tokens=POSITIONS, temperature=temperature)
    return PolicyObjective(resolved(config), sampling, TeacherConfig(coef=coef, top_k=top_k, jsd_beta=beta))


def by_objective(ours, batch, student_PV, room=64, packing=True):
    """The gradient of the logits, and metrics."""
    logits, divisors, sums = student_PV.detach().clone().requires_grad_(), ours.counts(batch), {}
    for micro in micro_batches(batch, room, packing=packing):
        loss, sums = ours.terms(Table(logits), micro, divisors)
        loss.backward()
    return logits.grad, ours.summarize(sums, divisors)


def expected_gradient(student_PV, teacher_PV, temperature=1.0, coef=1.0, **algorithm):
    """The objective's gradient, averaged over every sequence with its probability under the policy."""
    ours = objective(temperature, coef, **algorithm)
    with torch.no_grad():
        logprobs_PV = (student_PV / temperature).log_softmax(-1)
    total = torch.zeros_like(student_PV)
    means = {}
    for tokens in every_sequence().tolist():
        probability = sum(logprobs_PV[place, token] for place, token in enumerate(tokens)).exp().item()
        batch = StepBatch([sequence(tokens, teacher_PV, temperature)], [0.0])
        gradient, metrics = by_objective(ours, batch, student_PV)
        total += probability * gradient
        for name, value in metrics.items():
            means[name] = means.get(name, 0.0) + probability * value
    return total, means


def reverse_kl(student_PV, teacher_PV, temperature):
    """Mean over positions of KL(policy || teacher), over the whole vocabulary in float64."""
    ours, theirs = (x.div(temperature).log_softmax(-1) for x in (student_PV, teacher_PV))
    return (ours.exp() * (ours - theirs)).sum(-1).mean()


def trls_reverse_kl(student_PV, teacher_PV, temperature):
    """TRL's loss of on-policy distillation (GKD) at the end of its scale where it is that divergence."""
    pytest.importorskip("trl")
    from trl.experimental.gkd import GKDTrainer

    labels = torch.zeros(1, POSITIONS, dtype=torch.long)
    return GKDTrainer.generalized_jsd_loss(student_PV[None], teacher_PV[None], labels, 1.0, temperature)


@pytest.mark.parametrize("exact_loss", [reverse_kl, trls_reverse_kl])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("loss", ["policy_gradient", "clip", "cispo"])
def test_over_all_samples_it_is_the_gradient_of_the_reverse_kl(temperature, loss, exact_loss):
    student, teacher = logits_of(1).requires_grad_(), logits_of(2)
    exact = exact_loss(student, teacher, temperature)
    exact.backward()
    gradient, metrics = expected_gradient(student, teacher, temperature, loss=loss)
    # The objective keeps the teacher's log-probabilities in float32.
    torch.testing.assert_close(gradient, student.grad, atol=2e-6, rtol=1e-5)
    assert metrics["teacher/kl"] == pytest.approx(exact.item(), rel=1e-5)
    assert metrics["teacher/kl_k3"] == pytest.approx(exact.item(), rel=1e-5)


def test_the_coefficient_is_a_factor():
    student, teacher = logits_of(3), logits_of(4)
    once, _ = expected_gradient(student, teacher)
    twice, _ = expected_gradient(student, teacher, coef=2.0)
    torch.testing.assert_close(twice, 2 * once, atol=1e-9, rtol=1e-6)


def test_it_is_added_to_what_rewards_say():
    student, teacher, tokens = logits_of(6), logits_of(7), [4, 0, 2]
    gradients = []
    for kind, coef, advantage in (("grpo", 0.3, 0.8), ("grpo", None, 0.8), ("distill", 0.3, 0.0)):
        batch = StepBatch([sequence(tokens, teacher, 1.0)], [advantage])
        config = rl(kind=kind, loss="policy_gradient", importance_sampling="none")
        teacher_config = None if coef is None else TeacherConfig(coef=coef)
        ours = PolicyObjective(resolved(config), records.SamplingParams(max_tokens=3), teacher_config)
        gradients.append(by_objective(ours, batch, student)[0])
    torch.testing.assert_close(gradients[0], gradients[1] + gradients[2])


def test_samples_of_another_distribution_are_corrected_by_their_weights():
    """Tokens of an engine that is not quite the policy: with importance weights the expectation is the same."""
    student, teacher, engine = logits_of(8).requires_grad_(), logits_of(9), logits_of(10)
    reverse_kl(student, teacher, 1.0).backward()
    config = rl(kind="distill", importance_cap=1e9)
    ours = PolicyObjective(resolved(config), records.SamplingParams(max_tokens=1), TeacherConfig())
    drawn_PV, total = engine.log_softmax(-1), torch.zeros_like(student)
    for place in range(POSITIONS):
        for token in range(VOCABULARY):
            own = sequence([token], teacher[place : place + 1], 1.0)
            own.logprobs = [0.0, drawn_PV[place, token].item()]
            gradient, _ = by_objective(ours, StepBatch([own], [0.0]), student[place : place + 1])
            total[place] += drawn_PV[place, token].exp() * gradient[0] / POSITIONS
    torch.testing.assert_close(total, student.grad, atol=2e-6, rtol=1e-5)


def test_a_sequence_that_nobody_scored_is_refused():
    batch = StepBatch([records.Sequence([0, 1], [False, True], [0.0, -1.0])], [1.0])
    (micro,) = micro_batches(batch, 64)
    with pytest.raises(TrainingError, match="every rollout must be scored"):
        objective().terms(Table(logits_of(1)[:1]), micro, objective().counts(batch))


def with_likeliest(tokens, teacher_PV, temperature, k):
    """The sequence, with the teacher's k likeliest tokens."""
    found = sequence(tokens, teacher_PV, temperature)
    logprobs, ids = (teacher_PV / temperature).log_softmax(-1)[: len(tokens)].topk(k, -1)
    found.streams["teacher_top_ids"] = stream_of(ids)
    found.streams["teacher_top_logprobs"] = stream_of(logprobs.float())
    return found


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("k", [1, 3, VOCABULARY])
def test_with_the_likeliest_tokens_the_divergence_is_the_loss(k, temperature, beta, packing):
    """Whatever was sampled; with all tokens it is the divergence over the whole vocabulary."""
    student, teacher = logits_of(1).requires_grad_(), logits_of(2)
    batch = StepBatch([with_likeliest([4, 0, 2], teacher, temperature, k) for _ in range(2)], [0.0, 0.0])
    ours = objective(temperature, coef=0.7, top_k=k, beta=beta)
    gradient, metrics = by_objective(ours, batch, student, packing=packing)
    own, other = (x.div(temperature).log_softmax(-1) for x in (student, teacher))
    values, ids = other.topk(k, -1)
    exact = top_divergence(own.gather(-1, ids), values, beta) if k < VOCABULARY else divergence(own, other, beta)
    exact.mean().backward()
    # Each micro-batch without packing has one of the two sequences, and the metrics are of the last.
    torch.testing.assert_close(gradient, 0.7 * student.grad, atol=2e-6, rtol=1e-5)
    share = 1.0 if packing else 0.5
    assert metrics["teacher/divergence"] == pytest.approx(share * exact.mean().item(), rel=1e-4)
    assert metrics["teacher/tail"] == pytest.approx(share * tail_logprob(values).exp().mean().item(), abs=1e-6)
    assert metrics["loss"] == pytest.approx(share * 0.7 * exact.mean().item(), rel=1e-4)


def test_the_divergence_is_added_to_what_rewards_say():
    student, teacher, tokens = logits_of(6), logits_of(7), [4, 0, 2]
    gradients = []
    for kind, has_teacher, advantage in (("grpo", True, 0.8), ("grpo", False, 0.8), ("distill", True, 0.0)):
        batch = StepBatch([with_likeliest(tokens, teacher, 1.0, 2)], [advantage])
        config = rl(kind=kind, loss="policy_gradient", importance_sampling="none")
        teaches = TeacherConfig(coef=0.3, top_k=2) if has_teacher else None
        ours = PolicyObjective(resolved(config), records.SamplingParams(max_tokens=3), teaches)
        gradients.append(by_objective(ours, batch, student)[0])
    torch.testing.assert_close(gradients[0], gradients[1] + gradients[2])


def test_a_sequence_without_the_likeliest_tokens_is_refused():
    batch = StepBatch([sequence([4, 0, 2], logits_of(2), 1.0)], [0.0])
    (micro,) = micro_batches(batch, 64)
    ours = objective(top_k=3)
    with pytest.raises(TrainingError, match="no teacher_top_logprobs"):
        ours.terms(Table(logits_of(1)), micro, ours.counts(batch))
