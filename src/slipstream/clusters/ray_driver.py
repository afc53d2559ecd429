"""Asks Ray for a run's agents, and holds them: `python -m slipstream.clusters.ray_driver NODES GPUS`.

The other end is `ray.py`. Guarantees: when its channel closes, it kills its actors, removes its placement group, and
ends. After SIGKILL Ray does the same: neither outlives its driver.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from slipstream.clusters.ray import AgentActor, Ended, FromDriver, Placed, Reached, Refused, Start, Waiting
from slipstream.clusters.ray_placement import Bundle, RayNode, choose, not_placed
from slipstream.errors import ConfigError, one_line
from slipstream.processes import lifeline, stacks
from slipstream.processes.channel import ChannelClosed
from slipstream.processes.exits import leave

_NODE_ID = "ray.io/node-id"
"""Ray's own label of each node."""
_CONNECT_S = 5.0
_RELEASE_S = 10.0
_WARN_S = 10.0


class _Held:
    """Actors and a placement group of this process."""

    def __init__(self) -> None:
        self.actors: list[Any] = []
        self.group: Any = None
        self.is_released = False

    def release(self) -> None:
        """Give it up, unless Ray does not answer in time."""
        self.is_released = True
        thread = threading.Thread(target=self._release, daemon=True)
        thread.start()
        thread.join(_RELEASE_S)

    def _release(self) -> None:
        if (ray := sys.modules.get("ray")) is None or not ray.is_initialized():
            return
        for actor in self.actors:
            ray.kill(actor)
        self.drop_group()
        ray.shutdown()

    def drop_group(self) -> None:
        """Remove the placement group."""
        from ray.util import remove_placement_group

        if self.group is not None:
            remove_placement_group(self.group)
            self.group = None


class Driver:
    """See the module."""

    def __init__(self, parent: lifeline.Parent, held: _Held, num: int, gpus: int) -> None:
        self._parent, self._held, self._num, self._gpus = parent, held, num, gpus
        self._own_id = ""

    def send(self, message: FromDriver) -> None:
        """To the run, if it lives."""
        with contextlib.suppress(ChannelClosed, OSError):
            self._parent.send(msgspec.msgpack.encode(message))

    def reach(self) -> str:
        """Connect to Ray's cluster; this node's address in it. Raises ConfigError, also if it lacks the nodes."""
        address = os.environ.get("RAY_ADDRESS", "")
        if "://" in address:
            raise ConfigError(
                f"RAY_ADDRESS={address} is for clients: start the run on a node of the cluster, as by ray job submit"
            )
        host, _, port = address.rpartition(":")
        try:
            if port.isdigit():  # Ray itself tries for minutes
                socket.create_connection((host, int(port)), _CONNECT_S).close()
            import ray

            ray.init("auto", logging_level=logging.ERROR, log_to_driver=False)
        except ImportError as error:
            raise ConfigError(f"Ray cannot be imported ({one_line(error)}): pip install 'slipstream[ray]'") from error
        except Exception as error:
            where = f"at RAY_ADDRESS={address}" if address else "on this host, and RAY_ADDRESS is not set"
            raise ConfigError(f"no Ray cluster answers {where} ({one_line(error)}): start one by ray start") from error
        lifeline.leave_signals_to_trainer()  # Ray has put its handlers there
        self._own_id = ray.get_runtime_context().get_node_id()
        choose(self._nodes(), self._num, self._gpus)
        return ray.util.get_node_ip_address()

    def _nodes(self) -> list[RayNode]:
        """Ray's living nodes but this one."""
        import ray
        from ray._private.state import available_resources_per_node

        free = available_resources_per_node()
        found: list[RayNode] = []
        for node in ray.nodes():
            if node["Alive"] and (name := node["NodeID"]) != self._own_id:
                every = (node["Resources"], free.get(name, {}))
                counts = [float(each.get(kind, 0.0)) for each in every for kind in ("CPU", "GPU")]
                found.append(RayNode(name, node["NodeManagerAddress"], *counts))
        return found

    def place(self, start: Start) -> list[Bundle]:
        """Wait until Ray has reserved a bundle on each node; after a node's death, on others. Raises ConfigError."""
        from ray.util import placement_group, placement_group_table

        began, warn_at = time.monotonic(), _WARN_S
        while True:
            bundles = choose(self._nodes(), self._num, self._gpus)
            asked, where = [each.resources for each in bundles], [{_NODE_ID: each.node.id} for each in bundles]
            group = self._held.group = placement_group(
                asked, "STRICT_SPREAD", _name_of(start), bundle_label_selector=where
            )
            while not group.wait(1):
                table, now = placement_group_table(group), {node.id: node for node in self._nodes()}
                if any(bundle.node.id not in now for bundle in bundles):
                    break
                waited, state = time.monotonic() - began, table.get("stats", {}).get("scheduling_state", "unknown")
                said = not_placed(bundles, now, f"{table.get('state', 'unknown')}, {state}", waited)
                if waited >= start.timeout_s:
                    raise ConfigError(said)
                if waited >= warn_at:
                    self.send(Waiting(said))
                    warn_at += _WARN_S
            else:
                return bundles
            self._held.drop_group()

    def serve(self, start: Start, bundles: Sequence[Bundle]) -> None:
        """Have the agents join, and report their ends."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        remote, pending = ray.remote(AgentActor), dict[Any, str]()
        for number, bundle in enumerate(bundles):
            place = PlacementGroupSchedulingStrategy(self._held.group, number)
            name = f"node-{number + 1}"
            options = {"num_cpus": bundle.cpus, "num_gpus": bundle.gpus, "name": f"{_name_of(start)} {name}"}
            actor: Any = remote.options(**options, scheduling_strategy=place).remote()
            self._held.actors.append(actor)
            pending[actor.serve.remote(start, name)] = name
        self.send(Placed([bundle.node.name for bundle in bundles]))
        while pending:
            (ended, *_), _ = ray.wait([*pending])
            self.send(Ended(pending.pop(ended), _reason_of(ended)))


def _name_of(start: Start) -> str:
    return f"slipstream {start.run_id} {start.attempt}"


def _reason_of(ended: Any) -> str:
    import ray
    from ray.exceptions import RayError, RayTaskError

    try:
        ray.get(ended)
    except RayTaskError as error:
        cause = error.cause
        return str(cause) if isinstance(cause, ConfigError) else one_line(cause)
    except RayError as error:
        return one_line(error)
    return "its agent ended"


def main(num: str, gpus: str) -> int:
    """Serve until the channel closes."""
    stacks.register(beats=False)
    lifeline.leave_signals_to_trainer()
    held = _Held()
    parent = lifeline.Parent(at_end=held.release)
    driver = Driver(parent, held, int(num), int(gpus))
    try:
        driver.send(Reached(driver.reach()))
        start = msgspec.msgpack.decode(parent.receive(), type=Start)
        driver.serve(start, driver.place(start))
    except ConfigError as error:
        driver.send(Refused(str(error)))
    except Exception:
        if not held.is_released:
            raise
    parent.receive()  # to the end of the channel, which ends this process
    return 0


if __name__ == "__main__":
    leave(main(*sys.argv[1:]))
