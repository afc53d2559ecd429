"""Starts children on the nodes of a run, by their agents.

Guarantees: an agent joins once, with the run's token, run id and attempt. A late one is awaited until a deadline; the
error names the missing nodes. The children of a lost node count as killed, and `lost` gives the reason.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import os
import resource
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import msgspec

from slipstream.errors import ConfigError, EngineError, Interrupted
from slipstream.nodes.forwarding import Forwarder, end_connections
from slipstream.nodes.protocol import (
    Connect,
    Exited,
    Hello,
    Kill,
    Launch,
    Leave,
    Signal,
    ToAgent,
    ToRun,
    Welcome,
    admit,
    interface_of,
    prepare,
)
from slipstream.processes.channel import Channel, ChannelClosed
from slipstream.processes.child import DYING_S, END, Child
from slipstream.processes.launchers import LOCAL, Resources

_AS_HERE = Resources()
_STARTING_S = 60.0
"""How long an agent may take to start a child."""
_WARN_S = 10.0
"""Seconds between two warnings about missing nodes."""
_POLL_S = 0.5


class _Call:
    """A connection that the run has asked an agent for."""

    def __init__(self, number: int, node: _Node) -> None:
        self.number, self.node = number, node
        self.error = ""
        self._answered, self._connected = threading.Event(), threading.Event()
        self.socket: socket.socket

    def has_answer(self, error: str) -> None:
        """The agent's answer, or the node is lost."""
        self.error = error
        self._answered.set()
        if error:
            self._connected.set()

    def has_socket(self, connection: socket.socket) -> None:
        """The agent has connected."""
        self.socket = connection
        self._connected.set()

    def wait(self, *, for_answer: bool) -> None:
        """Raises OSError if there is no connection, or no answer, in time."""
        deadline = time.monotonic() + _STARTING_S
        in_time = self._connected.wait(_STARTING_S)
        if in_time and for_answer:
            in_time = self._answered.wait(deadline - time.monotonic())
        if self.error or not in_time:
            why = self.error or f"no answer within {_STARTING_S:g} s"
            raise OSError(f"{self.node.name} could not start it: {why}")


class RemoteChild:
    """See `Child`."""

    def __init__(self, call: _Call, connect: Callable[[Connect], socket.socket]) -> None:
        self._call, self._node, self._connect = call, call.node, connect
        self.pid = 0
        self._ended = threading.Event()
        self._code: int | None = None
        self._forwarder: Forwarder | None = None

    @property
    def socket(self) -> socket.socket:
        """See `Child`."""
        return self._call.socket

    @property
    def output(self) -> int:
        """See `Child`."""
        raise ConfigError(f"the output of a child on {self._node.name} is a file: give its path")

    def forward(self, path: Path) -> None:
        """See `Child`."""

        def reach() -> socket.socket:
            return self._connect(Connect(next(self._node.numbers), self._call.number, path.name))

        self._forwarder = Forwarder(path, reach)

    def poll(self) -> int | None:
        """See `Child`."""
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """See `Child`."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid} on {self._node.name}", timeout or 0.0)
        assert self._code is not None
        return self._code

    def send_signal(self, number: int) -> None:
        """See `Child`."""
        if self._code is None:
            self._node.send(Signal(self._call.number, number))

    def end(self, timeout_s: float, first: int = END) -> None:
        """See `Child`."""
        if self._code is None and timeout_s > 0:
            self.send_signal(first)
            self._ended.wait(timeout_s)
        self.kill()
        self._ended.wait(DYING_S)
        self.socket.close()
        if self._forwarder is not None:
            self._forwarder.close()

    def kill(self) -> None:
        """See `Child`."""
        self._node.send(Kill(self._call.number))

    def has_ended(self, code: int) -> None:
        """The agent's report, or the node is lost."""
        if self._code is None:
            self._code = code
        self._ended.set()


