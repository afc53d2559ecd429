import pytest
import torch
from tests.trainer.credit import batch_from
from tests.trainer.steps import check_interruption
from transformers import AutoModelForCausalLM

from slipstream import records
from slipstream.config.recipes import resolved
from slipstream.config.schema import RLConfig
from slipstream.errors import TrainingError
from slipstream.trainer.learner import deterministic_on_cpu
from slipstream.trainer.loss import PolicyObjective, SFTObjective
from slipstream.trainer.old_logprobs import fill_logprobs
from slipstream.trainer.packing import StepBatch, make_step_batches

SAMPLING = records.SamplingParams(max_tokens=64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_interrupted_run_is_the_same_bit_for_bit(dtype, make_learner, make_batch, tmp_path):
    check_interruption(lambda: make_learner(dtype=dtype, weight_decay=0.1), make_batch, tmp_path)
    learner = make_learner(dtype=dtype, weight_decay=0.1)
    learner.load(tmp_path)
    drawn = torch.rand(3)
    learner.load(tmp_path)
    assert learner.step == 2
    assert torch.equal(torch.rand(3), drawn)


def test_gradients_of_shared_positions_are_summed_in_one_order():
    """Many addends for each of a few positions, so that two threads meet at one of them."""
    hidden = torch.randn(1, 200, 128, requires_grad=True)
    places = torch.arange(15).repeat_interleave(44) * 9
    gradient = torch.randn(1, 660, 128) * torch.logspace(-3, 3, 660)[None, :, None]
    seen = set()
    for _ in range(200):
        hidden.grad = None
        with deterministic_on_cpu(torch.device("cpu")):
            hidden[:, places].backward(gradient)
        assert hidden.grad is not None
        seen.add(hidden.grad.numpy().tobytes())
    assert len(seen) == 1
    assert not torch.are_deterministic_algorithms_enabled()


def test_forward_scores_every_trainable_token_in_order(make_learner, make_batch, model_folder):
    learner, batch = make_learner(100), make_batch()
    batch.sequences.append(records.Sequence([1, 2], [False, False]))
    sampling = records.SamplingParams(max_tokens=64, temperature=0.7, top_k=5)
    scores = learner.forward(batch.sequences, sampling)
    network = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float64)
    for sequence, logprobs, entropies in zip(batch.sequences, scores.logprobs, scores.entropies, strict=True):
        positions = [position for position, trained in enumerate(sequence.mask) if trained]
        assert len(logprobs) == len(entropies) == len(positions)
        if not positions:
            continue
        logits = network(input_ids=torch.tensor([sequence.token_ids])).logits[0] / 0.7
        for place, position in enumerate(positions):
            row, token = logits[position - 1], sequence.token_ids[position]
            kept = row >= row.topk(5).values[-1]
            kept[token] = True
            distribution = row[kept].log_softmax(-1)
            expected = row[token] - row[kept].logsumexp(-1)
            assert logprobs[place].item() == pytest.approx(expected.item(), abs=1e-5)
            entropy = -(distribution.exp() * distribution).sum()
            assert entropies[place].item() == pytest.approx(entropy.item(), abs=1e-5)
    assert all(parameter.grad is None for parameter in learner.model.network.parameters())


def test_old_logprobs_are_filled_once_for_several_updates(make_learner, make_batch):
    learner, batch = make_learner(), make_batch(num=4)
    single = [StepBatch(batch.sequences, batch.advantages)]
    fill_logprobs(single, resolved(RLConfig()), learner, None, SAMPLING)
    assert "old_logprobs" not in single[0].sequences[0].streams
    twice = [single[0], single[0]]
    fill_logprobs(twice, resolved(RLConfig()), learner, None, SAMPLING)
    objective = PolicyObjective(resolved(RLConfig(importance_sampling="none")), SAMPLING)
    ratios = []
    for step in twice:
        metrics = learner.forward_backward(step, objective)
        ratios.append(metrics["ratio"])
        learner.optim_prepare(1e-3)
        learner.optim_commit()
    assert ratios[0] == pytest.approx(1.0, abs=1e-6)
    assert abs(ratios[1] - 1.0) > 1e-4


def test_one_update_needs_no_old_logprobs(make_learner, make_batch, gradients_of):
    """Without them the ratio is 1, exactly as if they had been computed first."""
    objective, batch, found = PolicyObjective(resolved(RLConfig()), SAMPLING), make_batch(), []
    for is_explicit in (False, True):
        learner = make_learner()
        if is_explicit:
            batch.fill("old_logprobs", learner.forward(batch.sequences, SAMPLING).logprobs)
        found.append((learner.forward_backward(batch, objective), gradients_of(learner)))
    (first, gradients), (second, others) = found
    assert first == second
    assert first["ratio"] == 1.0
    assert all(torch.equal(gradients[name], others[name]) for name in gradients)


def test_a_batch_without_a_trainable_token_is_refused(make_learner):
    batch = StepBatch([records.Sequence([1, 2, 3], [False] * 3)], [1.0])
    with pytest.raises(TrainingError, match="no trainable token"):
        make_learner().forward_backward(batch, SFTObjective())


def test_a_trainable_first_token_is_refused(make_learner):
    batch = StepBatch([records.Sequence([1, 2], [True, True])])
    with pytest.raises(TrainingError, match="first token is marked trainable"):
        make_learner().forward_backward(batch, SFTObjective())


def test_what_grpo_needs_and_does_not_get_is_named(make_learner, make_batch):
    learner, batch = make_learner(), make_batch()
    with pytest.raises(TrainingError, match="no advantage"):
        learner.forward_backward(StepBatch(batch.sequences), PolicyObjective(resolved(RLConfig()), SAMPLING))
    with pytest.raises(TrainingError, match="no reference log-probabilities"):
        learner.forward_backward(batch, PolicyObjective(resolved(RLConfig(kl_coef=0.1)), SAMPLING))
    batch.sequences[3].logprobs = None
    with pytest.raises(TrainingError, match="needs the engine's log-probabilities"):
        learner.forward_backward(batch, PolicyObjective(resolved(RLConfig()), SAMPLING))
    learner.forward_backward(batch, PolicyObjective(resolved(RLConfig(importance_sampling="none")), SAMPLING))


def rollout(group, number, outcome="done", turns=1):
    sequence = records.Sequence([1, 2, 3 + number], [False, True, True], [0.0, -1.0, -1.0])
    return records.Rollout(f"{group}{number}", group, group, [sequence] * turns, 0.0, outcome)


def test_step_batches_hold_whole_groups():
    rollouts = [rollout(group, number) for number in range(2) for group in "abc"]
    rollouts.append(rollout("a", 2, turns=2))
    batch = batch_from(rollouts)
    steps = make_step_batches(batch, [float(i) for i in range(7)], updates_per_batch=2, epochs=2)
    assert [step.advantages for step in steps] == [[0.0, 3.0, 6.0, 6.0, 1.0, 4.0], [2.0, 5.0]] * 2
    assert steps[0] is steps[2]
