"""Who waits for whom: rollouts for versions, versions for a batch, a fence for both."""

import asyncio

import pytest

from slipstream.errors import WeightsError
from slipstream.orchestrator.versions import Versions
from slipstream.records import ApplyReport, Ticket, Version
from tests.quick_time import event_loop_policy  # noqa: F401 (a fixture)

TICKETS = [Ticket(Version(0, step, "d"), "disk", "f", ()) for step in range(4)]


class Receiver:
    def __init__(self, reports=None):
        self.asked, self.reports = [], reports

    async def apply(self, ticket, timeout_s):
        self.asked.append((ticket.version.step, timeout_s))
        return self.reports or ApplyReport(ticket.version)

    async def fence(self, timeout_s):
        self.asked.append(("fence", timeout_s))
        await asyncio.sleep(0)


def is_free(versions):
    return not versions.generating().locked()


async def test_a_fence_keeps_batches_out_until_the_next_version_is_applied():
    receiver = Receiver()
    versions = Versions(receiver, apply_timeout_s=3.0, fence=receiver.fence)
    await versions.fence()
    await versions.fence()
    assert (receiver.asked, is_free(versions)) == ([("fence", 3.0)], False)
    assert await versions.apply(TICKETS[0]) == ApplyReport(TICKETS[0].version)
    assert (receiver.asked[1:], is_free(versions), versions.current) == ([(0, 3.0)], True, TICKETS[0].version)
    await versions.fence()
    assert (receiver.asked[2:], is_free(versions)) == ([("fence", 3.0)], False), "each version has its own"


async def test_without_a_fence_a_version_waits_for_the_batch_that_is_generated_unless_it_may_come_in_flight():
    receiver = Receiver()
    versions = Versions(receiver, apply_timeout_s=3.0)
    await versions.fence()
    assert is_free(versions)
    async with versions.generating():
        applied = asyncio.create_task(versions.apply(TICKETS[0]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert receiver.asked == []
    await asyncio.wait_for(applied, 10)
    versions.allow_in_flight()
    async with versions.generating():
        await asyncio.wait_for(versions.apply(TICKETS[1]), 10)
    assert versions.current == TICKETS[1].version


async def test_a_fence_that_fails_holds_nothing():
    async def broken(timeout_s):
        raise WeightsError("no")

    versions = Versions(Receiver(), apply_timeout_s=3.0, fence=broken)
    with pytest.raises(WeightsError):
        await versions.fence()
    assert is_free(versions)


async def test_a_batch_may_begin_before_its_version_which_is_then_the_next_one():
    receiver = Receiver()
    versions = Versions(receiver, apply_timeout_s=3.0, fence=receiver.fence)
    versions.allow_in_flight()
    await versions.apply(TICKETS[1])
    await versions.release(1)
    waiting = asyncio.create_task(versions.wait_to_begin(2, 2))
    await asyncio.gather(versions.begin(2), versions.fence())
    assert receiver.asked[1:] == [("fence", 3.0)], "one for both"
    assert await asyncio.wait_for(waiting, 10) == Version(0, 2)
    await versions.apply(TICKETS[2])
    await versions.release(2)
    assert await asyncio.wait_for(versions.wait_to_begin(2, 2), 10) == TICKETS[2].version
    await asyncio.gather(versions.begin(3), versions.apply(TICKETS[3]))
    await versions.fence()
    assert receiver.asked[-3:] == [("fence", 3.0), (3, 3.0), ("fence", 3.0)], "the first fence ended with its version"
    await versions.apply(TICKETS[3])
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(versions.wait_to_begin(4, 4), 0.01)


async def test_rollouts_wait_for_the_release_of_their_version():
    versions = Versions(Receiver(), apply_timeout_s=3.0)
    assert versions.released == -1
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(versions.wait_for(0), 0.01)
    await versions.apply(TICKETS[2])
    waiting = asyncio.create_task(versions.wait_for(2))
    await versions.release(1)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not waiting.done()
    await versions.release(2)
    assert await asyncio.wait_for(waiting, 10) == TICKETS[2].version
    await versions.release(1)
    assert versions.released == 2
    assert await asyncio.wait_for(versions.wait_for(1), 10) == TICKETS[2].version
