"""Runs whose agents Ray starts, on a cluster of two nodes on this host."""

import pytest

from slipstream.runlog import read_exit
from tests.clusters.ray_clusters import two_nodes
from tests.waiting import until

from .test_node_runs import PARITY, finish, numbers, options_of, start
from .test_real_runs import check_run, num_steps, sft_file

pytestmark = pytest.mark.real_start
BY_RAY = ("--cluster.nodes", 2, "--cluster.launcher", "ray")


@pytest.fixture(scope="module")
def cluster():
    with two_nodes() as found:
        yield found


def test_ranks_here_and_an_engine_on_the_other_node_have_the_losses_of_one_host(cluster, run_file, tmp_path):
    one, two, bridge = tmp_path / "one", tmp_path / "two", ("--weights.bridge", "broadcast")
    finish(start([], "train", run_file, *PARITY, *bridge, *options_of("", one, nodes=1)))
    here = options_of("", two, nodes=1)
    finish(start([], "train", run_file, *PARITY, *bridge, *here, *BY_RAY, RAY_ADDRESS=cluster.address))
    check_run(two, steps=3)
    assert numbers(two) == numbers(one)
    cluster.check_as_before()


@pytest.mark.full
def test_a_killed_node_is_named_and_the_run_goes_on_from_its_checkpoint(cluster, run_file, tmp_path):
    file, folder = sft_file(run_file), tmp_path / "run"
    every = ("--run.checkpoint_every", 1, "--run.max_restarts", 0, *options_of("", folder, nodes=1), *BY_RAY)
    run = start([], "sft", file, "--training.steps", 200, *every, RAY_ADDRESS=cluster.address)
    until(lambda: num_steps(folder) >= 2, 200)
    name = f"node-1 (Ray node {cluster.other[:8]} at "
    cluster.kill_node()
    output = finish(run, code=8)
    assert name in output
    assert name in read_exit(folder).message
    steps = num_steps(folder) + 2
    cluster.add_node()
    resume = ("--resume", "--training.steps", steps, *every)
    finish(start([], "sft", file, *resume, RAY_ADDRESS=cluster.address))
    assert num_steps(folder) == steps
    cluster.check_as_before()


@pytest.mark.full
def test_too_many_nodes_are_refused_and_the_plan_needs_no_cluster(cluster, run_file, tmp_path):
    file, asked = sft_file(run_file), ("--cluster.nodes", 4, "--cluster.launcher", "ray", "--training.ranks", 4)
    finish(start([], "plan", file, *asked, RAY_ADDRESS="127.0.0.1:1"))
    run = start([], "sft", file, "--run.folder", tmp_path / "run", *asked, RAY_ADDRESS=cluster.address)
    assert "cluster.nodes = 4 asks Ray for 3 nodes beside this one" in finish(run, code=2)
