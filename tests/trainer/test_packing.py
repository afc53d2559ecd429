"""How rows are made of sequences: which of them share a beginning, by their numbers of tokens, and what a row holds."""

import random

import pytest
import torch

from slipstream import records
from slipstream.errors import TrainingError
from slipstream.trainer.packing import (
    StepBatch,
    dummy_micro_batch,
    even_rows,
    make_step_batches,
    micro_batches,
    micro_batches_of,
)


def of(prompt, size, **fields):
    """`size` trainable tokens, all different, after `prompt`."""
    ids = [*prompt, *range(1000, 1000 + size)]
    return records.Sequence(ids, [False] * len(prompt) + [True] * size, **fields)


def groups_of(*sequences, max_tokens=10_000, device="cpu"):
    """The groups that share a beginning, of one rank's rows."""
    rows = even_rows(StepBatch([*sequences]), max_tokens, 1, device=device)
    return sorted(sorted(group) for ((*row,),) in rows for group in row)


def with_length(prompt, length):
    """A sequence of `length` tokens before its last one."""
    return of(prompt, length - len(prompt) + 1)


def test_long_continuations_share_a_prompt_on_a_gpu_and_short_ones_everywhere():
    """On a CPU up to 256 tokens and three times the prompt; the last token is a target only."""
    prompt = [1] * 10
    at, beyond = with_length(prompt, 286), with_length(prompt, 287)
    assert groups_of(at, at, with_length(prompt, 20)) == [[0, 1, 2]]
    assert groups_of(at, beyond, at) == [[0, 2], [1]]
    assert groups_of(beyond, beyond, device="cuda") == [[0, 1]]
    assert groups_of(at, beyond, beyond, at, device="cuda") == [[0, 1, 2, 3]]


def test_two_tokens_are_shared_and_one_is_not():
    assert groups_of(of([1, 2], 3), of([1, 2], 4)) == [[0, 1]]
    assert groups_of(of([1], 3), of([1], 4)) == [[0], [1]]


def test_different_prompts_share_their_beginning_on_a_cpu_where_a_fifth_is_saved():
    def pair(shared):
        beginning = [1] * shared
        return with_length([*beginning, 2], 10), with_length([*beginning, 3], 10)

    # One of two need not compute it: of 20 tokens.
    assert groups_of(*pair(4)) == [[0, 1]]
    assert groups_of(*pair(3)) == [[0], [1]]
    assert groups_of(*pair(4), device="cuda") == [[0], [1]]
    assert groups_of(*pair(8), of([5, 6], 3)) == [[0, 1], [2]]


@pytest.mark.parametrize(("shared", "own", "size"), [(80, 10, 50), (100, 10, 40), (100, 5, 13)])
def test_different_prompts_that_share_much_are_grouped_so_that_keys_stay_few(shared, own, size):
    """n continuations read about n times what they share, which is to be 8 times the group's tokens at most."""
    sequences = [with_length([*[1] * shared, 2 + number], shared + own) for number in range(50)]
    groups = groups_of(*sequences)
    assert max(map(len, groups)) == size
    assert sorted(index for group in groups for index in group) == list(range(50))
    assert size * shared <= 8 * (shared + size * own)
    assert size == 50 or (size + 1) * shared > 8 * (shared + (size + 1) * own)


def test_a_short_prompt_is_shared_by_equal_prompts_whatever_it_saves():
    assert groups_of(with_length([1, 2], 100), with_length([1, 2], 100)) == [[0, 1]]


def test_a_group_is_divided_where_the_rows_are_short():
    """The prompt, and of each continuation what follows it; the last token of the prompt counts for each."""
    sequences = [of([1] * 6, 5) for _ in range(4)]
    assert groups_of(*sequences, max_tokens=25) == [[0, 1, 2, 3]]
    assert [len(group) for group in groups_of(*sequences, max_tokens=24)] == [3, 1]
    assert [len(group) for group in groups_of(*sequences, max_tokens=15)] == [2, 2]
    assert [len(group) for group in groups_of(*sequences, max_tokens=14)] == [1] * 4
    assert [len(group) for group in groups_of(*sequences, max_tokens=1)] == [1] * 4
    short = [of([1] * 6, 1)] * 2
    assert groups_of(*short, max_tokens=7) == [[0, 1]]
    assert groups_of(*short, max_tokens=6) == [[0], [1]]


def test_a_group_costs_its_prompt_once_when_rows_are_filled():
    """The group 5 + 4 * 5 tokens, the other sequence 10."""
    batch = StepBatch([*(of([1] * 6, 5) for _ in range(4)), of([2] * 6, 5)])
    assert len(list(micro_batches(batch, 35))) == 1
    assert len(list(micro_batches(batch, 34))) == 2
    ((row, other),) = even_rows(batch, 25, 2)
    assert sorted([len(row), len(other)]) == [1, 1]
    assert len(list(micro_batches(batch, 1000, packing=False))) == 5


