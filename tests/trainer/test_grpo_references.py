"""GRPO's loss and gradients against a float64 reference written from the papers, and against TRL's own code."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from slipstream import records
from slipstream.config.recipes import resolved
from slipstream.config.schema import RLConfig
from slipstream.trainer.loss import PolicyObjective

PROMPT, COMPLETION = 7, 12
LENGTHS = [12, 5, 9, 1]
"""Completion lengths; two prompts with two completions each."""


@pytest.fixture
def problem():
    """The same numbers in TRL's padded tensors and in our records."""
    generator = torch.Generator().manual_seed(3)
    num = len(LENGTHS)
    prompt_lengths = [7, 7, 4, 4]
    prompt_ids = torch.randint(1, 97, (num, PROMPT), generator=generator)
    completion_ids = torch.randint(1, 97, (num, COMPLETION), generator=generator)
    prompt_mask = torch.tensor([[i >= PROMPT - n for i in range(PROMPT)] for n in prompt_lengths]).long()
    completion_mask = torch.tensor([[i < n for i in range(COMPLETION)] for n in LENGTHS]).long()
    noise = torch.randn(3, num, COMPLETION, generator=generator)
    base = -4.5 + 0.3 * noise
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "old_per_token_logps": base[0],
        "ref_per_token_logps": base[1],
        "sampling_per_token_logps": base[0] + 0.8 * noise[2],
        "advantages": torch.tensor([1.3, -1.3, 0.4, -0.7]),
        "num_items_in_batch": torch.tensor(sum(LENGTHS)),
    }


def as_step_batch(problem):
    from slipstream.trainer.packing import StepBatch

    batch = StepBatch([], problem["advantages"].tolist(), [], [])
    for row, length in enumerate(LENGTHS):
        prompt = problem["prompt_ids"][row][problem["prompt_mask"][row].bool()].tolist()
        completion = problem["completion_ids"][row, :length].tolist()
        behaviour = problem["sampling_per_token_logps"][row, :length].tolist()
        batch.sequences.append(
            records.Sequence(
                prompt + completion,
                [False] * len(prompt) + [True] * length,
                [0.0] * len(prompt) + behaviour,
            )
        )
        assert batch.old_logprobs is not None
        assert batch.reference_logprobs is not None
        batch.old_logprobs.append(problem["old_per_token_logps"][row, :length])
        batch.reference_logprobs.append(problem["ref_per_token_logps"][row, :length])
    return batch


def paper(folder, problem, config, temperature=1.0):
    """GRPO (2402.03300, eq. 3 and 4) and DAPO (2503.14476, eq. 8), token by token in float64."""
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    total, num_tokens = torch.zeros((), dtype=torch.float64), sum(LENGTHS)
    for row, length in enumerate(LENGTHS):
        prompt = problem["prompt_ids"][row][problem["prompt_mask"][row].bool()]
        ids = torch.cat([prompt, problem["completion_ids"][row, :length]])
        logprobs = (network(input_ids=ids[None]).logits[0] / temperature).log_softmax(-1)
        advantage = problem["advantages"][row].double()
        terms = []
        for t in range(length):
            position = len(prompt) + t
            logprob = logprobs[position - 1, ids[position]]
            old, behaviour, reference = (
                problem[key][row, t].double()
                for key in ("old_per_token_logps", "sampling_per_token_logps", "ref_per_token_logps")
            )
            ratio = torch.exp(logprob - old)
            clipped = torch.clamp(ratio, 1 - config.clip_low, 1 + config.clip_high)
            term = -torch.minimum(ratio * advantage, clipped * advantage)
            if config.importance_sampling == "truncated":
                term = term * torch.clamp(torch.exp(old - behaviour), max=config.importance_cap)
            if config.kl_coef:
                log_r = reference - logprob
                kl = {"k1": -log_r, "k2": log_r**2 / 2, "k3": torch.exp(log_r) - log_r - 1}
                term = term + config.kl_coef * kl[config.kl_estimator]
            terms.append(term)
        share = num_tokens if config.normalize == "token" else length * len(LENGTHS)
        total = total + torch.stack(terms).sum() / share
    total.backward()
    return total.item(), {name: p.grad.float() for name, p in network.named_parameters()}


def assert_same(result, expected):
    assert result[0] == pytest.approx(expected[0], abs=1e-5)
    torch.testing.assert_close(result[1], expected[1], atol=1e-5, rtol=1e-5)


