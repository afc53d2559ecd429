"""What crosses a process boundary is refused when another schema wrote it."""

import copy

import msgspec
import pytest

from slipstream.records import Batch, Rollout, Sequence, Stream, Version, decode, encode, encode_kept, encode_rollouts

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
