"""A Ray cluster of two nodes on this host, with an actor of somebody else on the second."""

import contextlib
import shutil
import signal
from pathlib import Path

import ray
from ray.cluster_utils import Cluster
from ray.util import placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tests.waiting import WAIT_S, until

SMALL = {"include_dashboard": False, "object_store_memory": 80 << 20}


class TwoNodes:
    """The driver of this process belongs to somebody else. Its actor holds a quarter of the other node's CPU."""

    def __init__(self):
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **SMALL})
        self.address = self.cluster.address
        ray.init(self.address, namespace="theirs", logging_level="error", log_to_driver=False)
        self.head = ray.get_runtime_context().get_node_id()
        self.other = None
        self.add_node()

    def add_node(self):
        self.node = self.cluster.add_node(num_cpus=1, **SMALL)
        self.other = self.node.node_id
        self.theirs = self.hold(0.25)

    def kill_node(self):
        """All of the other node's processes."""
        self.cluster.remove_node(self.node, allow_graceful=False)

    def hold(self, num_cpus):
        """An actor of theirs on the other node."""
        place = NodeAffinitySchedulingStrategy(self.other, soft=False)
        actor = ray.remote(Theirs).options(num_cpus=num_cpus, scheduling_strategy=place).remote()
        assert ray.get(actor.number.remote()) == 7
        return actor

    def free(self):
        """What the other node has free."""
        return {"CPU": 0.0, **ray._private.state.available_resources_per_node().get(self.other, {})}

    def kill_job(self, name):
        """The actor of a run in a queue."""
        ray.kill(ray.get_actor(name, "slipstream"))

    @property
    def folder(self):
        """Logs of all of Ray's processes."""
        return Path(self.node.get_session_dir_path())

    def is_alive(self, actor):
        return ray.get(actor.number.remote(), timeout=WAIT_S) == 7

    def groups(self):
        """Placement groups, all of which are ours."""
        return [each for each in placement_group_table().values() if each["state"] != "REMOVED"]

    def actors(self):
        """Names of living actors; theirs have none."""
        return [each["Name"] for each in ray._private.state.actors().values() if each["State"] != "DEAD"]

    def check_as_before(self):
        """Their actor lives; nothing of ours is left."""
        assert self.is_alive(self.theirs)
        assert not self.groups()
        until(lambda: self.actors() == [""])


class Theirs:
    def number(self):
        return 7


@contextlib.contextmanager
def two_nodes():
    handler = signal.getsignal(signal.SIGTERM)
    found = TwoNodes()
    try:
        yield found
    finally:
        ray.shutdown()
        folder = found.folder
        found.cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
        signal.signal(signal.SIGTERM, handler)
