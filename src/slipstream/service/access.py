"""Access to the service over HTTP.

Guarantees: without tokens only processes of the service's own Unix user (or root) on this machine are answered, also
on loopback, since a run is a program of this user. With tokens every request needs one; hashes are stored, and not the
tokens. A web page of another origin changes nothing.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
import os
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from slipstream.config.addresses import names_this_machine
from slipstream.errors import ConfigError
from slipstream.processes.files import write_whole
from slipstream.runlog.files import read_record
from slipstream.service.store import Store, name_from

MAX_BODY = 2 << 20
_TOKEN_BYTES, _MAX_HEADER = 32, 512
_ESTABLISHED = "01"


def tokens_of(store: Store) -> dict[str, str]:
    """Users and the hashes of their tokens."""
    return read_record(_file(store), dict[str, str]) or {}


def new_token(store: Store, user: str) -> str:
    """Make a token for a user. An earlier one ends. A running service needs tokens from its next request on."""
    if name_from(user) != user:
        raise ConfigError(f"{user!r} is no name of a user: use letters, digits, '.', '_' and '-'")
    token = secrets.token_urlsafe(_TOKEN_BYTES)
    write_whole(_file(store), msgspec.json.encode({**tokens_of(store), user: _hash(token)}))
    return token


def _file(store: Store) -> Path:
    return store.root / "tokens.json"


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


class Access:
    """ASGI middleware: sets `scope["user"]`, or refuses."""

    def __init__(
        self,
        app: Callable[..., Awaitable[None]],
        store: Store,
        owner: str,
        needs_token: bool | None,
        *,
        key: str = "",
        max_body: int = MAX_BODY,
    ) -> None:
        """`owner`: this Unix user, by whom a holder of `key` is taken, too. `needs_token` is None: as soon as there are
        tokens."""
        self._app, self._store, self._owner, self._needs_token = app, store, owner, needs_token
        self._key, self._max_body = key, max_body

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Pass on, or answer 401, 403, 411, 413 or 421."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        needs_token = bool(tokens_of(self._store)) if self._needs_token is None else self._needs_token
        user = self._user(scope, headers, needs_token)
        if user is None and needs_token:
            return await _refuse(send, 401, "the token is missing or wrong", [(b"www-authenticate", b"Basic")])
        if user is None:
            return await _refuse(send, 403, "this service answers its own user on this machine alone")
        if not needs_token and not names_this_machine(headers.get(b"host", "localhost")):
            return await _refuse(send, 421, "without tokens this service answers to 127.0.0.1 and localhost alone")
        if scope["method"] not in ("GET", "HEAD"):
            size = headers.get(b"content-length", "")
            if not _is_same_origin(headers):
                return await _refuse(send, 403, "the request comes from a page of another site")
            if not size.isdecimal():
                return await _refuse(send, 411, "the request has no Content-Length")
            if int(size) > self._max_body:
                return await _refuse(send, 413, f"the request has more than {self._max_body} bytes")
        return await self._app({**scope, "user": user}, receive, send)

    def _user(self, scope: dict[str, Any], headers: dict[bytes, str], needs_token: bool) -> str | None:
        token = _given_token(headers.get(b"authorization", ""))
        if token and (user := self._user_of(token)) is not None:
            return user
        if needs_token:
            return None
        return self._owner if _peer_uid(scope.get("client"), scope.get("server")) in (os.geteuid(), 0) else None

    def _user_of(self, token: str) -> str | None:
        given, found = _hash(token), None
        if self._key and hmac.compare_digest(given, _hash(self._key)):
            found = self._owner
        for user, known in tokens_of(self._store).items():  # all of them: the time tells nothing
            found = user if hmac.compare_digest(given, known) else found
        return found


def _given_token(header: str) -> str:
    """The token of `Bearer TOKEN`, or of a browser's `Basic user:TOKEN`."""
    scheme, _, value = header.partition(" ")
    if len(header) > _MAX_HEADER:
        return ""
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return ""
    return value.strip() if scheme.lower() == "bearer" else ""


def _is_same_origin(headers: dict[bytes, str]) -> bool:
    """Whether the page is ours, by the browser's word; other clients send no origin."""
    origin = headers.get(b"origin")
    if origin is not None:
        return origin.partition("://")[2] == headers.get(b"host")
    return headers.get(b"sec-fetch-site", "none") in ("none", "same-origin")


def _peer_uid(client: tuple[str, int] | None, server: tuple[str, int] | None) -> int | None:
    """The Unix user at the other end of a connection on this machine, by the kernel's table."""
    if client is None or server is None:
        return None
    for name, size in (("tcp", 4), ("tcp6", 16)):
        here, there = _kernel_form(client, size), _kernel_form(server, size)
        if not here or not there:
            continue
        try:
            lines = Path(f"/proc/net/{name}").read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[1:4] == [here, there, _ESTABLISHED]:
                return int(fields[7])
    return None


def _kernel_form(address: tuple[str, int], size: int) -> str:
    """`ADDRESS:PORT` as in /proc/net/tcp: words of the machine's byte order, in hexadecimal."""
    try:
        packed = ipaddress.ip_address(address[0].partition("%")[0]).packed
    except ValueError:
        return ""
    if len(packed) != size:
        return ""
    words = [packed[at : at + 4][::-1] for at in range(0, size, 4)]
    return f"{b''.join(words).hex().upper()}:{address[1]:04X}"


async def _refuse(send: Any, status: int, text: str, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    body = msgspec.json.encode({"error": "Refused", "message": text})
    # The body of the request was not read: a further request on this connection would begin in it.
    whole = [(b"content-type", b"application/json"), (b"connection", b"close"), *(headers or [])]
    await send({"type": "http.response.start", "status": status, "headers": whole})
    await send({"type": "http.response.body", "body": body})
