"""Divergences in float64 against sums over outcomes, and against the losses of TRL: GKD, SDFT, SDPO, and the chunked
divergence of its distillation trainer."""

import collections
import dataclasses
import types

import pytest
import torch

from slipstream.algo.divergences import divergence, tail_logprob, top_divergence, with_tail
from slipstream.algo.importance_sampling import importance_weights
from slipstream.algo.surrogate_losses import LossInputs, cispo_loss

pytest.importorskip("trl")
from trl.experimental.gkd import GKDTrainer
from trl.experimental.sdft import sdft_trainer
from trl.experimental.sdpo import sdpo_trainer
from trl.trainer.distillation_trainer import _chunked_divergence_loss

LENGTHS, V = (4, 2, 5), 13
N = sum(LENGTHS)
BETAS = (0.0, 0.1, 0.5, 0.9, 1.0)
CLOSE = {"rtol": 1e-5, "atol": 1e-12}


def draw(seed=0):
    """Logits of student and teacher, `[N, V]`, far from each other."""
    generator = torch.Generator().manual_seed(seed)
    student, teacher = (2.0 * torch.randn(N, V, dtype=torch.float64, generator=generator) for _ in range(2))
    return student.requires_grad_(), teacher


def gradient(loss, leaf):
    return torch.autograd.grad(loss.sum(), leaf)[0]


def by_hand(p, q, beta):
    """The divergence of two lists of probabilities: teacher `p`, student `q`."""
    total = torch.zeros((), dtype=torch.float64)
    for a, b in zip(p, q, strict=True):
        if beta == 0:
            total = total + a * (a / b).log()
        elif beta == 1:
            total = total + b * (b / a).log()
        else:
            m = beta * a + (1 - beta) * b
            total = total + beta * a * (a / m).log() + (1 - beta) * b * (b / m).log()
    return total


@pytest.mark.parametrize("beta", BETAS)
def test_the_formula(beta):
    student, teacher = draw()
    ours = divergence(student.log_softmax(-1), teacher.log_softmax(-1), beta)
    theirs = torch.stack([by_hand(p, q, beta) for p, q in zip(teacher.softmax(-1), student.softmax(-1), strict=True)])
    torch.testing.assert_close(ours, theirs, **CLOSE)
    torch.testing.assert_close(gradient(ours, student), gradient(theirs, student), **CLOSE)


@pytest.mark.parametrize("beta", BETAS)
def test_gkd(beta):
    student, teacher = draw()
    ours = divergence(student.log_softmax(-1), teacher.log_softmax(-1), beta)
    theirs = GKDTrainer.generalized_jsd_loss(student[None], teacher[None], beta=beta, reduction="none")[0].sum(-1)
    torch.testing.assert_close(ours, theirs, **CLOSE)
    torch.testing.assert_close(gradient(ours, student), gradient(theirs, student), **CLOSE)


