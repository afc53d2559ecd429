"""The agent of a node: starts a run's children here, and reports their ends.

Guarantees: its children end with it, and with its connection to the run. A child's standard input is connected to the
run's end of its channel, as on the run's host.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from slipstream.errors import ConfigError, one_line
from slipstream.nodes.protocol import Exited, Launch, Launched, Leave, Signal, ToAgent, ToRun, greet, prepare
from slipstream.processes.channel import Channel, ChannelClosed
from slipstream.processes.launchers import LOCAL, Child, Resources

_CHUNK = 1 << 16
_PAUSE_S = 0.5
_DRAIN_S = 5.0
"""How long a dead child's last messages may take."""


class Agent:
    """See the module."""

    def __init__(self, address: tuple[str, int], token: str, run_id: str, *, node: str = "", attempt: int = -1) -> None:
        self._address, self._token, self._run_id, self._attempt = address, token, run_id, attempt
        self.node = node
        self._sending = threading.Lock()
        self._control: Channel | None = None

    def join(self, wait_s: float) -> None:
        """Connect to the run, and wait for it. Raises ConfigError if it refuses, or after `wait_s`."""
        deadline = time.monotonic() + wait_s
        while True:
            try:
                connection = prepare(socket.create_connection(self._address, timeout=max(0.1, _PAUSE_S)))
                joined = greet(connection, self._token, self._run_id, self.node, self._attempt)
            except OSError as error:
                if time.monotonic() > deadline:
                    where = "{}:{}".format(*self._address)
                    raise ConfigError(
                        f"no run at {where} within {wait_s:g} s ({one_line(error)}): start it, or correct the address"
                    ) from error
                time.sleep(_PAUSE_S)
            else:
                self.node, self._control = joined
                return

    def serve(self) -> bool:
        """Serve the run until it ends. False: the connection was lost."""
        assert self._control is not None
        control, children = self._control, dict[int, Child]()
        try:
            while True:
                message: ToAgent = msgspec.msgpack.decode(control.receive(), type=ToAgent)
                if isinstance(message, Leave):
                    return True
                if isinstance(message, Launch):
                    threading.Thread(target=self._launch, args=(message, control, children), daemon=True).start()
                elif (child := children.get(message.child)) is not None and isinstance(message, Signal):
                    child.send_signal(message.number)
                elif child is not None:
                    child.kill()
        except (ChannelClosed, OSError, msgspec.DecodeError):
            return False
        finally:
            for child in [*children.values()]:
                child.kill()
            for child in [*children.values()]:
                child.end(0.0)
            control.close()

    def _send(self, control: Channel, message: ToRun) -> None:
        with self._sending, contextlib.suppress(ChannelClosed, OSError):
            control.send(msgspec.msgpack.encode(message))

    def _launch(self, message: Launch, control: Channel, children: dict[int, Child]) -> None:
        """Start a child, and report its end."""
        number = message.child
        try:
            connection = prepare(socket.create_connection(self._address, timeout=_DRAIN_S))
            greet(connection, self._token, self._run_id, self.node, self._attempt, number)
            options: dict[str, Any] = dict(message.resources)
            child = children[number] = LOCAL.launch(
                Path(message.module) if message.is_file else message.module,
                message.arguments,
                {**os.environ, **message.environment},
                Resources(**options),
                output=None if message.output is None else Path(message.output),
            )
        except (OSError, ConfigError) as error:
            self._send(control, Launched(number, error=one_line(error)))
            return
        outward = threading.Thread(target=_pump, args=(child.socket, connection), daemon=True)
        outward.start()
        threading.Thread(target=_pump, args=(connection, child.socket), daemon=True).start()
        self._send(control, Launched(number, child.pid))
        code = child.wait()
        child.kill()  # its session, which may hold its channel open
        outward.join(_DRAIN_S)
        child.end(0.0)
        self._send(control, Exited(number, code))
        connection.close()
        children.pop(number, None)


def _pump(source: socket.socket, target: socket.socket) -> None:
    """Copy all bytes, and then the end."""
    with contextlib.suppress(OSError):
        while data := source.recv(_CHUNK):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
