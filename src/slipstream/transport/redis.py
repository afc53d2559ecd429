"""The transport over a Redis server, 6.2 or newer.

A topic is a stream `slipstream/<run_id>/<lineage>/<topic>` with one consumer group, and a hash `.../state` beside it. A
record is an entry of the stream from `put` until `ack`, which deletes it; the stream is never trimmed. The entry holds
schema and checksum; the bytes are the value of a key `.../<id of the entry>`. A taken entry is pending for the consumer
that took it, and after `requeue` (XAUTOCLAIM) for a consumer named `requeued`, from which it is claimed before new
entries are read. The receipt is the entry's id and the number of its deliveries.

Every operation is one Lua script, so it happens whole or not at all. A call has a number, under which the script notes
its result: after a lost connection the same call is sent again and learns what it did, and does nothing twice. Only a
`put` that gives up (deadline or cancellation) while the server does not answer may have put its record.

The bytes of a `put` go before its script, by a SET of a key `.../coming/<call>`, which the server does not copy. The
script makes the entry and renames that key. Without the script, as when the producer is killed between the two, the
bytes are in no place of the queue and expire after a minute.

Each queue has a mark from its making, and counts its changes. A server that came back empty, or in an older state than
one that was seen, is noticed by these: every call then raises `TransportLost`, until the queue is opened again and
empty.
"""

from __future__ import annotations

import itertools
import os
import re
import secrets
import socket
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from slipstream.transport.base import Receipt, TransportClosed
from slipstream.transport.polled import Envelope, PolledTransport, Unreachable
from slipstream.transport.redis_server import RedisServer, Runs, Script, lost

T = TypeVar("T")

_OPEN_S = 10.0
_KEPT_S = 24 * 3600
"""How long a closed queue is kept, for the other side to read why."""
_COMING_S = 60
"""How long bytes are kept that no script has made a record of."""
_RECEIPT = re.compile(r"([0-9]{1,19}-[0-9]{1,19})\.([0-9]{1,9})")

_OPEN = """
local stream, state = KEYS[1], KEYS[2]
local mark = redis.call('HGET', state, 'mark')
if not mark or redis.call('EXISTS', stream) == 0 then
    for _, entry in ipairs(redis.call('XRANGE', stream, '-', '+')) do redis.call('DEL', stream .. '/' .. entry[1]) end
    redis.call('DEL', stream, state)
    redis.call('XGROUP', 'CREATE', stream, 'sides', '0', 'MKSTREAM')
    mark = ARGV[1]
    redis.call('HSET', state, 'mark', mark, 'changes', 0)
end
return {mark, redis.call('HGET', state, 'changes')}
"""

_HEAD = """
local stream, state = KEYS[1], KEYS[2]
local mark, seen, settled, operation = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]
if redis.call('HGET', state, 'mark') ~= mark then return {'lost'} end
if tonumber(redis.call('HGET', state, 'changes')) < seen then
    redis.call('HDEL', state, 'mark')  -- for everyone
    return {'lost'}
end
local before = redis.call('HGET', state, operation)
local reason = redis.call('HGET', state, 'closed')

local function note(result)
    redis.call('HSET', state, operation, result)
    redis.call('HINCRBY', state, 'changes', 1)
end

-- Called last: a server that is full refuses some writes, but none of a script that has written.
local function done(...)
    for name in string.gmatch(settled, '%S+') do redis.call('HDEL', state, name) end
    return {'done', tonumber(redis.call('HGET', state, 'changes')), ...}
end

local function bytes_of(id) return stream .. '/' .. id end

local function is_taken(id, deliveries)
    local entry = redis.call('XPENDING', stream, 'sides', id, id, 1)[1]
    return entry and entry[2] ~= 'requeued' and entry[4] == tonumber(deliveries)
end
"""

_PUT = """
local capacity, coming, head = tonumber(ARGV[5]), ARGV[6], ARGV[7]
local answer
if before then
    answer = done()
elseif reason then
    answer = {'closed', seen, reason}
elseif redis.call('XLEN', stream) >= capacity then
    answer = {'not yet', seen}
end
if answer then
    if coming then redis.call('DEL', coming) end
    return answer
end
if not coming then return {'room', seen} end
if redis.call('EXISTS', coming) == 0 then return {'missing', seen} end  -- long on their way, or refused
local id = redis.call('XADD', stream, 'NOMKSTREAM', '*', 'record', head)
if not id then return {'lost'} end
redis.call('PERSIST', coming)
redis.call('RENAME', coming, bytes_of(id))
note('put')
return done()
"""

