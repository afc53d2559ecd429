"""Agents that Ray starts: whom it is asked for, and real ones on a cluster of two nodes."""

import os
import signal
import sys

import pytest

from slipstream.clusters.ray import RayNodes
from slipstream.clusters.ray_placement import RayNode, choose, not_placed
from slipstream.config import load_config
from slipstream.config.schema import ClusterConfig
from slipstream.errors import ConfigError, Interrupted
from slipstream.nodes.protocol import TOKEN_VARIABLE
from slipstream.plan.preflight.needs import check_needs
from tests.clusters.ray_clusters import two_nodes
from tests.processes import small_child
from tests.waiting import WAIT_S, until

pytestmark = pytest.mark.real_start
CHILD = small_child.__name__
FREE = RayNode("aaaaaaaaaa", "10.0.0.2", 8, 2, 8, 2)
SHARED = RayNode("bbbbbbbbbb", "10.0.0.2", 1, 0, 0.75, 0)
FULL = RayNode("cccccccccc", "10.0.0.4", 4, 2, 0, 2)
RESERVED = RayNode("dddddddddd", "10.0.0.5")
RUN = """
model.path = "m"
algorithm.kind = "sft"
data.path = "d"
training = { ranks = 2, steps = 1 }
cluster = { nodes = 2, launcher = "ray" }
"""


def test_agents_ask_for_free_cpus_and_wait_for_all_of_a_full_node():
    nodes = [RESERVED, FULL, SHARED, FREE]
    assert [(each.node, each.resources) for each in choose(nodes, 3, 0)] == [
        (FREE, {"CPU": 8}),
        (SHARED, {"CPU": 0.75}),
        (FULL, {"CPU": 4}),
    ]
    assert [(each.node, each.resources) for each in choose(nodes, 2, 2)] == [
        (FREE, {"CPU": 8, "GPU": 2}),
        (FULL, {"CPU": 4, "GPU": 2}),
    ]


def test_too_few_nodes_are_refused_with_the_numbers():
    with pytest.raises(ConfigError) as found:
        choose([FREE, SHARED], 2, 2)
    assert (
        "cluster.nodes = 3 asks Ray for 2 nodes beside this one, each with some CPUs and 2 GPUs, and it has 1"
        in str(found.value)
    )
    assert "Ray node bbbbbbbb at 10.0.0.2: 0.75 of 1 CPUs and 0 of 0 GPUs free" in str(found.value)


def test_waiting_bundles_are_named():
    said = not_placed(choose([FREE, SHARED, FULL], 3, 0), {each.id: each for each in (FREE, FULL)}, "PENDING", 3)
    assert "node-1" not in said
    assert "node-2: Ray node bbbbbbbb at 10.0.0.2 is gone" in said
    assert "node-3: 4 CPUs and 0 GPUs asked, Ray node cccccccc at 10.0.0.4 has 0 of 4 CPUs" in said


def test_real_agents_have_what_is_free_and_leave_the_cluster_as_it_was(tmp_path, monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with two_nodes() as cluster:
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        with pytest.raises(ConfigError, match=r"asks Ray for 3 nodes .* it has 1 .*: 0.75 of 1 CPUs and 0 of 0"):
            RayNodes(ClusterConfig(nodes=4, launcher="ray"), "run-7")
        nodes = RayNodes(ClusterConfig(nodes=2, launcher="ray"), "run-7", log=tmp_path / "ray.log")
        try:
            nodes.wait(WAIT_S)
            assert nodes.launch(CHILD, ["exit", "4"], node="node-1").wait(WAIT_S) == 4
            assert nodes.launch(CHILD, ["say"], node="node-1", output=tmp_path / "say.log").wait(WAIT_S) == 0
            assert (tmp_path / "say.log").read_text().startswith("None None")
            live = nodes.launch(CHILD, ["live"], node="node-1")
            assert cluster.free()["CPU"] == 0
        finally:
            nodes.close()
        assert live.wait(WAIT_S) < 0
        assert not nodes.lost
        until(lambda: cluster.free()["CPU"] == 0.75)
        cluster.check_as_before()
        files = [path for folder in (tmp_path, cluster.folder) for path in folder.rglob("*") if path.is_file()]
        assert [path for path in files if nodes._token.encode() in path.read_bytes()] == []


def test_a_python_without_ray_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "run.toml").write_text(RUN)
    monkeypatch.setitem(sys.modules, "ray", None)
    config = load_config(tmp_path / "run.toml").config
    assert config.cluster.address == ""
    with pytest.raises(ConfigError, match=r"pip install 'slipstream\[ray\]'"):
        check_needs(config)


@pytest.mark.full
@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("ray://127.0.0.1:10001", "is for clients: start the run on a node"),
        ("127.0.0.1:1", "no Ray cluster answers at RAY_ADDRESS=127.0.0.1:1"),
    ],
)
def test_a_cluster_that_does_not_answer_is_named(address, said, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=said):
        RayNodes(ClusterConfig(nodes=2, launcher="ray"), "run-7")


@pytest.mark.full
def test_agents_wait_for_a_full_node_until_the_deadline(tmp_path, monkeypatch):
    with two_nodes() as cluster:
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        theirs = cluster.hold(0.75)
        said = []
        nodes = RayNodes(ClusterConfig(nodes=2, launcher="ray"), "run-7")
        with pytest.raises(ConfigError) as found:
            nodes.wait(12, said.append)
        nodes.close()
        assert f"node-1: 1 CPUs and 0 GPUs asked, Ray node {cluster.other[:8]} at" in str(found.value)
        assert "0 of 1 CPUs" in str(found.value)
        assert "has not placed all agents" in said[0]
        nodes = RayNodes(ClusterConfig(nodes=2, launcher="ray"), "run-7", log=tmp_path / "ray.log")
        with pytest.raises(Interrupted):
            nodes.wait(WAIT_S, should_stop=lambda: True)
        nodes.close()
        assert "Traceback" not in (tmp_path / "ray.log").read_text()
        assert cluster.is_alive(theirs)
        assert not cluster.groups()


@pytest.mark.full
def test_ray_ends_the_agents_of_a_killed_driver(monkeypatch):
    with two_nodes() as cluster:
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        nodes = RayNodes(ClusterConfig(nodes=2, launcher="ray"), "run-7")
        nodes.wait(WAIT_S)
        child = nodes.launch(CHILD, ["live"], node="node-1")
        os.kill(nodes._driver.pid, signal.SIGKILL)
        assert child.wait(WAIT_S) == -signal.SIGKILL
        assert f"node-1 (Ray node {cluster.other[:8]} at " in nodes.lost
        nodes.close()
        until(lambda: cluster.free()["CPU"] == 0.75)
        cluster.check_as_before()
