"""Copies bytes between sockets: a child's channel, and connections to a child's Unix socket on another node."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

_CHUNK = 1 << 16
_PAUSE_S = 0.05


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
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # closed meanwhile, or not connected
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as end:
                is_tcp = end.family in (socket.AF_INET, socket.AF_INET6)
                if is_tcp and end.getpeername()[0].removeprefix("::ffff:") == address:
                    end.shutdown(socket.SHUT_RDWR)


class Forwarder:
    """A Unix socket of this host. Each connection is joined with what `reach` returns, or closed at its OSError."""

    def __init__(self, path: Path, reach: Callable[[], socket.socket]) -> None:
        self._reach, self._is_closed = reach, False
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(path))
        self._server.listen(1024)
        threading.Thread(target=self._accept, name="forward", daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._server.accept()
            except OSError:  # closed, or out of descriptors for a moment
                time.sleep(_PAUSE_S)
                continue
            threading.Thread(target=self._forward, args=(connection,), name="forward", daemon=True).start()

    def _forward(self, connection: socket.socket) -> None:
        try:
            there = self._reach()
        except OSError:
            connection.close()
        else:
            join(connection, there)