def test_equal_tokens_that_stand_for_different_images_are_not_shared():
    def pictured(name, start=1):
        return of([7, 8, 8, 9], 3, media=[records.Media("image", name, name, start, 2)])

    assert groups_of(pictured("a"), pictured("a"), pictured("b")) == [[0, 1], [2]]
    after = [of([7, 8, 8, 9], 3, media=[records.Media("image", name, name, 5, 1)]) for name in "ab"]
    assert groups_of(*after) == [[0, 1]], "these come after the prompt"
    at = [of([7, 8, 8, 9], 3, media=[records.Media("image", name, name, 4, 1)]) for name in "ab"]
    assert groups_of(*at) == [[0, 1]]


def test_ranks_get_rows_of_like_size_and_groups_that_fit_into_them():
    sequences = [of([1] * 6, 5) for _ in range(4)]
    ((one, two),) = even_rows(StepBatch(sequences), 10_000, 2)
    assert sorted(len(group) for row in (one, two) for group in row) == [1, 3], "of 40 tokens no rank has more than 20"
    passes = even_rows(StepBatch([of([1, 2], size) for size in (9, 3, 5, 7)]), 10_000, 2, packing=False)
    assert passes == [[[[0]], [[3]]], [[[1]], [[2]]]]
    nothing = records.Sequence([1, 2], [False, False])
    assert even_rows(StepBatch([nothing, of([1, 2], 3)]), 100, 2) == [[[[1]], []]]
    assert even_rows(StepBatch([nothing, of([1, 2], 3)]), 100, 1, packing=False) == [[[[1]]]]
    assert even_rows(StepBatch([nothing]), 100, 2) == [[[], []]]
    assert even_rows(StepBatch([of([1], 1)] * 2), 100, 1, packing=False) == [[[[0]]], [[[1]]]]


def test_rows_are_built_as_they_were_planned():
    batch = StepBatch([of([1, 2], 3), of([3, 4], 2), of([3, 4], 4)])
    first, none, second = micro_batches_of(batch, [[[1, 2]], [], [[0]]])
    assert none is None
    assert (first.sequences, second.sequences) == ([1, 2], [0])
    assert first.token_ids_T.tolist() == [3, 4, 1000, 1000, 1001, 1002]
    assert first.position_ids_T.tolist() == [0, 1, 2, 2, 3, 4]
    assert first.layout.lengths == (2, 1, 3)
    assert first.layout.prefixes == (None, 0, 0)
    assert first.predict_index_N.tolist() == [1, 2, 1, 3, 4, 5]
    assert first.target_ids_N.tolist() == [1000, 1001, 1000, 1001, 1002, 1003]
    assert first.sequence_index_N.tolist() == [0, 0, 1, 1, 1, 1]
    assert (first.counts, first.num_sequences, second.counts) == ([2, 4], 2, [3])
    assert (second.layout.lengths, second.layout.prefixes) == ((4,), (None,)), "one alone shares nothing"


def test_tokens_after_the_last_trainable_one_are_left_out():
    sequence = records.Sequence([1, 2, 3, 4, 5, 6, 7], [False, True, False, True, False, False, False])
    batch = StepBatch([sequence, sequence])
    (row,) = micro_batches(batch, 6, packing=True)
    assert (row.token_ids_T.tolist(), row.position_ids_T.tolist()) == ([1, 2, 3] * 2, [0, 1, 2] * 2)
    assert (row.predict_index_N.tolist(), row.target_ids_N.tolist()) == ([0, 2, 3, 5], [2, 4, 2, 4])
    assert even_rows(batch, 6, 1) == [[[[0], [1]]]]


def test_a_dummy_row_has_one_prediction():
    micro = dummy_micro_batch("cpu")
    assert (micro.token_ids_T.tolist(), micro.predict_index_N.tolist(), micro.target_ids_N.tolist()) == ([0], [0], [0])


