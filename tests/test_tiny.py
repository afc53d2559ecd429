"""The small twin learns, and its loss is the trainer's: when they disagree, one of them is wrong."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slipstream import records
from slipstream.algo.logprobs import processed_logprobs
from slipstream.config.recipes import resolved
from slipstream.trainer.loss import PolicyObjective
from slipstream.trainer.packing import StepBatch, micro_batches
from tests.algo.problem import LENGTHS, VOCABULARY, FixedPolicy
from tests.recipe_settings import rl

from .programs import program

TWIN = Path(__file__).parents[1] / "examples" / "tiny" / "grpo.py"


@pytest.fixture(scope="module")
def twin():
    with program(TWIN, "tiny_grpo") as module:
        yield module


def accuracy(text, when):
    found = re.search(rf"^{when}\s+(\d\.\d+) \[", text, re.MULTILINE)
    assert found, text
    return float(found[1])


@pytest.mark.full
def test_the_twin_learns():
    command = [sys.executable, str(TWIN), "--steps", "25", "--num-eval-tasks", "1000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    before, after = accuracy(done.stdout, "before"), accuracy(done.stdout, "after")
    assert before > 0.1
    assert after > before + 0.15, done.stdout


def test_the_twin_stays_small():
    text = TWIN.read_text()
    assert len(text.splitlines()) < 250
    imported = set(re.findall(r"^from (slipstream[\w.]*) import", text, re.MULTILINE))
    assert imported
    assert all(name.startswith("slipstream.algo.") for name in imported)


def make_step(generator, *, is_first_update):
    """Six sequences with everything that the loss reads, and their leaf logits."""

    def noisy(logprobs_N, size):
        return logprobs_N + size * torch.randn(logprobs_N.shape, generator=generator)

    batch, old, reference = StepBatch([], []), [], []
    logits_of_sequence = []
    for length in LENGTHS:
        logits_NV = torch.randn(length, VOCABULARY, generator=generator)
        target_ids_N = torch.randint(VOCABULARY, (length,), generator=generator)
        logprobs_N, _ = processed_logprobs(logits_NV, target_ids_N)
        behaviour = noisy(logprobs_N, 0.8).tolist()
        batch.sequences.append(
            records.Sequence([1, 2, *target_ids_N.tolist()], [False] * 2 + [True] * length, [0.0] * 2 + behaviour)
        )
        batch.advantages.append(torch.randn((), generator=generator).item())
        if not is_first_update:
            old.append(noisy(logprobs_N, 0.4))
        reference.append(noisy(logprobs_N, 0.5))
        logits_of_sequence.append(logits_NV.requires_grad_())
    if not is_first_update:
        batch.fill("old_logprobs", old)
    batch.fill("reference_logprobs", reference)
    return batch, logits_of_sequence


def joined(batch, name):
    return torch.tensor([value for sequence in batch.sequences for value in sequence.values(name)])


def twins_loss(twin, batch, logits_of_sequence, settings):
    targets = [torch.tensor(sequence.token_ids[2:]) for sequence in batch.sequences]
    logprobs_N, _ = processed_logprobs(torch.cat(logits_of_sequence), torch.cat(targets))
    lengths = torch.tensor(LENGTHS)
    return twin.grpo_loss(
        settings,
        logprobs_N,
        joined(batch, "old_logprobs") if "old_logprobs" in batch.sequences[0].streams else logprobs_N.detach(),
        torch.tensor([logprob for sequence in batch.sequences for logprob in sequence.logprobs[2:]]),
        joined(batch, "reference_logprobs") if settings.kl_coef > 0 else None,
        torch.tensor(batch.advantages).repeat_interleave(lengths),
        torch.arange(len(LENGTHS)).repeat_interleave(lengths),
    )


@pytest.mark.parametrize("is_first_update", [True, False])
@pytest.mark.parametrize("normalize", ["token", "sequence"])
@pytest.mark.parametrize(("kl_coef", "kl_estimator"), [(0.0, "k3"), (0.1, "k3"), (0.1, "k2"), (0.1, "k1")])
def test_twin_and_trainer_have_the_same_loss_and_gradients(twin, is_first_update, normalize, kl_coef, kl_estimator):
    chosen = {"normalize": normalize, "kl_coef": kl_coef, "kl_estimator": kl_estimator}
    batch, logits_of_sequence = make_step(torch.Generator().manual_seed(5), is_first_update=is_first_update)

    loss = twins_loss(twin, batch, logits_of_sequence, twin.Settings(**chosen))
    gradients = torch.autograd.grad(loss, logits_of_sequence)

    objective = PolicyObjective(resolved(rl(**chosen)), records.SamplingParams(max_tokens=8))
    divisors = objective.counts(batch)
    micros = list(micro_batches(batch, max_tokens=12))
    assert len(micros) > 1
    losses = [objective.terms(FixedPolicy(logits_of_sequence), micro, divisors)[0] for micro in micros]
    trainers_loss = torch.stack(losses).sum()
    trainers_gradients = torch.autograd.grad(trainers_loss, logits_of_sequence)

    torch.testing.assert_close(loss, trainers_loss, rtol=1e-5, atol=1e-6)
    for mine, other in zip(gradients, trainers_gradients, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_twin_and_run_file_have_the_same_defaults(twin):
    settings, config = vars(twin.Settings()), resolved(rl()).model_dump()
    config |= config["arguments"]
    shared = settings.keys() & config.keys()
    assert len(shared) >= 8
    assert {name: settings[name] for name in shared} == {name: config[name] for name in shared}


def test_a_rollout_masks_what_follows_the_end(twin):
    class Script(torch.nn.Module):
        """Writes a digit, then the end, then would go on."""

        def forward(self, tokens_BT):
            position = tokens_BT.shape[1] - twin.PROMPT_LENGTH
            logits_BTV = torch.full((*tokens_BT.shape, len(twin.ALPHABET)), -1e9)
            logits_BTV[:, :, twin.END if position == 1 else 7] = 0.0
            return logits_BTV

    prompts_BT = twin.as_prompts(torch.tensor([123456, 777]))
    rollouts = twin.generate(Script(), prompts_BT, torch.Generator().manual_seed(0))
    assert rollouts.completions_BC[0].tolist() == [7, *[twin.END] * (twin.MAX_TOKENS - 1)]
    assert rollouts.mask_BC.sum(1).tolist() == [2, 2]
    assert rollouts.rewards_B.tolist() == [0.0, 0.0]
    assert twin.reward(prompts_BT, twin.gold(prompts_BT)).tolist() == [1.0, 1.0]
    assert twin.gold(prompts_BT).tolist() == [[6, 5, 4, 3, 2, 1, twin.END], [7, 7, 7, 0, 0, 0, twin.END]]
