"""One suite for every transport: add an implementation to `PLACES` in `conftest.py`."""

import asyncio
import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from slipstream.errors import DeadlineError
from slipstream.transport import TransportClosed

PLENTY_S = 60.0


def in_thread(function, *arguments):
    """Run in another thread; returns a function that waits for the result."""
    future = ThreadPoolExecutor(1).submit(function, *arguments)
    return lambda: future.result(PLENTY_S)


def test_a_full_transport_holds_the_producer_until_an_acknowledgement(make):
    transport = make(1)
    transport.put("a", 0)
    put = in_thread(transport.put, "b", PLENTY_S)
    receipt, record = transport.take(PLENTY_S)  # the other thread may hold the queue's lock at this moment
    assert record == "a"
    with pytest.raises(DeadlineError):
        transport.take(0.1)
    transport.ack(receipt)
    put()
    assert transport.take(PLENTY_S)[1] == "b"


def test_deadlines_name_who_was_waited_for(make):
    transport = make(1)
    start = time.monotonic()
    with pytest.raises(DeadlineError, match=r"waited 0\.1 s for the writer"):
        transport.take(0.1)
    transport.put("a", 0)
    with pytest.raises(DeadlineError, match=r"waited 0\.1 s for the reader.* 1 records"):
        transport.put("b", 0.1)
    assert 0.2 <= time.monotonic() - start < PLENTY_S
    transport.take(0)
    with pytest.raises(DeadlineError):
        transport.take(0)


@pytest.mark.parametrize("timeout_s", [float("inf"), float("nan"), -1.0])
async def test_no_wait_without_a_deadline(make, timeout_s):
    transport = make(1)
    with pytest.raises(ValueError, match="no deadline"):
        transport.put("a", timeout_s)
    with pytest.raises(ValueError, match="no deadline"):
        transport.take(timeout_s)
    with pytest.raises(ValueError, match="no deadline"):
        await transport.take_async(timeout_s)


@pytest.mark.parametrize("side", ["put", "take"])
def test_close_ends_the_other_sides_wait_at_once(make, side):
    transport = make(1)
    if side == "put":
        transport.put("a", 0)
        wait = in_thread(transport.put, "b", PLENTY_S)
    else:
        wait = in_thread(transport.take, PLENTY_S)
    time.sleep(0.05)
    start = time.monotonic()
    transport.close("the engine died")
    with pytest.raises(TransportClosed, match="the engine died"):
        wait()
    assert time.monotonic() - start < PLENTY_S / 2


def test_after_close_nothing_moves_but_acknowledgements(make):
    transport = make(3)
    transport.put("a", 0)
    transport.put("b", 0)
    receipt, _ = transport.take(0)
    transport.close("first")
    transport.close("second")
    with pytest.raises(TransportClosed, match="first"):
        transport.take(0)
    with pytest.raises(TransportClosed, match="first"):
        transport.put("c", 0)
    assert transport.ack(receipt)


async def test_coroutines_and_threads_meet(make):
    transport = make(2)

    def train():
        records = []
        for _ in range(50):
            receipt, record = transport.take(PLENTY_S)
            records.append(record)
            transport.ack(receipt)
        return records

    result = in_thread(train)
    for number in range(50):
        await transport.put_async(number, PLENTY_S)
    assert await asyncio.to_thread(result) == list(range(50))


async def test_a_waiting_coroutine_is_woken_by_a_thread(make):
    transport = make(1)
    start = time.monotonic()
    taking = asyncio.create_task(transport.take_async(PLENTY_S))
    await asyncio.sleep(0.02)
    put = in_thread(transport.put, "a", PLENTY_S)
    receipt, record = await taking
    put()
    assert record == "a"
    putting = asyncio.create_task(transport.put_async("b", PLENTY_S))
    await asyncio.sleep(0.02)
    assert not putting.done()
    in_thread(transport.ack, receipt)()
    await putting
    taking = asyncio.create_task(transport.put_async("c", PLENTY_S))
    await asyncio.sleep(0.02)
    in_thread(transport.close, "enough")()
    with pytest.raises(TransportClosed, match="enough"):
        await taking
    assert time.monotonic() - start < PLENTY_S / 2


