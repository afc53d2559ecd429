"""Which adapters an engine should hold, without an engine."""

from __future__ import annotations

import asyncio

import pytest

from slipstream.inference.plugin.weights.adapters import Adapters
from slipstream.records import Ticket, Version


class Held:
    """A host that holds adapters as vLLM does, and fails when it is told to."""

    def __init__(self):
        self.ids: list[int] = []
        self.fails = ""

    async def load_adapter(self, adapter):
        if self.fails == "load":
            raise OSError("no such file")
        self.ids.append(adapter.id)
        return self.fails != "refuse"

    async def remove_adapter(self, adapter):
        if self.fails == "remove":
            raise RuntimeError("not now")
        self.ids = [id_ for id_ in self.ids if id_ != adapter.id]


@pytest.mark.parametrize("fails", ["load", "remove"])
async def test_after_a_failure_the_next_adapter_is_held_with_the_one_before_it(fails):
    adapters = Adapters(host := Held())
    tickets = [Ticket(Version(0, step, "d"), "lora", f"{step}", ()) for step in range(4)]
    await adapters.load(tickets[0])
    await adapters.load(tickets[1])
    assert adapters.ids == [2, 1]
    host.fails = fails
    with pytest.raises((OSError, RuntimeError)):
        await adapters.load(tickets[2])
    assert adapters.current.id == 2
    host.fails = ""
    await adapters.load(tickets[3])
    assert adapters.ids == [4, 2]
    assert sorted(adapters.ids) == sorted(host.ids)


async def test_an_adapter_has_room_once_the_requests_of_the_oldest_have_ended():
    adapters = Adapters(Held())
    tickets = [Ticket(Version(0, step, "d"), "lora", f"{step}", ()) for step in range(2)]
    await adapters.until_room()
    await adapters.load(tickets[0])
    oldest = adapters.current
    with adapters.used(oldest):
        await adapters.until_room()
        with adapters.used(oldest):
            await adapters.load(tickets[1])
            assert adapters.ids == [2, 1]
            waiting = asyncio.create_task(adapters.until_room())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not waiting.done()
    await asyncio.wait_for(waiting, 60)
