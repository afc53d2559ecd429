"""Nodes of a run on a Ray cluster: Ray starts an agent on each, and has no other part in the run.

A separate process asks Ray (`ray_driver.py`): Ray's threads, signal handlers and exit functions stay out of the
trainer. Guarantees: it holds one placement group with an actor on each node, and releases both at the end of the run,
also after SIGKILL; nothing else on the cluster is touched. The token is the run's own. It goes to the actors as an
argument of a call: Ray neither shows nor stores it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from slipstream.config.schema import ClusterConfig
from slipstream.errors import ConfigError, Interrupted
from slipstream.nodes.agent import Agent
from slipstream.nodes.launcher import Nodes
from slipstream.processes import exits
from slipstream.processes.channel import Channel, ChannelClosed
from slipstream.processes.launchers import LOCAL

PROGRAM = "slipstream.clusters.ray_driver"
_REACH_S = 60.0
"""How long it may take to import Ray and to reach its cluster."""
_RELEASE_S = 15.0
"""How long actors and placement group may take to end."""
_POLL_S = 0.5


class Reached(msgspec.Struct, frozen=True, tag=True):
    """Ray has the nodes. `host`: this node's address in its cluster."""

    host: str


class Waiting(msgspec.Struct, frozen=True, tag=True):
    """The agents are not placed so far."""

    reason: str


class Placed(msgspec.Struct, frozen=True, tag=True):
    """Each agent has its node, named here in the order of the agents."""

    nodes: Sequence[str]


class Ended(msgspec.Struct, frozen=True, tag=True):
    """An agent has ended."""

    node: str
    reason: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """There will be no agents."""

    reason: str


class Start(msgspec.Struct, frozen=True):
    """To the driver: place the agents, and have them join."""

    host: str
    port: int
    token: str
    run_id: str
    attempt: int
    timeout_s: float
    folder: str
    """The run's current one."""


FromDriver = Reached | Waiting | Placed | Ended | Refused
_Awaited = TypeVar("_Awaited", Reached, Placed)


class AgentActor:
    """An agent in a process of Ray's."""

    def serve(self, start: Start, node: str) -> None:
        """Join the run and serve it to its end. Raises ConfigError if it is refused."""
        for name in ("OMP_NUM_THREADS", "PYTHONBREAKPOINT"):  # Ray's; the run gives its children threads
            os.environ.pop(name, None)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # children's exit codes are read
        with contextlib.suppress(OSError):
            os.chdir(start.folder)
        agent = Agent((start.host, start.port), start.token, start.run_id, node=node, attempt=start.attempt)
        agent.join(start.timeout_s)
        agent.serve()


class RayNodes(Nodes):
    """Nodes with agents of Ray."""

    def __init__(
        self,
        cluster: ClusterConfig,
        run_id: str,
        attempt: int = 0,
        log: Path | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Raises ConfigError if Ray's cluster cannot be reached, or lacks the nodes; and Interrupted."""
        self._ray_nodes: dict[str, str] = {}
        self._refused = ""
        self._log = log
        gpus = cluster.gpus_per_node
        asked = [str(cluster.nodes - 1), str(0 if gpus == "auto" else gpus)]
        self._driver = LOCAL.launch(PROGRAM, asked, {**os.environ, **exits.SAFE_PATH}, output=log)
        self._channel = Channel(self._driver.socket)
        try:
            reached = self._await(Reached, _REACH_S, should_stop)
            address = cluster.host_and_port if cluster.address else (reached.host, 0)
            super().__init__(cluster.nodes, address, secrets.token_hex(32), run_id, attempt)
        except BaseException:
            self._release()
            raise

    @property
    def remedy(self) -> str:
        """See `Nodes`."""
        return "let Ray's nodes reach {}:{}".format(*self.address)

    def title(self, name: str) -> str:
        """See `Nodes`."""
        found = self._ray_nodes.get(name)
        return f"{name} ({found})" if found else name

    def wait(
        self,
        timeout_s: float,
        warn: Callable[[str], object] = lambda text: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """See `Nodes`. Has Ray place the agents first: a ConfigError then names the waiting ones and their requests."""
        deadline = time.monotonic() + timeout_s
        if not self._ray_nodes:
            host, port = self.address
            start = Start(host, port, self._token, self._run_id, self._attempt, timeout_s, os.getcwd())
            with contextlib.suppress(ChannelClosed):
                self._channel.send(msgspec.msgpack.encode(start))
            placed = self._await(Placed, timeout_s + _RELEASE_S, should_stop, warn)
            self._ray_nodes = dict(zip(self.names, placed.nodes, strict=True))
            threading.Thread(target=self._watch, name="ray", daemon=True).start()

        def stops() -> bool:
            if self._refused:
                raise ConfigError(self._refused)
            return should_stop()

        super().wait(round(max(0.0, deadline - time.monotonic()), 1), warn, stops)

    def close(self, code: int = 0) -> None:
        """See `Nodes`. All agents end; Ray starts others for a next attempt."""
        super().close(code)
        self._release()

    def _release(self) -> None:
        """End the driver, and so its actors and placement group."""
        with contextlib.suppress(OSError):
            self._driver.socket.shutdown(socket.SHUT_WR)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._driver.wait(_RELEASE_S)
        self._driver.end(0.0)

    def _await(
        self,
        kind: type[_Awaited],
        timeout_s: float,
        should_stop: Callable[[], bool],
        warn: Callable[[str], object] = lambda text: None,
    ) -> _Awaited:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                message: FromDriver = msgspec.msgpack.decode(self._channel.receive(_POLL_S), type=FromDriver)
            except TimeoutError:
                if should_stop():
                    raise Interrupted("stopped while waiting for Ray: continue with --resume") from None
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"Ray did not answer within {timeout_s:g} s: see ray status, or correct RAY_ADDRESS"
                    ) from None
            except (ChannelClosed, OSError, msgspec.DecodeError) as error:
                raise ConfigError(f"the driver of Ray {self._ending()}") from error
            else:
                if isinstance(message, kind):
                    return message
                if isinstance(message, Refused):
                    raise ConfigError(message.reason)
                if isinstance(message, Waiting):
                    warn(message.reason)

    def _ending(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._driver.wait(_POLL_S)
        code = self._driver.poll()
        return f"ended with code {code}" if self._log is None else exits.ending(code, self._log)

    def _watch(self) -> None:
        """Take the ends of agents."""
        reason = "Ray's driver ended"
        try:
            while True:
                message: FromDriver = msgspec.msgpack.decode(self._channel.receive(), type=FromDriver)
                if isinstance(message, Ended):
                    self._lose(message.node, message.reason)
        except (ChannelClosed, OSError, msgspec.DecodeError):
            for name in self.names:
                self._lose(name, reason)

    def _lose(self, name: str, reason: str) -> None:
        if not self.lose(name, reason):
            self._refused = self._refused or f"the agent of {self.title(name)} did not join: {reason}"
