"""What crosses a process boundary is refused when another schema wrote it."""

import msgspec
import pytest

from slipstream.records import Batch, Rollout, Sequence, Version, decode, encode

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