class _Node:
    """A node with its agent."""

    def __init__(self, name: str, connection: socket.socket, numbers: Iterator[int]) -> None:
        self.name, self._connection, self.numbers = name, connection, numbers
        self.children: dict[int, RemoteChild] = {}
        self.calls: dict[int, _Call] = {}
        self.channel = Channel(connection)
        self._sending = threading.Lock()

    def send(self, message: ToAgent) -> None:
        """Nothing if the node is lost."""
        with self._sending, contextlib.suppress(ChannelClosed, OSError):
            self.channel.send(msgspec.msgpack.encode(message))

    def end(self) -> None:
        """End the connection, which the agent and `receive` notice."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def receive(self) -> None:
        """Take reports of children until the connection ends."""
        with contextlib.suppress(ChannelClosed, OSError, msgspec.DecodeError):
            while True:
                message: ToRun = msgspec.msgpack.decode(self.channel.receive(), type=ToRun)
                child, call = self.children.get(message.child), self.calls.get(message.child)
                if isinstance(message, Exited):
                    if child is not None:
                        child.has_ended(message.code)
                elif call is not None:
                    if child is not None:
                        child.pid = message.pid
                    call.has_answer(message.error)

    def lose(self) -> None:
        """All children count as killed."""
        for call in [*self.calls.values()]:
            call.has_answer("its agent is lost")
        for child in [*self.children.values()]:
            child.has_ended(-signal.SIGKILL)


class Nodes:
    """The nodes `node-1` to `node-<num - 1>` of a run; this host is `node-0`. Implements `Launcher`."""

    def __init__(self, num: int, address: tuple[str, int], token: str, run_id: str, attempt: int = 0) -> None:
        """Listens at `address`. Raises ConfigError if another program does."""
        if not token:
            raise ConfigError("the run has no token for its nodes: set SLIPSTREAM_CLUSTER_TOKEN, here and for agents")
        self.names = [f"node-{number}" for number in range(1, num)]
        self._token, self._run_id, self._attempt = token, run_id, attempt
        self._joined: dict[str, _Node] = {}
        self._free = [*self.names]
        """Names that no agent has."""
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        self._awaited: dict[int, _Call] = {}
        self.interface = ""
        """This host's interface towards its nodes."""
        self.lost = ""
        """A sentence about the first lost node."""
        self._is_over = False
        _allow_files()
        try:
            self._server = socket.create_server((_bound(address[0]), address[1]), backlog=1024)
        except OSError as error:
            where = "{}:{}".format(*address)
            raise ConfigError(
                f"agents cannot join at {where} ({error.strerror}): end the other run, or give another port"
            ) from error
        self.address: tuple[str, int] = address[0], self._server.getsockname()[1]
        """Host and port."""
        threading.Thread(target=self._accept, name="nodes", daemon=True).start()

    @property
    def remedy(self) -> str:
        """How a missing agent is started."""
        return "slipstream node --join {}:{} --run-id {}".format(*self.address, self._run_id)

    def title(self, name: str) -> str:
        """A node's name in messages."""
        return name

    def wait(
        self,
        timeout_s: float,
        warn: Callable[[str], object] = lambda text: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Wait for all agents. Raises ConfigError that names the missing nodes, and Interrupted."""
        began, warn_at = time.monotonic(), _POLL_S
        with self._changed:
            while missing := [self.title(name) for name in self.names if name not in self._joined]:
                num = len(self.names)
                said = f"{num - len(missing)} of {num} agents have joined; missing {', '.join(missing)}"
                waited = time.monotonic() - began
                if waited >= timeout_s:
                    raise ConfigError(f"{said} after {timeout_s:g} s: {self.remedy}")
                if should_stop():
                    raise Interrupted(f"stopped while waiting for agents ({said}): continue with --resume")
                if waited >= warn_at:
                    warn(f"{said}: {self.remedy}")
                    warn_at += _WARN_S
                self._changed.wait(min(_POLL_S, timeout_s - waited))

    def launch(
        self,
        module: str | Path,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] = os.environ,
        resources: Resources = _AS_HERE,
        node: str = "",
        *,
        output: Path | int | None = None,
    ) -> Child:
        """See `Launcher`. The agent's environment gets what `environment` has beside this process's."""
        if not node:
            return LOCAL.launch(module, arguments, environment, resources, output=output)
        if isinstance(output, int):
            raise ConfigError(f"the output of a child on {node} is a file: give its path")
        with self._changed:
            where = self._joined.get(node)
        if where is None and self.lost:
            raise EngineError(f"{self.lost}: continue with --resume")
        if where is None:
            raise ConfigError(f"no agent of {node} has joined: nodes are {', '.join(self.names)}")
        call = _Call(number := next(self._numbers), where)
        child = where.children[number] = RemoteChild(call, self._connect)
        own = {name: value for name, value in environment.items() if os.environ.get(name) != value}
        is_file = isinstance(module, Path)
        asked = asdict(resources)
        if resources.python == _AS_HERE.python:
            del asked["python"]  # the agent's
        file = None if output is None else str(output)
        try:
            self._ask(call, Launch(number, str(module), is_file, arguments, own, asked, file), for_answer=True)
        except OSError as error:
            where.send(Kill(number))
            raise (EngineError(f"{self.lost}: continue with --resume") if self.lost else error) from error
        return child

    def _connect(self, message: Connect) -> socket.socket:
        """Raises OSError."""
        with self._changed:
            node = next((each for each in self._joined.values() if message.child in each.children), None)
        if node is None:
            raise OSError(self.lost)
        call = _Call(message.connection, node)
        self._ask(call, message, for_answer=False)
        return call.socket

    def _ask(self, call: _Call, message: ToAgent, *, for_answer: bool) -> None:
        """Have an agent connect, and answer. Raises OSError."""
        self._awaited[call.number] = call.node.calls[call.number] = call
        try:
            call.node.send(message)
            call.wait(for_answer=for_answer)
        finally:
            del self._awaited[call.number], call.node.calls[call.number]

    def lose(self, name: str, reason: str) -> bool:
        """End a joined node that is known to be lost. False: it has not joined."""
        with self._changed:
            node = self._joined.get(name)
        if node is not None:
            self._is_lost(node, reason)
            node.end()
        return node is not None

    def close(self, code: int = 0) -> None:
        """End all that the agents have started, after a run with this exit code (`Leave.code`). Agents without a
        launcher await the next attempt of a failed run. After a failure the connections end with this process."""
        self._is_over = True
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        with self._changed:
            joined = [*self._joined.values()]
        for node in joined:
            node.send(Leave(code))
            if code <= 0:
                node.end()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:  # closed, or out of descriptors for a moment
                if self._is_over:
                    return
                time.sleep(_POLL_S)
                continue
            threading.Thread(target=self._admit, args=(connection,), name="nodes", daemon=True).start()

    def _admit(self, connection: socket.socket) -> None:
        given: list[Welcome] = []
        try:
            hello = admit(prepare(connection), self._token, lambda each: given.append(self._judge(each)) or given[0])
        except (OSError, ChannelClosed, msgspec.DecodeError):
            hello = None
            with self._changed:  # it left before it got its name
                self._free += [each.node for each in given if each.node in self.names]
        call = None if hello is None else self._awaited.get(hello.child)
        if hello is None or (hello.child >= 0 and call is None):
            connection.close()
        elif call is not None:
            call.has_socket(connection)
        else:
            self._follow(hello, connection)

    def _judge(self, hello: Hello) -> Welcome:
        """Whether an agent, or the connection of a child, is one of this run and attempt. It gets its name."""
        if hello.run_id != self._run_id:
            return Welcome(refused=f"this is the run {self._run_id}, not {hello.run_id}: correct the run id or address")
        if 0 <= hello.attempt != self._attempt:
            return Welcome(
                refused=f"this is attempt {self._attempt} of the run, not {hello.attempt}: start an agent of this one"
            )
        if hello.child >= 0:
            return Welcome(hello.node)
        with self._changed:
            free = self._free
            if hello.node and hello.node not in self.names:
                return Welcome(refused=f"{hello.node} is no node of this run: nodes are {', '.join(self.names)}")
            if not free or (hello.node and hello.node not in free):
                return Welcome(refused=f"{hello.node or 'every node'} has an agent already: end one of the two")
            name = hello.node or free[0]
            self._free.remove(name)
        return Welcome(name)

    def _follow(self, hello: Hello, connection: socket.socket) -> None:
        """Take a node's reports to its end."""
        node = _Node(hello.node, connection, self._numbers)
        with self._changed:
            self.interface = self.interface or interface_of(connection.getsockname()[0])
            self._joined[node.name] = node
            self._changed.notify_all()
        here, there = connection.getsockname()[0], connection.getpeername()[0]
        node.receive()
        # Before its children end: the error of a rank is then the node's.
        self._is_lost(node, "its agent ended, or the network between failed")
        if here != there and not self._is_over:
            end_connections(there)
        with self._changed:
            del self._joined[node.name]
        node.lose()

    def _is_lost(self, node: _Node, reason: str) -> None:
        if not self._is_over:
            self.lost = self.lost or f"{self.title(node.name)} is lost: {reason}"


def _allow_files() -> None:
    """Raise the limit on open files: each agent and each remote child takes one. Many systems allow 1024 at first."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _bound(host: str) -> str:
    """The address to listen at: all of this host's for a name of loopback, as Debian has it of a host's own name."""
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(host))
    own = host != "localhost" and ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    return "" if own else host
