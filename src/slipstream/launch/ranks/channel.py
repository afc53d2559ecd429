"""Messages between a run and a child of it, over a pair of connected sockets that nobody else can reach.

Guarantees: a message comes whole or not at all; whoever waits for one has a deadline, and learns at once when the other
side has ended. What a message says is the business of those who send it; it is never unpickled.
"""

from __future__ import annotations

import socket
import time

_LENGTH = 8
_CHUNK = 1 << 20


class ChannelClosed(Exception):
    """The other side has ended."""


class Channel:
    """One end."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._received = bytearray()

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """This side's end, and the other's, which may be given to a child."""
        ours, theirs = socket.socketpair()
        return cls(ours), theirs

    def send(self, message: bytes, timeout_s: float | None) -> None:
        """Raises ChannelClosed when the other side has ended, TimeoutError when it takes nothing for so long. A side
        that receives without a deadline in another thread sends with None: a socket has one timeout for both."""
        self._socket.settimeout(timeout_s)
        try:
            self._socket.sendall(len(message).to_bytes(_LENGTH, "little") + message)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosed from error

    def receive(self, timeout_s: float | None) -> bytes:
        """The next message. Raises ChannelClosed when none comes any more, TimeoutError when none came in time."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (message := self._next()) is None:
            self._socket.settimeout(None if deadline is None else max(1e-3, deadline - time.monotonic()))
            try:
                data = self._socket.recv(_CHUNK)
            except ConnectionResetError as error:
                raise ChannelClosed from error
            if not data:
                raise ChannelClosed
            self._received += data
        return message

    def _next(self) -> bytes | None:
        if len(self._received) < _LENGTH:
            return None
        end = _LENGTH + int.from_bytes(self._received[:_LENGTH], "little")
        if len(self._received) < end:
            return None
        message = bytes(self._received[_LENGTH:end])
        del self._received[:end]
        return message

    def close(self) -> None:
        """The other side learns of it."""
        self._socket.close()
