"""Files of deployments, below `deployments/` of the state folder.

    records/NAME.json           a deployment
    servers/KEY/spec.json       a server, its log, and `adapters/NAME@DIGEST/`
    host.json, host.lock        the host, and the lock that it holds while it lives
    key                         clients show it; readable by this user alone

Guarantees: one writer at a time, by a lock; a file is replaced atomically. A name is checked before it becomes a path.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Generator
from pathlib import Path

import msgspec

from slipstream.errors import SlipstreamError
from slipstream.processes.files import open_own, write_whole
from slipstream.processes.identity import Handle
from slipstream.regular_files import read_regular
from slipstream.runlog.files import read_record, try_lock
from slipstream.service.deployments.records import MAX_NAME, Deployment, ServerSpec
from slipstream.service.store import Store, locked

_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_NAME - 1}}}")


class Listening(msgspec.Struct, frozen=True):
    """The address that a host has, or is asked to have."""

    host: str = "127.0.0.1"
    port: int | None = None
    """0: a free one; None: the usual one, if it is free."""
    handle: Handle | None = None
    """The host, or who is about to be."""
    launches: int = 0
    """Starts in vain."""


class Registry:
    """The deployments of a state folder."""

    def __init__(self, store: Store) -> None:
        self.root = store.root / "deployments"
        self._records, self._servers = self.root / "records", self.root / "servers"
        for folder in (self._records, self._servers):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    @contextlib.contextmanager
    def locked(self) -> Generator[None]:
        """In this context nobody else changes a record. Raises DeadlineError."""
        with locked(self.root / "lock"):
            yield

    def one(self, name: str) -> Deployment | None:
        """A deployment; None for an unknown name."""
        return read_record(self._records / f"{name}.json", Deployment) if _NAME.fullmatch(name) else None

    def all(self) -> list[Deployment]:
        """All readable deployments, the oldest first."""
        found: list[Deployment] = []
        for path in self._records.glob("*.json"):
            with contextlib.suppress(SlipstreamError, OSError):
                if (record := self.one(path.stem)) is not None:
                    found.append(record)
        return sorted(found, key=lambda each: (each.created, each.name))

    def put(self, record: Deployment) -> None:
        """Store a record, under the lock."""
        write_whole(self._records / f"{record.name}.json", _encoded(record))

    def change(self, name: str, how: Callable[[Deployment], Deployment]) -> Deployment | None:
        """Change a record by compare-and-set; the new one."""
        with self.locked():
            old = self.one(name)
            if old is None:
                return None
            if (new := how(old)) != old:
                self.put(new)
            return new

    def remove(self, record: Deployment) -> None:
        """Remove a record and its copies, under the lock."""
        (self._records / f"{record.name}.json").unlink(missing_ok=True)
        shutil.rmtree(self.adapters(record.server) / record.served, ignore_errors=True)

    def spec(self, key: str) -> ServerSpec | None:
        """A server."""
        return read_record(self.server(key) / "spec.json", ServerSpec)

    def put_spec(self, spec: ServerSpec) -> None:
        """Store a server, under the lock."""
        self.server(spec.key).mkdir(exist_ok=True, mode=0o700)
        write_whole(self.server(spec.key) / "spec.json", _encoded(spec))

    def server(self, key: str) -> Path:
        """The folder of a server."""
        return self._servers / key

    def server_keys(self) -> list[str]:
        """All servers with a folder."""
        return sorted(os.listdir(self._servers))

    def adapters(self, key: str) -> Path:
        """The folder with a server's adapters."""
        return self.server(key) / "adapters"

    def key(self) -> str:
        """The key of the address; it is made at the first call."""
        path = self.root / "key"
        with self.locked():
            if not path.exists():
                write_whole(path, f"{secrets.token_urlsafe(32)}\n".encode())
            return read_regular(path).decode().strip()

    # The host

    def listening(self) -> Listening:
        """The host's address."""
        return read_record(self.root / "host.json", Listening) or Listening()

    def put_listening(self, found: Listening) -> None:
        """Store the host's address."""
        write_whole(self.root / "host.json", _encoded(found))

    def claim_host(self) -> int | None:
        """Become the host, until the descriptor is closed; None if there is one."""
        handle = open_own(self.root / "host.lock", os.O_RDWR)
        if try_lock(handle, fcntl.LOCK_EX):
            return handle
        os.close(handle)
        return None

    def has_host(self) -> bool:
        """Whether a host lives."""
        handle = self.claim_host()
        if handle is not None:
            os.close(handle)
        return handle is None


def _encoded(value: msgspec.Struct) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"