_TAKE = """
local consumer = ARGV[5]
local function given(id, deliveries, entry)
    local bytes = redis.call('GET', bytes_of(id))
    if not bytes then
        redis.call('HDEL', state, 'mark')  -- for everyone
        return {'lost'}
    end
    return done(id .. '.' .. deliveries, entry[2][2], bytes)
end
local id, deliveries = string.match(before or '', '^(%S+) (%S+)$')
if id then
    if not is_taken(id, deliveries) then return {'not yet', seen} end
    return given(id, deliveries, redis.call('XRANGE', stream, id, id)[1])
end
if reason then return {'closed', seen, reason} end
local entry
local oldest = redis.call('XPENDING', stream, 'sides', '-', '+', 1, 'requeued')[1]
if oldest then
    entry = redis.call('XCLAIM', stream, 'sides', consumer, 0, oldest[1])[1]
else
    local read = redis.call('XREADGROUP', 'GROUP', 'sides', consumer, 'COUNT', 1, 'STREAMS', stream, '>')
    if not read then return {'not yet', seen} end
    entry = read[1][2][1]
end
id = entry[1]
deliveries = redis.call('XPENDING', stream, 'sides', id, id, 1)[1][4]
note(id .. ' ' .. deliveries)
return given(id, deliveries, entry)
"""

_ACK = """
local id, deliveries = ARGV[5], ARGV[6]
if before then return done(1) end
if not is_taken(id, deliveries) then return done(0) end
redis.call('XACK', stream, 'sides', id)
redis.call('XDEL', stream, id)
redis.call('UNLINK', bytes_of(id))
note('acknowledged')
return done(1)
"""

_GIVE_BACK = """
local id, deliveries = ARGV[5], ARGV[6]
if before or not is_taken(id, deliveries) then return done() end
redis.call('XCLAIM', stream, 'sides', 'requeued', 0, id, 'JUSTID')
note('given back')
return done()
"""

_REQUEUE = """
if before then return done(tonumber(before)) end
local held = 0
local pending = redis.call('XPENDING', stream, 'sides')
for _, consumer in ipairs(pending[4] or {}) do
    if consumer[1] ~= 'requeued' then held = held + tonumber(consumer[2]) end
end
local cursor = '0-0'
repeat
    cursor = redis.call('XAUTOCLAIM', stream, 'sides', 'requeued', 0, cursor, 'COUNT', 1000, 'JUSTID')[1]
until cursor == '0-0'
note(held)
return done(held)
"""

_CLOSE = """
local why, kept = ARGV[5], ARGV[6]
redis.call('EXPIRE', stream, kept)
redis.call('EXPIRE', state, kept)
for _, entry in ipairs(redis.call('XRANGE', stream, '-', '+')) do redis.call('EXPIRE', bytes_of(entry[1]), kept) end
redis.call('HSETNX', state, 'closed', why)
note('closed')
return done()
"""

_REMOVE = """
for _, entry in ipairs(redis.call('XRANGE', stream, '-', '+')) do redis.call('DEL', bytes_of(entry[1])) end
redis.call('DEL', stream, state)
return {'done', seen}
"""

_LEN = "return done(redis.call('XLEN', stream))"


