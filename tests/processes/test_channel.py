"""Frames: what is sent arrives in order and whole, however it is cut; garbage is named; both ends of both kinds."""

import asyncio
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.envs.hosted.inside import host
from slipstream.processes.channel import AsyncChannel, Channel, ChannelClosed, Frames, Garbage, pack

MESSAGES = st.lists(st.binary(max_size=300), max_size=6)


@given(MESSAGES, st.integers(1, 50))
def test_messages_however_they_are_cut(messages, size):
    data, frames, found = b"".join(map(pack, messages)), Frames(), []
    for start in range(0, len(data), size):
        frames.add(data[start : start + size])
        while frames.has_next:
            found.append(frames.next())
    assert found == messages
    assert frames.next() is None


def test_a_longer_message_than_agreed_is_garbage():
    frames = Frames(10)
    frames.add(pack(bytes(10)))
    assert frames.next() == bytes(10)
    frames.add(pack(bytes(11))[:4])
    with pytest.raises(Garbage):
        frames.next()
    assert issubclass(Garbage, ChannelClosed)


def test_a_deadline_and_a_closed_end():
    own, other = map(Channel, socket.socketpair())
    with pytest.raises(TimeoutError):
        own.receive(0.01)
    other.send(b"last")
    other.close()
    assert own.receive(1.0) == b"last"
    with pytest.raises(ChannelClosed):
        own.receive(1.0)
    with pytest.raises(ChannelClosed):
        own.send(b"x")
    own.close()


async def test_an_asyncio_end_against_a_blocking_one_and_a_cancelled_receiver_loses_nothing():
    own, other = socket.socketpair()
    blocking, channel = Channel(other), await AsyncChannel.over(own, max_bytes=1 << 21)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(channel.receive(), 0.01)
    sent = [b"", b"a" * (1 << 20), b"b"]
    thread = threading.Thread(target=lambda: [blocking.send(each) for each in sent])
    thread.start()
    assert [await channel.receive() for _ in sent] == sent
    thread.join()
    channel.send(*sent)
    assert [await asyncio.to_thread(blocking.receive, 10.0) for _ in sent] == sent
    other.sendall(b"\xff" * 4)
    with pytest.raises(Garbage):
        await channel.receive()
    blocking.close()
    channel.close()


async def test_the_end_inside_other_interpreters_has_the_same_frames():
    own, other = socket.socketpair()
    blocking, inside = Channel(own), host.Channel(other.detach())
    inside.send({"op": "ready"})
    assert blocking.receive(1.0) == b'{"op": "ready"}'
    blocking.send(b'{"op": "rows"}')
    blocking.send(b'{"op": "close"}')
    assert inside.read() == {"op": "rows"}
    assert await inside.receive() == {"op": "close"}
    sender = asyncio.to_thread(inside.send, {"text": "x" * (1 << 20)})  # more than a socket holds
    message, _ = await asyncio.gather(asyncio.to_thread(blocking.receive, 10.0), sender)
    assert len(message) > 1 << 20
    blocking.close()
    assert await inside.receive() is None
