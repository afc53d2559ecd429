"""Copies bytes between sockets: a child's channel, and connections to a child's Unix socket on another node."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

_CHUNK = 1 << 16


def pump(source: socket.socket, target: socket.socket, first: bytes = b"") -> None:
    """Copy `first` and all bytes, and then the end."""
    with contextlib.suppress(OSError):
        target.sendall(first)
        while data := source.recv(_CHUNK):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def join(one: socket.socket, other: socket.socket, first: bytes = b"") -> None:
    """Copy both ways until both have ended, and close them. `first`: what was read from `other` already."""
    back = threading.Thread(target=pump, args=(other, one, first), daemon=True)
    back.start()
    pump(one, other)
    back.join()
    one.close()
    other.close()


def end_connections(address: str) -> None:
    """End this process's TCP connections with another host. In a collective over a cut network nothing else would end
    them before its timeout."""
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(descriptor))) as end:
            if end.family != socket.AF_UNIX and end.getpeername()[0].removeprefix("::ffff:") == address:
                end.shutdown(socket.SHUT_RDWR)


class Forwarder:
    """A Unix socket of this host. Each connection is joined with what `reach` returns, or closed at its OSError."""

    def __init__(self, path: Path, reach: Callable[[], socket.socket]) -> None:
        self._reach = reach
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(path))
        self._server.listen(1024)
        threading.Thread(target=self._accept, name="forward", daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self._server.accept()
                threading.Thread(target=self._forward, args=(connection,), name="forward", daemon=True).start()

    def _forward(self, connection: socket.socket) -> None:
        try:
            there = self._reach()
        except OSError:
            connection.close()
        else:
            join(connection, there)