class RedisTransport(PolledTransport[T]):
    """A bounded queue on a Redis server. Any number of producers and one consumer, each in any process.

    While the server does not answer every call tries again, `put` and `take` until their deadline and the others for
    30 s, and then raises a `DeadlineError` that names the server. One answer may take 10 s, and so may a record on its
    way: a deadline is exceeded by as much where the server is stopped.
    """

    def __init__(
        self,
        url: str,
        run_id: str,
        topic: str,
        kind: type[T],
        capacity: int,
        *,
        lineage: int = 0,
        password_variable: str = "",
        producer: str = "the orchestrator",
        consumer: str = "the trainer",
    ) -> None:
        """Opens the queue, and makes it if there is none. `kind` is the type of the records; `capacity` counts them
        from `put` to `ack`. Raises `ConfigError` for a server that cannot be used, and `DeadlineError` for one that
        does not answer for 10 s."""
        super().__init__(kind, capacity, producer, consumer)
        self._server = RedisServer(url, password_variable)
        stream = f"slipstream/{run_id}/{lineage}/{topic}"
        self._keys = [stream, f"{stream}/state"]
        self._name = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(8)}"
        self._numbers = itertools.count()
        self._settled: deque[str] = deque()
        """Calls whose notes the server may forget."""
        self._repeated: set[str] = set()
        """Calls that were sent more than once: what was sent first may still arrive, so their notes are kept."""
        self._unsure_takes: deque[str] = deque()
        """Calls of `take` without an answer: they may have taken a record, which the next one gets."""
        texts = (_PUT, _TAKE, _ACK, _GIVE_BACK, _REQUEUE, _CLOSE, _LEN, _REMOVE)
        self._put, self._take, self._ack, self._return, self._requeue, self._close, self._count, self._delete = (
            self._server.script(_HEAD + text) for text in texts
        )
        self._mark, self._seen = self._call(self._open, _OPEN_S)

    def __repr__(self) -> str:
        return f"the queue {self._keys[0]} on {self._server}"

    def __len__(self) -> int:
        """Number of occupied places."""
        return int(self._call(self._attempt(self._count))[0])

    def ack(self, receipt: Receipt) -> bool:
        """See `Transport.ack`."""
        if not (match := _RECEIPT.fullmatch(receipt)):
            return False
        return bool(self._call(self._attempt(self._ack, *match.groups()))[0])

    def requeue(self) -> int:
        """See `Transport.requeue`."""
        return int(self._call(self._attempt(self._requeue))[0])

    def close(self, reason: str) -> None:
        """See `Transport.close`. The server keeps a closed queue for a day."""
        self._call(self._attempt(self._close, reason, _KEPT_S))

    def remove(self) -> None:
        """See `Transport.remove`."""
        self._call(self._attempt(self._delete))

    def _putting(self, envelope: Envelope) -> Callable[[], bool | None]:
        operation = self._new_operation()
        coming = f"{self._keys[0]}/coming/{operation}"
        put_with_bytes = self._put.after_setting(coming, envelope.body, _COMING_S)
        head = f"{envelope.schema} {envelope.checksum}"
        is_full = False

        def attempt() -> bool | None:
            nonlocal is_full
            # While there is no place, the record is not sent.
            if is_full and self._ask(self._put, operation, self._capacity) is None:
                return None
            is_full = self._ask(put_with_bytes, operation, self._capacity, coming, head) is None
            return None if is_full else True

        return attempt

    def _taking(self) -> Callable[[], tuple[Receipt, Envelope] | None]:
        def attempt() -> tuple[Receipt, Envelope] | None:
            try:
                operation = self._unsure_takes.popleft()
            except IndexError:
                operation = self._new_operation()
            try:
                answer = self._ask(self._take, operation, self._name)
            except Unreachable:
                self._unsure_takes.append(operation)
                raise
            if answer is None:
                return None
            receipt, head, body = answer
            schema, checksum = map(int, head.split())
            return receipt.decode(), Envelope(schema, checksum, body)

        return attempt

    def _give_back(self, receipt: Receipt) -> None:
        if match := _RECEIPT.fullmatch(receipt):
            self._call(self._attempt(self._return, *match.groups()))

    def _attempt(self, script: Script, *arguments: str | int) -> Callable[[], list[Any] | None]:
        operation = self._new_operation()
        return lambda: self._ask(script, operation, *arguments)

    def _new_operation(self) -> str:
        return f"{self._name}:{os.getpid()}:{next(self._numbers)}"

    def _open(self) -> tuple[str, int]:
        self._server.check_version()
        mark, changes = self._server.script(_OPEN)(self._keys, [secrets.token_hex(8)])
        try:
            return mark.decode(), int(changes)
        except ValueError:
            raise lost(str(self._server)) from None  # somebody else wrote there

    def _ask(self, script: Runs, operation: str, *arguments: str | int) -> list[Any] | None:
        """What the script answers; None for "not yet"."""
        settled = [*_drained(self._settled)]
        status = ""
        try:
            answer = script(self._keys, [self._mark, self._seen, " ".join(settled), operation, *arguments])
            status = answer[0].decode()
        except Unreachable:
            self._repeated.add(operation)
            raise
        finally:
            if status != "done":  # they were not forgotten
                self._settled.extend(settled)
        if status == "lost":
            raise lost(str(self._server))
        self._seen = max(self._seen, int(answer[1]))
        if status == "closed":
            raise TransportClosed(answer[2].decode(errors="replace"))
        if status == "done" and operation not in self._repeated:
            self._settled.append(operation)
        return None if status in ("not yet", "missing") else answer[2:]


def _drained(names: deque[str]) -> Iterator[str]:
    """Takes everything out, also while other threads do."""
    while True:
        try:
            yield names.popleft()
        except IndexError:
            return
