"""A step dealt to several processes: what they add up to is what one of them finds."""

import random

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.trainer.steps import learner_of

from slipstream import records
from slipstream.algo.surrogate_losses import LOSSES
from slipstream.config.recipes import resolved
from slipstream.config.schema import RLConfig, TeacherConfig
from slipstream.trainer.distributed.worker import Answer, decode, encode, rank_batch_of
from slipstream.trainer.learner import add_gradients, row_predictions
from slipstream.trainer.loss import PolicyObjective
from slipstream.trainer.packing import StepBatch, even_rows, micro_batches_of

SAMPLING = records.SamplingParams(max_tokens=32, temperature=0.9)
OBJECTIVES = st.builds(
    lambda loss, normalize, correction: PolicyObjective(
        resolved(
            RLConfig(loss=loss, normalize=normalize, importance_sampling=correction, kl_coef=0.1, entropy_coef=0.1)
        ),
        SAMPLING,
        TeacherConfig(coef=0.5),
    ),
    st.sampled_from(sorted(LOSSES)),
    st.sampled_from(["token", "sequence", "constant"]),
    st.sampled_from(["none", "truncated", "masked", "sequence_truncated", "sequence_masked"]),
)


def make_groups(seed, prompts, size):
    """Groups of completions of a prompt, some empty; with everything that a policy gradient may need."""
    rng, noise = random.Random(seed), torch.Generator().manual_seed(seed)
    sequences = []
    for _ in range(prompts):
        prompt = [rng.randrange(1, 90) for _ in range(rng.randint(1, 20))]
        for _ in range(size):
            length = rng.choice((0, 1, 3, 11, 25))
            ids = prompt + [rng.randrange(1, 90) for _ in range(length)]
            mask = [False] * len(prompt) + [True] * length
            taught = {"teacher_logprobs": records.Stream.of([-2.5] * length)}
            sequences.append(records.Sequence(ids, mask, [-3.0 * trained for trained in mask], streams=taught))
    counts = [sequence.num_trainable for sequence in sequences]
    batch = StepBatch(sequences, [rng.gauss(0, 1) for _ in sequences])
    old = [torch.full((count,), -4.5) + 0.1 * torch.rand(count, generator=noise) for count in counts]
    batch.fill("old_logprobs", old)
    batch.fill("reference_logprobs", [values - 0.2 for values in old])
    for name in ("old_values", "returns"):
        batch.fill(name, [torch.rand(count, generator=noise) for count in counts])
    return batch


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000), prompts=st.integers(1, 4), size=st.integers(1, 4), objective=OBJECTIVES, data=st.data()
)
def test_the_shares_add_up_to_the_step(session_learner, seed, prompts, size, objective, data):
    learner = session_learner
    batch = make_groups(seed, prompts, size)
    if not batch.num_tokens:
        return
    ranks, tokens = data.draw(st.integers(1, 5)), data.draw(st.sampled_from((20, 60, 4000)))
    learner.optimizer.discard_gradients()
    learner.forward_backward(batch, objective)
    expected = gradients(learner)
    learner.optimizer.discard_gradients()
    passes = even_rows(batch, tokens, ranks)
    divisors = objective.counts(batch)
    seen = []
    for rank in range(ranks):
        share, chosen = rank_batch_of(batch, [row[rank] for row in passes])
        assert len(share.rows) == len(passes)
        seen += chosen
        rows = list(micro_batches_of(share.batch, share.rows))
        assert all(row is None or len(row.token_ids_T) <= tokens or len(row.sequences) == 1 for row in rows)
        add_gradients(learner.model, rows, objective, divisors)
        found = row_predictions(learner.model, rows, SAMPLING)
        whole = learner.forward(batch.sequences, SAMPLING).logprobs
        for place, index in enumerate(chosen):
            torch.testing.assert_close(found[place][0], whole[index], atol=1e-6, rtol=1e-6)
    assert sorted(seen) == [index for index, sequence in enumerate(batch.sequences) if sequence.num_trainable]
    for name, gradient in gradients(learner).items():
        difference = (gradient - expected[name]).norm() / max(1e-9, expected[name].norm())
        assert difference < 2e-6, name


def test_completions_of_a_prompt_stay_together_where_each_rank_has_one():
    """So that their prompt is computed once."""
    prompt = [7] * 40
    ids = [[*prompt, *([place + 1] * 10)] for place in range(8)]
    other = [[9, *each[1:]] for each in ids]
    sequences = [records.Sequence(each, [False] * 40 + [True] * 10, [0.0] * 50) for each in (*ids, *other)]
    batch = StepBatch(sequences, [1.0] * 16)
    (step,) = even_rows(batch, 4000, 2)
    assert sorted(sorted(group) for row in step for group in row) == [[*range(8)], [*range(8, 16)]]


def gradients(learner):
    return {name: master.grad.clone() for name, master in learner.optimizer.masters().items()}


@pytest.fixture(scope="module")
def session_learner(model_folder):
    from slipstream.trainer.model.policy import PolicyModel

    model = PolicyModel.load(model_folder)
    model.network.double()  # in float32 some gradients are small differences of large numbers, and rounding shows
    return learner_of(model)


@pytest.mark.parametrize("tensor", [torch.zeros(0), torch.tensor(2.5), torch.arange(6).reshape(2, 3), torch.rand(3, 1)])
def test_a_packed_tensor_comes_out_as_it_was(tensor):
    (again,) = decode(encode(Answer([tensor])), Answer).predictions
    assert again.dtype == tensor.dtype
    assert torch.equal(again, tensor)


def test_a_rank_gets_all_that_a_row_is_trained_on_and_not_where_it_is_from():
    image = records.Media("image", "file", "0" * 64, 1, 1)
    own = records.Sequence(
        [5, 6, 7], [False, True, True], [0.0, -1.0, -2.0], [records.VersionSpan(1, "0.3")],
        {"advantages": records.Stream.of([0.5, 1.0]), "ids": records.Stream.of([3, 4, 5, 6], "int64", 2)},
        media=[image],
    )  # fmt: skip
    other = records.Sequence([1, 2], [False, True])
    batch = StepBatch([other, own, other], [1.0, 2.0, 3.0])
    share, chosen = rank_batch_of(batch, [[[1]], [[2]]])
    assert chosen == [1, 2]
    found = share.batch
    assert found.advantages == [2.0, 3.0]
    assert found.sequences[0] == msgspec.structs.replace(own, versions=[])
    assert share.rows == [[[0]], [[1]]]
    bare, _ = rank_batch_of(StepBatch([own]), [[[0]]])
    assert bare.batch.advantages is None