async def test_a_waiting_coroutine_leaves_the_loop_free_and_meets_its_deadline(make):
    transport = make(1)
    taking = asyncio.create_task(transport.take_async(PLENTY_S))
    for _ in range(5):
        await asyncio.sleep(0.01)
    assert not taking.done(), "the loop was held up until the wait was over"
    taking.cancel()
    await asyncio.wait([taking])
    with pytest.raises(DeadlineError, match="the writer"):
        await transport.take_async(0.2)


async def test_a_cancelled_take_takes_nothing(make):
    transport = make(1)
    for _ in range(50):
        taking = asyncio.create_task(transport.take_async(PLENTY_S))
        await asyncio.sleep(0)
        transport.put("a", PLENTY_S)  # the thread that tries to take may hold the queue's lock at this moment
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking
        receipt, _ = transport.take(0)
        transport.ack(receipt)


async def test_a_cancelled_put_puts_nothing(make):
    transport = make(1)
    for number in range(60):
        putting = asyncio.create_task(transport.put_async(number, PLENTY_S))
        await asyncio.sleep(0.0001 * (number % 20))
        putting.cancel()
        await asyncio.wait([putting])
        if putting.cancelled():
            with pytest.raises(DeadlineError):
                transport.take(0)
        else:
            receipt, record = transport.take(0)
            assert record == number
            transport.ack(receipt)


async def test_a_timeout_of_the_caller_ends_a_put_for_good(make):
    transport = make(1)
    for number in range(30):
        done = False
        try:
            async with asyncio.timeout(0.0002 * (number % 15)):
                await transport.put_async(number, PLENTY_S)
                done = True
        except TimeoutError:
            pass
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert (len(transport) == 1) == done
        if done:
            transport.ack(transport.take(0)[0])


async def test_a_cancellation_that_comes_after_the_put_ends_the_task_at_its_next_wait(make):
    transport = make(100)
    put = []

    async def produce():
        for number in itertools.count():
            await transport.put_async(number, PLENTY_S)
            put.append(number)
            await asyncio.sleep(0)

    task = asyncio.create_task(produce())
    while not put:
        await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.wait([task], timeout=PLENTY_S)
    assert task.cancelled()
    assert len(transport) == len(put)


def test_many_threads_lose_and_double_nothing(make):
    transport = make(3)
    num_records, taken, guard = 200, [], threading.Lock()

    def produce(first):
        for number in range(first, num_records, 2):
            transport.put(number, PLENTY_S)

    def consume():
        for _ in range(num_records // 2):
            receipt, record = transport.take(PLENTY_S)
            with guard:
                taken.append(record)
            assert transport.ack(receipt)

    results = [in_thread(produce, 0), in_thread(produce, 1), in_thread(consume), in_thread(consume)]
    for result in results:
        result()
    assert sorted(taken) == list(range(num_records))
    with pytest.raises(DeadlineError):
        transport.take(0)


class Model(RuleBasedStateMachine):
    """Any order of calls behaves as two lists do."""

    @initialize(capacity=st.integers(1, 4))
    def start(self, capacity):
        self.capacity, self.transport = capacity, self.make(capacity)
        self.waiting: list[int] = []
        self.taken: dict[str, int] = {}
        self.stale: list[str] = []
        self.next = 0

    @rule()
    def put(self):
        if len(self.waiting) + len(self.taken) < self.capacity:
            self.transport.put(self.next, 0)
            self.waiting.append(self.next)
        else:
            with pytest.raises(DeadlineError):
                self.transport.put(self.next, 0)
        self.next += 1

    @rule()
    def take(self):
        if self.waiting:
            receipt, record = self.transport.take(0)
            assert record == self.waiting.pop(0)
            assert receipt not in self.taken
            assert receipt not in self.stale
            self.taken[receipt] = record
        else:
            with pytest.raises(DeadlineError):
                self.transport.take(0)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def ack(self, data):
        receipt = data.draw(st.sampled_from(sorted(self.taken)))
        assert self.transport.ack(receipt)
        del self.taken[receipt]
        self.stale.append(receipt)

    @invariant()
    def old_receipts_stay_invalid(self):
        if hasattr(self, "stale"):
            assert not any(self.transport.ack(receipt) for receipt in [*self.stale, "unknown"])


def test_any_order_of_calls_behaves_as_two_lists_do(make):
    class Here(Model):
        pass

    Here.make = staticmethod(make)
    num_examples = 60 if make.name == "memory" else 20
    run_state_machine_as_test(Here, settings=settings(max_examples=num_examples, stateful_step_count=30, deadline=None))
