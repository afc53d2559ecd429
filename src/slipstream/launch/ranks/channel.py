"""Message channel between a run and a child process, over a private pair of connected sockets.

Guarantees: a message arrives complete or not at all; a receiver has a deadline, and learns at once when the other side
has ended. Messages are bytes, and are never unpickled.
"""

from __future__ import annotations

import socket
import time

_LENGTH = 8
_CHUNK = 1 << 20


class ChannelClosed(Exception):
    """The other process has ended, or closed its end."""


class Channel:
    """One end of a channel."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._received = bytearray()

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """Create a channel: this side's end, and the socket for the child."""
        own_end, child_end = socket.socketpair()
        return cls(own_end), child_end

    def send(self, message: bytes, timeout_s: float | None) -> None:
        """Send a message. Raises ChannelClosed when the other side has ended, TimeoutError when it does not read within
        `timeout_s`. A side that receives without a deadline in another thread must send with None, since a socket has
        one timeout for both directions."""
        self._socket.settimeout(timeout_s)
        try:
            self._socket.sendall(len(message).to_bytes(_LENGTH, "little") + message)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosed from error

    def receive(self, timeout_s: float | None) -> bytes:
        """Return the next message. Raises ChannelClosed when the other side has ended, TimeoutError when none came in
        time."""
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
        """Close this end, which the other side notices."""
        self._socket.close()
