"""Runs whose trainer is on several nodes: network namespaces with an agent each, real gloo between them."""

import os
import signal
import subprocess
import sys

import pytest

from slipstream.nodes.protocol import TOKEN_VARIABLE
from slipstream.runlog import read_exit, read_metrics
from tests.nodes.agents import TOKEN, agent
from tests.nodes.networks import CAN_MAKE, ip, networks
from tests.waiting import WAIT_S, until

from .test_real_runs import COIN, check_run, num_steps, sft_file

pytestmark = pytest.mark.real_start
PORT = 29411


def options_of(host, folder, nodes=2, **settings):
    chosen = {"training.ranks": 2, "run.threads": 2, "run.folder": folder, **settings}
    if nodes > 1:
        chosen |= {"cluster.nodes": nodes, "cluster.address": f"{host}:{PORT}", "cluster.run_id": "run-7"}
    return [part for key, value in chosen.items() for part in (f"--{key}", str(value))]


def start(prefix, *arguments):
    environment = os.environ | {TOKEN_VARIABLE: TOKEN, "OMP_NUM_THREADS": "1"}
    command = [*prefix, sys.executable, "-m", "slipstream.cli", *map(str, arguments)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def finish(process, code=0):
    try:
        output, _ = process.communicate(timeout=500)
    finally:
        process.kill()
    assert process.returncode == code, output
    return output


def numbers(folder):
    return [(row["train/loss"], row["train/grad_norm"]) for row in read_metrics(folder) if "train/loss" in row]


def test_two_nodes_have_the_losses_of_one_host(run_file, tmp_path):
    file = sft_file(run_file)
    with networks(2) as (((here, host), (there, _)), _):
        one = start(here, "sft", file, "--training.steps", 4, *options_of(host, tmp_path / "one", nodes=1))
        finish(one)
        run = start(here, "sft", file, "--training.steps", 4, *options_of(host, tmp_path / "two"))
        with agent((host, PORT), prefix=there) as other:
            finish(run)
            assert other.wait(WAIT_S) == 0
            assert "the run is over" in other.stdout.read()
    assert numbers(tmp_path / "two") == numbers(tmp_path / "one")
    assert len(numbers(tmp_path / "two")) == 4


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


@pytest.mark.full
@pytest.mark.skipif(not CAN_MAKE, reason="there is no network to cut on loopback")
def test_a_short_cut_of_the_network_changes_no_loss(run_file, tmp_path):
    file = sft_file(run_file)
    with networks(2) as (((here, host), (there, _)), hub):
        for name in ("whole", "cut"):
            run = start(here, "sft", file, "--training.steps", 60, *options_of(host, tmp_path / name))
            with agent((host, PORT), prefix=there):
                if name == "cut":
                    until(lambda: num_steps(tmp_path / "cut") >= 2, 200)
                    ip("-n", hub, "link", "set", "to1", "nomaster")
                    stood = num_steps(tmp_path / "cut")
                    with pytest.raises(subprocess.TimeoutExpired):
                        run.wait(5)
                    assert num_steps(tmp_path / "cut") <= stood + 1
                    ip("-n", hub, "link", "set", "to1", "master", "hub")
                finish(run)
    assert numbers(tmp_path / "cut") == numbers(tmp_path / "whole")


@pytest.mark.full
def test_real_vllm_gets_the_weights_of_two_nodes(run_file, tmp_path):
    with networks(2) as (((here, host), (there, _)), _):
        bridge = {"weights.bridge": "disk"}
        for name, nodes in (("one", 1), ("two", 2)):
            run = start(here, "train", run_file, *COIN, *options_of(host, tmp_path / name, nodes, **bridge))
            if nodes == 1:
                finish(run)
                continue
            with agent((host, PORT), prefix=there):
                finish(run)
    check_run(tmp_path / "two", steps=3)
    assert numbers(tmp_path / "two") == numbers(tmp_path / "one")