@pytest.mark.parametrize("beta", BETAS)
def test_trls_distillation_trainer(beta):
    """Its tiles are float32, whatever comes in."""
    student, teacher = draw()
    identity, mask = torch.eye(V), torch.ones(1, N)
    hidden = student.detach().float()[None].requires_grad_()
    loss, _, count = _chunked_divergence_loss(hidden, teacher.float()[None], identity, identity, mask, beta)
    ours = divergence(student.log_softmax(-1), teacher.log_softmax(-1), beta)
    assert ours.mean().item() == pytest.approx(loss.item(), rel=1e-5)
    loss.backward()
    theirs = hidden.grad[0].double() * count
    torch.testing.assert_close(gradient(ours, student), theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("k", [1, 4, V - 1])
def test_the_rest_is_one_more_outcome(k, beta):
    student, teacher = draw()
    logprobs, top = teacher.log_softmax(-1).topk(k, -1)
    ours = top_divergence(student.log_softmax(-1).gather(-1, top), logprobs, beta)
    theirs = []
    for p, q, ids in zip(teacher.softmax(-1), student.softmax(-1), top, strict=True):
        rest = [i for i in range(V) if i not in ids.tolist()]
        theirs.append(by_hand([*p[ids], p[rest].sum()], [*q[ids], q[rest].sum()], beta))
    torch.testing.assert_close(ours, torch.stack(theirs), **CLOSE)
    torch.testing.assert_close(gradient(ours, student), gradient(torch.stack(theirs), student), **CLOSE)
    covered = torch.stack([p[ids].sum() for p, ids in zip(teacher.softmax(-1), top, strict=True)])
    torch.testing.assert_close(tail_logprob(logprobs).exp(), 1 - covered, **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("beta", BETAS)
def test_the_whole_vocabulary_has_no_rest(beta, dtype):
    student, teacher = draw()
    student = student.detach().to(dtype).requires_grad_()
    logprobs, top = teacher.to(dtype).log_softmax(-1).topk(V, -1)
    ours = top_divergence(student.log_softmax(-1).gather(-1, top), logprobs, beta)
    whole = divergence(student.double().log_softmax(-1), teacher.log_softmax(-1), beta)
    bounds = CLOSE if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(ours.double(), whole, **bounds)
    torch.testing.assert_close(gradient(ours, student), gradient(whole, student), **bounds)


@pytest.mark.parametrize("beta", BETAS)
def test_impossible_tokens_stay_finite(beta):
    student = torch.tensor([[0.0, -torch.inf, -1.0]], dtype=torch.float64).requires_grad_()
    teacher = torch.tensor([[-torch.inf, 0.0, -2.0]], dtype=torch.float64)
    loss = divergence(student.log_softmax(-1), teacher.log_softmax(-1), beta)
    assert loss.isfinite().all()
    assert gradient(loss, student).isfinite().all()


def test_a_beta_outside_is_refused():
    with pytest.raises(ValueError, match=r"beta 1\.5"):
        divergence(torch.zeros(1, 1), torch.zeros(1, 1), 1.5)


def padded(rows):
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def trl_loss(module, kind, student, teacher, ids, old, **settings):
    """TRL's own method on an object with the attributes that it reads."""
    trainer = object.__new__(kind)
    trainer.args = types.SimpleNamespace(
        distillation_topk=4, distillation_add_tail=True, distillation_is_clip=1.5, **settings
    )
    trainer.accelerator = types.SimpleNamespace(gather=lambda value: value)
    trainer._metrics = {"train": collections.defaultdict(list)}
    trainer._name = "loss"
    trainer._log_self_distillation_metric = lambda *_: None
    mask = padded([torch.ones(length) for length in LENGTHS])
    split = {"completion_ids": ids, "student_logits": student, "teacher_logits": teacher}
    given = {name: padded(each.split(LENGTHS)) for name, each in split.items()} | {"loss_mask": mask}
    names = {each.name for each in dataclasses.fields(module.DistillationLogits)}
    inputs = module.DistillationLogits(**given, **dict.fromkeys(names - given.keys(), mask))
    model = types.SimpleNamespace(training=True)
    return trainer._compute_self_distillation_loss(model, {"old_per_token_logps": padded(old.split(LENGTHS))}, inputs)


@pytest.mark.parametrize(
    ("module", "kind"),
    [(sdft_trainer, sdft_trainer.SDFTTrainer), (sdpo_trainer, sdpo_trainer.SDPOTrainer)],
    ids=["sdft", "sdpo"],
)
@pytest.mark.parametrize(
    ("mode", "beta"),
    [("sampled_token", 1.0), *((mode, beta) for mode in ("topk_logits", "full_logits") for beta in BETAS)],
)
def test_self_distillation(module, kind, mode, beta):
    """TRL takes the student's k most likely tokens."""
    student, teacher = draw()
    ids = torch.randint(V, (N,), generator=torch.Generator().manual_seed(3))
    own = student.log_softmax(-1)
    logprobs = own.gather(-1, ids[:, None])[:, 0]
    old = logprobs.detach() + 0.4 * torch.randn(N, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    settings = {"distillation_mode": mode, "distillation_alpha": beta}
    theirs = trl_loss(module, kind, student, teacher, ids, old, **settings)
    guide, rows = teacher.log_softmax(-1), torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    if mode == "sampled_token":
        advantages = (guide.gather(-1, ids[:, None])[:, 0] - logprobs).detach()
        per_token = cispo_loss(LossInputs(logprobs, logprobs.detach(), advantages, rows, len(LENGTHS), 1.0, 4.0)).loss_N
    elif mode == "full_logits":
        per_token = divergence(own, guide, beta)
    else:
        top = own.detach().topk(4, -1).indices
        per_token = top_divergence(own.gather(-1, top), guide.gather(-1, top), beta)
    per_token = per_token * importance_weights(logprobs, old, rows, len(LENGTHS), "truncated", 0.0, 1.5)[0]
    ours = torch.stack([part.mean() for part in per_token.split(LENGTHS)]).mean()
    torch.testing.assert_close(ours, theirs, **CLOSE)
    torch.testing.assert_close(gradient(ours, student), gradient(theirs, student), **CLOSE)


def test_the_tail_is_appended():
    logprobs = torch.tensor([[0.5, 0.25]], dtype=torch.float64).log()
    torch.testing.assert_close(with_tail(logprobs).exp(), torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64))
