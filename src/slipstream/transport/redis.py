"""The transport over a Redis server, 6.2 or newer.

A topic is a stream `slipstream/<run_id>/<lineage>/<topic>` with one consumer group, and the reason of `close` is a key
`.../closed`. A record is an entry of the stream from `put` until `ack`, which deletes it; the stream is never trimmed.
A taken entry is pending in the group. `take` prefers the oldest pending entry that this object does not hold. There is
one after a `take` with a lost answer, and in a restarted reader.

A `put` with a lost answer is sent again. Both entries have its mark, and the reader drops the second one. A `put` that
ends (deadline or cancellation) while the server does not answer may have put its record.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from slipstream.transport.base import Receipt, TransportClosed
from slipstream.transport.polled import Envelope, PolledTransport
from slipstream.transport.redis_server import RedisServer

T = TypeVar("T")

_OPEN_S = 10.0
_KEPT_S = 24 * 3600
"""How long a closed queue is kept, for the other side to read why."""
_GROUP = _READER = "reader"
_NUM_MARKS = 4096
"""Marks of puts that a reader remembers; what is sent again comes within a few records."""


@dataclass(frozen=True)
class RedisStreams:
    """Queues on a Redis server."""

    url: str
    """`redis://host:port/database`, `rediss://` with TLS, or `unix:///path`; without a password."""
    run_id: str
    """Tells the runs on one server apart."""
    lineage: int = 0
    """As in `FileStreams`."""
    password_variable: str = ""
    """Name of the environment variable that holds the password; empty for a private Unix socket."""


class RedisTransport(PolledTransport[T]):
    """A bounded queue on a Redis server. One process puts and one takes, each through one object.

    While the server does not answer every call tries again, `put` and `take` until their deadline and the others for
    30 s, and then raises a `DeadlineError` that names the server. One answer may take 10 s: a deadline is exceeded by
    as much where the server is stopped.
    """

    def __init__(
        self,
        streams: RedisStreams,
        topic: str,
        kind: type[T],
        capacity: int,
        producer: str,
        consumer: str,
    ) -> None:
        """Opens the queue, and makes it if there is none; see `PolledTransport`. Raises `ConfigError` for a server that
        cannot be used, and `DeadlineError` for one that does not answer for 10 s."""
        super().__init__(kind, capacity, producer, consumer)
        self._server = RedisServer(streams.url, streams.password_variable)
        self._stream = f"slipstream/{streams.run_id}/{streams.lineage}/{topic}"
        self._closed = f"{self._stream}/closed"
        self._guard = threading.Lock()
        """Between looking at the queue and changing it."""
        self._held: dict[bytes, Receipt] = {}
        """Entries that were taken through this object and not acknowledged."""
        self._marks: dict[bytes, bytes] = {}
        """The first entry of each put."""
        self._call(lambda: self._server.make_group(self._stream, _GROUP), _OPEN_S)

    def __repr__(self) -> str:
        return f"the queue {self._stream} on {self._server}"

    def __len__(self) -> int:
        """Number of occupied places."""
        return self._call(lambda: self._server.ask(lambda client: int(client.xlen(self._stream))))

    def ack(self, receipt: Receipt) -> bool:
        """See `Transport.ack`."""
        entry = receipt.partition(".")[0].encode()

        def attempt() -> bool:
            with self._guard:
                if self._held.get(entry) != receipt:
                    return False
                self._delete(entry)
                del self._held[entry]
                return True

        return self._call(attempt)

    def close(self, reason: str) -> None:
        """See `Transport.close`. The server keeps a closed queue for a day."""

        def mark(pipe: Any) -> None:
            pipe.set(self._closed, reason, nx=True, ex=_KEPT_S)
            pipe.expire(self._stream, _KEPT_S)

        self._call(lambda: self._server.together(mark))

    def remove(self) -> None:
        """See `Transport.remove`."""
        self._call(lambda: self._server.ask(lambda client: int(client.delete(self._stream, self._closed))))

    def _putting(self, envelope: Envelope) -> Callable[[], bool | None]:
        fields = {"record": msgspec.msgpack.encode(envelope), "mark": secrets.token_bytes(8)}

        def attempt() -> bool | None:
            with self._guard:
                if self._look(lambda pipe: pipe.xlen(self._stream)) >= self._capacity:
                    return None
                if self._server.ask(lambda client: client.xadd(self._stream, fields, nomkstream=True)) is None:
                    raise self._server.lost()
                return True

        return attempt

    def _try_take(self) -> tuple[Receipt, bytes] | None:
        with self._guard:
            num_asked = len(self._held) + 1
            pending = self._look(lambda pipe: pipe.xpending_range(self._stream, _GROUP, "-", "+", num_asked))
            again = next((item["message_id"] for item in pending if item["message_id"] not in self._held), None)
            found = self._server.ask(lambda client: self._entry(client, again))
            if found is None:
                return None
            entry, fields = found
            if self._marks.setdefault(fields.get(b"mark", entry), entry) != entry:
                self._delete(entry)
                return None
            if len(self._marks) > _NUM_MARKS:
                self._marks.pop(next(iter(self._marks)))
            receipt = self._held[entry] = f"{entry.decode()}.{secrets.token_hex(4)}"
            return receipt, fields.get(b"record", b"")

    def _entry(self, client: Any, again: bytes | None) -> tuple[bytes, dict[bytes, bytes]] | None:
        """The pending entry `again`, or the next new one if there is any."""
        if again is None:
            read = client.xreadgroup(_GROUP, _READER, {self._stream: ">"}, count=1)
            return read[0][1][0] if read else None
        found = client.xrange(self._stream, again, again)
        if not found:
            raise self._server.lost()
        return found[0]

    def _give_back(self, receipt: Receipt) -> None:
        with self._guard:
            self._held.pop(receipt.partition(".")[0].encode(), None)

    def _delete(self, entry: bytes) -> list[Any]:
        def delete(pipe: Any) -> None:
            pipe.xack(self._stream, _GROUP, entry)
            pipe.xdel(self._stream, entry)

        return self._server.together(delete)

    def _look(self, add: Callable[[Any], Any]) -> Any:
        """The answer to one question about a queue that is not closed."""

        def look(pipe: Any) -> None:
            pipe.get(self._closed)
            add(pipe)

        reason, answer = self._server.together(look)
        if reason is not None:
            raise TransportClosed(reason.decode(errors="replace"))
        return answer
