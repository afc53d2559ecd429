"""Runs as detached actors of a Ray cluster: `python -m slipstream.clusters.ray_jobs ACTION ADDRESS [ARGUMENTS]`.

A separate process, as in `ray_driver.py`. It prints its answer as JSON. Guarantees: of two actors with one name Ray
makes one. An actor holds the resources of its run, and the run ends with it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from slipstream.errors import ConfigError, one_line
from slipstream.processes import exits
from slipstream.processes.exits import leave
from slipstream.processes.launchers import LOCAL

NAMESPACE = "slipstream"
SUPERVISOR = "slipstream.service.job"
_MODULE = "slipstream.clusters.ray_jobs"
_CONNECT_S, _ANSWER_S = 5.0, 120.0
_OF_RAY = ("OMP_NUM_THREADS", "PYTHONBREAKPOINT")
_FRESH = {"PENDING_CREATION", "DEPENDENCIES_UNREADY", "RESTARTING", "ALIVE"}


class ActorState(msgspec.Struct, frozen=True):
    """A run's actor."""

    id: str
    state: str
    """In Ray's words."""

    @property
    def has_ended(self) -> bool:
        """Whether it will not run again."""
        return self.state not in _FRESH


class NodeShape(msgspec.Struct, frozen=True):
    """A node of the cluster, by its resources."""

    cpus: int
    gpus: int
    kind: str = ""


class Start(msgspec.Struct, frozen=True):
    """A run as an actor."""

    name: str
    folder: str
    log: str
    cpus: int
    gpus: int


class _Answer(msgspec.Struct, frozen=True):
    error: str = ""
    actors: Mapping[str, ActorState] = {}
    nodes: Sequence[NodeShape] = ()


def actors(address: str) -> Mapping[str, ActorState]:
    """The actors of runs on the cluster, by name. Raises ConfigError."""
    return _ask("list", address).actors


def nodes(address: str) -> Sequence[NodeShape]:
    """The cluster's living nodes. Raises ConfigError."""
    return _ask("nodes", address).nodes


def submit(address: str, start: Start) -> str:
    """Make a run's actor, or find it; its id. Raises ConfigError."""
    return _ask("submit", address, msgspec.json.encode(start).decode()).actors[start.name].id


def kill(address: str, name: str) -> None:
    """End an actor, and its run. Raises ConfigError."""
    _ask("kill", address, name)


def _ask(action: str, address: str, *arguments: str) -> _Answer:
    command = [sys.executable, "-P", "-m", _MODULE, action, address, *arguments]
    environment = {**os.environ, **exits.SAFE_PATH}
    try:
        done = subprocess.run(command, capture_output=True, env=environment, timeout=_ANSWER_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"Ray did not answer within {_ANSWER_S:g} s: see ray status") from None
    lines = done.stdout.splitlines()
    try:
        answer = msgspec.json.decode(lines[-1] if lines else b"", type=_Answer)
    except msgspec.DecodeError:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise ConfigError(f"Ray's client failed ({''.join(last) or done.returncode}): see ray status") from None
    if answer.error:
        raise ConfigError(answer.error)
    return answer


class JobActor:
    """Holds a run's resources until its supervisor ends."""

    def __init__(self, start: Start) -> None:
        import ray

        if not Path(start.folder).is_dir():
            raise ConfigError(f"{start.folder} is not on this node: use a folder that all nodes share")
        environment = {name: value for name, value in os.environ.items() if name not in _OF_RAY}
        context: Any = ray.get_runtime_context()
        environment["RAY_ADDRESS"] = str(context.gcs_address)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        arguments = [start.folder, start.name, str(context.get_actor_id()), ray.util.get_node_ip_address()]
        self._child = LOCAL.launch(SUPERVISOR, arguments, environment, output=Path(start.log))
        threading.Thread(target=self._wait, args=(start.name,), daemon=True).start()

    def _wait(self, name: str) -> None:
        import ray

        self._child.wait()
        with contextlib.suppress(Exception):
            ray.kill(ray.get_actor(name, NAMESPACE))


def _reach(address: str) -> None:
    """Connect to the cluster. Raises ConfigError."""
    address = address or os.environ.get("RAY_ADDRESS", "")
    if "://" in address:
        raise ConfigError(
            f"{address} is for Ray's clients: give HOST:PORT of the cluster, and call this on one of its nodes"
        )
    host, _, port = address.rpartition(":")
    try:
        if port.isdigit():  # Ray itself tries for minutes
            socket.create_connection((host, int(port)), _CONNECT_S).close()
        import ray

        ray.init(address or "auto", namespace=NAMESPACE, logging_level=logging.ERROR, log_to_driver=False)
    except ImportError as error:
        raise ConfigError(f"Ray cannot be imported ({one_line(error)}): pip install 'slipstream[ray]'") from error
    except Exception as error:
        where = f"at {address}" if address else "on this host"
        raise ConfigError(f"no Ray cluster answers {where} ({one_line(error)}): see ray status") from error


def _answer(action: str, arguments: Sequence[str]) -> _Answer:
    import ray

    if action == "nodes":
        return _Answer(nodes=[_shape(node["Resources"]) for node in ray.nodes() if node["Alive"]])
    if action == "kill":
        with contextlib.suppress(ValueError):  # it has ended
            ray.kill(ray.get_actor(arguments[0], NAMESPACE))
        return _Answer()
    if action == "submit":
        start = msgspec.json.decode(arguments[0], type=Start)
        made: Any = ray.remote(JobActor).options(
            name=start.name,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=start.cpus,
            num_gpus=start.gpus,
            max_restarts=0,
        )
        actor = made.remote(start)
        return _Answer(actors={start.name: ActorState(actor._actor_id.hex(), "")})
    return _Answer(actors=_listed())


def _listed() -> dict[str, ActorState]:
    from ray._private.state import actors

    table: Any = actors()
    found: dict[str, ActorState] = {}
    for number, row in table.items():
        if row["Name"]:
            found[row["Name"]] = ActorState(number, row["State"])
    return found


def _shape(resources: Mapping[str, float]) -> NodeShape:
    kinds = [name.partition(":")[2] for name in resources if name.startswith("accelerator_type:")]
    return NodeShape(int(resources.get("CPU", 0)), int(resources.get("GPU", 0)), kinds[0] if kinds else "")


def main(action: str, address: str, *arguments: str) -> int:
    """Print the answer."""
    try:
        _reach(address)
        answer = _answer(action, arguments)
    except ConfigError as error:
        answer = _Answer(error=str(error))
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    from slipstream.clusters import ray_jobs  # Ray pickles what it starts by its module's name

    leave(ray_jobs.main(*sys.argv[1:]))
