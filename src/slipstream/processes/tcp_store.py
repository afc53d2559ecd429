"""A store for `rendezvous.meet` over TCP: messages of a group's processes before they are connected.

torch's own TCPStore has no authentication and lists its keys. Here a member proves its knowledge of the group's secret
by an HMAC (RFC 2104) over a nonce. The secret is never sent. Messages are not encrypted. `abort` ends all waits.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import threading
import time
from datetime import timedelta

import msgspec
import torch

from slipstream.processes.channel import Channel, ChannelClosed

_GREETING_S = 10.0
_MOST_BYTES = 1 << 20
_NONCE_BYTES = 32
_SLACK_S = 5.0
"""How much later than a wait's own deadline its answer may come."""


class _Ask(msgspec.Struct, frozen=True, array_like=True):
    call: str
    keys: tuple[str, ...]
    value: bytes = b""
    seconds: float = 0.0


class StoreServer:
    """The store itself, in the process of rank 0."""

    def __init__(self, host: str) -> None:
        """Listens on a free port of `host`."""
        self._secret = secrets.token_hex(32)
        self._data: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._is_over = False
        self._server = socket.create_server((host, 0), family=_family(host), backlog=1024)
        self.address = f"tcp://{_bracketed(host)}:{self._server.getsockname()[1]}/{self._secret}"
        threading.Thread(target=self._accept, name="store", daemon=True).start()

    def abort(self) -> None:
        """End all waits, and answer no further call."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _accept(self) -> None:
        while not self._is_over:
            try:
                connection, _ = self._server.accept()
            except OSError:  # closed, or out of descriptors for a moment
                time.sleep(0.05)
                continue
            threading.Thread(target=self._serve, args=(connection,), name="store", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        channel = Channel(connection, _MOST_BYTES)
        with contextlib.suppress(ChannelClosed, OSError, msgspec.DecodeError, TimeoutError):
            nonce = secrets.token_bytes(_NONCE_BYTES)
            channel.send(nonce, _GREETING_S)
            if hmac.compare_digest(channel.receive(_GREETING_S), _proof(self._secret, nonce)):
                while not self._is_over:
                    ask = msgspec.msgpack.decode(channel.receive(), type=_Ask)
                    channel.send(msgspec.msgpack.encode(self._answer(ask)))
        connection.close()

    def _answer(self, ask: _Ask) -> bytes | int | bool | None:
        """None: not in time."""
        with self._changed:
            if ask.call == "set":
                self._data[ask.keys[0]] = ask.value
            elif ask.call == "add":
                total = int(self._data.get(ask.keys[0], b"0")) + int(ask.value)
                self._data[ask.keys[0]] = str(total).encode()
                self._changed.notify_all()
                return total
            elif ask.call == "delete":
                return self._data.pop(ask.keys[0], None) is not None
            elif ask.call == "count":
                return len(self._data)
            elif ask.call == "check":
                return self._has(ask.keys)
            elif not self._changed.wait_for(lambda: self._is_over or self._has(ask.keys), ask.seconds) or self._is_over:
                return None
            elif ask.call == "get":
                return self._data[ask.keys[0]]
            self._changed.notify_all()
            return True

    def _has(self, keys: tuple[str, ...]) -> bool:
        return all(key in self._data for key in keys)


class TCPStore(torch.distributed.Store):
    """A member's connection to it. Waits raise RuntimeError."""

    def __init__(self, address: str, timeout_s: float) -> None:
        super().__init__()
        place, _, secret = address.removeprefix("tcp://").rpartition("/")
        host, _, port = place.rpartition(":")
        self._timeout_s, self._one = timeout_s, threading.Lock()
        connection = socket.create_connection((host.strip("[]"), int(port)), timeout=min(timeout_s, _GREETING_S))
        self._channel = Channel(connection, _MOST_BYTES)
        try:
            self._channel.send(_proof(secret, self._channel.receive(_GREETING_S)), _GREETING_S)
        except ChannelClosed as error:
            raise RuntimeError("the trainer's store has closed the connection") from error

    def _ask(self, call: str, *keys: str, value: bytes = b"", seconds: float | None = None) -> bytes | int | bool:
        within = self._timeout_s if seconds is None else seconds
        with self._one:
            try:
                self._channel.send(msgspec.msgpack.encode(_Ask(call, keys, value, within)), _GREETING_S)
                found = msgspec.msgpack.decode(self._channel.receive(within + _SLACK_S), type=bytes | int | bool | None)
            except (ChannelClosed, OSError) as error:
                raise RuntimeError("the trainer's store has closed the connection") from error
        if found is None:
            raise RuntimeError(f"not all members of the group came within {within:g} s")
        return found

    def set(self, key: str, value: str | bytes) -> None:
        """See torch's `Store`."""
        self._ask("set", key, value=value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """See torch's `Store`."""
        found = self._ask("get", key)
        assert isinstance(found, bytes)
        return found

    def add(self, key: str, value: int) -> int:
        """See torch's `Store`."""
        return int(self._ask("add", key, value=str(value).encode()))

    def check(self, keys: list[str]) -> bool:
        """See torch's `Store`."""
        return bool(self._ask("check", *keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """See torch's `Store`."""
        self._ask("wait", *keys, seconds=None if timeout is None else timeout.total_seconds())

    def delete_key(self, key: str) -> bool:
        """See torch's `Store`."""
        return bool(self._ask("delete", key))

    def num_keys(self) -> int:
        """See torch's `Store`."""
        return int(self._ask("count"))

    deleteKey, getNumKeys = delete_key, num_keys


def _proof(secret: str, nonce: bytes) -> bytes:
    return hmac.digest(secret.encode(), nonce, "sha256")


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
