"""Runs whose trainer is on several nodes: network namespaces with an agent each, real gloo between them."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from slipstream.nodes.protocol import TOKEN_VARIABLE
from slipstream.runlog import read_events, read_exit, read_metrics
from tests.nodes.agents import TOKEN, agent
from tests.nodes.networks import CAN_MAKE, ip, networks
from tests.waiting import WAIT_S, until

from .conftest import family_of
from .test_real_runs import check_run, num_steps, sft_file

pytestmark = pytest.mark.real_start
PORT = 29411
EXAMPLE = Path(__file__).parents[2] / "examples" / "cluster"
PARITY = ("--environment.settings", "{parity = true}", "--evaluation", "false")
"""The reward follows from the completion, whichever engine makes it and whenever."""


def options_of(host, folder, nodes=2, **settings):
    chosen = {"training.ranks": 2, "run.threads": 2, "run.folder": folder, **settings}
    if nodes > 1:
        chosen |= {"cluster.nodes": nodes, "cluster.address": f"{host}:{PORT}", "cluster.run_id": "run-7"}
    return [part for key, value in chosen.items() for part in (f"--{key}", str(value))]


def start(prefix, *arguments, program=(), **variables):
    environment = os.environ | {TOKEN_VARIABLE: TOKEN, "OMP_NUM_THREADS": "1"} | variables
    command = [*prefix, sys.executable, *program, "-m", "slipstream.cli", *map(str, arguments)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def torchrun(prefix, host, node, *arguments, **options):
    """torchrun on one of two nodes."""
    chosen = {"nnodes": 2, "nproc-per-node": 1, "node-rank": node, "master-addr": host, "master-port": PORT - 1}
    given = [f"--{key}={value}" for key, value in (chosen | options).items()]
    return start(prefix, *arguments, program=("-m", "torch.distributed.run", *given))


def finish(process, code=0):
    try:
        output, _ = process.communicate(timeout=500)
    finally:
        process.kill()
    assert code is None or process.returncode == code, output
    return output


def numbers(folder):
    return [(row["train/loss"], row["train/grad_norm"]) for row in read_metrics(folder) if "train/loss" in row]


def test_two_ranks_and_an_engine_on_three_nodes_have_the_losses_of_one_host(run_file, tmp_path):
    one, three, more = tmp_path / "one", tmp_path / "three", {"weights.bridge": "broadcast"}
    with networks(3) as (places, _):
        here, host = places[0]
        options = options_of(host, one, 1, **more)
        finish(start(here, "train", run_file, *PARITY, *options))
        run = start(here, "train", run_file, *PARITY, *options_of(host, three, 3, **more))
        with agent((host, PORT), prefix=places[1][0]) as other, agent((host, PORT), prefix=places[2][0]) as last:
            finish(run)
            assert (other.wait(WAIT_S), last.wait(WAIT_S)) == (0, 0)
            assert "the run is over" in other.stdout.read()
    check_run(three, steps=3)
    assert numbers(three) == numbers(one)


def test_torchrun_has_the_losses_of_agents_by_hand_and_of_one_host(run_file, tmp_path):
    every = ("sft", sft_file(run_file), "--training.steps", 4)
    with networks(2) as (((here, host), (there, _)), _):
        finish(start(here, *every, *options_of(host, tmp_path / "one", nodes=1)))
        run = start(here, *every, *options_of(host, tmp_path / "two"))
        with agent((host, PORT), prefix=there) as other:
            finish(run)
            assert other.wait(WAIT_S) == 0
        every = (*every, *options_of(host, tmp_path / "three", nodes=1))
        run, other = (torchrun(prefix, host, node, *every) for node, prefix in enumerate((here, there)))
        finish(run)
        assert "is node-1 of none" in finish(other)
    assert numbers(tmp_path / "two") == numbers(tmp_path / "three") == numbers(tmp_path / "one")
    assert len(numbers(tmp_path / "two")) == 4


@pytest.mark.cluster
@pytest.mark.parametrize(("restarts", "backend"), [(0, "static"), (1, "static"), (1, "c10d")])
def test_torchrun_sees_that_a_run_failed_and_alone_starts_it_again(restarts, backend, run_file, tmp_path):
    folder = tmp_path / "run"
    with networks(2) as (places, _):
        every = ("sft", sft_file(run_file), "--training.steps", 40, "--run.checkpoint_every", 1, "--resume=auto")
        every = (*every, *options_of("", folder, nodes=1))
        options = {"max-restarts": restarts, "monitor-interval": 0.1}
        if backend == "c10d":  # which of the two is the run is its choice
            options |= {"rdzv-backend": backend, "rdzv-endpoint": f"{places[0][1]}:{PORT - 1}", "rdzv-id": "first"}
        both = []
        for node, (prefix, own) in enumerate(places):
            # Both have one host name, by which torchrun would know the host of its store.
            local = {"local-addr": own, "rdzv-conf": f"is_host={int(node == 0)}"} if backend == "c10d" else {}
            both.append(torchrun(prefix, places[0][1], node, *every, **options, **local))
        until(lambda: num_steps(folder) >= 2, 200)
        family = [each for process in both for each in family_of(process.pid).values()]
        (rank,) = (each for each in family if "slipstream.launch.ranks.child" in each.cmdline())
        rank.kill()
        for process in both:
            output = finish(process, code=0 if restarts else 1)
            assert restarts or re.search(r"exitcode +: 8", output)
    events = read_events(folder)
    assert [event["previous"] for event in events if event["kind"] == "opened"] == ["none", "failed"][: restarts + 1]
    assert not [event for event in events if event["kind"] == "restart"]
    assert read_exit(folder).exit_code == (0 if restarts else 8)


@pytest.mark.full
def test_several_processes_on_a_node_are_refused(run_file, tmp_path):
    options = {"nnodes": 1, "nproc-per-node": 2}
    run = torchrun((), "127.0.0.1", 0, "sft", sft_file(run_file), *options_of("", tmp_path / "run", 1), **options)
    assert "torchrun started 2 processes on this node, and one is needed" in finish(run, code=1)
    assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_a_lost_node_is_named_and_the_run_goes_on_from_its_checkpoint(run_file, tmp_path):
    file, folder = sft_file(run_file), tmp_path / "run"
    every = ("--run.checkpoint_every", 1, "--run.max_restarts", 0)
    with networks(2) as (((here, host), (there, _)), _):
        run = start(here, "sft", file, "--training.steps", 200, *every, *options_of(host, folder))
        with agent((host, PORT), prefix=there) as other:
            until(lambda: num_steps(folder) >= 2, 200)
            other.send_signal(signal.SIGKILL)
            output = finish(run, code=8)
        assert "node-1 is lost: its agent ended, or the network between failed" in output
        assert "node-1 is lost" in read_exit(folder).message
        steps = num_steps(folder) + 2
        run = start(here, "sft", file, "--resume", "--training.steps", steps, *every, *options_of(host, folder))
        with agent((host, PORT), prefix=there):
            finish(run)
    assert num_steps(folder) == steps


@pytest.mark.full
def test_a_missing_agent_is_named(run_file, tmp_path):
    with networks(1) as (((here, host),), _):
        wait = ("--cluster.join_timeout_s", 0.5)
        output = finish(start(here, "sft", sft_file(run_file), *options_of(host, tmp_path / "run"), *wait), code=2)
    assert "0 of 1 agents have joined; missing node-1 after 0.5 s" in output


@contextlib.contextmanager
def run_on_four_nodes(run_file, folder, *arguments):
    """Two ranks and two engines, with a node each; the agents, and the namespace of the bridge between them."""
    more = {"weights.bridge": "broadcast", "inference.replicas": 2, "run.threads": 1, "run.max_restarts": 0}
    with networks(4) as (places, hub), contextlib.ExitStack() as stack:
        here, host = places[0]
        run = start(here, "train", run_file, *PARITY, *arguments, *options_of(host, folder, 4, **more))
        stack.callback(run.kill)
        nodes = [run]
        for other in range(1, 4):
            name = ("--name", f"node-{other}", "--attempt", "0")
            nodes.append(stack.enter_context(agent((host, PORT), *name, prefix=places[other][0])))
        yield nodes, hub


def nothing_is_left(folder):
    until(lambda: not [each for each in psutil.process_iter(["cmdline"]) if str(folder) in str(each.info)], 30)


@pytest.mark.cluster
@pytest.mark.skipif(not CAN_MAKE, reason="there is no network to cut on loopback")
@pytest.mark.parametrize("number", [1, 3])
def test_a_short_cut_of_the_network_changes_no_loss_on_four_nodes(run_file, tmp_path, number):
    steps = ("--training.steps", 200)
    with run_on_four_nodes(run_file, tmp_path / "whole", *steps) as ((run, *_), _):
        finish(run)
    with run_on_four_nodes(run_file, tmp_path / "cut", *steps) as ((run, *_), hub):
        until(lambda: num_steps(tmp_path / "cut") >= 2, 200)
        ip("-n", hub, "link", "set", f"to{number}", "nomaster")
        stood = num_steps(tmp_path / "cut")
        with pytest.raises(subprocess.TimeoutExpired):
            run.wait(10)
        assert num_steps(tmp_path / "cut") <= stood + 1
        ip("-n", hub, "link", "set", f"to{number}", "master", "hub")
        finish(run)
    assert numbers(tmp_path / "cut") == numbers(tmp_path / "whole")


@pytest.mark.cluster
@pytest.mark.skipif(not CAN_MAKE, reason="there is no network to cut on loopback")
@pytest.mark.parametrize("number", [1, 3])
def test_a_long_cut_of_the_network_is_a_named_end(run_file, tmp_path, number):
    with run_on_four_nodes(run_file, tmp_path / "ends", "--training.steps", 100_000) as (nodes, hub):
        until(lambda: num_steps(tmp_path / "ends") >= 2, 200)
        began = time.monotonic()
        ip("-n", hub, "link", "set", f"to{number}", "nomaster")
        assert f"node-{number} is lost" in finish(nodes[0], code=None)
        assert nodes[0].returncode not in (0, None)
        assert time.monotonic() - began < 60
        # The lost node's agent may have sent something meanwhile; then its kernel waits for as long again.
        assert all(each.wait(60) for each in nodes[1:])
    nothing_is_left(tmp_path)


@pytest.mark.cluster
def test_the_example_on_one_node_and_on_four(tmp_path):
    example = shutil.copytree(EXAMPLE, tmp_path / "example")
    one, four = tmp_path / "one", tmp_path / "four"
    with networks(4) as (places, _), contextlib.ExitStack() as stack:
        here, host = places[0]
        finish(start(here, "model", "new", example / "model"))
        finish(start(here, "train", example / "smoke.toml", *options_of(host, one, 1)))
        run = start(here, "train", example / "smoke.toml", *options_of(host, four, 4, **{"run.threads": 1}))
        for number in range(1, 4):
            stack.enter_context(agent((host, PORT), prefix=places[number][0]))
        finish(run)
    subprocess.run([sys.executable, example / "check.py", four, one], check=True, timeout=WAIT_S)


@pytest.mark.cluster
@pytest.mark.parametrize("bridge", ["broadcast", "disk"])
def test_two_ranks_and_two_engines_on_four_nodes_then_three(run_file, tmp_path, bridge):
    one, several = tmp_path / "one", tmp_path / "several"
    more = {"weights.bridge": bridge, "inference.replicas": 2, "run.checkpoint_every": 1}
    with networks(4) as (places, _):
        here, host = places[0]
        # As many threads for each process: two share the one host.
        alone = options_of(host, one, 1, **more)
        finish(start(here, "train", run_file, *PARITY, "--training.steps", 6, *alone))
        for nodes, steps in ((4, 2), (4, 4), (3, 6)):
            resumed = ("--resume",) if steps > 2 else ()
            threads = {"run.threads": 1 if nodes == 4 else 2}
            options = options_of(host, several, nodes, **more, **threads)
            run = start(here, "train", run_file, *PARITY, *resumed, "--training.steps", steps, *options)
            with contextlib.ExitStack() as stack:
                for number in range(1, nodes):
                    name = ("--name", f"node-{number}")
                    stack.enter_context(agent((host, PORT), *name, prefix=places[number][0]))
                finish(run)
    check_run(one, steps=6)
    assert numbers(several) == numbers(one)
    assert max(row["probe/abs_logprob_diff"] for row in read_metrics(several)) <= 0.001
    versions = [[event["version"] for event in read_events(several, kinds=(kind,))] for kind in ("publish", "apply")]
    assert versions[0] == versions[1]
    assert len(versions[0]) == 6 + 3, "each start proves the version that it goes on with"


@pytest.mark.cluster
@pytest.mark.parametrize("moment", ["start", "step"])
@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_a_node_that_is_killed_is_named_and_nothing_is_left(run_file, tmp_path, number, moment):
    folder = tmp_path / "run"
    with run_on_four_nodes(run_file, folder, "--training.steps", 100_000) as (nodes, _):
        if moment == "start":
            until(lambda: (folder / "logs" / "engine-1.log").exists(), 100)
        else:
            until(lambda: num_steps(folder) >= 2, 200)
        nodes[number].send_signal(signal.SIGKILL)
        began = time.monotonic()
        if number:
            assert f"node-{number} is lost" in finish(nodes[0], code=None)
            assert nodes[0].returncode not in (0, None)
        assert all(each.wait(60) is not None for each in nodes)
        assert time.monotonic() - began < 60
    nothing_is_left(tmp_path)
