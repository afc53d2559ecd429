"""The agent of a node: starts a run's children here, and reports their ends.

Guarantees: its children end with it, and with its connection to the run. A child's standard input is connected to the
run's end of its channel, as on the run's host. Its temporary folder (TMPDIR) ends with it.
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
from slipstream.nodes.forwarding import join, pump
from slipstream.nodes.protocol import (
    Connect,
    Exited,
    Launch,
    Launched,
    Leave,
    Signal,
    ToAgent,
    ToRun,
    greet,
    interface_of,
    prepare,
)
from slipstream.processes.channel import Channel, ChannelClosed
from slipstream.processes.exits import private_folder
from slipstream.processes.launchers import LOCAL, Child, Resources, gpu_name
from slipstream.processes.rendezvous import INTERFACE
from slipstream.processes.temporary import remove_temporary

_PAUSE_S = 0.5
_DRAIN_S = 5.0
"""How long a dead child's last messages may take."""
_ENDING_S = 60.0
"""How long a failed run may take to end its process."""


class Agent:
    """See the module."""

    def __init__(self, address: tuple[str, int], token: str, run_id: str, *, node: str = "", attempt: int = -1) -> None:
        self._address, self._token, self._run_id, self._attempt = address, token, run_id, attempt
        self.node = node
        self._sending = threading.Lock()
        self._control: Channel | None = None
        self._interface = ""

    def join(self, wait_s: float) -> None:
        """Connect to the run, and wait for it. Raises ConfigError if it refuses, or after `wait_s`."""
        deadline = time.monotonic() + wait_s
        while True:
            try:
                connection = prepare(socket.create_connection(self._address, timeout=max(0.1, _PAUSE_S)))
                self._interface = os.environ.get(INTERFACE) or interface_of(connection.getsockname()[0])
                if not self._interface:
                    raise ConfigError(f"no network interface has the address of this agent: set {INTERFACE}")
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

    def serve(self, *, is_last: bool = False) -> int | None:
        """Serve the run until it ends, and return `Leave.code`. None: the connection was lost. `is_last`: return
        after the process of a failed run, as a launcher kills all others after the first failure."""
        assert self._control is not None
        control, children, folders = self._control, dict[int, Child](), dict[int, Path]()
        code = None
        try:
            while True:
                message: ToAgent = msgspec.msgpack.decode(control.receive(), type=ToAgent)
                if isinstance(message, Leave):
                    code = message.code
                    return code
                if isinstance(message, Launch):
                    own = message, control, children, folders
                    threading.Thread(target=self._launch, args=own, daemon=True).start()
                elif isinstance(message, Connect):
                    folder = folders.get(message.child, Path("/nowhere"))
                    threading.Thread(target=self._connect, args=(message, control, folder), daemon=True).start()
                elif (child := children.get(message.child)) is not None and isinstance(message, Signal):
                    child.send_signal(message.number)
                elif child is not None:
                    child.kill()
        except (ChannelClosed, OSError, msgspec.DecodeError):
            return None
        finally:
            for child in [*children.values()]:
                child.kill()
            for child in [*children.values()]:
                child.end(0.0)
            for folder in [*folders.values()]:
                remove_temporary(folder)
            if code and code > 0 and is_last:
                with contextlib.suppress(ChannelClosed, OSError):
                    control.receive(_ENDING_S)
            control.close()

    def _send(self, control: Channel, message: ToRun) -> None:
        with self._sending, contextlib.suppress(ChannelClosed, OSError):
            control.send(msgspec.msgpack.encode(message))

    def _call_back(self, number: int) -> tuple[socket.socket, bytes]:
        """A connection to the run for a child, or for a connection to one, and what the run has sent already."""
        connection = prepare(socket.create_connection(self._address, timeout=_DRAIN_S))
        _, channel = greet(connection, self._token, self._run_id, self.node, self._attempt, number)
        return connection, channel.take_rest()

    def _connect(self, message: Connect, control: Channel, folder: Path) -> None:
        """Connect the run with a child's socket."""
        there = socket.socket(socket.AF_UNIX)
        try:
            there.connect(str(folder / message.name))
            connection, first = self._call_back(message.connection)
        except (OSError, ConfigError) as error:
            there.close()
            self._send(control, Launched(message.connection, error=one_line(error)))
        else:
            join(there, connection, first)

    def _launch(self, message: Launch, control: Channel, children: dict[int, Child], folders: dict[int, Path]) -> None:
        """Start a child, and report its end."""
        number = message.child
        try:
            connection, first = self._call_back(number)
            folder = folders[number] = private_folder("node")
            options, visible = dict[str, Any](message.resources), os.environ.get("CUDA_VISIBLE_DEVICES")
            options["gpus"] = [gpu_name(int(gpu), visible) for gpu in options["gpus"]]
            child = children[number] = LOCAL.launch(
                Path(message.module) if message.is_file else message.module,
                message.arguments,
                {**os.environ, **message.environment, INTERFACE: self._interface, "TMPDIR": str(folder)},
                Resources(**options),
                output=None if message.output is None else Path(message.output),
            )
        except (OSError, ConfigError) as error:
            self._send(control, Launched(number, error=one_line(error)))
            return
        outward = threading.Thread(target=pump, args=(child.socket, connection), daemon=True)
        outward.start()
        threading.Thread(target=pump, args=(connection, child.socket, first), daemon=True).start()
        self._send(control, Launched(number, child.pid))
        code = child.wait()
        child.kill()  # its session, which may hold its channel open
        outward.join(_DRAIN_S)
        child.end(0.0)
        self._send(control, Exited(number, code))
        connection.close()
        children.pop(number, None)
        remove_temporary(folders.pop(number))
