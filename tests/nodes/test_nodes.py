"""Agents join a run, are refused, are missed, are lost."""

import os
import resource
import signal
import socket
import subprocess
import threading
import time

import pytest

from slipstream.doctor.nodes import check_nodes
from slipstream.errors import ConfigError, Interrupted
from slipstream.nodes.agent import Agent
from slipstream.nodes.forwarding import end_connections
from slipstream.nodes.launcher import Nodes
from slipstream.nodes.protocol import JOIN_AGAIN
from slipstream.processes.channel import Channel
from tests.nodes.agents import RUN_ID, TOKEN, agent, many_agents, open_nodes
from tests.nodes.networks import CAN_MAKE
from tests.processes import small_child
from tests.waiting import WAIT_S, ends, until

pytestmark = pytest.mark.real_start
CHILD = small_child.__name__


def pid_of(child):
    return int(Channel(child.socket).receive(WAIT_S))


@pytest.fixture
def few_files():
    """A lower limit on open files than a run with hundreds of nodes needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 100, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_256_processes_join_and_the_missing_ones_are_named(few_files):
    names = [f"node-{number}" for number in range(1, 257)]
    here = [name for name in names if name not in ("node-3", "node-7")]
    with open_nodes(257) as nodes:
        began, said = time.monotonic(), []
        with many_agents(nodes.address, here) as joined:
            assert sorted(joined) == sorted(here)
            with pytest.raises(ConfigError, match=r"254 of 256 agents have joined; missing node-3, node-7 after 0.7 s"):
                nodes.wait(0.7, said.append)
            assert "missing node-3, node-7: slipstream node --join 127.0.0.1:" in said[0]
            with pytest.raises(Interrupted, match="stopped while waiting for agents"):
                nodes.wait(WAIT_S, should_stop=lambda: True)
            with many_agents(nodes.address, ["", ""]) as late:
                nodes.wait(WAIT_S)
                assert sorted(late) == ["node-3", "node-7"]
                assert time.monotonic() - began < 30
                nodes.close()


def test_an_agent_joins_once_there_are_descriptors_again():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open_nodes(2) as nodes, socket.socket() as first, socket.socket() as second:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            first.connect(nodes.address)  # a waiting accept may have its descriptor already
            second.connect(nodes.address)
            second.settimeout(0.5)
            with pytest.raises(TimeoutError):
                second.recv(1)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        joined = Agent(nodes.address, TOKEN, RUN_ID)
        joined.join(WAIT_S)
        nodes.wait(WAIT_S)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"token": "another"}, "the token is not this run's"),
        ({"run_id": "run-8"}, "this is the run run-7, not run-8"),
        ({"attempt": 1}, "this is attempt 2 of the run, not 1"),
        ({"node": "node-9"}, "node-9 is no node of this run: nodes are node-1"),
        ({"node": "node-1"}, "node-1 has an agent already"),
        ({}, "every node has an agent already"),
    ],
)
def test_an_agent_that_does_not_belong_is_refused(changes, said):
    with open_nodes(2, attempt=2) as nodes:
        first = Agent(nodes.address, TOKEN, RUN_ID, attempt=2)
        first.join(WAIT_S)
        nodes.wait(WAIT_S)
        how = {"token": TOKEN, "run_id": RUN_ID} | changes
        with pytest.raises(ConfigError, match=said):
            Agent(nodes.address, **how).join(1.0)


def test_a_program_that_does_not_know_the_token_is_no_run():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def pretend():
            connection, _ = server.accept()
            channel = Channel(connection)
            channel.send(b"n" * 32)
            channel.receive(WAIT_S)
            channel.send(b"\x83\xa4node\xa6node-1\xa5proof\xc4\x00\xa7refused\xa0")

        threading.Thread(target=pretend, daemon=True).start()
        with pytest.raises(ConfigError, match="does not know the token"):
            Agent(server.getsockname(), TOKEN, RUN_ID).join(1.0)


def test_garbage_and_silence_hold_up_nobody():
    with open_nodes(2) as nodes, socket.create_connection(nodes.address) as silent:
        with socket.create_connection(nodes.address) as other:
            other.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert len(other.recv(100)) == 36
            until(lambda: other.recv(100) == b"")
        joined = Agent(nodes.address, TOKEN, RUN_ID)  # its end would be the node's
        joined.join(WAIT_S)
        nodes.wait(WAIT_S)
        assert silent.recv(100)


def test_a_second_run_at_the_address_is_refused():
    with open_nodes(2) as nodes, pytest.raises(ConfigError, match="end the other run, or give another port"):
        Nodes(2, nodes.address, TOKEN, RUN_ID)


def test_no_run_in_time_is_said():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    with agent(address, "--wait", "0.2") as process:
        assert process.wait(WAIT_S) == 2
        assert "no run at 127.0.0.1" in process.stdout.read()


def test_agents_join_a_run_that_is_planned_again():
    with open_nodes(2) as nodes, agent(nodes.address, "--attempt", "0") as process:
        nodes.wait(WAIT_S)
        nodes.close(JOIN_AGAIN)
        with open_nodes(2, nodes.address) as again:
            again.wait(WAIT_S)
        assert process.wait(WAIT_S) == 0


@pytest.mark.parametrize("how", ["over", "failed", "lost", "agent killed"])
def test_all_of_a_node_ends_with_the_run_or_the_agent(how):
    with open_nodes(2) as nodes, agent(nodes.address, "--attempt", "0") as process:
        nodes.wait(WAIT_S)
        child = nodes.launch(CHILD, ["family"], node="node-1")
        pids = [child.pid, pid_of(child)]
        if how != "agent killed":
            pids.append(nodes.launch(CHILD, ["alone"], node="node-1").pid)
        if how == "over":
            nodes.close()
            assert process.wait(WAIT_S) == 0
        elif how == "failed":
            nodes.close(7)
            assert process.wait(WAIT_S) == 7
        elif how == "lost":
            for each in [*nodes._joined.values()]:
                each.channel._socket.shutdown(socket.SHUT_RDWR)
            assert process.wait(WAIT_S) == 1
        else:
            process.send_signal(signal.SIGKILL)
        assert all(ends(pid) for pid in pids)
        assert child.wait(WAIT_S) == -signal.SIGKILL
        assert bool(nodes.lost) == (how in ("lost", "agent killed"))


def test_a_child_of_nowhere_and_one_that_cannot_be_started(tmp_path):
    with open_nodes(2) as nodes, agent(nodes.address):
        nodes.wait(WAIT_S)
        with pytest.raises(ConfigError, match="no agent of node-2 has joined: nodes are node-1"):
            nodes.launch(CHILD, node="node-2")
        with pytest.raises(ConfigError, match="give its path"):
            nodes.launch(CHILD, node="node-1", output=subprocess.PIPE)
        (tmp_path / "file").touch()
        with pytest.raises(OSError, match="node-1 could not start it"):
            nodes.launch(CHILD, node="node-1", output=tmp_path / "file" / "log")
        assert nodes.launch(CHILD, ["exit", "4"], node="node-1").wait(WAIT_S) == 4
        assert nodes.interface == "lo"


def test_connections_with_a_lost_host_are_ended_and_no_others():
    with (
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW),  # no TCP: its peer is a number
        socket.create_server(("127.0.7.5", 0)) as lost,
        socket.create_server(("127.0.7.6", 0)) as kept,
        socket.create_connection(lost.getsockname()) as one,
        socket.create_connection(kept.getsockname()) as other,
    ):
        before = len(os.listdir("/proc/self/fd"))
        end_connections("127.0.7.5")
        assert len(os.listdir("/proc/self/fd")) == before
        assert one.recv(1) == b""
        other.sendall(b"x")
        assert kept.accept()[0].recv(1) == b"x"


def test_the_token_is_needed_on_both_sides(monkeypatch):
    with pytest.raises(ConfigError, match="SLIPSTREAM_CLUSTER_TOKEN"):
        Nodes(2, ("127.0.0.1", 0), "", RUN_ID)
    with agent(("127.0.0.1", 1), token="") as process:
        assert process.wait(WAIT_S) == 2
        assert "SLIPSTREAM_CLUSTER_TOKEN is not set" in process.stdout.read()
    assert os.environ.get("SLIPSTREAM_CLUSTER_TOKEN") is None


def test_the_doctor_looks_at_every_node(tmp_path, monkeypatch):
    address = ("127.0.0.1", 29412)
    monkeypatch.setenv("SLIPSTREAM_CLUSTER_TOKEN", TOKEN)
    file = tmp_path / "run.toml"
    file.write_text(
        f"""
        model.path = "m"
        algorithm.kind = "sft"
        data.path = "d"
        training = {{ ranks = 3, steps = 1 }}
        run.folder = "{tmp_path / "runs"}"
        cluster = {{ nodes = 3, address = "127.0.0.1:29412", run_id = "{RUN_ID}", join_timeout_s = 60 }}
        """
    )
    hidden = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs none {tmp_path / "runs"} && exec "$0" "$@"']
    (tmp_path / "runs").mkdir()
    limited = ["sh", "-c", 'ulimit -n 512 && exec "$0" "$@"']
    with (
        agent(address, "--name", "node-1", prefix=limited),
        agent(address, "--name", "node-2", prefix=hidden if CAN_MAKE else ()),
    ):
        found = [(each.check, each.verdict, each.reason) for each in check_nodes(file)]
        assert [each[:2] for each in found if each[0].startswith("node-1")] == [("node-1 limits", "warning")]
        if CAN_MAKE:
            assert ("node-2", "fault", f"{tmp_path / 'runs'} is another folder there") in found
        again = [(each.check, each.verdict) for each in check_nodes(file)]
        assert again[0] == ("node-1 limits", "warning"), "agents await the run"
    (found,) = check_nodes(file, ["--cluster.join_timeout_s", "0.2"])
    assert "0 of 2 agents have joined; missing node-1, node-2" in found.reason
