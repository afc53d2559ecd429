"""What crosses a process boundary is refused when another schema wrote it."""

import copy

import msgspec
import pytest

from slipstream.records import (
    Batch,
    Likeliest,
    Message,
    Rollout,
    Sequence,
    Stream,
    Version,
    decode,
    encode,
    encode_kept,
    encode_rollouts,
)

BATCH = Batch(1, Version(0, 1), [Rollout("r", "t", "g", [Sequence([1], [True])], 1.0, "done")])


def test_a_batch_comes_back_as_it_was():
    assert decode(encode(BATCH), Batch) == BATCH


@pytest.mark.parametrize(
    "change",
    [
        lambda batch: batch.update(schema=99),
        lambda batch: batch.update(new=1),
        lambda batch: batch["rollouts"][0].update(new=1),
        lambda batch: batch["rollouts"][0]["sequences"][0].update(new=1),
        lambda batch: batch.pop("step"),
    ],
)
def test_another_schema_is_refused(change):
    batch = msgspec.msgpack.decode(encode(BATCH))
    change(batch)
    with pytest.raises(msgspec.ValidationError):
        decode(msgspec.msgpack.encode(batch), Batch)


def test_a_batch_of_schema_2_is_read():
    batch = msgspec.msgpack.decode(encode(BATCH)) | {"schema": 2}
    batch["rollouts"][0]["sequences"][0]["detection"] = None
    assert decode(msgspec.msgpack.encode(batch), Batch) == BATCH


def test_a_batch_of_schema_1_is_read():
    batch = msgspec.msgpack.decode(encode(BATCH)) | {"schema": 1}
    (sequence,) = batch["rollouts"][0]["sequences"]
    del sequence["streams"]
    sequence["detection"] = None
    sequence |= {"token_ids": [1, 2, 3], "mask": [False, True, True]}
    sequence |= {"advantages": [0.0, 0.5, -0.1], "teacher_logprobs": None}
    found = decode(msgspec.msgpack.encode(batch), Batch)
    assert found.rollouts[0].sequences[0].streams == {"advantages": Stream.of([0.5, -0.1])}
    assert found.rollouts[0].sequences[0].values("advantages") == [0.5, -0.1]
    assert decode(encode(found), Batch) == found


def test_bytes_that_rollouts_keep_are_those_of_encode():
    rollouts = [Rollout(f"é{n}", "t", "g", [Sequence([n] * n, [True] * n)], n / 3, "done") for n in range(20)]
    batch = Batch(1, Version(0, 1), [*BATCH.rollouts, *rollouts], draws=[3])
    bare = encode(batch)
    assert encode_rollouts(rollouts) == encode_rollouts(rollouts, keep=True) == msgspec.msgpack.encode(rollouts)
    assert encode(batch) == encode_kept(batch) == bare, "with rollouts that keep theirs, and one that does not"
    changed = [msgspec.structs.replace(batch.rollouts[-1], reward=7.0), copy.deepcopy(batch.rollouts[-1])]
    changed[1].reward = 7.0
    assert decode(encode_kept(Batch(1, Version(0, 1), changed)), Batch).rollouts == changed, "a copy keeps none"
    batch.draws = [4]
    assert decode(encode_kept(batch), Batch) == batch


def test_the_likeliest_tokens_of_each_place():
    places = [None, {7: -0.5, 3: -0.1, 9: -4.0}, {1: -0.2, 2: -0.3}]
    found = Likeliest.of(places, 2)
    assert found.token_ids == Stream.of([0, 0, 3, 7, 1, 2], "int64", 2)
    assert found.logprobs == Stream.of([0.0, 0.0, -0.1, -0.5, -0.2, -0.3], "float32", 2)
    assert found.where([False, True, False]).token_ids.tolist() == [3, 7]
    assert len(found.where([False, True, True]).logprobs) == 2
    assert Likeliest.of([], 2).where([]).token_ids.tolist() == []
    with pytest.raises(ValueError, match="2 of the 3 likeliest"):
        Likeliest.of(places[2:], 3)


def test_streams_of_several_numbers_a_token_come_back_as_they_were():
    """With queues, kept batches and the commands to ranks."""
    sequence = Sequence([1, 2, 3], [False, True, True])
    own = Likeliest.of([None, {2**40: -0.5, 3: -0.1}, {1: -0.2, 2: -0.3}], 2).where(sequence.mask)
    sequence.streams = {"teacher_top_ids": own.token_ids, "teacher_top_logprobs": own.logprobs}
    batch = Batch(1, Version(0, 1), [Rollout("r", "t", "g", [sequence], 1.0, "done")])
    assert decode(encode(batch), Batch) == batch
    streams = decode(encode(batch), Batch).rollouts[0].sequences[0].streams
    assert [(each.width, len(each)) for each in streams.values()] == [(2, 2), (2, 2)]
    assert streams["teacher_top_ids"].tolist() == [3, 2**40, 1, 2]


def test_unpaired_surrogates_in_texts_of_a_rollout_are_escaped():
    turns = [Message("assistant", "a\ud83d", tool_calls=({"name": "\udc00"},))]
    rollout = msgspec.structs.replace(BATCH.rollouts[0], error="a\ud83d", metrics={"\ud83d": 1.0}, turns=turns)
    (found,) = msgspec.msgpack.decode(encode_rollouts([rollout]), type=list[Rollout])
    assert found == rollout, "the rollout itself is changed, too"
    assert (found.error, found.metrics) == ("a\\ud83d", {"\\ud83d": 1.0})
    assert found.turns[0].tool_calls == ({"name": "\\udc00"},)
