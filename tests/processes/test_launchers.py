"""The contract of `Launcher` and `Child`, for children of this process and for those of an agent."""

import os
import signal
import subprocess
import sys
import time

import pytest

from slipstream.errors import ConfigError
from slipstream.processes import launchers
from slipstream.processes.channel import Channel, ChannelClosed
from slipstream.processes.launchers import LOCAL, Resources
from tests.nodes.agents import agent, open_nodes
from tests.processes import small_child
from tests.waiting import WAIT_S, ends

pytestmark = pytest.mark.real_start
CHILD = small_child.__name__


@pytest.fixture(scope="module")
def nodes():
    """An agent at work."""
    with open_nodes(2) as found, agent(found.address):
        found.wait(WAIT_S)
        yield found


@pytest.fixture(params=["", "node-1"], ids=["local", "of an agent"])
def launch(request):
    """Starts `small_child`; none outlives the test."""
    children, node = [], request.param
    launcher = request.getfixturevalue("nodes") if node else LOCAL

    def make(*arguments, **options):
        children.append(launcher.launch(CHILD, arguments, node=node, **options))
        return children[-1]

    yield make
    for child in children:
        child.end(0.0)


def first_message(child):
    return Channel(child.socket).receive(WAIT_S)


def test_arguments_environment_resources_and_output(launch, tmp_path):
    log = tmp_path / "logs" / "child.log"
    for _ in range(2):
        resources = Resources(threads=3, gpus=("1", "5"))
        child = launch("say", "a b", environment={**os.environ, "SECRET": "x"}, resources=resources, output=log)
        assert child.wait(WAIT_S) == 0
    assert sorted(log.read_text().split("\n")) == ["", *2 * ["('a b',)"], *2 * ["x 3 1,5"]]
    assert log.stat().st_mode & 0o777 == 0o600


def test_output_over_a_pipe():
    child = LOCAL.launch(CHILD, ["say"], output=launchers.PIPE)
    with open(child.output, "rb", closefd=False) as output:
        assert len(output.read().splitlines()) == 2


def test_exit_status(launch):
    child = launch("exit", "5")
    assert child.wait(WAIT_S) == child.poll() == 5


def test_a_signal_ends_it_and_nothing_is_sent_to_an_ended_one(launch):
    child = launch("live")
    first_message(child)
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.1)
    assert child.poll() is None
    child.send_signal(signal.SIGUSR1)
    assert child.wait(WAIT_S) == -signal.SIGUSR1
    child.send_signal(signal.SIGUSR1)


@pytest.mark.parametrize(("kind", "seconds", "code"), [("polite", WAIT_S, 7), ("deaf", 0.2, -9), ("polite", 0.0, -9)])
def test_it_is_asked_to_end_and_killed_at_the_deadline(launch, kind, seconds, code):
    child = launch(kind)
    first_message(child)
    began = time.monotonic()
    child.end(seconds)
    assert child.poll() == code
    assert time.monotonic() - began < WAIT_S / 2


@pytest.mark.parametrize("end", ["end", "kill", "its own death", "the channel's"])
def test_its_session_ends_with_it(launch, end):
    child = launch("family")
    grandchild = int(first_message(child))
    if end == "its own death":
        os.kill(child.pid, signal.SIGKILL)
        child.wait(WAIT_S)
        child.end(WAIT_S)
    elif end == "the channel's":
        child.socket.close()
    else:
        child.end(0.0) if end == "end" else child.kill()
    assert child.wait(WAIT_S) == -signal.SIGKILL
    assert ends(grandchild)


def test_messages_of_any_size_in_order(launch):
    channel = Channel(launch("echo").socket)
    sent = [b"", b"a", b"\0" * (1 << 20), b"last"]
    for message in sent[:2]:
        channel.send(message, WAIT_S)
    assert [channel.receive(WAIT_S) for _ in sent[:2]] == sent[:2]
    for message in sent[2:]:
        channel.send(message, WAIT_S)
        assert channel.receive(WAIT_S) == message
    with pytest.raises(TimeoutError):
        channel.receive(0.0)


def test_its_end_closes_the_channel(launch):
    child = launch("live")
    channel = Channel(child.socket)
    channel.receive(WAIT_S)
    child.send_signal(signal.SIGKILL)
    with pytest.raises(ChannelClosed):
        channel.receive(WAIT_S)


def test_garbage_of_its_parent_ends_it_and_its_output_says_so(launch, tmp_path):
    child = launch("live", output=tmp_path / "log")
    first_message(child)
    child.socket.sendall(b"\xff" * 8)
    assert child.wait(WAIT_S) == -signal.SIGKILL
    assert "a message of 4294967295 bytes" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_its_parent(number):
    script = f"""
import sys, time
from slipstream.processes.launchers import LOCAL
from slipstream.processes.channel import Channel
child = LOCAL.launch({CHILD!r}, ["family"])
print(child.pid, Channel(child.socket).receive().decode(), flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        parent.send_signal(number)
        parent.wait(WAIT_S)
        assert [ends(pid) for pid in pids] == [True, True]


def test_this_host_is_the_only_node_of_local_children():
    with pytest.raises(ConfigError, match="node"):
        LOCAL.launch(CHILD, ["exit", "0"], node="b")


def test_what_cannot_be_started_leaves_nothing(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="python"):
        LOCAL.launch(CHILD, resources=Resources(python=str(tmp_path / "python")), output=tmp_path / "log")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_of_the_current_folder_hides_no_module(tmp_path, monkeypatch):
    (tmp_path / "socket.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    child = LOCAL.launch(CHILD, ["exit", "0"])
    assert child.wait(WAIT_S) == 0
