"""Calls that share requests: which go together, and what each gets however a request ends."""

import asyncio

import pytest

from slipstream.errors import EngineError
from slipstream.inference.shared_requests import SharedRequests


class Server:
    """Doubles numbers, once `answers` is set."""

    def __init__(self):
        self.requests, self.answers, self.failure = [], asyncio.Event(), None
        self.shared = SharedRequests(self.send)

    async def send(self, numbers):
        self.requests.append(list(numbers))
        await self.answers.wait()
        if self.failure is not None:
            raise self.failure
        return [2 * number for number in numbers]

    def calls(self, *numbers):
        return [asyncio.create_task(self.shared.call(number)) for number in numbers]

    async def until_asked(self, times):
        async with asyncio.timeout(5):
            while len(self.requests) < times:
                await asyncio.sleep(0)


async def test_calls_of_one_turn_and_those_during_a_request_go_together():
    server = Server()
    first = server.calls(1, 2, 3)
    await server.until_asked(1)
    second = server.calls(4, 5)
    await asyncio.sleep(0)
    server.answers.set()
    assert await asyncio.gather(*first, *second) == [2, 4, 6, 8, 10]
    assert await server.shared.call(6) == 12
    assert server.requests == [[1, 2, 3], [4, 5], [6]]


async def test_a_cancelled_call_costs_no_other():
    server = Server()
    first, second = server.calls(1, 2)
    await server.until_asked(1)
    third, fourth = server.calls(3, 4)
    await asyncio.sleep(0)
    first.cancel()
    third.cancel()
    server.answers.set()
    await asyncio.wait([first, second, third, fourth])
    assert first.cancelled()
    assert third.cancelled()
    assert (second.result(), fourth.result()) == (4, 8)
    assert server.requests == [[1, 2], [4]]


@pytest.mark.parametrize("failure", [EngineError("it died"), ValueError("no number")])
async def test_a_failed_request_fails_its_calls_alone(failure):
    server = Server()
    server.failure = failure
    calls = server.calls(1, 2)
    server.answers.set()
    for call in calls:
        with pytest.raises(EngineError, match=str(failure)):
            await call
    server.failure = None
    assert await server.shared.call(3) == 6


@pytest.mark.parametrize("is_asked", [False, True])
async def test_the_end_fails_all_calls(is_asked):
    server = Server()
    calls = server.calls(1)
    if is_asked:
        await server.until_asked(1)
        calls += server.calls(2)
    await asyncio.sleep(0)
    server.shared.cancel()
    for call in calls:
        with pytest.raises(EngineError, match="closed"):
            await call
    server.answers.set()
    assert await server.shared.call(3) == 6