CONFIGS = [
    resolved(RLConfig(normalize=normalize, kl_coef=kl_coef, kl_estimator=kind, importance_sampling=sampling))
    for normalize in ("token", "sequence")
    for sampling in ("truncated", "none")
    for kl_coef, kind in ((0.0, "k3"), (0.3, "k3"), (0.3, "k2"), (0.3, "k1"))
]


def name_of(config):
    return f"{config.normalize}-{config.importance_sampling}-{config.kl_coef}{config.kl_estimator}"


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_equals_the_papers(config, temperature, problem, model_folder, make_learner, gradients_of):
    learner = make_learner(20)
    sampling = records.SamplingParams(max_tokens=COMPLETION, temperature=temperature)
    metrics = learner.forward_backward(as_step_batch(problem), PolicyObjective(resolved(config), sampling))
    assert 0.0 < metrics["clip_fraction_low"] + metrics["clip_fraction_high"] < 1.0, "the clip must be at work"
    assert_same((metrics["loss"], gradients_of(learner)), paper(model_folder, problem, config, temperature))


@pytest.mark.parametrize("config", [c for c in CONFIGS if c.kl_estimator == "k3"], ids=name_of)
def test_equals_trl(config, problem, model_folder, make_learner, gradients_of, tmp_path):
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    network = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    trainer = trl.GRPOTrainer(
        model=network,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        processing_class=AutoTokenizer.from_pretrained(model_folder),
        train_dataset=Dataset.from_dict({"prompt": ["1"] * 4}),
        args=trl.GRPOConfig(
            output_dir=str(tmp_path),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            per_device_train_batch_size=4,
            num_generations=2,
            loss_type={"token": "dapo", "sequence": "grpo"}[config.normalize],
            epsilon=config.clip_low,
            epsilon_high=config.clip_high,
            beta=config.kl_coef,
            # GRPO's own KL term (equation 4); TRL's default multiplies it by the ratio (arXiv 2512.02556).
            use_bias_correction_kl=False,
        ),
    )
    inputs = dict(problem)
    if config.importance_sampling == "truncated":
        # Set after the constructor, which would otherwise look for a vLLM server.
        trainer.use_vllm, trainer.vllm_importance_sampling_correction = True, True
        ratio = torch.exp(inputs["old_per_token_logps"] - inputs["sampling_per_token_logps"])
        inputs["importance_sampling_ratio"] = ratio.clamp(max=config.importance_cap)
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    theirs = loss.item(), {name: parameter.grad for name, parameter in network.named_parameters()}

    learner = make_learner(20)
    objective = PolicyObjective(resolved(config), records.SamplingParams(max_tokens=COMPLETION))
    metrics = learner.forward_backward(as_step_batch(problem), objective)
    assert_same((metrics["loss"], gradients_of(learner)), theirs)


def test_one_update_needs_no_old_logprobs(problem, make_learner, gradients_of):
    """Without them the ratio is 1, exactly as if they had been computed first."""
    objective = PolicyObjective(resolved(RLConfig()), records.SamplingParams(max_tokens=COMPLETION))
    batch = as_step_batch(problem)
    batch.old_logprobs = None
    implicit, explicit = make_learner(20), make_learner(20)
    first = implicit.forward_backward(batch, objective)
    batch.old_logprobs = explicit.forward(batch.sequences).logprobs
    second = explicit.forward_backward(batch, objective)
    assert first == second
    assert first["ratio"] == 1.0
    a, b = gradients_of(implicit), gradients_of(explicit)
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_mismatch_metrics_by_value(problem, make_learner):
    batch = as_step_batch(problem)
    objective = PolicyObjective(resolved(RLConfig()), records.SamplingParams(max_tokens=COMPLETION))
    metrics = make_learner(20).forward_backward(batch, objective)
    mask = problem["completion_mask"].bool()
    difference = (problem["old_per_token_logps"] - problem["sampling_per_token_logps"])[mask]
    assert metrics["mismatch/abs_logprob_diff"] == pytest.approx(difference.abs().mean().item(), rel=1e-5)
    weights = difference.exp().clamp(max=2.0)
    assert metrics["importance_weight"] == pytest.approx(weights.mean().item(), rel=1e-5)
    capped = (weights >= 2.0).float().mean().item()
    assert metrics["importance_capped_fraction"] == pytest.approx(capped, rel=1e-5)
    assert 0.0 < metrics["effective_sample_size"] <= 1.0
    assert metrics["num_tokens"] == sum(LENGTHS)