def test_a_row_holds_what_each_target_is_given():
    """Values that tell their sequence and place, over every cut of the batch."""
    rng = random.Random(3)
    sequences, lists = [], {name: [] for name in ("old_logprobs", "reference_logprobs", "old_values", "returns")}
    for number in range(8):
        size, prompt = rng.randint(2, 9), [number % 3] * rng.randint(1, 6)
        mask = [False] * len(prompt) + [place % 3 != 1 for place in range(size)]
        at = [float(100 * number + place) for place in range(len(mask))]
        sequences.append(records.Sequence([*map(int, at)], mask, [-value for value in at]))
        sequences[-1].put("teacher_logprobs", [value / 2 for value in at])
        own = torch.tensor([value for value, is_trained in zip(at, mask, strict=True) if is_trained])
        for factor, values in enumerate(lists.values(), start=2):
            values.append(own * factor)
    sequences[4].put("advantages", [4.0] * len(sequences[4]))
    batch = StepBatch(sequences, [0.0, 1.0, 2.0, 3.0, -9.0, 5.0, 6.0, 7.0])
    for name, values in lists.items():
        batch.fill(name, values)
    batch.fill("pairs", [torch.stack([own.long(), own.long() + 1], 1) for own in lists["old_values"]])
    assert "old_values" not in sequences[0].streams, "records of others stay as they are"
    for cut in ({"packing": False}, {}):
        seen = 0
        for micro in micro_batches(batch, 20, **cut):
            at = micro.target_ids_N.float()
            seen += len(at)
            expected = {"behaviour_logprobs": -1, "teacher_logprobs": 0.5, "old_logprobs": 2, "reference_logprobs": 3}
            for name, factor in (expected | {"old_values": 4, "returns": 5}).items():
                assert torch.equal(micro.streams[name], at * factor)
            advantages = micro.streams["advantages"]
            assert advantages.tolist() == [float(target // 100) for target in micro.target_ids_N.tolist()]
            assert advantages.dtype == torch.float32
            assert torch.equal(micro.streams["pairs"], 4 * micro.target_ids_N[:, None] + torch.tensor([0, 1]))
        assert seen == batch.num_tokens == batch.num_computed
    batch.sequences[5].logprobs = None
    del batch.sequences[5].streams["teacher_logprobs"]
    micros = {index: micro for micro in micro_batches(batch, 20, packing=False) for index in micro.sequences}
    assert [index for index, micro in micros.items() if "behaviour_logprobs" not in micro.streams] == [5]
    assert [index for index, micro in micros.items() if "teacher_logprobs" not in micro.streams] == [5]
    assert "returns" in micros[5].streams
    (plain,) = micro_batches(StepBatch([of([1, 2], 2)]), 20)
    assert (plain.streams, plain.experts) == ({}, None)


def test_streams_that_do_not_fit_are_refused():
    first, second = of([1], 2), of([2], 3)
    first.streams["x"], second.streams["x"] = records.Stream.of([1.0, 2.0]), records.Stream.of([1.0, 2.0])
    with pytest.raises(TrainingError, match=r"the stream 'x' does not fit: .*\[2, 2\]"):
        list(micro_batches(StepBatch([first, second]), 20))
    second.streams["x"] = records.Stream.of([1, 2, 3], "int64")
    with pytest.raises(TrainingError, match="'int64'"):
        list(micro_batches(StepBatch([first, second]), 20))


def test_what_counts_as_a_signal():
    def having(**streams):
        return of([1], 1, streams={name: records.Stream.of(values) for name, values in streams.items()})

    plain, own, taught = of([1], 1), having(advantages=[0.5]), having(teacher_logprobs=[-1.0])
    assert not StepBatch([plain]).has_signal
    assert not StepBatch([plain], [0.0]).has_signal
    assert not StepBatch([having(advantages=[0.0])], [0.0]).has_signal
    assert StepBatch([plain, plain], [0.0, -1.0]).has_signal
    assert StepBatch([plain, own], [0.0, 0.0]).has_signal
    assert StepBatch([plain, taught], [0.0, 0.0]).has_signal


def test_tokens_and_sequences_that_are_silent_count_but_are_not_computed():
    nothing = records.Sequence([1, 2], [False, False])
    batch = StepBatch([of([1], 2), nothing], silent=[of([1], 3), of([1], 4), nothing])
    assert (batch.num_tokens, batch.num_computed, batch.num_sequences) == (9, 2, 3)


def batch_of(*rollouts):
    made = [
        records.Rollout(f"{n}", "t", group, [of([1], n + 1)] * 2, 0.0, outcome)
        for n, (group, outcome) in enumerate(rollouts)
    ]
    return records.Batch(4, records.Version(0, 4), made)


def test_rollouts_that_carry_no_loss_are_left_out_with_their_targets():
    batch = batch_of(("a", "done"), ("a", "done"), ("b", "truncated"), ("b", "reward_error"), ("c", "done"))
    carries = [True, False, True, True, True]
    steps = make_step_batches(batch, [1.0, 2.0, 3.0, 4.0, 5.0], updates_per_batch=2, carries_loss=carries)
    assert [step.advantages for step in steps] == [[1.0, 1.0, 3.0, 3.0], [5.0, 5.0]]
    assert [step.num_sequences for step in steps] == [4, 2]
    assert steps[0].silent == []
    (whole,) = make_step_batches(batch)
    assert (whole.advantages, whole.num_sequences) == (None, 8)
    with pytest.raises(TrainingError, match="4 advantages for 5 rollouts of batch 4"):
        make_step_batches(batch, [1.0] * 4)


def test_one_of_eight_silent_rollouts_is_computed_and_those_with_a_signal_of_their_own_are_not_silent():
    batch = batch_of(*[("a", "done")] * 12)
    own = {"advantages": records.Stream.of([1.0, 1.0])}
    for number in (9, 10):
        batch.rollouts[number].sequences = [of([1], 2, streams=own), of([1], 1)]
    advantages = [0.0] * 11 + [1.0]
    (step,) = make_step_batches(batch, advantages, ignores_silent=True)
    computed = [0, 0, 8, 8, 9, 9, 10, 10, 11, 11]
    assert [id(each) for each in step.sequences] == [
        id(batch.rollouts[n].sequences[place % 2]) for place, n in enumerate(computed)
    ]
    assert step.advantages == [0.0] * 8 + [1.0] * 2
    assert len(step.silent) == 14
    (whole,) = make_step_batches(batch, advantages)
    assert (len(whole.sequences), whole.silent) == (24, [])
