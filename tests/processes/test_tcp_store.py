"""The store by which members of a process group meet over TCP."""

import gc
import threading
import time
import weakref
from datetime import timedelta

import pytest
import torch

from slipstream.processes.rendezvous import meet
from slipstream.processes.tcp_store import StoreServer, TCPStore
from slipstream.weights.bridges import broadcast
from slipstream.weights.bridges.broadcast import Group, Rendezvous


@pytest.fixture
def store():
    server = StoreServer("127.0.0.1")
    yield server
    server.abort()


def test_it_is_a_store_of_torch(store):
    one, other = TCPStore(store.address, 10.0), TCPStore(store.address, 10.0)
    threading.Timer(0.1, lambda: other.set("key", "value")).start()
    assert one.get("key") == b"value", "it waits"
    assert (one.add("number", 2), other.add("number", 3)) == (2, 5)
    assert one.check(["key", "number"])
    assert not one.check(["key", "other"])
    assert one.num_keys() == 2
    assert one.delete_key("key")
    with pytest.raises(RuntimeError, match=r"within 0.1 s"):
        one.wait(["key"], timedelta(seconds=0.1))


def test_gloo_connects_a_group_by_it(store):
    rendezvous, got = Rendezvous(store.address, 2, 20.0), {}

    def join(rank):
        buffer = torch.full((3,), float(rank))
        Group(rendezvous, rank).broadcast(buffer)
        got[rank] = buffer.tolist()

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert got == {rank: [0.0] * 3 for rank in range(3)}


def test_a_group_keeps_its_store(store, monkeypatch):
    """NCCL asks the store at the first broadcast, and torch calls a Python object only while it lives."""
    made = list[weakref.ref]()

    def meeting(*arguments):
        made.append(weakref.ref(found := meet(*arguments)))
        return found

    monkeypatch.setattr(broadcast, "meet", meeting)
    group = Group(Rendezvous(store.address, 0, 20.0), 0)
    gc.collect()
    assert made[0]() is not None
    assert torch.distributed.PrefixStore("its", made[0]()).num_keys() > 0
    del group


def test_who_does_not_know_the_secret_is_not_answered(store):
    where, _, _ = store.address.rpartition("/")
    stranger = TCPStore(f"{where}/{'0' * 64}", 5.0)
    with pytest.raises(RuntimeError, match="closed the connection"):
        stranger.set("here-0", b"1")


def test_its_end_ends_all_waits(store):
    threading.Timer(0.2, store.abort).start()
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        meet(store.address, 0, 2, 60.0)
    assert time.monotonic() - began < 30
