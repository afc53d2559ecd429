"""Messages between two processes over a connected socket: one framing, with a blocking and an asyncio end.

A frame is the length of a message in four bytes, big-endian, and the message, whose encoding is its owner's matter.
Guarantees: a message arrives complete or not at all; a receiver learns at once that the other process has ended, or
that it wrote something else. `envs/hosted/inside/host.py` runs in other interpreters and repeats the framing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time

LENGTH = 4
MAX_BYTES = 1 << 30
"""The longest message, if the two ends agree on no smaller bound."""
_CHUNK = 1 << 16


class ChannelClosed(Exception):
    """The other process has ended, or closed its end."""


class Garbage(ChannelClosed):
    """It announced a longer message than agreed: something else has written there."""


def pack(message: bytes) -> bytes:
    """The frame of a message."""
    return len(message).to_bytes(LENGTH, "big") + message


def length_of(data: bytes | bytearray, max_bytes: int = MAX_BYTES) -> int:
    """The length of the message whose frame begins with `data`. Raises `Garbage`."""
    length = int.from_bytes(data[:LENGTH], "big")
    if length > max_bytes:
        raise Garbage(f"a message of {length} bytes")
    return length


class Frames:
    """Splits what arrives into messages."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._data = bytearray()

    def add(self, data: bytes) -> None:
        """Take what has arrived."""
        self._data += data

    @property
    def has_next(self) -> bool:
        """Whether a whole message is there. Raises `Garbage`."""
        size = len(self._data)
        return size >= LENGTH and size >= LENGTH + length_of(self._data, self._max_bytes)

    def next(self) -> bytes | None:
        """Take the next message; None while it is not complete. Raises `Garbage`."""
        if not self.has_next:
            return None
        end = LENGTH + length_of(self._data)
        message = bytes(self._data[LENGTH:end])
        del self._data[:end]
        return message

    def take_rest(self) -> bytes:
        """Take the bytes after the last message."""
        rest = bytes(self._data)
        self._data.clear()
        return rest


def take_stdin() -> int:
    """Move standard input, this side of `Child.socket`, to a private descriptor; reading from it then gives nothing."""
    private = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return private


class Channel:
    """A blocking end."""

    def __init__(self, end: socket.socket, max_bytes: int = MAX_BYTES) -> None:
        self._socket, self._frames = end, Frames(max_bytes)

    @classmethod
    def of_parent(cls) -> Channel:
        """A child's end, which was its standard input."""
        return cls(socket.socket(fileno=take_stdin()))

    def send(self, message: bytes, timeout_s: float | None = None) -> None:
        """Send a message. Raises `ChannelClosed`, or TimeoutError when the other side does not read in time. A side
        that receives without a deadline in another thread must send without one, since a socket has one timeout for
        both directions."""
        self._socket.settimeout(timeout_s)
        try:
            self._socket.sendall(pack(message))
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosed from error

    def receive(self, timeout_s: float | None = None) -> bytes:
        """The next message. Raises `ChannelClosed`, or TimeoutError when there is none in time."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (message := self._frames.next()) is None:
            self._socket.settimeout(None if deadline is None else max(1e-3, deadline - time.monotonic()))
            try:
                data = self._socket.recv(_CHUNK)
            except ConnectionResetError as error:
                raise ChannelClosed from error
            if not data:
                raise ChannelClosed
            self._frames.add(data)
        return message

    @property
    def has_message(self) -> bool:
        """Whether `receive` has one without reading."""
        return self._frames.has_next

    def take_rest(self) -> bytes:
        """The bytes read after the last message; the socket's next reader needs them first."""
        return self._frames.take_rest()

    def fileno(self) -> int:
        """For an event loop that is to notice messages."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close this end, which the other side notices."""
        self._socket.close()


class AsyncChannel:
    """An end in an event loop, for one receiver."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, max_bytes: int) -> None:
        self._reader, self._writer, self._frames = reader, writer, Frames(max_bytes)

    @classmethod
    async def over(cls, end: socket.socket, max_bytes: int = MAX_BYTES) -> AsyncChannel:
        """The running loop's end; it owns the socket from now on."""
        reader, writer = await asyncio.open_connection(sock=end)
        return cls(reader, writer, max_bytes)

    def send(self, *messages: bytes) -> None:
        """Begin to send; the receiver notices that the other side has ended."""
        with contextlib.suppress(ConnectionError, RuntimeError):
            self._writer.write(b"".join(pack(message) for message in messages))

    async def receive(self) -> bytes:
        """The next message. Raises `ChannelClosed`. Cancelling it loses nothing."""
        while (message := self._frames.next()) is None:
            try:
                data = await self._reader.read(_CHUNK)
            except ConnectionError as error:
                raise ChannelClosed from error
            if not data:
                raise ChannelClosed
            self._frames.add(data)
        return message

    @property
    def is_closed(self) -> bool:
        """Whether the other side has ended, as far as is known."""
        return self._reader.at_eof()

    def close(self) -> None:
        """Close this end, which the other side notices."""
        self._writer.close()
