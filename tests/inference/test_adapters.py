"""The adapters that an engine holds, one after another."""

import asyncio

import pytest

from slipstream.inference.plugin.weights.adapters import Adapters

from .scripted_host import Host, lora, until


async def test_a_failed_removal_is_told_only_after_the_loading_beside_it_has_ended():
    host = Host()
    adapters = Adapters(host)
    for _ in range(2):
        await adapters.load(lora())
    gate, loaded = asyncio.Event(), []

    async def remove(adapter):
        raise KeyError(adapter.id)

    async def load(adapter):
        await gate.wait()
        loaded.append(adapter.id)
        return True

    host.remove_adapter, host.load_adapter = remove, load
    loading = asyncio.create_task(adapters.load(lora()))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not loading.done()
    gate.set()
    with pytest.raises(KeyError):
        await loading
    assert (loaded, adapters.ids) == ([3], [2, 1, 3])
    del host.remove_adapter, host.load_adapter
    removed = []
    host.remove_adapter = lambda adapter: asyncio.sleep(0, removed.append(adapter.id))
    host.load_adapter = lambda adapter: asyncio.sleep(0, True)
    await adapters.load(lora())
    assert (removed, adapters.ids) == ([1, 3], [4, 2])


async def test_an_adapter_has_room_once_the_requests_of_the_oldest_have_ended():
    adapters = Adapters(Host())
    await adapters.until_room()
    await adapters.load(lora())
    oldest = adapters.current
    with adapters.used(oldest):
        await adapters.until_room()
        with adapters.used(oldest):
            await adapters.load(lora())
            assert adapters.ids == [2, 1]
            waiting = asyncio.create_task(adapters.until_room())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not waiting.done()
    await until(waiting.done)
