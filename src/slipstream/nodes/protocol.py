"""Messages between a run and the agents of its nodes, over TCP.

Each side proves its knowledge of the run's token by an HMAC (RFC 2104) over a nonce of either side. The token is never
sent. Messages are not encrypted: the network between the nodes must be trusted. The kernel ends a connection after
`SILENT_S` without an answer. A shorter cut of the network goes unnoticed.
"""

from __future__ import annotations

import hmac
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence

import msgspec
import psutil

from slipstream.errors import ConfigError
from slipstream.processes.channel import Channel, ChannelClosed

TOKEN_VARIABLE = "SLIPSTREAM_CLUSTER_TOKEN"
JOIN_AGAIN = -1
"""In place of an exit code: the run is planned again, or still to come."""
SILENT_S = 45.0
_GREETING_S = 20.0
"""How long a proof may take."""
_MOST_BYTES = 1 << 20
"""The longest message; a child's variables take most."""
_NONCE_BYTES = 32


class Hello(msgspec.Struct, frozen=True):
    """An agent's first message; with `child`, the first one of a child's connection."""

    run_id: str
    node: str
    """`node-3`, or empty for any free one."""
    attempt: int
    """The run's attempt; negative: any."""
    nonce: bytes
    child: int = -1


class Welcome(msgspec.Struct, frozen=True):
    """The run's answer, or the reason of a refusal."""

    node: str = ""
    proof: bytes = b""
    refused: str = ""


class Launch(msgspec.Struct, frozen=True, tag=True):
    """Start a child. Fields as of `Launcher.launch` and `Resources`; `environment` differs from the agent's own."""

    child: int
    module: str
    is_file: bool
    arguments: Sequence[str]
    environment: Mapping[str, str]
    resources: Mapping[str, str | int | bool | Sequence[str] | None]
    output: str | None


class Signal(msgspec.Struct, frozen=True, tag=True):
    """Send a child a signal."""

    child: int
    number: int


class Kill(msgspec.Struct, frozen=True, tag=True):
    """Kill a child and its session."""

    child: int


class Connect(msgspec.Struct, frozen=True, tag=True):
    """Connect the run with a child's Unix socket of this name, in the child's temporary folder."""

    connection: int
    child: int
    name: str


class Leave(msgspec.Struct, frozen=True, tag=True):
    """The run has ended."""

    code: int
    """Its exit code, or `JOIN_AGAIN`."""


class Launched(msgspec.Struct, frozen=True, tag=True):
    """A child runs, or could not be started; or a child's socket could not be reached."""

    child: int
    pid: int = 0
    error: str = ""


class Exited(msgspec.Struct, frozen=True, tag=True):
    """A child has ended, with an exit code as of `Child.poll`."""

    child: int
    code: int


ToAgent = Launch | Signal | Kill | Connect | Leave
ToRun = Launched | Exited


def prepare(connection: socket.socket) -> socket.socket:
    """Have the kernel send small messages at once, and end a connection after `SILENT_S` of silence."""
    seconds = int(SILENT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, seconds // 3))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, seconds // 9))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, seconds * 1000)
    return connection


def greet(
    connection: socket.socket, token: str, run_id: str, node: str, attempt: int, child: int = -1
) -> tuple[str, Channel]:
    """The agent's side: join. Returns the node's name and the channel to the run. Raises OSError, and ConfigError if
    the run refuses, or does not know the token. `child`: the number of a child, or of a connection to one."""
    channel = Channel(connection, _MOST_BYTES)
    try:
        theirs = channel.receive(_GREETING_S)
        hello = Hello(run_id, node, attempt, secrets.token_bytes(_NONCE_BYTES), child)
        sent = msgspec.msgpack.encode(hello)
        channel.send(_proof(token, b"agent", theirs, sent) + sent, _GREETING_S)
        welcome = msgspec.msgpack.decode(channel.receive(_GREETING_S), type=Welcome)
    except (ChannelClosed, msgspec.DecodeError) as error:
        raise ConnectionError("the connection was closed during the greeting") from error
    if welcome.refused:
        raise ConfigError(welcome.refused)
    if not hmac.compare_digest(welcome.proof, _proof(token, b"run", theirs, sent)):
        raise ConfigError("the run at this address does not know the token: another program listens there")
    connection.settimeout(None)
    return welcome.node, channel  # the next message may be in it already


def admit(connection: socket.socket, token: str, judge: Callable[[Hello], Welcome]) -> Hello | None:
    """The run's side: check the other side's proof and answer by `judge`. None after a refusal. Raises
    OSError, ChannelClosed and msgspec.DecodeError."""
    channel, nonce = Channel(connection, _MOST_BYTES), secrets.token_bytes(_NONCE_BYTES)
    channel.send(nonce, _GREETING_S)
    message = channel.receive(_GREETING_S)
    proof, sent = message[:_NONCE_BYTES], message[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(token, b"agent", nonce, sent)):
        answer, hello = Welcome(refused=f"the token is not this run's: give the agent that of {TOKEN_VARIABLE}"), None
    else:
        hello = msgspec.msgpack.decode(sent, type=Hello)
        answer = judge(hello)
    if not answer.refused:
        answer = msgspec.structs.replace(answer, proof=_proof(token, b"run", nonce, sent))
    channel.send(msgspec.msgpack.encode(answer), _GREETING_S)
    connection.settimeout(None)
    return None if hello is None or answer.refused else msgspec.structs.replace(hello, node=answer.node)


def _proof(token: str, side: bytes, nonce: bytes, hello: bytes) -> bytes:
    return hmac.digest(token.encode(), side + nonce + hello, "sha256")


def interface_of(address: str) -> str:
    """The network interface with this address, or empty."""
    every = psutil.net_if_addrs().items()
    return next((name for name, found in every if any(each.address == address for each in found)), "")
